"""A tiny real GPT, built and trained by stock megatron-core in any layout."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec, get_gpt_mtp_block_spec
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

from harness.weights import fill
from harness.worlds import Layout
from mcore_prefix_tree.cpu.specs import cpu_spec
from mcore_prefix_tree.mcore.engine.pipeline import run_schedule
from mcore_prefix_tree.mcore.seam.micro_batch import MicroBatch
from mcore_prefix_tree.mcore.seam.output_layer import with_vocab_size

# It came with megatron-core 0.18.
HAS_OUTPUT_PROCESSOR = "output_processor" in inspect.signature(GPTModel.forward).parameters

Spec: TypeAlias = "ModuleSpec | TransformerBlockSubmodules"
SpecFor: TypeAlias = Callable[[TransformerConfig, int | None], Spec]
# The forward step of Megatron's schedules: (data iterator, model chunk) -> (output, loss function).
ForwardStep: TypeAlias = Callable[[Iterator[Any], torch.nn.Module], tuple[torch.Tensor, Callable[..., Any]]]


def tiny_gpt_config(*, layout: Layout, dtype: torch.dtype = torch.float64, **changes: Any) -> TransformerConfig:
    """Return a configuration with the features of current models: grouped queries, RoPE, SwiGLU, RMSNorm, no biases.

    Args:
        layout: degrees of parallelism; they must be those of ``parallel_state``.
        dtype: of parameters, activations and pipeline messages. float64 stays float64 all the way through.
        **changes: fields of ``TransformerConfig`` to change; of ``MLATransformerConfig`` with
            ``multi_latent_attention=True`` among them.
    """
    settings: dict[str, Any] = {
        "num_layers": 4,
        "hidden_size": 64,
        "num_attention_heads": 4,
        "num_query_groups": 2,
        "ffn_hidden_size": 96,
        "gated_linear_unit": True,
        "activation_func": torch.nn.functional.silu,
        "normalization": "RMSNorm",
        "add_bias_linear": False,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "use_cpu_initialization": True,
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "bf16": dtype is torch.bfloat16,
        "autocast_dtype": dtype,
        "calculate_per_token_loss": True,
        "tensor_model_parallel_size": layout.tp,
        "pipeline_model_parallel_size": layout.pp,
        "virtual_pipeline_model_parallel_size": layout.vpp,
        "expert_model_parallel_size": layout.ep,
        "expert_tensor_parallel_size": 1 if layout.ep > 1 else None,
        "sequence_parallel": layout.sequence_parallel,
        # Stages send each other the length of the next micro-batch; the default MoE dispatcher rejects that.
        "variable_seq_lengths": True,
        "moe_token_dispatcher_type": "alltoall",
        # With two stages, the interleaved schedule without overlap sends two messages at once to the same rank, forward
        # and backward, which only their order distinguishes. Megatron-LM's arguments reject it too.
        "overlap_p2p_comm": layout.vpp is not None,
        "batch_p2p_comm": layout.vpp is None,
    }
    kind = MLATransformerConfig if changes.get("multi_latent_attention") else TransformerConfig
    return kind(**(settings | changes))


def build_chunks(
    config: TransformerConfig,
    spec: Spec | SpecFor | None = None,
    *,
    vocab_size: int = 128,
    max_sequence_length: int = 256,
    share_embeddings: bool = False,
    seed: int = 0,
    groups: Any = None,
    pattern: str | None = None,
    position_embedding_type: str = "rope",
) -> list[Any]:
    """Build this rank's model chunks (several under virtual pipelining), with the weights that belong to ``seed``.

    Args:
        config: its parallel degrees must be those of ``parallel_state``, or of ``groups``; with one pipeline stage a
            rank has all layers.
        spec: a layer's spec, a block's, or a function of the configuration and the virtual stage that makes one;
            Megatron's local layer by default, with the parts that it lacks on a CPU (:func:`cpu_spec`).
        vocab_size: number of tokens; padded to a multiple of the tensor-parallel degree, and without probability there.
        max_sequence_length: as in ``GPTModel``.
        share_embeddings: tie the output layer to the word embeddings.
        seed: of the weights, which are the same in every layout: see :mod:`harness.weights`.
        groups: of the model's ranks; those of ``parallel_state`` by default.
        pattern: of a ``HybridModel``'s layers, which is built in place of a ``GPTModel``.
        position_embedding_type: as in ``GPTModel``.
    """
    last_pp_rank = config.pipeline_model_parallel_size - 1
    pp_rank = parallel_state.get_pipeline_model_parallel_rank() if last_pp_rank else 0
    vpp = config.virtual_pipeline_model_parallel_size
    stages: list[int | None] = [None] if vpp is None else list(range(vpp))
    chunks = []
    for stage in stages:
        chosen = spec
        stage_settings: dict[str, Any] = {
            "vocab_size": -(-vocab_size // config.tensor_model_parallel_size) * config.tensor_model_parallel_size,
            "max_sequence_length": max_sequence_length,
            "pre_process": pp_rank == 0 and stage in (None, 0),
            "post_process": pp_rank == last_pp_rank and (stage is None or stage == stages[-1]),
            "position_embedding_type": position_embedding_type,
            "share_embeddings_and_output_weights": share_embeddings,
            "vp_stage": stage,
            "pg_collection": groups,
        }
        if pattern is not None:
            from megatron.core.models.hybrid.hybrid_model import HybridModel

            hybrid = HybridModel(config, spec, hybrid_layer_pattern=pattern, **stage_settings)
            chunks.append(hybrid.to(config.params_dtype))
            continue
        if chosen is None:
            chosen = get_gpt_layer_local_spec(
                normalization=config.normalization, multi_latent_attention=config.multi_latent_attention
            )
        if not isinstance(chosen, ModuleSpec | TransformerBlockSubmodules):
            chosen = chosen(config, stage)
        chosen = cpu_spec(chosen, config, stage)
        if config.mtp_num_layers:
            depths = get_gpt_mtp_block_spec(config, chosen, use_transformer_engine=False, vp_stage=stage)
            stage_settings["mtp_block_spec"] = depths and cpu_spec(depths, config, stage)
        chunk = GPTModel(config, chosen, **stage_settings)
        # The norms of PyTorch start in the default dtype, regardless of params_dtype.
        chunks.append(chunk.to(config.params_dtype))
    fill(chunks, seed=seed)
    return [with_vocab_size(chunk, vocab_size) for chunk in chunks]


@dataclass(frozen=True, kw_only=True)
class Trainer:
    """Megatron's own training loop around this rank's chunks: DDP, optimizer, pipeline schedule, gradient finalising.

    Attributes:
        config: of the model.
        chunks: wrapped in ``DistributedDataParallel``.
        optimizer: a ``MegatronOptimizer``.
    """

    config: TransformerConfig
    chunks: list[DistributedDataParallel]
    optimizer: Any

    @classmethod
    def of(
        cls,
        chunks: Sequence[GPTModel],
        *,
        lr: float = 1e-2,
        distributed_optimizer: bool = False,
        overlap_grad_reduce: bool = False,
        **optimizer_changes: Any,
    ) -> Trainer:
        """Wrap bare chunks. Gradients stay in the parameters' dtype, except for bf16, with float32 gradients.

        Args:
            chunks: from :func:`build_chunks`.
            lr: constant learning rate of AdamW.
            distributed_optimizer: shard the optimizer's state over the data-parallel ranks. Megatron's takes no
                float64 parameters.
            overlap_grad_reduce: sum gradients over the data-parallel ranks while others are computed.
            **optimizer_changes: fields of ``OptimizerConfig``. Clipping is off by default, because Megatron's asserts
                that gradients are float32.
        """
        config = chunks[0].config
        half = config.params_dtype is torch.bfloat16
        ddp_config = DistributedDataParallelConfig(
            grad_reduce_in_fp32=half,
            use_distributed_optimizer=distributed_optimizer,
            overlap_grad_reduce=overlap_grad_reduce,
        )
        wrapped = [
            DistributedDataParallel(config, ddp_config, Float16Module(config, chunk) if half else chunk)
            for chunk in chunks
        ]
        settings: dict[str, Any] = {
            "optimizer": "adam",
            "lr": lr,
            "weight_decay": 0.01,
            "clip_grad": 0.0,
            "bf16": half,
            "params_dtype": config.params_dtype,
            "use_distributed_optimizer": distributed_optimizer,
        }
        optimizer = get_megatron_optimizer(OptimizerConfig(**(settings | optimizer_changes)), wrapped)
        config.finalize_model_grads_func = finalize_model_grads
        config.grad_scale_func = optimizer.scale_loss
        return cls(config=config, chunks=wrapped, optimizer=optimizer)

    def backward(
        self, forward_step: ForwardStep, microbatches: Sequence[Any], *, seq_length: int, forward_only: bool = False
    ) -> list[Any]:
        """Run the schedule over this rank's micro-batches; the gradients are in ``main_grad``, reduced and scaled.

        Folded micro-batches run as in a recipe's job, others as a trainer's own loop runs them.

        Args:
            forward_step: as Megatron's schedules call it.
            microbatches: items of each chunk's data iterator; the same number on every rank.
            seq_length: the schedule's sequence length, if messages do not carry their own.
            forward_only: no gradients.

        Returns:
            Reports of the loss functions, on the last pipeline stage; elsewhere an empty list.
        """
        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        if isinstance(microbatches[0], MicroBatch):
            return run_schedule(self.chunks, microbatches, forward_step, forward_only=forward_only)
        iterators = [iter(microbatches) for _ in self.chunks]
        return list(
            get_forward_backward_func()(
                forward_step_func=forward_step,
                data_iterator=iterators if len(iterators) > 1 else iterators[0],
                model=self.chunks if len(self.chunks) > 1 else self.chunks[0],
                num_microbatches=len(microbatches),
                seq_length=seq_length,
                micro_batch_size=1,
                forward_only=forward_only,
            )
        )

    def step(self, forward_step: ForwardStep, microbatches: Sequence[Any], *, seq_length: int) -> list[Any]:
        """Do :meth:`backward` and one optimizer step; return the loss functions' reports."""
        reported = self.backward(forward_step, microbatches, seq_length=seq_length)
        success, _, _ = self.optimizer.step()
        assert success, "the optimizer skipped a step"
        return reported


VOCAB = 128
LENGTHS = (16, 24, 32, 20)
Microbatch = tuple[torch.Tensor, torch.Tensor]


def microbatches() -> list[Microbatch]:
    generator = torch.Generator().manual_seed(7)
    made = []
    for length in LENGTHS:
        tokens = torch.randint(0, VOCAB, (1, length + 1), generator=generator)
        mask = (torch.rand(1, length, generator=generator) < 0.7).double()
        made.append((tokens, mask))
    return made


def forward_step(
    data: Iterator[Microbatch], model: torch.nn.Module
) -> tuple[torch.Tensor, Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor, dict[str, Any]]]]:
    from megatron.core.tensor_parallel import gather_from_tensor_model_parallel_region

    tokens, mask = next(data)
    positions = torch.arange(tokens.shape[1] - 1)[None]
    output = model(tokens[:, :-1], positions, None)

    def loss(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
        # Megatron's own vocabulary-parallel cross entropy goes through float32.
        logits_of_ranks = gather_from_tensor_model_parallel_region(logits)
        per_token = torch.nn.functional.cross_entropy(logits_of_ranks[0], tokens[0, 1:], reduction="none")
        total = (per_token * mask[0].to(per_token.dtype)).sum()
        return total, mask.sum().int(), {"loss": total.item(), "tokens": mask.sum().item()}

    return output, loss
