"""What tests leave behind in a process: groups of gloo, and upstream's logs of losses."""

from __future__ import annotations

import gc
import sys
from typing import Any

import psutil
from torch.distributed import distributed_c10d as c10d

# Idle threads that a process may keep. Each group of gloo has three, one of which wakes a hundred times a second: a
# hundred forgotten groups take a tenth of a core from the tests that follow.
LEFT_BEHIND = 30

_ROTARY = (
    ("megatron.core.models.common.embeddings.rotary_pos_embedding", "RotaryEmbedding"),
    ("megatron.core.models.common.embeddings.yarn_rotary_pos_embedding", "YarnRotaryEmbedding"),
)


_Gloo: Any = c10d.ProcessGroupGloo
_alone: dict[object, Any] = {}


class _SharedAlone(type):
    """Makes gloo's back-ends, of which groups of one rank need only one: they have nobody to talk to."""

    def __call__(cls, store: object, rank: int, size: int, timeout: object) -> Any:
        if size > 1:
            return _Gloo(store, rank, size, timeout=timeout)
        if timeout not in _alone:
            _alone[timeout] = _Gloo(store, rank, size, timeout=timeout)
        return _alone[timeout]

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, _Gloo)


def share_groups_of_one() -> None:
    """Make the threads of groups of one rank once in this process, for all of its jobs.

    Megatron makes thirty groups per job, and what keeps them alive is in caches and reference cycles.
    """
    c10d.ProcessGroupGloo = _SharedAlone("ProcessGroupGloo", (), {})  # type: ignore[assignment,misc]


def threads() -> int:
    """Return the number of threads of this process."""
    return int(psutil.Process().num_threads())


def release_groups() -> None:
    """Free the groups of models that are no longer used.

    Megatron's caches of rotary tables hold the last 32 models' groups; reference cycles of models and optimizers hold
    others. A dispatcher of experts keeps probabilities whose autograd graph leads back to it, which no collection sees.
    """
    for module, name in _ROTARY:
        if module in sys.modules:
            getattr(sys.modules[module], name).forward.cache_clear()
    experts = sys.modules.get("megatron.core.transformer.moe.token_dispatcher")
    if experts is not None:
        # isinstance would ask objects of torch that warn of their names.
        for dispatcher in (one for one in gc.get_objects() if issubclass(type(one), experts.MoETokenDispatcher)):
            dispatcher.probs = None
    gc.collect()


def forget_losses() -> None:
    """Forget the losses of layers and their scales, which upstream keeps in tensors of the first model's shapes."""
    sparse = sys.modules.get("megatron.core.transformer.experimental_attention_variant.dsa")
    if sparse is not None:
        sparse.DSAIndexerLossAutoScaler.main_loss_backward_scale = None
        sparse.DSAIndexerLossLoggingHelper.tracker.clear()
    utils = sys.modules.get("megatron.core.transformer.moe.moe_utils")
    if utils is None:
        return
    utils.MoEAuxLossAutoScaler.main_loss_backward_scale = None
    logging = sys.modules.get("megatron.core.transformer.moe.moe_logging")
    if logging is None:
        utils.get_moe_layer_wise_logging_tracker().clear()
    else:
        logging.set_moe_metrics_tracker(logging.MoEMetricsTracker())
