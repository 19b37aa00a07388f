"""Result files of measurements: the machine that a figure belongs to, and a step, folded against unfolded."""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from mcore_prefix_tree.utils.versions import installed_version_of

if TYPE_CHECKING:
    from mcore_prefix_tree.mcore.engine.comparison import Comparison, Gain, Measurement

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


def step_result(recipe: Mapping[str, Any], comparison: Comparison) -> dict[str, Any]:
    """Return the object that ``json.dump`` writes."""
    cpu_gain = comparison.cpu_gain
    return {
        "kind": "step",
        "machine": describe_machine(),
        "recipe": dict(recipe),
        "comparison": {
            **{
                name: None if way is None else _measurement(way)
                for name, way in (
                    ("folded", comparison.folded),
                    ("packed", comparison.packed),
                    ("small", comparison.small),
                    ("stock", comparison.stock),
                )
            },
            "fastest": comparison.fastest.name,
            "stock_missing": comparison.stock_missing,
            "logical_tokens": comparison.logical_tokens,
            "fold_ratio": comparison.fold_ratio,
            "expected_speedup": comparison.expected.to_json(),
        },
        "gain": _gain(comparison.gain),
        "cpu_gain": None if cpu_gain is None else _gain(cpu_gain),
    }


def _measurement(way: Measurement) -> dict[str, Any]:
    return {
        "name": way.name,
        "tokens": way.tokens,
        "peak_bytes": way.peak_bytes,
        "seconds": way.seconds,
        "cpu_seconds": way.cpu_seconds,
        "parts": [parts._asdict() for parts in way.rounds],
        "cpu_parts": None if way.cpu_rounds is None else [parts._asdict() for parts in way.cpu_rounds],
    }


def _gain(gain: Gain) -> dict[str, Any]:
    """Return the range and the median of speed-up and share, and the bound with its parts."""
    bound, shares = gain.bound, gain.shares_of_bound
    return {
        "speedup": {"min": gain.speedups[0], "median": gain.speedup, "max": gain.speedups[-1]},
        "share_of_bound": {"min": shares[0], "median": gain.share_of_bound, "max": shares[-1]},
        "bound": {
            "ratio": bound.ratio,
            "unfolded_seconds": bound.unfolded_seconds,
            **{
                name: {"ratio": ratio, "share": share, "least_unfolded_seconds": getattr(bound.least, name)}
                for name, (ratio, share) in bound.parts.items()
            },
        },
    }
