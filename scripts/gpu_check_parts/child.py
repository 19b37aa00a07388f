"""The process of one part: ``python -m gpu_check_parts.child FILE DESCRIPTOR``, started by the parent."""

from __future__ import annotations

import json
import os
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

from gpu_check_parts.context import Context, Options
from gpu_check_parts.results import Key


def context_of(asked: dict[str, Any], stream: int) -> Context:
    """Return the context that the parent wrote."""
    options = asked["options"]
    return Context(
        part=asked["rows"],
        options=Options(**{**options, "workloads": tuple(options["workloads"])}),
        device_name=asked["device_name"],
        earlier=asked["earlier"],
        skip=frozenset(Key(*key) for key in asked["skip"]),
        stream=stream,
    )


def main(file: str, descriptor: str) -> None:
    """Run a part. FILE has its function and the context as JSON; lines for the parent go to DESCRIPTOR."""
    asked, stream = json.loads(Path(file).read_text()), int(descriptor)
    module, function = asked["function"].split(":")
    getattr(import_module(module), function)(context_of(asked, stream))
    os.write(stream, b'{"finished": true}\n')


if __name__ == "__main__":
    main(*sys.argv[1:])
