"""Enums in checkpoints, written in the form that Megatron-Core's loader accepts.

Megatron-LM's checkpoints hold its arguments, and these hold enums. Its loader admits a class called with a value,
which is how most versions of Python pickle an enum. Python 3.11.2, for example, pickles ``getattr`` and a name instead,
and Python 3.10 the name of ``signal.SIGTERM``: the loader refuses both, under any Python. Stock Megatron-LM writes such
checkpoints.
"""

from __future__ import annotations

import copyreg
from enum import Enum
from typing import Any

from megatron.core.safe_globals import SAFE_GLOBALS
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING


def pickle_enums_by_value() -> None:
    """Register the enums that the loader admits, and torch's tensor metadata's, to be pickled as class and value."""
    for admitted in (*SAFE_GLOBALS, _MEM_FORMAT_ENCODING):
        if isinstance(admitted, type) and issubclass(admitted, Enum):
            copyreg.pickle(admitted, _by_value)


def _by_value(member: Enum) -> tuple[Any, ...]:
    return type(member), (member.value,)
