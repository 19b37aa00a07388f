"""The machine that a figure belongs to."""

from __future__ import annotations

import os
import platform
import re
from pathlib import Path

import torch

from mcore_prefix_tree.utils.versions import installed_version_of

# Packages whose version can move a figure.
_PACKAGES = (
    "torch", "triton", "megatron-core", "transformer-engine", "flash-attn", "flash-attn-3", "flash-attn-4",
    "liger-kernel", "numpy",
)  # fmt: skip


def describe_machine() -> dict[str, object]:
    """Processor, GPU, threads and versions, for a result file."""
    cpuinfo = Path("/proc/cpuinfo")
    names = [line.split(":", 1)[1].strip() for line in _lines(cpuinfo) if line.startswith("model name")]
    found: dict[str, object] = {
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "cpu": names[0] if names else platform.machine(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "cuda": torch.version.cuda,
    }
    return found | {
        package: installed for package in _PACKAGES if (installed := installed_version_of(package)) is not None
    }


def name_in_files(machine: dict[str, object]) -> str:
    """Return the device's name for file names: ``nvidia_h200``."""
    return re.sub(r"[^a-z0-9]+", "_", str(machine["device"]).lower()).strip("_")


def _lines(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.exists() else []
