"""verl's own Megatron engines on a CPU, around a tiny model.

Megatron-Bridge needs TransformerEngine, and that a GPU: a stand-in takes its place, and the model that a provider would
make of a checkpoint is a tiny one. Everything else is verl's.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest import mock
from zlib import crc32

import numpy as np
import torch
from bridge_models import auto_bridge
from harness.seam_models import build, local_spec, tiny_config
from harness.worlds import Layout
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_mtp_block_spec
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher
from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper
from megatron.core.transformer.transformer_config import TransformerConfig
from qwen_vl_jobs import BEGIN, END, PICTURE, pictures_of
from stand_ins import StandIn

from mcore_prefix_tree.cpu.specs import PackedAttention, cpu_spec, exchanged

VOCAB, EXPERTS = 64, 4


class Provider:
    """A replacement for Megatron-Bridge's provider in verl."""

    fp16 = bf16 = sequence_parallel = moe_enable_routing_replay = False
    num_layers, moe_layer_freq, fp8 = 4, 1, None

    def __init__(self) -> None:
        self.hooks: list[Any] = []
        self.overrides: dict[str, Any] = {}

    def transformer_layer_spec(self, config: Any) -> Any:
        return exchanged(local_spec(config), {DotProductAttention: PackedAttention})

    def apply_overrides_and_finalize(self, *, dtype: torch.dtype, overrides: dict[str, Any]) -> None:
        self.overrides = overrides
        self.sequence_parallel = overrides["sequence_parallel"]

    def register_pre_wrap_hook(self, hook: Any) -> None:
        self.hooks.append(hook)

    def provide_distributed_model(self, *, wrap_with_ddp: bool, ddp_config: Any, **_: Any) -> list[Any]:
        names = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "sequence_parallel")
        names += ("virtual_pipeline_model_parallel_size", "expert_model_parallel_size", "expert_tensor_parallel_size")
        names += ("overlap_p2p_comm", "batch_p2p_comm", "num_moe_experts", "moe_router_topk")
        names += ("moe_enable_routing_replay", "mtp_num_layers", "mtp_loss_scaling_factor")
        config = tiny_config(
            num_layers=self.num_layers,
            calculate_per_token_loss=False,
            variable_seq_lengths=True,
            moe_token_dispatcher_type="alltoall",
            pipeline_dtype=torch.float64,
            moe_router_load_balancing_type="none",
            moe_grouped_gemm=False,
            **{name: self.overrides[name] for name in names if self.overrides.get(name) is not None},
        )
        stages = config.virtual_pipeline_model_parallel_size
        spec = self.transformer_layer_spec(config)
        chunks = [
            build(
                config,
                spec,
                vocab_size=VOCAB,
                pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=stage),
                post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=stage),
                vp_stage=stage,
                mtp_block_spec=config.mtp_num_layers and depths_of(config, spec, stage),
            )
            for stage in ([None] if stages is None else range(stages))
        ]
        for hook in self.hooks:
            chunks = hook(chunks) or chunks
        for chunk in chunks:
            chunk.double()  # a critic's head is verl's, in float32
        return [DistributedDataParallel(config, ddp_config, chunk) for chunk in chunks]


def depths_of(config: Any, spec: Any, stage: int | None) -> Any:
    """The spec of the depths, None for a stage without."""
    found = get_gpt_mtp_block_spec(config, spec, use_transformer_engine=False, vp_stage=stage)
    return found and cpu_spec(found, config, stage)


class VisionProvider(Provider):
    """One of a model that reads pictures, Megatron-Bridge's own."""

    def provide_distributed_model(self, *, wrap_with_ddp: bool, ddp_config: Any, **_: Any) -> list[Any]:
        from qwen_vl_jobs import VisionJob, model_of

        names = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "sequence_parallel")
        tp, pp, sequence_parallel = (self.overrides[name] for name in names)
        layout = Layout(tp=tp, pp=pp, sequence_parallel=sequence_parallel)
        chunk = model_of(VisionJob(family="Qwen3VL"), layout, hooks=self.hooks)
        return [DistributedDataParallel(chunk.config, ddp_config, chunk)]


class AutoBridge:
    provider: type[Provider] = Provider

    @classmethod
    def from_hf_pretrained(cls, *_: Any, **__: Any) -> AutoBridge:
        return cls()

    def to_megatron_provider(self, load_weights: bool) -> Provider:
        return self.provider()

    def load_hf_weights(self, *_: Any, **__: Any) -> None:
        pass


@contextmanager
def emulated(vendor: str) -> Iterator[None]:
    """Stand-ins for Megatron-Bridge while verl is imported and its engine runs."""
    bridge = "megatron.bridge"
    members = {
        bridge: {"AutoBridge": AutoBridge},
        f"{bridge}.models": {},
        f"{bridge}.models.conversion": {},
        f"{bridge}.models.conversion.param_mapping": {
            "AutoMapping": SimpleNamespace(register_module_type=lambda *_: None)
        },
        f"{bridge}.training": {},
        f"{bridge}.training.utils": {},
        f"{bridge}.training.utils.config_utils": {"create_ddp_config": _ddp_config},
    }
    modules = {name: StandIn(name, **found) for name, found in members.items()}
    before = {name: sys.modules[name] for name in modules if name in sys.modules}
    sys.modules.update(modules)
    settings = {"VERL_ENGINE_DEVICE": "cuda", "VERL_ENGINE_VENDOR": vendor}
    try:
        with mock.patch.dict(os.environ, settings), mock.patch("torch.cuda.mem_get_info", return_value=(1, 1)):
            import mcore_prefix_tree.integrations.verl.engine  # noqa: F401

            yield
    finally:
        for name in modules:
            del sys.modules[name]
        sys.modules.update(before)


def _ddp_config(*, use_distributed_optimizer: bool, overrides: dict[str, Any], **_: Any) -> Any:
    return DistributedDataParallelConfig(use_distributed_optimizer=use_distributed_optimizer, **overrides)


def engine(
    kind: str = "language_model", *, pictures: bool = False, mtp: dict[str, Any] | None = None, **settings: Any
) -> Any:
    """The engine that verl's registry chooses, of a model that reads pictures if ``pictures``, or with two depths."""
    from verl.trainer.config import CheckpointConfig
    from verl.workers.config import McoreEngineConfig, McoreOptimizerConfig, MtpConfig
    from verl.workers.engine import EngineRegistry

    hf_config = SimpleNamespace(architectures=["LlamaForCausalLM"], hidden_size=32, rope_theta=1e4, model_type="llama")
    if pictures:
        hf_config.vision_config, hf_config.image_token_id = SimpleNamespace(spatial_merge_size=2), PICTURE
    model_config = SimpleNamespace(
        model_type=kind,
        hf_config=hf_config,
        architectures=hf_config.architectures,
        share_embeddings_and_output_weights=False,
        local_path="",
        trust_remote_code=False,
        mtp=MtpConfig(**mtp or {}),
        lora={},
        tokenizer=SimpleNamespace(pad_token_id=0),
        get_processor=lambda: None,
        get=lambda name, default=None: default,
    )
    if mtp is not None:
        hf_config.num_nextn_predict_layers = 2  # which Megatron-Bridge reads
        settings.setdefault("override_transformer_config", {})["mtp_num_layers"] = 2
    own = {"use_distributed_optimizer": False, "override_ddp_config": {"grad_reduce_in_fp32": False}}
    config = McoreEngineConfig(**own, **settings)
    object.__setattr__(config, "dtype", "float32")  # of the optimizer; the model's is float64
    return EngineRegistry.new(
        kind,
        "megatron",
        model_config,
        config,
        McoreOptimizerConfig(lr=1e-3, total_training_steps=10),
        CheckpointConfig(),
    )


def routes_of(tokens: Any, *, strays: bool) -> Any:
    """Experts ``[tokens - 1, layers, 2]`` of a row: an engine's with a prefix cache, or (``strays``) another's once."""
    seeds = [[crc32(tokens[: at + 1].tobytes()), layer] for at in range(len(tokens) - 1) for layer in range(4)]
    routes = np.array([np.random.default_rng(seed).permutation(EXPERTS)[:2] for seed in seeds], dtype=np.int16)
    routes = routes.reshape(-1, 4, 2)
    if strays:
        routes[2, 1] = (routes[2, 1] + 1) % EXPERTS
    return routes


def batch(
    seed: int,
    *,
    max_tokens: int,
    dynamic: bool,
    groups: int = 3,
    rollouts: int = 4,
    replays: bool = False,
    pictures: bool = False,
) -> Any:
    """A mini-batch as verl's trainer sends it: groups of rollouts of one prompt, not side by side.

    With ``pictures``, two of the groups have prompts that differ only in their pictures.
    """
    from verl.utils import tensordict_utils as tu

    rng = np.random.default_rng(seed)
    draw = partial(rng.integers, END + 1 if pictures else 0, VOCAB)
    pairs, inputs = [], []
    prompts = [draw(size=rng.integers(5, 12)) for _ in range(groups)]
    if pictures:
        picture = [BEGIN, *[PICTURE] * 6, END]
        prompts[0] = prompts[1] = np.concatenate((picture, prompts[0]))
    for group, prompt in enumerate(prompts):
        stem = draw(size=3)
        for rollout in range(rollouts):
            answer = draw(size=rng.integers(2, 7))
            pairs.append((prompt, np.concatenate((stem, answer)) if rollout % 2 else answer))
            inputs.append(pictures_of([["ab"[group]] if pictures and group < 2 else []]))
    order = rng.permutation(len(pairs))
    pairs, inputs = [pairs[index] for index in order], [inputs[index] for index in order]

    def jagged(rows: list[Any]) -> torch.Tensor:
        return torch.nested.as_nested_tensor([torch.as_tensor(row) for row in rows], layout=torch.jagged)

    answers = [answer for _, answer in pairs]
    mask = jagged([np.append(np.ones(len(answer) - 1), rng.integers(2)) for answer in answers])
    floats = ("old_log_probs", "advantages", "values", "returns")
    near = {name: jagged([rng.standard_normal(len(answer)) for answer in answers]) for name in floats}
    tensors = {
        "input_ids": jagged([np.concatenate(pair) for pair in pairs]),
        "prompts": jagged([prompt for prompt, _ in pairs]),
        "responses": jagged(answers),
        "response_mask": mask,
        "loss_mask": mask,
        **near | {"old_log_probs": near["old_log_probs"] - 4},
    }
    if replays:
        rows = [np.concatenate(pair) for pair in pairs]
        tensors["routed_experts"] = jagged([routes_of(row, strays=at == 1) for at, row in enumerate(rows)])
    if pictures:
        tensors["multi_modal_inputs"] = inputs
    settings = {
        "use_dynamic_bsz": dynamic,
        "max_token_len_per_gpu": max_tokens,
        "micro_batch_size_per_gpu": 6,
        "temperature": 0.7,
        "calculate_entropy": True,
        "disable_auto_offload": True,  # as train_mini_batch
        "global_batch_size": len(pairs) * parallel_state.get_data_parallel_world_size(),
        "enable_routing_replay": replays,
    }
    return tu.get_tensordict(tensors, settings)


def loss_of(kind: str) -> Any:
    from verl.workers.config import ActorConfig, CriticConfig
    from verl.workers.utils.losses import ppo_loss, value_loss

    if kind == "value_model":
        return partial(value_loss, CriticConfig(strategy="megatron", rollout_n=4, use_dynamic_bsz=True))
    actor = ActorConfig(strategy="megatron", rollout_n=4, use_dynamic_bsz=True, entropy_coeff=0.1)
    return partial(ppo_loss, actor)


def _but_last(rows: torch.Tensor) -> torch.Tensor:
    """The last token of a row is scored against the row behind it, and verl ignores that."""
    return torch.cat([row[:-1] for row in rows.unbind()])


@contextmanager
def unpatched(*classes: type) -> Iterator[None]:
    """Restore Megatron-Core's classes after verl's replay, for example ``TopKRouter.routing``."""
    before = [dict(vars(kind)) for kind in classes]
    try:
        yield
    finally:
        for kind, members in zip(classes, before, strict=True):
            for name in vars(kind).keys() - members.keys():
                delattr(kind, name)
            for name, member in members.items():
                if vars(kind)[name] is not member:
                    setattr(kind, name, member)


def _logged_depths(*outputs: dict[str, Any]) -> dict[str, torch.Tensor]:
    """The losses of depths that verl logs, which it takes from the first rank of tensor parallelism."""
    if parallel_state.get_tensor_model_parallel_rank():
        return {}
    logged = [(run, metric) for run, output in enumerate(outputs) for metric in output.get("metrics", {}).items()]
    return {f"{name} {run}": torch.tensor(value) for run, (name, value) in logged if name.startswith("mtp_losses/")}


def compare(layout: Any, kind: str, dynamic: bool = True, **of_batch: Any) -> dict[str, Any]:
    """Every rank: results of verl's own engine and ours for the same batch, and the metrics of ours."""
    with unpatched(TopKRouter, TransformerConfig, MoEAlltoAllTokenDispatcher):
        return _compare(layout, kind, dynamic, **of_batch)


def compare_pictures(layout: Any) -> dict[str, Any]:
    """The same with a model that reads pictures."""
    auto_bridge()
    importlib.import_module("megatron.bridge.models.qwen_vl.qwen35_vl_provider")
    with mock.patch.object(AutoBridge, "provider", VisionProvider):
        return compare(layout, "language_model", pictures=True)


def _compare(
    layout: Any,
    kind: str,
    dynamic: bool,
    *,
    replays: bool = False,
    pictures: bool = False,
    mtp: dict[str, Any] | None = None,
    **settings: Any,
) -> dict[str, Any]:
    from verl.workers.config.engine import EngineRouterReplayConfig

    answers: list[dict[str, Any]] = []
    weights: list[Any] = []
    shape = {
        "tensor_model_parallel_size": layout.tp,
        "pipeline_model_parallel_size": layout.pp,
        "sequence_parallel": layout.sequence_parallel,
        "virtual_pipeline_model_parallel_size": layout.vpp,
        "expert_model_parallel_size": layout.ep,
        "expert_tensor_parallel_size": 1 if layout.ep > 1 else None,
        "override_transformer_config": {"num_moe_experts": 2} if layout.ep > 1 else {},
    }
    if replays:
        shape["override_transformer_config"] = {"num_moe_experts": EXPERTS, "moe_router_topk": 2}
        shape["router_replay"] = EngineRouterReplayConfig(mode="R3")
    for vendor, max_tokens, own in (("nvidia", 80, {}), ("mcore_prefix_tree", 50, settings)):
        with emulated(vendor):
            MTPLossLoggingHelper.tracker.clear()
            built = engine(kind, pictures=pictures, mtp=mtp, **shape, **own)
            assert type(built).__name__.startswith("Folding") == (vendor != "nvidia")
            built.initialize()
            parameters = {
                f"{chunk}.{name}": parameter
                for chunk, module in enumerate(built.module)
                for name, parameter in module.module.named_parameters()
            }
            weights = weights or [parameter.detach().clone() for parameter in parameters.values()]
            for parameter, weight in zip(parameters.values(), weights, strict=True):
                parameter.data.copy_(weight)
            rank = parallel_state.get_data_parallel_rank()
            data = batch(rank, max_tokens=max_tokens, dynamic=dynamic, replays=replays, pictures=pictures)
            with built.eval_mode(disable_auto_offload=True):
                inferred = built.infer_batch(data.clone())
            with built.train_mode(disable_auto_offload=True):
                built.optimizer_zero_grad()
                trained = built.forward_backward_batch(data.clone(), loss_of(kind))
                gradients = {f"gradient of {name}": p.main_grad.clone() for name, p in parameters.items()}
            # Megatron-Bridge leaves each rank the gradients of its own tokens.
            for name, gradient in gradients.items():
                if layout.sequence_parallel and "vision_model" in name:
                    torch.distributed.all_reduce(gradient, group=parallel_state.get_tensor_model_parallel_group())
        metrics = trained.get("metrics", {})
        outputs = [run.get("model_output", {}) for run in (inferred, trained)]
        answers.append(
            {f"{name} {run}": _but_last(value) for run, out in enumerate(outputs) for name, value in out.items()}
            | gradients
            | ({"loss": torch.tensor(sum(trained["loss"]))} if trained else {})
            | _logged_depths(inferred, trained)
        )
    stock, ours = answers
    assert stock.keys() == ours.keys()
    for name, expected in stock.items():
        error = (ours[name].double() - expected.double()).norm()
        assert error <= 1e-5 * max(1e-3, expected.double().norm()), (name, error, expected.norm())
    return {
        "names": sorted(stock),
        "fold": {k: v for k, v in metrics.items() if k.startswith("fold/")},
        "learns": {name.split(".")[1] for name, value in stock.items() if name.startswith("gradient") and value.any()},
    }


def track(layout: Any, folder: str, backends: list[str]) -> Any:
    """Every rank: SFT's metrics for trackers; the first rank of the last stage logs it with ``Tracking``."""
    from verl.utils import tensordict_utils as tu
    from verl.utils.tracking import Tracking
    from verl.workers.engine_workers import TrainingWorker

    with emulated("mcore_prefix_tree"):
        built = engine("language_model")
        built.initialize()
        data = batch(parallel_state.get_data_parallel_rank(), max_tokens=50, dynamic=True)
        tu.pop(data, key="disable_auto_offload")
        with built.train_mode(disable_auto_offload=True):
            built.optimizer_zero_grad()
            output = built.forward_backward_batch(data, loss_of("language_model"))
        # sft_loss has no metrics.
        output["metrics"] = {name: value for name, value in output["metrics"].items() if "fold/" in name}
        output.pop("model_output")
        worker = SimpleNamespace(engine=built, device_name="cpu", flops_counter=None)
        spent = {"global_token_num": None, "delta_time": 1.0, "forward_only": False, "images_seqlens": None}
        metrics = tu.get(TrainingWorker._postprocess_output(worker, output, **spent), "metrics")
        if parallel_state.get_data_parallel_rank() == 0:
            settings = {"VERL_FILE_LOGGER_ROOT": folder, "TENSORBOARD_DIR": folder, "WANDB_DIR": folder}
            with mock.patch.dict(os.environ, settings | {"WANDB_MODE": "offline"}):
                tracking = Tracking("project", "run", backends, config={"trainer": {}})
                tracking.log(data=metrics, step=1)
                tracking.finish()
    return metrics
