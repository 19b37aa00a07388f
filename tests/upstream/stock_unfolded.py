"""The other side of the comparison: Megatron-LM's ``pretrain`` with its stock model, each sample by itself.

Takes the arguments of ``pretrain_gpt.py`` and those of the folded run; a micro-batch is one sample, with its labels, as
Megatron's own scripts pass them. Under another objective than sft it is a full step, whose samples go through the
model one after another, and the loss is the objective's formula, token by token. With a balancing loss that compares
samples, a full step goes through the model in one row. One process: no parallel layout stands
between this run and its results.
"""

from __future__ import annotations

import inspect
import os
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, os.environ["MEGATRON_LM_PATH"])
sys.path += [str(Path(__file__).parents[1] / name) for name in (".", "unit", "world")]

import torch
from harness.folded_jobs import in_one_row
from objective_oracles import (
    Alone,
    ValuesAlone,
    critic_loss,
    kto_loss,
    pair_loss,
    policy_loss,
    reward_model_loss,
    top_k_loss,
)
from stock_teacher import chunk_loss

from mcore_prefix_tree.arguments.flags import add_argument_group
from mcore_prefix_tree.cpu.emulation import enable_training
from mcore_prefix_tree.data import iter_sample_groups
from mcore_prefix_tree.data.batches import SampleOrder
from mcore_prefix_tree.mcore.seam.scalar_output_layer import with_scalar_head
from mcore_prefix_tree.objectives import make_objective

if not torch.cuda.is_available():
    enable_training()

from megatron.core.enums import ModelType
from megatron.training import get_args, pretrain
from model_provider import model_provider

ORACLES: dict[str, Any] = {"dpo": pair_loss, "ipo": pair_loss, "kto": kto_loss, "distill": top_k_loss}
# Of values instead of distributions.
SCALAR_ORACLES: dict[str, Any] = {"critic": critic_loss, "reward_model": reward_model_loss}


def unfolded_samples(order: SampleOrder, consumed: int) -> Any:
    while True:
        yield from order.take(consumed, 1)
        consumed += 1


def full_steps(order: SampleOrder, consumed: int, step: int) -> Any:
    while True:
        yield order.take(consumed, step)
        consumed += step


def datasets_provider(num_samples: Any, vp_stage: int | None = None) -> Any:
    args = get_args()

    def samples_of(paths: Any, consumed: int, order: Any) -> Any:
        samples = SampleOrder(list(iter_sample_groups(paths)), seed=args.seed, order=order)
        if args.prefix_tree_objective != "sft" or compares_samples(args):
            return full_steps(samples, consumed, args.global_batch_size)
        return unfolded_samples(samples, consumed)

    train = samples_of(args.prefix_tree_data_path, args.consumed_train_samples, args.prefix_tree_order)
    if not args.prefix_tree_valid_data_path:
        args.eval_iters = 0
        return train, None, None
    return train, samples_of(args.prefix_tree_valid_data_path, args.consumed_valid_samples, "file"), None


datasets_provider.is_distributed = True  # type: ignore[attr-defined]


def compares_samples(args: Any) -> bool:
    return args.num_experts is not None and "global_aux_loss" in args.moe_router_load_balancing_type


def forward_step(data_iterator: Any, model: Any) -> Any:
    args = get_args()
    if compares_samples(args):
        return row_step(next(data_iterator), model)
    if args.prefix_tree_objective != "sft":
        return objective_step(args, next(data_iterator), model)
    sample = next(data_iterator)
    device = next(model.parameters()).device
    tokens = torch.from_numpy(sample.tokens.copy()).long().to(device)
    mask = torch.from_numpy(sample.loss_mask[1:].copy()).to(device)
    # One token more than is scored, so that a sample of one token is a forward pass too.
    labels = torch.cat([tokens[1:], tokens[:1]])
    masks = {"loss_mask": torch.cat([mask, mask.new_zeros(1)])[None]} if args.mtp_num_layers else {}
    losses = model(tokens[None], torch.arange(len(tokens), device=device)[None], None, labels=labels[None], **masks)

    def loss_func(losses: torch.Tensor) -> Any:
        loss = torch.dot(losses[0, :-1].float(), mask)
        num_tokens = mask.count_nonzero().to(torch.int)
        return loss, num_tokens, {"lm loss": torch.stack([loss.detach(), num_tokens.float()])}

    return losses, loss_func


def row_step(samples: Any, model: Any) -> Any:
    """A full step in one row of one micro-batch."""
    row = in_one_row(samples)
    mask = torch.tensor([weight for one in samples for weight in (*one.loss_mask[1:].tolist(), 0.0)] + [0.0])
    losses = model(**row, labels=row["input_ids"].roll(-1, 1))

    def loss_func(losses: torch.Tensor) -> Any:
        loss, num_tokens = torch.dot(losses[0].float(), mask), mask.count_nonzero().to(torch.int)
        return loss, num_tokens, {"lm loss": torch.stack([loss.detach(), num_tokens.float()])}

    return losses, loss_func


def objective_step(args: Any, samples: Any, model: Any) -> Any:
    alone: Any
    objective: Any = make_objective(args.prefix_tree_objective, args.prefix_tree_objective_options)
    device = next(model.parameters()).device

    def logits_of(tokens: Any) -> torch.Tensor:
        ids = torch.tensor([tokens], device=device)
        logits: torch.Tensor = model(ids, torch.arange(len(tokens), device=device)[None], None)
        return logits[0].double()

    if objective.output == "chunks":
        divisor = sum(int((sample.loss_mask[1:] != 0).sum()) for sample in samples)
        total = chunk_loss(args, objective, samples, logits_of) * divisor
    else:
        divisor = objective.targets(samples).divisor
        formula, alone = ORACLES.get(args.prefix_tree_objective, policy_loss), Alone(logits_of, samples)
        if objective.has_scalar_head:
            formula = SCALAR_ORACLES[args.prefix_tree_objective]
            alone = ValuesAlone(lambda tokens: logits_of(tokens)[:, 0], samples)
        total = formula(objective, alone) * divisor

    # Losses of experts are multiplied by tokens.
    tokens = divisor if args.num_experts is None else sum(map(len, samples))

    def loss_func(total: torch.Tensor) -> Any:
        report = {"lm loss": torch.stack([total.detach().float(), torch.tensor(float(divisor), device=device)])}
        return total * tokens / divisor, torch.tensor(tokens, dtype=torch.int, device=device), report

    return total, loss_func


def stock_model(*args: Any, **kwargs: Any) -> Any:
    """Build the stock model; that of a critic ends in a scalar head."""
    if getattr(get_args(), "hybrid_layer_pattern", None) is None:
        from gpt_builders import gpt_builder as builder
    else:
        from hybrid_builders import hybrid_builder as builder
    model = model_provider(builder, *args, **kwargs)
    return with_scalar_head(model) if get_args().prefix_tree_objective in SCALAR_ORACLES else model


def main() -> None:
    """As the checkout's own scripts call it; core_v0.19 parses first, and builds from a ``ModelConfig``."""
    model, kind = stock_model, ModelType.encoder_or_decoder
    if "cfg_container" not in inspect.signature(pretrain).parameters:
        pretrain(datasets_provider, model, kind, forward_step, extra_args_provider=add_argument_group)
        return
    from megatron.training.argument_utils import (
        gpt_config_from_args,
        hybrid_config_from_args,
        pretrain_cfg_container_from_args,
    )
    from megatron.training.arguments import parse_and_validate_args

    args = parse_and_validate_args(extra_args_provider=add_argument_group)
    if args.prefix_tree_objective in SCALAR_ORACLES:
        pretrain(pretrain_cfg_container_from_args(args), datasets_provider, kind, forward_step, model_provider=model)
    else:
        config_from_args = gpt_config_from_args if args.hybrid_layer_pattern is None else hybrid_config_from_args
        container = pretrain_cfg_container_from_args(args, config_from_args(args))
        pretrain(container, datasets_provider, kind, forward_step)


if __name__ == "__main__":
    main()
