"""slime's own steps on a CPU, around a tiny model.

The checkout in SLIME_PATH is run as it is: its model provider, schedule of micro-batches, batches, forward passes,
losses and training step. Stand-ins take the place of Megatron-LM's ``megatron.training``, whose arguments a tiny model
does not need, and of packages that would log or serve.
"""

from __future__ import annotations

import ast
import importlib.util
import os
import sys
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from harness.routes import with_routes
from harness.seam_models import local_spec, tiny_config
from megatron.core import mpu
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.moe import router as megatron_router
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.utils import unwrap_model
from stand_ins import StandIn

from mcore_prefix_tree import Sample
from mcore_prefix_tree.cpu.specs import PackedAttention, cpu_spec, exchanged

VOCAB = 64  # tensor-parallel ranks have as much of it
ROUTES = (4, 2, 4)  # layers, experts of a token, experts
OURS = "mcore_prefix_tree.integrations.slime"
ARGS = Namespace()  # megatron.training's global arguments
LOGGED: list[dict[str, float]] = []  # the entries of slime's log


def config_of(args: Namespace) -> Any:
    """The stand-in of ``core_transformer_config_from_args``."""
    dtype = torch.bfloat16 if args.bf16 else torch.float64
    return tiny_config(
        calculate_per_token_loss=False,
        variable_seq_lengths=True,
        pipeline_dtype=dtype,
        num_layers=4,
        moe_token_dispatcher_type="alltoall",
        **({"bf16": True, "params_dtype": dtype} if args.bf16 else {}),
        **args.config,
    )


def packed_spec(args: Namespace, config: Any, vp_stage: int | None) -> Any:
    """``--spec``: Megatron's local layers, whose attention takes packed rows."""
    if config.num_moe_experts:
        spec = cpu_spec(get_gpt_decoder_block_spec(config, use_transformer_engine=False, vp_stage=vp_stage), config)
    else:
        spec = local_spec(config)
    return exchanged(spec, {DotProductAttention: PackedAttention})


def minimax_spec(args: Namespace, config: Any, vp_stage: int | None) -> Any:
    """``--spec``: the same with slime's attention of MiniMax-M2, which norms all heads together."""
    from slime_plugins.models.minimax_m2 import MiniMaxM2SelfAttention

    spec = packed_spec(args, config, vp_stage)
    attention = spec.submodules.self_attention
    attention.module = MiniMaxM2SelfAttention
    attention.submodules.q_layernorm = attention.submodules.k_layernorm = WrappedTorchNorm
    return spec


def building_spec(args: Namespace, config: Any, vp_stage: int | None) -> Any:
    """``--spec``: a function that builds a model, as slime also takes."""

    def build(pre_process: bool, post_process: bool, vp_stage: int | None) -> GPTModel:
        return GPTModel(
            config,
            packed_spec(args, config, vp_stage),
            args.padded_vocab_size,
            args.max_position_embeddings,
            pre_process=pre_process,
            post_process=post_process,
            share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
            position_embedding_type=args.position_embedding_type,
            rotary_base=args.rotary_base,
            vp_stage=vp_stage,
        )

    return build


@contextmanager
def slime() -> Iterator[None]:
    """Let slime be imported and run."""
    members: dict[str, dict[str, Any]] = {
        "megatron.training": {},
        "megatron.training.arguments": {"core_transformer_config_from_args": config_of},
        "megatron.training.checkpointing": dict.fromkeys(
            ("load_checkpoint", "save_checkpoint", "get_load_checkpoint_path_by_args")
        ),
        "megatron.training.global_vars": {"get_args": lambda: ARGS},
        "megatron.training.training": {"get_model": None},
        "httpx": {"AsyncClient": object},
        "wandb": {"log": LOGGED.append},
    }
    modules = {name: StandIn(name, **found) for name, found in members.items()}
    with (
        mock.patch.dict(sys.modules, modules),
        mock.patch.object(sys, "path", [os.environ["SLIME_PATH"], *sys.path]),
        torch.compiler.set_stance("force_eager"),
    ):
        if importlib.util.find_spec("slime.utils.accelerator"):  # since 0.3.1
            _register_accelerator()
        yield


@contextmanager
def routing_replay(asked: bool) -> Iterator[None]:
    """slime's patch of Megatron-Core's routers, and the variables that its actors set.

    The patch makes a replay when a router is made, and asks it after any other choice of experts.
    """
    if not asked:
        yield
        return
    from slime.utils.routing_replay import RoutingReplay, get_routing_replay_compute_topk, register_routing_replay

    made, chosen = megatron_router.TopKRouter.__init__, megatron_router.topk_routing_with_score_function

    def make(router: Any, *args: Any, **kwargs: Any) -> None:
        made(router, *args, **kwargs)
        register_routing_replay(router)

    def choose(*args: Any, router_replay: Any = None, **kwargs: Any) -> Any:
        def compute_topk(scores: Any, topk: int, num_groups: Any, group_topk: Any, default: Any) -> Any:
            def unpatched(*given: Any, **named: Any) -> Any:
                if router_replay is None:
                    return default(*given, **named)
                return router_replay.get_replay_topk(*given, **named, default_compute_topk=default)

            return get_routing_replay_compute_topk(unpatched)(scores, topk, num_groups, group_topk)

        return chosen(*args, router_replay=Namespace(get_replay_topk=compute_topk), **kwargs)

    empty_like = torch.empty_like
    with (
        mock.patch.object(megatron_router.TopKRouter, "__init__", make),
        mock.patch.object(megatron_router, "topk_routing_with_score_function", choose),
        mock.patch.object(RoutingReplay, "all_routing_replays", []),
        mock.patch.object(torch, "empty_like", lambda like, pin_memory=False, **kwargs: empty_like(like, **kwargs)),
        mock.patch.dict(os.environ, ENABLE_ROUTING_REPLAY="1", ROUTING_REPLAY_STAGE="fallthrough"),
    ):
        yield


def fill_routing_replay(*given: Any) -> None:
    """Call slime's own method, of an actor that cannot be imported without packages for a GPU."""
    from slime.backends.megatron_utils.cp_utils import prepare_routed_experts_for_routing_replay

    file = Path(os.environ["SLIME_PATH"], "slime", "backends", "megatron_utils", "actor.py")
    methods = [node for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.FunctionDef)]
    own = next(method for method in methods if method.name == "fill_routing_replay")
    names = {"prepare_routed_experts_for_routing_replay": prepare_routed_experts_for_routing_replay}
    exec(compile(ast.Module([own], []), str(file), "exec"), names)
    names["fill_routing_replay"](*given)


def _register_accelerator() -> None:
    """Let slime take the emulated GPU, through its own registry."""
    from slime.utils.accelerator import CUDAAccelerator, register_accelerator

    emulated = {"is_available": lambda self: True, "current_device": lambda self: 0}
    register_accelerator("emulated", type("Emulated", (CUDAAccelerator,), emulated), priority=1)


def arguments(layout: Any, **changes: Any) -> Namespace:
    """A command line as slime's parser would return it."""
    config = {
        "tensor_model_parallel_size": layout.tp,
        "pipeline_model_parallel_size": layout.pp,
        "expert_model_parallel_size": layout.ep,
        "sequence_parallel": layout.sequence_parallel,
    }
    settings: dict[str, Any] = {
        "config": config,
        "bf16": False,
        "transformer_impl": "local",
        "spec": ("slime_runs", "packed_spec"),
        "custom_model_provider_path": None,
        "num_experts": None,
        "sequence_parallel": layout.sequence_parallel,
        "use_routing_replay": False,
        "use_rollout_routing_replay": False,
        "fp8_param_gather": False,
        "padded_vocab_size": VOCAB,
        "max_position_embeddings": 64,
        "fp16_lm_cross_entropy": False,
        "untie_embeddings_and_output_weights": True,
        "position_embedding_type": "rope",
        "rotary_percent": 1.0,
        "rotary_base": 10000,
        "use_rope_scaling": False,
        "mtp_num_layers": None,
        "enable_mtp_training": False,
        "allgather_cp": False,
        "data_pad_size_multiplier": 8,
        "use_dynamic_batch_size": True,
        "max_tokens_per_gpu": 60,
        "balance_by_flops": False,
        "balance_data": False,
        "rollout_temperature": 0.7,
        "rollout_top_p": 1.0,
        "log_probs_chunk_size": -1,
        "entropy_coef": 0.1,
        "use_rollout_entropy": True,
        "custom_megatron_before_log_prob_hook_path": None,
        "custom_megatron_before_train_step_hook_path": None,
        "custom_pg_loss_reducer_function_path": None,
        "custom_loss_function_path": None,
        "save_debug_train_data": None,
        "seq_length": 1,
        "decoder_seq_length": None,
        "micro_batch_size": 1,
        "loss_type": "policy_loss",
        "advantage_estimator": "grpo",
        "recompute_loss_function": False,
        "calculate_per_token_loss": False,
        "use_rollout_logprobs": False,
        "kl_coef": 0.0,
        "use_critic": False,
        "keep_old_actor": False,
        "use_opd": False,
        "use_opsm": False,
        "use_tis": False,
        "get_mismatch_metrics": False,
        "use_kl_loss": True,
        "use_unbiased_kl": True,
        "kl_loss_type": "low_var_kl",
        "kl_loss_coef": 0.2,
        "eps_clip": 0.2,
        "eps_clip_high": 0.3,
        "eps_clip_c": None,
        "value_clip": 0.2,
        "ci_test": False,
        "use_wandb": True,
        "use_tensorboard": False,
        "rollout_batch_size": 6,
        "n_samples_per_prompt": 4,
        "global_batch_size": 12,
    }
    return Namespace(**settings | changes | {"config": config | changes.get("config", {})})


def rollouts(args: Namespace, groups: int = 3, answers: int = 4) -> tuple[dict[str, Any], list[int]]:
    """A rollout as slime's actor has it, groups side by side, and the number of micro-batches of its one step."""
    from slime.utils.dp_schedule import build_dp_schedule

    rng = np.random.default_rng(0)
    pairs = []
    for _ in range(groups):
        prompt, stem = rng.integers(VOCAB, size=rng.integers(5, 12)), rng.integers(VOCAB, size=3)
        for answer in range(answers):
            own = rng.integers(VOCAB, size=rng.integers(2, 7))
            pairs.append((prompt, np.concatenate((stem, own)) if answer % 2 else own))
    total = [len(prompt) + len(answer) for prompt, answer in pairs]
    parallel = {"cp_size": 1, "vpp_size": 1, "microbatch_group_size_per_vp_stage": 1}
    parallel["dp_size"] = mpu.get_data_parallel_world_size()
    partitions, micro_batches, counts, _ = build_dp_schedule(
        args, parallel, total, global_batch_size=len(pairs), rollout_indices=list(range(len(pairs)))
    )
    data: dict[str, list[Any]] = {
        "tokens": [torch.from_numpy(np.concatenate(pair)) for pair in pairs],
        "total_lengths": total,
        "response_lengths": [len(answer) for _, answer in pairs],
        "loss_masks": [torch.from_numpy(rng.integers(2, size=len(answer))) for _, answer in pairs],
    }
    if args.use_rollout_routing_replay:
        rows = with_routes([Sample(tokens=tokens.numpy()) for tokens in data["tokens"]], "one token", ROUTES)
        data["rollout_routed_experts"] = [torch.from_numpy(row.signals.routes.ids[:-1]).int() for row in rows]
    data["rollout_mask_sums"] = [mask.sum() for mask in data["loss_masks"]]
    for name in ("log_probs", "ref_log_probs", "rollout_log_probs", "advantages", "values", "returns"):
        near = -4 if "log" in name else 0
        data[name] = [torch.from_numpy(rng.standard_normal(len(answer)) + near).float() for _, answer in pairs]
    rank = mpu.get_data_parallel_rank()
    mine: dict[str, Any] = {name: [values[index] for index in partitions[rank]] for name, values in data.items()}
    return mine | {"micro_batch_indices": micro_batches[rank]}, counts


class Optimizer:
    """Keeps the gradients that it is asked to step with."""

    def __init__(self, chunks: list[Any]) -> None:
        self.chunks = chunks
        self.gradients: dict[str, torch.Tensor] = {}

    def zero_grad(self) -> None:
        pass

    def scale_loss(self, loss: torch.Tensor) -> torch.Tensor:
        return loss

    def step(self) -> tuple[bool, float, int]:
        for chunk in self.chunks:
            self.gradients |= {name: p.main_grad.clone() for name, p in chunk.module.named_parameters()}
        return True, 0.0, 0


def models(args: Namespace, role: str) -> list[Any]:
    """The result of ``get_model`` in slime's ``setup_model_and_optimizer``: a chunk with float32 outputs."""
    from slime.backends.megatron_utils.model_provider import get_model_provider_func

    first, last = mpu.is_pipeline_first_stage(), mpu.is_pipeline_last_stage()
    model = get_model_provider_func(args, role)(pre_process=first, post_process=last)
    config = model.config
    if args.bf16:
        model = Float16Module(config, model)
    else:
        model.double()
        if last:  # as Float16Module does
            model.register_forward_hook(lambda module, args, output: output.float())
    generator = torch.Generator().manual_seed(mpu.get_tensor_model_parallel_rank())
    for parameter in model.parameters():
        noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64) / 5
        parameter.data = noise.to(parameter.dtype)
        parameter.requires_grad_()
    for name, parameter in model.named_parameters():
        if not getattr(parameter, "tensor_model_parallel", False):
            whole = torch.Generator().manual_seed(len(name))
            noise = torch.randn(parameter.shape, generator=whole, dtype=torch.float64) / 5
            parameter.data = (1 + noise).to(parameter.dtype)
    ddp = DistributedDataParallelConfig(use_distributed_optimizer=False, grad_reduce_in_fp32=args.bf16)
    return [DistributedDataParallel(config, ddp, model)]


def run(args: Namespace, role: str) -> dict[str, Any]:
    """slime's results for a rollout: log-probabilities and entropies or values, metrics, and gradients.

    Of a model that folds also the report of the first of these, and slime's log of the training step.
    """
    from slime.backends.megatron_utils.data import get_data_iterator
    from slime.backends.megatron_utils.loss import get_log_probs_and_entropy, get_values
    from slime.backends.megatron_utils.model import finalize_model_grads, forward_only, train_one_step
    from slime.utils.misc import load_function
    from slime.utils.routing_replay import RoutingReplay

    vars(ARGS).clear()
    vars(ARGS).update(vars(args))
    replays = args.use_rollout_routing_replay
    data, counts = rollouts(args)
    chunks = models(ARGS, role)
    answer = get_values if role == "critic" else get_log_probs_and_entropy
    reference = {}
    if replays:
        fill_routing_replay(Namespace(args=ARGS, model=chunks), get_data_iterator(data), counts, data)
        reference = forward_only(answer, ARGS, chunks, get_data_iterator(data), counts, store_prefix="ref_")
        os.environ["ROUTING_REPLAY_STAGE"] = "replay_forward"
    answers = forward_only(answer, ARGS, chunks, get_data_iterator(data), counts) | reference
    if replays:
        RoutingReplay.clear_all_forward()
        os.environ["ROUTING_REPLAY_STAGE"] = "replay_backward"
    folding = getattr(unwrap_model(chunks[0]), "folding", None)
    report: dict[str, Any] = {}
    if folding:
        report["report"] = folding.report().to_log()
        ARGS.custom_megatron_before_train_step_hook_path = f"{OURS}.log_folding"
    if role == "critic":
        ARGS.loss_type = "value_loss"
    optimizer = Optimizer(chunks)
    chunks[0].config.grad_scale_func = optimizer.scale_loss
    chunks[0].config.finalize_model_grads_func = finalize_model_grads
    step = (chunks, optimizer, mock.Mock(), counts[0], len(data["tokens"]))
    metrics, _ = train_one_step(ARGS, 3, 0, get_data_iterator(data), *step)
    found: dict[str, Any] = {f"{name} {row}": value for name, rows in answers.items() for row, value in enumerate(rows)}
    found |= {f"metric {name}": torch.as_tensor(value) for name, value in metrics.items()}
    if folding:  # the next step begins with a log of this one
        assert not LOGGED
        load_function(ARGS.custom_megatron_before_train_step_hook_path)(ARGS, 3, 1, *step[:3])
        report["logged"] = list(LOGGED)
        LOGGED.clear()
    return found | {f"gradient of {name}": grad for name, grad in optimizer.gradients.items()} | report


def compare(
    layout: Any, role: str, limit: float, ours: dict[str, Any], both: dict[str, Any], keep_scores: bool = False
) -> dict[str, Any]:
    """Every rank: slime's answers with its own model and with ours agree; the names, and the reports of ours.

    ``keep_scores`` keeps Megatron-Core from rounding the scores of routers to fp32.
    """
    softmax = torch.softmax
    kept = mock.patch.object(torch, "softmax", lambda values, dim, dtype=None: softmax(values, dim))
    args = arguments(layout, **both)
    with slime(), kept if keep_scores else nullcontext():
        with routing_replay(args.use_rollout_routing_replay):
            stock = run(args, role)
        vars(args).update(ours, custom_model_provider_path=f"{OURS}.model_provider")
        with routing_replay(args.use_rollout_routing_replay):
            folded = run(args, role)
    reports = {name: folded.pop(name) for name in ("report", "logged")}
    assert stock.keys() == folded.keys(), stock.keys() ^ folded.keys()
    for name, expected in stock.items():
        expected = expected.double()
        error = (folded[name].double() - expected).norm()
        assert error <= limit * max(1e-3, expected.norm()), (name, error, expected.norm())
    return {"names": sorted(stock), **reports}


def warnings_of(changes: dict[str, Any]) -> list[str]:
    """Return the warnings of our provider for these arguments."""
    from harness.worlds import Layout

    with slime():
        from mcore_prefix_tree.integrations import slime as ours

        vars(ARGS).clear()
        vars(ARGS).update(vars(arguments(Layout(), custom_model_provider_path=f"{OURS}.model_provider", **changes)))
        with mock.patch.object(ours.logger, "warning") as warn:
            models(ARGS, "actor")
        return [call.args[0] for call in warn.call_args_list]


def same_parameters(experts: int | None) -> None:
    """Without ``--spec``, our model has the parameters of slime's."""
    from harness.worlds import Layout

    names = []
    for provider in (None, f"{OURS}.model_provider"):
        with slime():
            from slime.backends.megatron_utils.model_provider import get_model_provider_func

            args = arguments(
                Layout(),
                spec=None,
                num_experts=experts,
                moe_grouped_gemm=False,
                qk_layernorm=False,
                multi_latent_attention=False,
                moe_use_legacy_grouped_gemm=False,
                custom_model_provider_path=provider,
            )
            args.config |= {
                "num_moe_experts": experts,
                "normalization": "LayerNorm",
                "moe_router_load_balancing_type": "none",
            }
            vars(ARGS).clear()
            vars(ARGS).update(vars(args))
            names.append([(name, p.shape) for name, p in get_model_provider_func(ARGS)().named_parameters()])
    assert names[0] == names[1]
