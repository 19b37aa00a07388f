"""Print the machine as one line of JSON for the parent: the GPU, versions, and modules that are missing."""

from __future__ import annotations

import json
import sys
from importlib import import_module
from typing import Any


def probe(modules: list[str]) -> dict[str, Any]:
    """Return ``gpu`` (False without one), ``machine``, and ``missing``: why modules of a list do not import."""
    missing = {module: reason for module in modules if (reason := _why_not(module))}
    found: dict[str, Any] = {"gpu": False, "missing": missing}
    if "torch" in missing:
        return found
    import torch

    if not torch.cuda.is_available():
        return found
    from mcore_prefix_tree.bench import describe_machine, name_in_files

    machine = describe_machine()
    capability = torch.cuda.get_device_capability()
    machine |= {
        "capability": ".".join(map(str, capability)),
        "memory_bytes": torch.cuda.get_device_properties(0).total_memory,
    }
    return found | {
        "gpu": True,
        "machine": machine,
        "file": f"gpu_{name_in_files(machine)}",
        "runs_fa4": capability[0] in (9, 10),
    }


def _why_not(module: str) -> str | None:
    try:
        import_module(module)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


if __name__ == "__main__":
    print(json.dumps(probe(sys.argv[1:])))
