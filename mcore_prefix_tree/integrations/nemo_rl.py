"""NeMo-RL's Megatron policy worker with a model that folds inside; see docs/trainers.md.

``Policy(worker_extension_cls_fqn="mcore_prefix_tree.integrations.nemo_rl.FoldingPolicyWorker")`` takes it in place of
NeMo-RL's worker, which builds, trains, scores and saves as before; only its model folds the rows that NeMo-RL packs.
"""

from __future__ import annotations

from typing import Any, ClassVar

import ray
import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.utils import unwrap_model
from nemo_rl.models.policy.utils import get_runtime_env_for_policy_worker
from nemo_rl.models.policy.workers.megatron_policy_worker import MegatronPolicyWorkerImpl

from mcore_prefix_tree.mcore.packed import FoldReport, RoutedPackedSeqParams, fold_inside
from mcore_prefix_tree.plan.model_shape import layers_with_experts


def _check(config: Any) -> None:
    """Raise NotImplementedError that names a setting which folding does not support, or that packs no rows."""
    megatron = config["megatron_cfg"]
    asked = {
        "sequence_packing.enabled=false: only packed rows are folded; set it to true": (
            not config["sequence_packing"]["enabled"]
        ),
        "megatron_cfg.use_fused_linear_logprobs=true: NeMo-RL does not support it with packed rows either": (
            megatron.get("use_fused_linear_logprobs", False)
        ),
        "generation.backend=megatron: a model that folds inside does not generate; use vllm or sglang": (
            (config.get("generation") or {}).get("backend") == "megatron"
        ),
        "draft.enabled=true: a draft model reads hidden states of packed rows": (
            (config.get("draft") or {}).get("enabled", False)
        ),
    }
    for reason in (reason for reason, applies in asked.items() if applies):
        raise NotImplementedError(f"folding in NeMo-RL does not support policy.{reason}")


class LayerRoutes(torch.nn.Module):
    """The experts of a layer for a packed micro-batch, which NeMo-RL gives it as it gives them to a router's replay.

    A pipeline stage has one for every layer with experts, not only for its own: all layers decide what rows share.
    """

    def __init__(self, layer_number: int) -> None:
        super().__init__()
        self.layer_number = layer_number  # the layer, counted from 1
        # int64 ``[T, top-k]``, under sequence parallelism a rank's part of T; None without replay.
        self.experts: torch.Tensor | None = None

    @property
    def router_replay(self) -> LayerRoutes:
        """The object that NeMo-RL looks for in the modules of a model, this one."""
        return self

    def set_target_indices(self, experts: torch.Tensor) -> None:
        """Take the experts of the next forward pass."""
        self.experts = experts

    def clear_indices(self) -> None:
        """Forget the experts."""
        self.experts = None

    def set_router_replay_action(self, action: Any) -> None:
        """Ignore what a router would do: recomputed layers find the routes on the tree."""

    def clear_router_replay_action(self) -> None:
        """Ignore the end of a replay."""


def _take_routes(model: Any) -> None:
    """Let a model take the routes that NeMo-RL would give its routers."""
    for module in model.modules():
        if isinstance(module, TopKRouter):
            module.router_replay = None
    model.config.moe_enable_routing_replay = False
    has_experts = layers_with_experts(model.config.num_layers, model.config.moe_layer_freq)
    numbers = [number for number, has in enumerate(has_experts, start=1) if has]
    model.layer_routes = torch.nn.ModuleList(LayerRoutes(number) for number in numbers)
    model.register_forward_pre_hook(_give_routes, with_kwargs=True)


def _give_routes(
    model: Any, positional: tuple[Any, ...], call: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Give the rows of a call their experts, in the passes for which NeMo-RL replays them."""
    parts = [layer.experts for layer in model.layer_routes]
    if parts[0] is None:
        return None
    routes = torch.stack(parts, dim=1).to(torch.int32)
    if model.config.sequence_parallel:
        routes = gather_from_sequence_parallel_region(routes, group=model.tp_group)
    return positional, call | {"packed_seq_params": RoutedPackedSeqParams.of(call["packed_seq_params"], routes)}


class FoldingPolicyWorkerImpl(MegatronPolicyWorkerImpl):  # type: ignore[misc]
    """The worker without Ray, to derive from; ``inside`` has the settings of :func:`fold_inside`."""

    inside: ClassVar[dict[str, Any]] = {}

    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        """Build as NeMo-RL does, then let the model fold; raises NotImplementedError that names a setting."""
        _check(config)
        super().__init__(config, *args, **kwargs)
        model = unwrap_model(self.model)
        if model.config.moe_enable_routing_replay:  # policy.router_replay.enabled
            _take_routes(model)
        fold_inside(model, **self.inside)

    def train(self, data: Any, loss_fn: Any, eval_mode: bool = False, **others: Any) -> dict[str, Any]:
        """Train as NeMo-RL does; the metrics of each step gain the report of folding."""
        self._report()  # drops the counts of other passes
        metrics: dict[str, Any] = super().train(data, loss_fn, eval_mode=eval_mode, **others)
        return metrics if eval_mode else self._with_report(metrics)

    def begin_train_step(self, *args: Any, **kwargs: Any) -> Any:
        """Begin a step that gets its micro-batches one by one."""
        self._report()
        return super().begin_train_step(*args, **kwargs)

    def finish_train_step(self) -> dict[str, Any]:
        """Finish the step; the metrics gain the report of folding."""
        return self._with_report(super().finish_train_step())

    def _report(self) -> FoldReport | None:
        report: FoldReport | None = unwrap_model(self.model).folding.report(training_only=True)
        return report

    def _with_report(self, metrics: dict[str, Any]) -> dict[str, Any]:
        """Add the report of all data-parallel ranks, each with its share, because NeMo-RL sums their results."""
        report, group = self._report(), parallel_state.get_data_parallel_group()
        assert report is not None
        numbers = report.over_ranks(group, next(self.model.parameters()).device).to_log()
        shares = {name: [value / group.size()] for name, value in numbers.items()}
        return metrics | {"all_mb_metrics": metrics["all_mb_metrics"] | shares}


@ray.remote(runtime_env=get_runtime_env_for_policy_worker("megatron_policy_worker"))  # type: ignore[untyped-decorator]
class FoldingPolicyWorker(FoldingPolicyWorkerImpl):
    """The worker, for ``Policy(worker_extension_cls_fqn=...)``."""
