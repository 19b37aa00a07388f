"""The other side of the comparison: Megatron-LM's ``pretrain`` with its stock model, each sample alone.

Takes the arguments of ``pretrain_gpt.py`` and those of the folded run; a micro-batch is one sample, with its labels, as
Megatron's own scripts pass them. One process: no parallel layout stands between this run and what it says.
"""

from __future__ import annotations

import inspect
import os
import sys
from functools import partial
from typing import Any

sys.path.insert(0, os.environ["MEGATRON_LM_PATH"])

import torch

from mcore_prefix_tree.cpu.emulation import enable_training
from mcore_prefix_tree.data import iter_sample_groups
from mcore_prefix_tree.data.batches import SampleOrder
from mcore_prefix_tree.mcore.megatron_lm.arguments import add_argument_group

if not torch.cuda.is_available():
    enable_training()

from gpt_builders import gpt_builder
from megatron.core.enums import ModelType
from megatron.training import get_args, pretrain
from model_provider import model_provider


def samples_alone(order: SampleOrder, consumed: int) -> Any:
    while True:
        yield from order.take(consumed, 1)
        consumed += 1


def datasets_provider(num_samples: Any, vp_stage: int | None = None) -> Any:
    args = get_args()

    def alone(paths: Any, consumed: int, order: Any) -> Any:
        groups = list(iter_sample_groups(paths))
        return samples_alone(SampleOrder(groups, seed=args.seed, order=order), consumed)

    train = alone(args.prefix_tree_data_path, args.consumed_train_samples, args.prefix_tree_order)
    if not args.prefix_tree_valid_data_path:
        args.eval_iters = 0
        return train, None, None
    return train, alone(args.prefix_tree_valid_data_path, args.consumed_valid_samples, "file"), None


datasets_provider.is_distributed = True  # type: ignore[attr-defined]


def forward_step(data_iterator: Any, model: Any) -> Any:
    sample = next(data_iterator)
    device = next(model.parameters()).device
    tokens = torch.from_numpy(sample.tokens.copy()).long().to(device)
    mask = torch.from_numpy(sample.loss_mask[1:].copy()).to(device)
    # One token more than is scored, so that a sample of one token is a forward pass too.
    labels = torch.cat([tokens[1:], tokens[:1]])
    losses = model(tokens[None], torch.arange(len(tokens), device=device)[None], None, labels=labels[None])

    def loss_func(losses: torch.Tensor) -> Any:
        loss = torch.dot(losses[0, :-1].float(), mask)
        num_tokens = mask.count_nonzero().to(torch.int)
        return loss, num_tokens, {"lm loss": torch.stack([loss.detach(), num_tokens.float()])}

    return losses, loss_func


def main() -> None:
    """As the checkout's own pretrain_gpt.py calls it; core_v0.19 parses first, and builds from a ``ModelConfig``."""
    if "cfg_container" not in inspect.signature(pretrain).parameters:
        model = partial(model_provider, gpt_builder)
        kind = ModelType.encoder_or_decoder
        pretrain(datasets_provider, model, kind, forward_step, extra_args_provider=add_argument_group)
        return
    from megatron.training.argument_utils import gpt_config_from_args, pretrain_cfg_container_from_args
    from megatron.training.arguments import parse_and_validate_args

    args = parse_and_validate_args(extra_args_provider=add_argument_group)
    container = pretrain_cfg_container_from_args(args, gpt_config_from_args(args))
    pretrain(container, datasets_provider, ModelType.encoder_or_decoder, forward_step)


if __name__ == "__main__":
    main()
