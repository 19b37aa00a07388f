"""The plugin of verl 0.9 that registers engines which fold inside the model; see docs/verl.md.

verl loads it through the entry point group ``verl.plugins``, in every process that imports verl. It imports
Megatron-Core only where ``VERL_ENGINE_VENDOR`` asks for these engines.
"""

from __future__ import annotations

import logging
import os

VENDOR = "mcore_prefix_tree"

if os.getenv("VERL_ENGINE_VENDOR") == VENDOR:
    try:
        from mcore_prefix_tree.integrations.verl import engine  # noqa: F401
    except Exception as error:
        # verl would hide the error and take its own engine.
        logging.getLogger(__name__).error(
            "VERL_ENGINE_VENDOR=%s, but its engines cannot be registered, and verl takes its own: %r", VENDOR, error
        )
        raise
