"""The plugin of verl 0.9 that registers engines which fold inside the model, and trainers for them; see docs/verl.md.

verl loads it through the entry point group ``verl.plugins``, in every process that imports verl. It imports
Megatron-Core only if ``VERL_ENGINE_VENDOR`` names these engines.
"""

from __future__ import annotations

import logging
import os
from importlib.util import find_spec

VENDOR = "mcore_prefix_tree"

if os.getenv("VERL_ENGINE_VENDOR") == VENDOR:
    logger = logging.getLogger(__name__)
    try:
        from mcore_prefix_tree.integrations.verl import engine
    except Exception as error:
        # verl would hide the error and take its own engine.
        logger.error(
            "VERL_ENGINE_VENDOR=%s, but its engines cannot be registered, and verl takes its own: %r", VENDOR, error
        )
        raise
    if find_spec("transfer_queue") is not None:  # no V1 trainer runs without it
        try:
            from mcore_prefix_tree.integrations.verl import trainers
        except Exception as error:
            logger.error("the trainers that keep groups together cannot be registered: %r", error)
