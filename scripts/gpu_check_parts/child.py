"""The process of one part: ``python -m gpu_check_parts.child NAME FILE DESCRIPTOR``, started by the parent."""

from __future__ import annotations

import json
import os
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

from gpu_check_parts.context import Context, Options
from gpu_check_parts.registry import PARTS
from gpu_check_parts.results import Key


def context_of(part: str, asked: dict[str, Any], stream: int) -> Context:
    """Return the context that the parent wrote down."""
    options = asked["options"]
    return Context(
        part=part,
        options=Options(**{**options, "workloads": tuple(options["workloads"])}),
        device_name=asked["device_name"],
        earlier=asked["earlier"],
        skip=frozenset(Key(*key) for key in asked["skip"]),
        stream=stream,
    )


def main(name: str, file: str, descriptor: str) -> None:
    """Run a part. FILE has the context as JSON; lines for the parent go to DESCRIPTOR."""
    part, stream = PARTS[name], int(descriptor)
    context = context_of(part.rows, json.loads(Path(file).read_text()), stream)
    module, function = part.function.split(":")
    getattr(import_module(f"gpu_check_parts.{module}"), function)(context)
    os.write(stream, b'{"finished": true}\n')


if __name__ == "__main__":
    main(*sys.argv[1:])
