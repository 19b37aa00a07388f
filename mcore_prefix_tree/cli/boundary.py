"""Where errors meet the terminal: one sentence and an exit code for what a user can mend, a traceback for a bug."""

from __future__ import annotations

import logging
import warnings
from typing import Any

from typer.core import TyperGroup

from mcore_prefix_tree.errors import readable_errors

# What they say below an error: that GPTModel will give way to HybridModel, that nvcc is there and a GPU is not.
_CHATTY_LOGGERS = ("megatron.core.models.gpt.gpt_model", "torch.utils.cpp_extension")


def quiet_upstream() -> None:
    """Spare the terminal what megatron-core warns of on every rank: optional packages, torch's names of its calls."""
    warnings.filterwarnings("ignore", module=r"megatron\.")
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed")
    for name in _CHATTY_LOGGERS:
        logging.getLogger(name).setLevel(logging.ERROR)


class Commands(TyperGroup):
    """A group whose every command runs inside :func:`readable_errors`; Typer handles a reader that has gone away."""

    def invoke(self, ctx: Any) -> Any:
        """Run the command that the arguments name."""
        with readable_errors():
            return super().invoke(ctx)
