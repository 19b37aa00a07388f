"""Peak memory of a stretch of work: the GPU's allocator, or this process's resident set on the CPU."""

from __future__ import annotations

import ctypes
import gc
import os
from pathlib import Path

import psutil
import torch

_STATUS = Path("/proc/self/status")
_CLEAR = Path("/proc/self/clear_refs")


class PeakMemory:
    """Peak in addition to the memory held when it was made; on the CPU, Linux's high-water mark of the resident set."""

    def __init__(self, device: torch.device) -> None:
        gc.collect()
        # glibc returns memory that earlier work freed, which would otherwise hide the next peak.
        getattr(ctypes.CDLL(None), "malloc_trim", lambda _: None)(0)
        self._device = device
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
            self._held = torch.cuda.memory_allocated(device)
        elif _CLEAR.exists():
            _CLEAR.write_text("5")  # see proc(5): resets VmHWM to the current resident set
            self._held = _status_bytes("VmRSS")

    def bytes(self) -> int | None:
        """Return the bytes at the peak so far, beyond those held at the start; None if that is not known."""
        if self._device.type == "cuda":
            return torch.cuda.max_memory_allocated(self._device) - self._held
        return _status_bytes("VmHWM") - self._held if _CLEAR.exists() else None


def available_bytes(device: torch.device) -> int:
    """Return the bytes that this rank can still allocate; on the CPU its share of the machine's available memory."""
    if device.type == "cuda":
        # Memory that torch has reserved and does not use is free only for torch.
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + unused
    ranks_here = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))  # set by torchrun
    return int(psutil.virtual_memory().available) // ranks_here


def _status_bytes(key: str) -> int:
    line = next(line for line in _STATUS.read_text().splitlines() if line.startswith(f"{key}:"))
    return int(line.split()[1]) * 1024
