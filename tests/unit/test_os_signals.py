"""Signals end a process at once, whatever it has open."""

from __future__ import annotations

import signal
import subprocess
import sys

from mcore_prefix_tree.utils.os_signals import ENDED_BY_SIGNAL

PROGRAM = """
import os, resource, time
from mcore_prefix_tree.utils.os_signals import ended_at_once

resource.setrlimit(resource.RLIMIT_NOFILE, (2048, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
descriptors = [os.dup(1) for _ in range(1100)]
with ended_at_once():
    print("ready", flush=True)
    time.sleep(60)
"""


def test_a_process_with_many_descriptors_ends_by_a_signal() -> None:
    started = subprocess.Popen(
        [sys.executable, "-c", PROGRAM], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert started.stdout is not None
    assert started.stdout.readline() == "ready\n"
    started.send_signal(signal.SIGTERM)
    _, said = started.communicate(timeout=30)
    assert started.returncode == ENDED_BY_SIGNAL + signal.SIGTERM
    assert said == "ended by SIGTERM while no step was running; no checkpoint is lost\n"
