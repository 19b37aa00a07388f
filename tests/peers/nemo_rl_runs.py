"""NeMo-RL's own micro-batches, forward and backward passes and losses on a CPU, around a tiny model.

The checkout in NEMO_RL_PATH is run as it is, except its worker: that needs GPUs, and Megatron-Bridge's main branch. A
stand-in takes its place, which builds a model as the worker does. Stand-ins also take the place of packages that would
log, serve or quantize.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from bridge_models import auto_bridge
from harness.routes import with_routes
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_decoder_block_spec,
    get_gpt_layer_local_spec,
    get_gpt_mtp_block_spec,
)
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.dot_product_attention import DotProductAttention
from stand_ins import Finder, StandIn

from mcore_prefix_tree import Sample
from mcore_prefix_tree.cpu.specs import PackedAttention, cpu_spec, exchanged

VOCAB = 64
ROUTES = (4, 2, 4)  # layers, experts of a token, experts
WORKER = "nemo_rl.models.policy.workers.megatron_policy_worker"


class Worker:
    """``MegatronPolicyWorkerImpl``, as far as it builds the model, runs micro-batches and gathers their metrics."""

    def __init__(self, config: Any, provider: Any) -> None:
        from megatron.bridge.models.model_provider import get_model

        self.cfg = config
        self.megatron_cfg = SimpleNamespace(model=provider)
        groups = ProcessGroupCollection.use_mpu_process_groups()
        provider._pg_collection = groups  # so does NeMo-RL
        ddp = DistributedDataParallelConfig(use_distributed_optimizer=False, grad_reduce_in_fp32=False)
        self.model = get_model(
            self.megatron_cfg.model, ddp, pre_wrap_hook=[], use_cpu_initialization=True, pg_collection=groups
        )[0]

    def train(self, data: Any, loss_fn: Any, eval_mode: bool = False) -> dict[str, Any]:
        """Two micro-batches of the same data."""
        from nemo_rl.models.megatron.train import LossPostProcessor, aggregate_training_statistics

        sampling = sampling_params()
        loss = LossPostProcessor(loss_fn, self.cfg, num_microbatches=2, sampling_params=sampling)
        found = self.passes(data, loss, forward_only=eval_mode)
        if not found:  # not the last stage
            return {"all_mb_metrics": {}}
        group = parallel_state.get_data_parallel_group()
        metrics, _ = aggregate_training_statistics(found, [float(one["loss"]) for one in found], group)
        return {"all_mb_metrics": metrics}

    def passes(self, data: Any, processor: Any, *, forward_only: bool) -> list[dict[str, Any]]:
        from nemo_rl.models.megatron.data import make_processed_microbatch_iterator
        from nemo_rl.models.megatron.train import megatron_forward_backward

        multiple = parallel_state.get_tensor_model_parallel_world_size()
        iterator = make_processed_microbatch_iterator(
            iter([data, data]), self.cfg, "input_lengths", multiple, multiple, None, None
        )
        reported: list[dict[str, Any]] = megatron_forward_backward(
            self.model,
            iterator,
            num_microbatches=2,
            seq_length=1,
            mbs=1,
            post_processing_fn=processor,
            forward_only=forward_only,
            global_valid_seqs=torch.tensor(float(len(data["input_ids"]))),
            global_valid_toks=data["token_mask"].sum().float(),
            sampling_params=sampling_params(),
            use_router_replay="routed_experts" in data,
            router_replay_train=not forward_only,
        )
        return reported


def sampling_params() -> Any:
    from nemo_rl.algorithms.logits_sampling_utils import TrainingSamplingParams

    return TrainingSamplingParams(temperature=0.7)


@contextmanager
def nemo_rl() -> Iterator[None]:
    """Let NeMo-RL be imported and run."""
    auto_bridge()
    import transformers

    with (
        mock.patch.dict(sys.modules, {WORKER: StandIn(WORKER, MegatronPolicyWorkerImpl=Worker)}),
        mock.patch.object(sys, "path", [os.environ["NEMO_RL_PATH"], *sys.path]),
        mock.patch.object(sys, "meta_path", [Finder(), *sys.meta_path]),
        mock.patch.object(transformers, "__version__", "5.11.0"),  # newer ones are refused for their tokenizers
    ):
        yield


def layers(config: Any) -> Any:
    """A provider's layer spec: Megatron's local layers, whose attention takes packed rows."""
    if config.num_moe_experts:
        spec = get_gpt_decoder_block_spec(config, use_transformer_engine=False)
    else:
        spec = get_gpt_layer_local_spec(normalization=config.normalization)
    return exchanged(cpu_spec(spec, config), {DotProductAttention: PackedAttention})


def provider_of(layout: Any, policy: dict[str, Any]) -> Any:
    """Contents of the worker's ``run_config.yaml``."""
    from megatron.bridge.models import GPTModelProvider

    replays = policy.get("router_replay", {}).get("enabled", False)
    dtype = getattr(torch, policy.get("precision", "float64"))
    experts = {
        "num_layers": 4,
        "num_moe_experts": 4,
        "moe_layer_freq": [0, 1, 1, 1],
        "moe_router_topk": 2,
        "moe_ffn_hidden_size": 24,
        "moe_router_load_balancing_type": "none",
        "moe_aux_loss_coeff": 0.0,
        "moe_enable_routing_replay": True,
        "recompute_granularity": "full",
        "recompute_method": "uniform",
        "recompute_num_layers": 1,
    }
    provider = GPTModelProvider(
        **(experts if replays else {"num_layers": 2}),
        mtp_num_layers=policy["megatron_cfg"].get("mtp_num_layers"),
        cross_entropy_loss_fusion=False,  # the fused loss of a depth rounds its gradient to bfloat16
        hidden_size=32,
        num_attention_heads=4,
        num_query_groups=2,
        ffn_hidden_size=48,
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        vocab_size=VOCAB,
        seq_length=64,
        normalization="RMSNorm",
        position_embedding_type="rope",
        share_embeddings_and_output_weights=False,
        transformer_layer_spec=layers,
        tensor_model_parallel_size=layout.tp,
        pipeline_model_parallel_size=layout.pp,
        pipeline_dtype=dtype,
        expert_model_parallel_size=layout.ep,
        sequence_parallel=layout.sequence_parallel,
        use_cpu_initialization=True,
        gradient_accumulation_fusion=False,
        bias_dropout_fusion=False,
        persist_layer_norm=False,
        variable_seq_lengths=True,
        moe_token_dispatcher_type="alltoall",
    )
    return provider.apply_overrides_and_finalize(dtype=dtype)


def depths_of(config: Any, vp_stage: int | None = None) -> Any:
    """A provider's layers of multi-token prediction, which Megatron-Bridge makes of TransformerEngine's only."""
    if not config.mtp_num_layers:
        return None
    block = get_gpt_mtp_block_spec(config, layers(config), use_transformer_engine=False, vp_stage=vp_stage)
    return None if block is None else cpu_spec(block, config)


def batch(route_layers: slice | None = None, *, depths: int | None = None) -> Any:
    """A micro-batch as NeMo-RL's packer cuts it: groups of answers, rows padded to the longest.

    ``route_layers`` are the layers of its routes, of all layers; None gives no routes. For ``depths`` it has the mask
    that NeMo-RL's worker adds.
    """
    from nemo_rl.distributed.batched_data_dict import BatchedDataDict

    rng = np.random.default_rng(0)
    pairs = []
    for _ in range(2):
        prompt, stem = rng.integers(VOCAB, size=rng.integers(5, 12)), rng.integers(VOCAB, size=3)
        for answer in range(4):
            own = rng.integers(VOCAB, size=rng.integers(2, 7))
            pairs.append((prompt, np.concatenate((stem, own)) if answer % 2 else own))
    lengths = [len(prompt) + len(answer) for prompt, answer in pairs]
    ids, mask = np.zeros((2, len(pairs), max(lengths)), dtype=np.int64)
    for row, (prompt, answer) in enumerate(pairs):
        ids[row, : lengths[row]] = np.concatenate((prompt, answer))
        mask[row, len(prompt) : lengths[row]] = 1
    floats = ("advantages", "prev_logprobs", "generation_logprobs", "reference_policy_logprobs")
    near = {name: rng.standard_normal(ids.shape) - (0 if name == "advantages" else 4) for name in floats}
    routes: dict[str, torch.Tensor] = {}
    if route_layers is not None:
        rows = [Sample(tokens=row[:length]) for row, length in zip(ids, lengths, strict=True)]
        filled = np.full((*ids.shape, *ROUTES[:2]), -1, dtype=np.int16)
        for row, sample in enumerate(with_routes(rows, "one token", ROUTES)):
            filled[row, : len(sample)] = sample.signals.routes.ids
        filled[4:, 2] = -1  # a token that the engine did not report
        routes["routed_experts"] = torch.from_numpy(filled[:, :, route_layers])
    return BatchedDataDict(
        **routes,
        **({"mtp_loss_mask": torch.from_numpy(mask).float()} if depths else {}),
        input_ids=torch.from_numpy(ids),
        input_lengths=torch.tensor(lengths),
        token_mask=torch.from_numpy(mask),
        sample_mask=torch.ones(len(pairs)),
        **{name: torch.from_numpy(value).float() for name, value in near.items()},
    )


def run(layout: Any, worker: type, policy: dict[str, Any], route_layers: slice | None) -> dict[str, Any]:
    """Log-probabilities, loss, metrics and gradients of two micro-batches."""
    from megatron.core.utils import get_model_config
    from nemo_rl.algorithms.loss import ClippedPGLossConfig, ClippedPGLossFn
    from nemo_rl.models.megatron.train import LogprobsPostProcessor

    built = worker(policy, provider_of(layout, policy))
    model = built.model
    get_model_config(model).finalize_model_grads_func = finalize_model_grads  # so does NeMo-RL
    generator = torch.Generator().manual_seed(torch.distributed.get_rank())
    for name, parameter in model.named_parameters():
        if not getattr(parameter, "tensor_model_parallel", False):
            generator.manual_seed(len(name))
        noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        parameter.data = ((parameter.ndim == 1) + noise / 5).to(parameter.dtype)
    depths = policy["megatron_cfg"].get("mtp_num_layers")
    data, loss = batch(route_layers, depths=depths), ClippedPGLossFn(ClippedPGLossConfig())
    scored = built.passes(data, LogprobsPostProcessor(policy, sampling_params()), forward_only=True)
    found = {f"logprobs {name}": torch.as_tensor(value) for one in scored[:1] for name, value in one.items()}
    judged = built.train(data, loss, eval_mode=True)["all_mb_metrics"]
    metrics = built.train(data, loss)["all_mb_metrics"]
    report = {name: metrics.pop(name) for name in list(metrics) if name.startswith("fold/")}
    assert judged.keys() == metrics.keys()
    found |= {f"loss {name}": torch.as_tensor(values) for name, values in metrics.items()}
    found |= {f"gradient of {name}": p.main_grad for name, p in model.module.named_parameters()}
    return found | ({"report": report} if report else {})


POLICY: dict[str, Any] = {
    "sequence_packing": {"enabled": True},
    "megatron_cfg": {"context_parallel_size": 1},
    "make_sequence_length_divisible_by": 1,
}


def compare(
    layout: Any,
    limit: float = 1e-12,
    route_layers: slice | None = None,
    keep_scores: bool = False,
    depths: int | None = None,
    precision: str = "float64",
) -> dict[str, Any]:
    """Every rank: NeMo-RL's answers with its own model and with ours agree; the names and the report of ours.

    ``keep_scores`` keeps Megatron-Core from rounding the scores of routers to fp32. ``depths`` predict further tokens.
    """
    softmax = torch.softmax
    kept = mock.patch.object(torch, "softmax", lambda values, dim, dtype=None: softmax(values, dim))
    policy = POLICY if route_layers is None else POLICY | {"router_replay": {"enabled": True}}
    policy = policy | {"megatron_cfg": policy["megatron_cfg"] | {"mtp_num_layers": depths}, "precision": precision}
    with nemo_rl(), kept if keep_scores else nullcontext():
        from megatron.bridge.models import gpt_provider

        from mcore_prefix_tree.integrations.nemo_rl import FoldingPolicyWorkerImpl

        with mock.patch.object(gpt_provider, "mtp_block_spec", depths_of):
            stock, folded = (run(layout, one, policy, route_layers) for one in (Worker, FoldingPolicyWorkerImpl))
    report = folded.pop("report")
    assert stock.keys() == folded.keys()
    for name, expected in stock.items():
        expected = expected.double()
        error = (folded[name].double() - expected).norm()
        assert error <= limit * max(1e-3, expected.norm()), (name, error, expected.norm())
    return {"names": sorted(stock), "report": report}


def refusals(layout: Any, policies: list[dict[str, Any]]) -> list[str]:
    """Errors of workers whose policies have other settings."""
    said = []
    with nemo_rl():
        from mcore_prefix_tree.integrations.nemo_rl import FoldingPolicyWorkerImpl

        for changes in policies:
            with pytest.raises(NotImplementedError) as refused:
                FoldingPolicyWorkerImpl(POLICY | changes, provider_of(layout, POLICY))
            said.append(str(refused.value))
    return said
