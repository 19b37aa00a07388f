"""slime's own model, folding inside, and losses that need no logits; see docs/trainers.md.

A user only sets ``--custom-model-provider-path mcore_prefix_tree.integrations.slime.model_provider``. slime builds the
model, with its own arguments and its own layers; built layers follow trees.
"""

from __future__ import annotations

import logging
import os
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from megatron.core import mpu
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.utils import unwrap_model
from megatron.training.global_vars import get_args
from slime.backends.megatron_utils.model_provider import get_model_provider_func
from slime.utils.ppo_utils import compute_approx_kl, compute_cispo_loss, compute_policy_loss
from slime.utils.routing_replay import RoutingReplay

from mcore_prefix_tree.mcore.packed import RoutedPackedSeqParams, RowLogprobs, fold_inside

try:
    from slime.observability.logging_utils import log
except ImportError:  # slime 0.3.1
    from slime.utils.logging_utils import log

logger = logging.getLogger(__name__)

Batch = Mapping[str, Any]
Loss = tuple[torch.Tensor, dict[str, torch.Tensor]]


def _refuse(asked: dict[str, Any]) -> None:
    """Raise NotImplementedError with the name of the first setting that is set."""
    for setting in (name for name, value in asked.items() if value):
        raise NotImplementedError(f"folding in slime does not support {setting}; remove it")


def model_provider(pre_process: bool = True, post_process: bool = True, vp_stage: int | None = None) -> Any:
    """Return slime's model for its arguments, folding inside.

    ``prefix_tree`` in the file of ``--custom-config-path`` holds the settings of :func:`fold_inside`. slime gives a
    critic its head afterwards.

    Raises:
        NotImplementedError: slime's arguments set an option that folding does not support; names it.
    """
    args = get_args()
    recorded = args.use_routing_replay and not args.use_rollout_routing_replay
    # slime's own Megatron-LM runs depths by an argument of its forward, and detaches their output weight.
    depths = getattr(args, "mtp_num_layers", None)
    _refuse({"--use-routing-replay without --use-rollout-routing-replay": recorded, "--mtp-num-layers": depths})
    if torch.distributed.get_rank() == 0 and not vp_stage and _adds_a_forward_pass(args):
        logger.warning(
            "--loss-type custom_loss: slime computes old log-probabilities in a separate forward pass, which its "
            "policy_loss would not need here; set --use-rollout-logprobs to skip that pass, or remove "
            "--loss-type custom_loss if the logits of all rows fit in memory"
        )
    own = copy(args)
    own.custom_model_provider_path = None
    own.spec = args.spec or (__name__, "layer_spec")
    model = get_model_provider_func(own)(pre_process, post_process, vp_stage=vp_stage)
    model.register_forward_pre_hook(partial(_ask_for_logprobs, args), with_kwargs=True)
    if os.environ.get("ENABLE_ROUTING_REPLAY") == "1":  # slime sets it for actors
        model.register_forward_pre_hook(partial(_give_routes, _folded_replay(model)), with_kwargs=True)
    # slime generates with as many tokens: it cuts the padding off the weights that it sends.
    settings = {"vocab_size": getattr(args, "vocab_size", None)} | (getattr(args, "prefix_tree", None) or {})
    return fold_inside(model, **settings)


class FoldedReplay(RoutingReplay):  # type: ignore[misc]
    """slime's replay of a router that folds; it gives the router the experts of unique tokens.

    slime records the rows' experts of a layer, in views of those of all layers. All layers decide what rows share, on
    each pipeline stage, so the first replay of a model chunk keeps the latter: int16 tensors ``[T, layers, top-k]``.
    """

    router: Any
    is_first: bool

    def record(self, top_indices: torch.Tensor) -> None:
        """Keep the experts of a micro-batch; ``top_indices`` is ``[T, top-k]``, or a rank's part of T."""
        if not self.is_first:
            return
        every_layer = top_indices._base
        if every_layer is None or every_layer.ndim != 3:
            raise RuntimeError(
                "folding in slime finds the routes of all layers behind the view that slime records for a layer, and "
                "this slime records a copy; use slime 0.3.1, or remove --use-rollout-routing-replay"
            )
        self.top_indices_list.append(every_layer.to(torch.int16))

    def next_micro_batch(self) -> torch.Tensor:
        """Return the experts of a pass's next micro-batch, int16 ``[T, layers, top-k]``."""
        routes: torch.Tensor = self.top_indices_list[self.forward_index]
        self.forward_index += 1
        return routes

    def pop_forward(self) -> torch.Tensor:
        """Return the experts of the router's tokens, int64 ``[L, top-k]``; tokens without a route go to any."""
        experts = self.router.router_replay.experts
        anywhere = torch.arange(experts.numel(), device=experts.device) % self.router.config.num_moe_experts
        return torch.where(experts < 0, anywhere.view_as(experts), experts)

    pop_backward = pop_forward  # a recomputed router has the tokens of its forward pass


def _folded_replay(model: Any) -> FoldedReplay:
    """Let slime's replays of a model chunk fold, and return the first."""
    routers = [module for module in model.modules() if isinstance(module, TopKRouter)]
    _refuse({"--use-rollout-routing-replay with a pipeline stage that has no experts": not routers})
    for router in routers:
        replay = router.routing_replay  # which slime keeps in a list by its place
        replay.__class__ = FoldedReplay
        replay.router, replay.is_first = router, router is routers[0]
    first: FoldedReplay = routers[0].routing_replay
    return first


def _give_routes(
    replay: FoldedReplay, model: Any, positional: tuple[Any, ...], call: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Give the rows of a call their experts, in the passes for which slime replays them."""
    if os.environ["ROUTING_REPLAY_STAGE"] != "replay_forward":
        return None
    params = RoutedPackedSeqParams.of(call["packed_seq_params"], replay.next_micro_batch())
    return positional, call | {"packed_seq_params": params}


def _adds_a_forward_pass(args: Namespace) -> bool:
    """Return whether slime's ``can_reuse_log_probs_in_loss`` would hold, were its ``policy_loss`` not replaced."""
    ours = args.loss_type == "custom_loss" and args.custom_loss_function_path == f"{__name__}.policy_loss"
    needed = ("kl_coef", "use_rollout_logprobs", "get_mismatch_metrics", "use_critic", "keep_old_actor", "use_opd")
    return ours and _steps_of_a_rollout(args) == 1 and not any(getattr(args, name) for name in needed)


def _steps_of_a_rollout(args: Namespace) -> int:
    steps: int = args.rollout_batch_size * args.n_samples_per_prompt // args.global_batch_size
    return steps


def layer_spec(args: Namespace, config: Any, vp_stage: int | None = None) -> Any:
    """Return the spec of slime's layers without ``--spec``; slime's own takes options of older releases."""
    with_te = args.transformer_impl == "transformer_engine"
    return get_gpt_decoder_block_spec(config, use_transformer_engine=with_te, vp_stage=vp_stage)


def _ask_for_logprobs(
    args: Namespace, model: Any, positional: tuple[Any, ...], call: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Ask for log-probabilities in place of logits in the forward passes whose loss is one of this module's."""
    ours = str(args.custom_loss_function_path).startswith(f"{__name__}.")
    if not (model.training and args.loss_type == "custom_loss" and ours):
        return None
    asked = RowLogprobs(labels=call["input_ids"].roll(-1, dims=1), temperature=args.rollout_temperature, entropy=True)
    return positional, call | {"output_processor": asked}


def log_folding(
    args: Namespace, rollout_id: int, step_id: int, model: Sequence[Any], optimizer: Any, opt_param_scheduler: Any
) -> None:
    """Log the savings of the last training step, for ``--custom-megatron-before-train-step-hook-path``.

    slime calls it before each step. The numbers of all data-parallel ranks are logged with slime's own, for the step
    that they belong to; those of the last step of a run are not logged.
    """
    report = unwrap_model(model[-1]).folding.report(training_only=True)
    if report is None:  # before the first step
        return
    report = report.over_ranks(mpu.get_data_parallel_group(), next(model[-1].parameters()).device)
    is_last = mpu.is_pipeline_last_stage(ignore_virtual=True)
    if mpu.get_data_parallel_rank() or mpu.get_tensor_model_parallel_rank() or not is_last:
        return  # one rank logs, as in slime
    role = getattr(model[0], "role", "actor")
    prefix = "train/" if role == "actor" else f"train/{role}-"
    numbers = {f"{prefix}{name}": value for name, value in report.to_log().items()}
    numbers["train/step"] = rollout_id * _steps_of_a_rollout(args) + step_id - 1
    log(args, numbers, step_key="train/step")
    logger.info("step %d: %s", numbers["train/step"], report)


def _responses(column: torch.Tensor, batch: Batch) -> list[torch.Tensor]:
    """Return a column of the model's output ``[T]`` per response: predictions of its tokens, ``[n]`` each."""
    spans = zip(accumulate(batch["total_lengths"]), batch["response_lengths"], strict=True)
    return [column[end - length - 1 : end - 1] for end, length in spans]


def policy_loss(
    args: Namespace, batch: Batch, logprobs: torch.Tensor, mean: Callable[[torch.Tensor], torch.Tensor]
) -> Loss:
    """Return slime's ``policy_loss`` and its metrics, for ``--custom-loss-function-path``.

    ``logprobs`` is ``[1, T, 2]``, log-probabilities and entropies; ``mean`` is slime's ``sum_of_sample_mean``.

    Raises:
        NotImplementedError: slime's arguments set an option that only its own loss supports; names it.
    """
    _refuse(
        {
            "--advantage-estimator gspo with this loss": args.advantage_estimator == "gspo",
            "--use-opsm with this loss": args.use_opsm,
            "--use-tis with this loss": args.use_tis,
            "--get-mismatch-metrics with this loss": args.get_mismatch_metrics,
            "--rollout-top-p below 1 with this loss": args.rollout_top_p != 1.0,
            "--custom-pg-loss-reducer-function-path with this loss": args.custom_pg_loss_reducer_function_path,
            "--save-debug-train-data with this loss": args.save_debug_train_data,
        }
    )
    logprob, entropy = (torch.cat(_responses(column, batch)) for column in logprobs[0].float().unbind(-1))
    given = batch["rollout_log_probs"] if args.use_rollout_logprobs else batch.get("log_probs")
    old = torch.cat(given) if given else logprob.detach()
    log_ratio = old - logprob
    advantages = torch.cat(batch["advantages"])
    if args.advantage_estimator == "cispo":
        losses, clipped = compute_cispo_loss(log_ratio, logprob, advantages, args.eps_clip, args.eps_clip_high)
    else:
        limits = (args.eps_clip, args.eps_clip_high)
        losses, clipped = compute_policy_loss(log_ratio, advantages, *limits, eps_clip_c=args.eps_clip_c)
    metrics = {
        "pg_loss": mean(losses), "entropy_loss": mean(entropy), "pg_clipfrac": mean(clipped), "ppo_kl": mean(log_ratio)
    }  # fmt: skip
    loss = metrics["pg_loss"] - args.entropy_coef * metrics["entropy_loss"]
    if args.use_kl_loss:
        ratio = torch.exp(logprob - old) if args.use_unbiased_kl else None
        reference = torch.cat(batch["ref_log_probs"])
        metrics["kl_loss"] = mean(
            compute_approx_kl(logprob, reference, kl_loss_type=args.kl_loss_type, importance_ratio=ratio)
        )
        loss = loss + args.kl_loss_coef * metrics["kl_loss"]
    if batch.get("rollout_log_probs"):
        compared = logprob if args.use_rollout_logprobs else old
        rollout = torch.cat(batch["rollout_log_probs"])
        metrics["train_rollout_logprob_abs_diff"] = mean((compared - rollout).abs())
    if batch.get("opd_reverse_kl"):
        metrics["opd_reverse_kl"] = mean(torch.cat(batch["opd_reverse_kl"]))
    return _with_graph(loss, logprobs, batch), {
        name: value.detach() for name, value in ({"loss": loss} | metrics).items()
    }


def sft_loss(
    args: Namespace, batch: Batch, logprobs: torch.Tensor, mean: Callable[[torch.Tensor], torch.Tensor]
) -> Loss:
    """Return slime's ``sft_loss``, for ``--custom-loss-function-path``; ``logprobs`` is ``[1, T, 2]``."""
    loss = -mean(torch.cat(_responses(logprobs[0, :, 0].float(), batch)))
    return _with_graph(loss, logprobs, batch), {"loss": loss.detach()}


def _with_graph(loss: torch.Tensor, logprobs: torch.Tensor, batch: Batch) -> torch.Tensor:
    """Return the loss, a scalar, with a gradient of 0 for the model if no row has a response."""
    return loss if any(batch["response_lengths"]) else loss + 0 * logprobs.sum()
