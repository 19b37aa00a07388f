"""Signals that end a job."""

from __future__ import annotations

import faulthandler
import signal

# Terminals, torchrun, Slurm and other schedulers send these to all processes of a job, workers too, to end it.
ENDING_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


def handled_signals() -> list[int]:
    """Return the ending signals that this process does not ignore; ``nohup`` has it ignore SIGHUP."""
    return [number for number in ENDING_SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]


def end_without_stacks() -> None:
    """Keep ending signals, for example torchrun's, from printing stacks, as ``megatron.training`` requests."""
    for number in ENDING_SIGNALS:
        faulthandler.unregister(number)
