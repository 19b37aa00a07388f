"""Parts that stand for those of ``scripts/gpu_check``: they need no torch, and end as a test asks them to."""

from __future__ import annotations

import os
import signal
import sys
import time
from functools import partial
from pathlib import Path

METHODS = ("first", "second", "third")


class OutOfMemoryError(RuntimeError):
    """Named as torch's."""


def run(context):
    """Three measurements; the second follows FAKE_PART."""
    for method in METHODS:
        key, used = context.key("forest", method), context.used(version=os.environ.get("FAKE_VERSION", "1"))
        if not context.is_done(key, used):
            context.measure(key, used, partial(measured, method))


def measured(method):
    with Path(os.environ["FAKE_SEEN"]).open("a") as seen:
        seen.write(f"{method}\n")
    end = os.environ.get("FAKE_PART", "") if method == "second" else ""
    if end == "crash":
        print("the last words", file=sys.stderr, flush=True)
        os.kill(os.getpid(), signal.SIGSEGV)
    if end == "hang":
        time.sleep(600)
    if end == "memory":
        raise OutOfMemoryError("CUDA out of memory. Tried to allocate 20 GiB")
    if end == "error":
        raise ValueError("it does not compile")
    if end == "refused":
        return "it would need about 90 GiB, and 80 GiB are free"
    return {"seconds": [0.5], "shown": "0.5 s"}


def main():
    """``scripts/gpu_check`` with this part, on a machine that is made up."""
    from gpu_check_parts import check
    from gpu_check_parts.registry import PARTS, Part

    seconds = float(os.environ.get("FAKE_SECONDS", "60"))
    PARTS.clear()
    PARTS["parity"] = Part(
        name="parity", title="a part", minutes=1, function="gpu_parts:run", rows="parity", row_seconds=seconds
    )
    machine = {"device": "NVIDIA H100", "torch": "2.11.0"}
    check.ask_machine = lambda parts: {"gpu": True, "machine": machine, "file": "gpu_h100", "missing": {}}
    sys.exit(check.main(sys.argv[1:]))


if __name__ == "__main__":
    main()
