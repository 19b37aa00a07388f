"""Functions of the checkout's ``train_rl.py`` and ``megatron.rl`` that folded training calls."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from mcore_prefix_tree.arguments.refusals import ArgumentError
from mcore_prefix_tree.mcore import compat
from mcore_prefix_tree.mcore.megatron_lm.pretrain_forms import checkout

# Parameters of the script's loss_func, in this order.
_LOSS = ["loss_mask", "kl_term", "ratios", "entropy_term", "truncated_from_above", "truncated_from_below"]


@dataclass(frozen=True, kw_only=True)
class Script:
    """Functions of the checkout.

    Attributes:
        grpo_loss: ``calculate_grpo_loss``, from log-probabilities ``[b, s]`` to the loss and its terms ``[b, s]``.
        report: ``loss_func``, from a mask, these terms and the loss to the logged values.
        packed_bin: ``load_packed_data_by_index``, the tensors of a bin of ``--rl-use-sequence-packing``.
        state: ``get_rl_runtime_state``, whose result counts sequences and keeps bins.
    """

    grpo_loss: Callable[..., tuple[Any, ...]]
    report: Callable[..., tuple[Any, Any, dict[str, Any]]]
    packed_bin: Callable[..., tuple[Any, ...]]
    state: Callable[[], Any]


def load_script() -> Script:
    """Import the script of the checkout that is on the path.

    Raises:
        ArgumentError: the checkout has no such script, or one with another interface, or a package is missing.
        MegatronCoreError: another name that the package relies on is missing; see :func:`compat.check`.
    """
    file = checkout() / "train_rl.py"
    if not file.is_file():
        raise ArgumentError(
            f"{file} is missing: Megatron-LM {compat.installed_version()} has no loop for reinforcement learning; "
            "check out core_v0.19.0"
        )
    try:
        script = importlib.import_module("train_rl")
    except ModuleNotFoundError as error:
        raise ArgumentError(
            f"{file} needs the package {error.name}, which is not installed; pip install wandb openai fastapi uvicorn "
            "httpx, and the other packages that its environments import"
        ) from error
    compat.check(compat.MEGATRON_LM_RL)
    parameters = list(inspect.signature(script.loss_func).parameters)
    if parameters != [*_LOSS, "output_tensor"]:
        raise ArgumentError(
            f"loss_func of {file} takes {', '.join(parameters)}, not the {', '.join(_LOSS)} and output_tensor of "
            "core_v0.19.0; check out core_v0.19.0"
        )
    rl = importlib.import_module("megatron.rl.rl_utils")
    return Script(
        grpo_loss=rl.calculate_grpo_loss,
        report=script.loss_func,
        packed_bin=rl.load_packed_data_by_index,
        state=rl.get_rl_runtime_state,
    )
