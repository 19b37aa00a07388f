"""Clocks for work on a device, and the two ceilings that kernels are compared with."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

# Two milliseconds of a GPU at 2 GHz.
_HEAD_START_CYCLES = 4_000_000
# Size of the work that measures the ceilings.
_REPEATS = 5


@dataclass(frozen=True, kw_only=True)
class Ceilings:
    """Ceilings of this machine: its measured rates in the simplest work of each kind.

    Attributes:
        matrix_tflops: a large matrix product, in the dtype of the benchmark.
        copy_gbytes: a large copy in memory, bytes read plus bytes written per second.
    """

    matrix_tflops: float
    copy_gbytes: float


def wait_for(device: torch.device) -> None:
    """Wait until a GPU has finished all queued work; return at once for other devices."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def seconds_of(run: Callable[[], object], device: torch.device) -> float:
    """Return the seconds of one run on the device: by events on a GPU, by the clock on a CPU."""
    if device.type != "cuda":
        started = time.perf_counter()
        run()
        return time.perf_counter() - started
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    # On an idle stream `begin` would be over before the host has launched anything, and the time would be that of the
    # launches. So the GPU sleeps first, while the host gets ahead: the work after `begin` runs back to back. If the
    # host needs longer than this to launch the work, the time includes the rest of its launches.
    torch.cuda._sleep(_HEAD_START_CYCLES)
    begin.record()
    run()
    end.record()
    end.synchronize()
    milliseconds: float = begin.elapsed_time(end)
    return milliseconds / 1e3


def measure_ceilings(device: torch.device, dtype: torch.dtype, *, small: bool = False) -> Ceilings:
    """Return the best rate of a matrix product and the median of a copy.

    They use random numbers, because zeros take less power and less time.

    Args:
        device: device to measure.
        dtype: dtype of the product.
        small: use little work; the rates are then meaningless.
    """
    size, count = (64, 1 << 12) if small else (8192, 1 << 30) if device.type == "cuda" else (1024, 1 << 24)
    one, other = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    numbers = torch.randn(count, device=device, dtype=torch.float32)
    copy = torch.empty_like(numbers)

    def product() -> None:
        torch.mm(one, other)

    def copying() -> None:
        copy.copy_(numbers)

    product()
    copying()
    return Ceilings(
        matrix_tflops=2 * size**3 / min(seconds_of(product, device) for _ in range(_REPEATS)) / 1e12,
        copy_gbytes=2 * numbers.nbytes / statistics.median(seconds_of(copying, device) for _ in range(_REPEATS)) / 1e9,
    )
