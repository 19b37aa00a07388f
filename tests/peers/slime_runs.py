"""slime's own steps on a CPU, around a tiny model.

The checkout in SLIME_PATH is run as it is: its model provider, schedule of micro-batches, batches, forward passes,
losses and training step. Stand-ins take the place of Megatron-LM's ``megatron.training``, whose arguments a tiny model
does not need, and of packages that would log or serve.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import numpy as np
import torch
from harness.seam_models import local_spec, tiny_config
from megatron.core import mpu
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.transformer.dot_product_attention import DotProductAttention
from stand_ins import StandIn

from mcore_prefix_tree.cpu.dot_product import PackedAttention
from mcore_prefix_tree.cpu.specs import exchanged

VOCAB = 64  # tensor-parallel ranks have as much of it
OURS = "mcore_prefix_tree.integrations.slime"
ARGS = Namespace()  # megatron.training's global arguments
LOGGED: list[dict[str, float]] = []  # the entries of slime's log


def config_of(args: Namespace) -> Any:
    """The stand-in of ``core_transformer_config_from_args``."""
    return tiny_config(
        calculate_per_token_loss=False,
        variable_seq_lengths=True,
        pipeline_dtype=torch.float64,
        num_layers=4,
        moe_token_dispatcher_type="alltoall",
        **args.config,
    )


def packed_spec(args: Namespace, config: Any, vp_stage: int | None) -> Any:
    """``--spec``: Megatron's local layers, whose attention takes packed rows."""
    return exchanged(local_spec(config), {DotProductAttention: PackedAttention})


def building_spec(args: Namespace, config: Any, vp_stage: int | None) -> Any:
    """``--spec``: a function that builds a model, as slime also takes."""

    def build(pre_process: bool, post_process: bool, vp_stage: int | None) -> None:
        raise AssertionError

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
        "sequence_parallel": layout.sequence_parallel,
    }
    settings: dict[str, Any] = {
        "config": config,
        "transformer_impl": "local",
        "spec": ("slime_runs", "packed_spec"),
        "custom_model_provider_path": None,
        "num_experts": None,
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
    return Namespace(**settings | changes)


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
    model = get_model_provider_func(args, role)(pre_process=first, post_process=last).double()
    if last:  # as Float16Module does
        model.register_forward_hook(lambda module, args, output: output.float())
    generator = torch.Generator().manual_seed(mpu.get_tensor_model_parallel_rank())
    for parameter in model.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator, dtype=torch.float64) / 5
        parameter.requires_grad_()
    for name, parameter in model.named_parameters():
        if not getattr(parameter, "tensor_model_parallel", False):
            whole = torch.Generator().manual_seed(len(name))
            parameter.data = 1 + torch.randn(parameter.shape, generator=whole, dtype=torch.float64) / 5
    ddp = DistributedDataParallelConfig(use_distributed_optimizer=False, grad_reduce_in_fp32=False)
    return [DistributedDataParallel(model.config, ddp, model)]


def run(args: Namespace, role: str) -> dict[str, Any]:
    """slime's results for a rollout: log-probabilities and entropies or values, metrics, and gradients.

    Of a model that folds also the report of the first of these, and slime's log of the training step.
    """
    from slime.backends.megatron_utils.data import get_data_iterator
    from slime.backends.megatron_utils.loss import get_log_probs_and_entropy, get_values
    from slime.backends.megatron_utils.model import finalize_model_grads, forward_only, train_one_step
    from slime.utils.misc import load_function

    vars(ARGS).clear()
    vars(ARGS).update(vars(args))
    data, counts = rollouts(args)
    chunks = models(ARGS, role)
    answers = forward_only(
        get_values if role == "critic" else get_log_probs_and_entropy, ARGS, chunks, get_data_iterator(data), counts
    )
    folding = getattr(chunks[0].module, "folding", None)
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


def compare(layout: Any, role: str, limit: float, ours: dict[str, Any], both: dict[str, Any]) -> dict[str, Any]:
    """Every rank: slime's answers with its own model and with ours agree; the names, and the reports of ours."""
    with slime():
        stock = run(arguments(layout, **both), role)
        folded = run(arguments(layout, custom_model_provider_path=f"{OURS}.model_provider", **both | ours), role)
    reports = {name: folded.pop(name) for name in ("report", "logged")}
    assert stock.keys() == folded.keys(), stock.keys() ^ folded.keys()
    for name, expected in stock.items():
        expected = expected.double()
        error = (folded[name].double() - expected).norm()
        assert error <= limit * max(1e-3, expected.norm()), (name, error, expected.norm())
    return {"names": sorted(stock), **reports}


def warnings_of(changes: dict[str, Any]) -> list[str]:
    """What our provider warns of with these arguments."""
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
