"""Full training steps of one batch of samples, folded, for worlds of gloo processes; and the single-process oracle.

The functions here run inside the processes of :mod:`harness.worlds`.
"""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

import numpy as np
import torch
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.post_training.modelopt.layers import Linear
from megatron.core.transformer.moe import router
from megatron.core.utils import get_model_config

from harness.in_double import kept_double
from harness.models import Trainer, build_chunks, tiny_gpt_config
from harness.routes import replaying
from harness.weights import local_parts
from mcore_prefix_tree import Sample, fold
from mcore_prefix_tree.cpu.specs import cpu_spec
from mcore_prefix_tree.layout import Padding, row_multiple
from mcore_prefix_tree.mcore import with_edge_head, with_prefix_tree
from mcore_prefix_tree.mcore.engine.carried_trees import fold_carrying
from mcore_prefix_tree.mcore.engine.folding import Folding
from mcore_prefix_tree.mcore.engine.forward_step import forward_step
from mcore_prefix_tree.mcore.outputs import Logprobs, WeightedSum
from mcore_prefix_tree.mcore.seam.micro_batch import MicroBatch
from mcore_prefix_tree.mcore.seam.multi_token import with_multi_token
from mcore_prefix_tree.objectives import LossOutput, sft_loss
from mcore_prefix_tree.plan import plan_step

VOCAB = 128
# AdamW divides a gradient by its own size: with a tiny eps, entries that are zero up to rounding move the weights by
# rounding errors blown up to the learning rate, in any two runs whatsoever.
ADAM_EPS = 1e-3


def branching_samples(seed: int = 59) -> list[Sample]:
    """Trees of depth four, branching at every level, with duplicates, strict prefixes, loners, a single token.

    By default 27 samples in 178 tokens, which are as few as such trees have.
    """
    rng = np.random.default_rng(seed)
    samples: list[Sample] = []

    def grow(prefix: list[int], level: int) -> None:
        path = prefix + rng.integers(0, VOCAB, size=rng.integers(2, 9)).tolist()
        if level == 0 or rng.random() < 0.3:
            mask = rng.choice([0.0, 0.5, 1.0], size=len(path))
            samples.append(Sample(tokens=path, loss_mask=mask, source=f"sample {len(samples)}"))
        if level:
            for _ in range(int(rng.integers(2, 4))):
                grow(path, level - 1)

    for _ in range(2):
        grow([], 3)
    samples.append(Sample(tokens=samples[0].tokens, source="duplicate"))
    samples.append(Sample(tokens=samples[1].tokens[:5], source="strict prefix"))
    samples.append(Sample(tokens=[7], source="one token"))
    samples.append(Sample(tokens=samples[2].tokens, merge_key="other policy", source="other merge key"))
    return samples


@dataclass(frozen=True, kw_only=True)
class Job:
    """How the batch is cut and trained; ``native``: by stock layer specs, which a patched Megatron-Core folds with."""

    max_tokens: int = 10_000
    dtype: torch.dtype = torch.float64
    steps: int = 0
    distributed_optimizer: bool = False
    share_embeddings: bool = False
    backend: str = "path"
    native: bool = False
    way: str = "logits"  # or "logprobs", "weighted sum"
    config: tuple[tuple[str, Any], ...] = ()
    pattern: str | None = None  # of a HybridModel
    vocab_size: int = VOCAB
    over_budget: str = "repeat"
    double: bool = False  # compute in fp64 what upstream takes to fp32
    positions: str = "rope"


def in_precision_of(job: Any) -> Any:
    """A context manager."""
    return kept_double() if job.double else contextlib.nullcontext()


def folded_gradients(layout: Any, job: Job, samples: Sequence[Sample]) -> tuple[float, list[Any], int]:
    """Every rank: the step's loss, its parts of the gradients after ``job.steps`` steps, and its micro-batches."""
    config = tiny_gpt_config(layout=layout, dtype=job.dtype, **dict(job.config))
    chunks = chunks_of(job, config, stock_spec if job.native else tree_spec, positions=job.positions)
    if job.way != "logits":
        chunks = [with_multi_token(with_edge_head(chunk)) for chunk in chunks]
    trainer = Trainer.of(chunks, distributed_optimizer=job.distributed_optimizer, adam_eps=ADAM_EPS)
    rank = parallel_state.get_data_parallel_rank()
    plan = plan_step(
        samples,
        max_tokens=job.max_tokens,
        dp_size=parallel_state.get_data_parallel_world_size(),
        micro_batch_multiple=layout.pp if layout.vpp else 1,
        over_budget=job.over_budget,  # type: ignore[arg-type]
    )
    if plan.carrying is None:
        batches = [_micro_batch([samples[i] for i in indices], layout, job) for indices in plan.micro_batches[rank]]
    else:
        folding = folding_of(
            layout,
            job.max_tokens,
            depths=dict(job.config).get("mtp_num_layers", 0),
            padding=Padding(multiple=_multiple(layout, job)),
            attention_backend=job.backend,
            only_supervised=job.way != "logits",
        )
        batches = fold_carrying(samples, plan.micro_batches[rank], plan.carrying[rank], folding)
    step = functools.partial(forward_step, readout=supervised(job.way))
    with in_precision_of(job):
        for _ in range(job.steps):
            trainer.step(step, batches, seq_length=1)
        reported = trainer.backward(step, batches, seq_length=1)
    # A distributed optimizer scatters gradients: compare the weights instead.
    parts = local_parts(trainer.chunks, lambda p: p.data if job.distributed_optimizer else p.main_grad)
    return step_loss(reported), parts, len(batches)


def folding_of(layout: Any, max_tokens: int, **changes: Any) -> Folding:
    """How a rank of the layout folds, as recipes find it."""
    settings: dict[str, Any] = {
        "dp_size": parallel_state.get_data_parallel_world_size(),
        "cost_model": None,
        "device": torch.device("cpu"),
        "micro_batch_multiple": layout.pp if layout.vpp else 1,
        "padding": Padding(multiple=layout.tp if layout.sequence_parallel else 1),
    }
    return Folding(max_tokens=max_tokens, **settings | changes)


def _multiple(layout: Any, job: Job) -> int:
    """The divisor of padded sizes; as recipes find it."""
    given = dict(job.config)
    return row_multiple(layout.tp if layout.sequence_parallel else 1, given.get("fp8"), given.get("fp8_recipe"))


def _micro_batch(samples: Sequence[Sample], layout: Any, job: Job) -> Any:
    """Whole samples."""
    folded = fold(samples, pad_to_multiple_of=_multiple(layout, job), depths=dict(job.config).get("mtp_num_layers", 0))
    needed = None if job.way == "logits" else folded.loss_weight != 0
    return MicroBatch.from_layout(folded, attention_backend=job.backend, needed=needed)


def supervised(way: str) -> Any:
    """The supervised loss from the last stage's output."""

    class OfLogprobs(Logprobs):
        def read(self, output: torch.Tensor, batch: Any) -> Any:
            return LossOutput(loss=sft_loss(super().read(output, batch)[0], batch.loss_weight))

    return OfLogprobs() if way == "logprobs" else WeightedSum(fused=way != "logits")


def tree_spec(config: Any, vp_stage: int | None) -> Any:
    """The same block, tree-capable."""
    return with_prefix_tree(stock_spec(config, vp_stage))


def stock_spec(config: Any, vp_stage: int | None) -> Any:
    """Megatron's local block for this stage, with the parts that it lacks on a CPU."""
    plain = copy.copy(config)
    plain.experimental_attention_variant = None  # cpu_spec puts its layers in
    block = get_gpt_decoder_block_spec(
        plain, use_transformer_engine=False, normalization=config.normalization, vp_stage=vp_stage
    )
    if config.multi_latent_attention and config.sequence_parallel:
        for layer in block.layer_specs:
            # As in TransformerEngine's layers, all ranks hold these in full.
            attention = layer.submodules.self_attention.submodules
            attention.linear_q_down_proj = attention.linear_kv_down_proj = Linear
    return cpu_spec(block, config, vp_stage)


def chunks_of(job: Any, config: Any, spec: Any, *, follows: bool = True, positions: str = "rope") -> list[Any]:
    """This rank's chunks of a job's GPT, from ``spec``, or of its HybridModel; a stock one is on one process."""
    pattern = job.pattern
    if pattern is not None:
        from mcore_prefix_tree.cpu.hybrid import hybrid_stack

        spec = with_prefix_tree(hybrid_stack) if follows else hybrid_stack
        pattern = pattern if follows else pattern.replace("|", "")
    return build_chunks(
        config,
        spec,
        vocab_size=job.vocab_size,
        share_embeddings=job.share_embeddings,
        pattern=pattern,
        position_embedding_type=positions,
    )


def step_loss(reported: Sequence[dict[str, torch.Tensor]]) -> float:
    """Mean over the scored tokens of all ranks."""
    total = torch.zeros(2, dtype=torch.float64)
    if parallel_state.is_pipeline_last_stage(ignore_virtual=True):
        total[0] = sum(float(entry["loss_sum"]) for entry in reported)
        total[1] = sum(float(entry["num_tokens"]) for entry in reported)
    torch.distributed.all_reduce(total, group=parallel_state.get_data_parallel_group())
    torch.distributed.all_reduce(
        total, op=torch.distributed.ReduceOp.MAX, group=parallel_state.get_pipeline_model_parallel_group()
    )
    return float(total[0] / total[1])


def in_one_row(samples: Sequence[Sample]) -> dict[str, torch.Tensor]:
    """A stock model's arguments for samples that share a micro-batch, each seeing only itself, and a token of padding.

    Rotary embeddings would number the tokens of the whole row: the model has to have learned ones, or none.
    """
    own = torch.tensor([index for index, one in enumerate(samples) for _ in range(len(one))] + [len(samples)])
    mask = (own[:, None] == own[None]).tril()
    return {
        "input_ids": torch.tensor([[*(int(token) for one in samples for token in one.tokens), 0]]),
        "position_ids": torch.tensor([[*(place for one in samples for place in range(len(one))), 0]]),
        "attention_mask": ~mask[None, None],
        "padding_mask": own[None] == len(samples),
    }


@contextlib.contextmanager
def counting_exactly() -> Iterator[None]:
    """Count a stock router's tokens under a mask of padding in fp64, a rank's own too.

    Upstream counts those after the sum over ranks has overwritten them, and divides in fp32.
    """
    count = router.get_tokens_per_expert_and_token_count

    def exact(*, routing_map: torch.Tensor, topk: int, **settings: Any) -> tuple[torch.Tensor, ...]:
        """Return counts ``[E]`` of all ranks, and the numbers of tokens of this rank and of all."""
        of_ranks = count(routing_map=routing_map, topk=topk, **settings)[0]
        return of_ranks, routing_map.sum().double() / topk, of_ranks.sum().double() / topk

    with mock.patch.object(router, "get_tokens_per_expert_and_token_count", exact):
        yield


def packed_gradients(layout: Any, job: Job, samples: Sequence[Sample]) -> tuple[float, list[Any]]:
    """Every rank: as :func:`unfolded_gradients`, with the micro-batches of the folded job, each in one row."""
    config = tiny_gpt_config(layout=layout, dtype=job.dtype, **dict(job.config))
    chunks = chunks_of(job, config, stock_spec, follows=False, positions=job.positions)
    trainer = Trainer.of(chunks, adam_eps=ADAM_EPS)
    plan = plan_step(samples, max_tokens=job.max_tokens, dp_size=parallel_state.get_data_parallel_world_size())
    own = plan.micro_batches[parallel_state.get_data_parallel_rank()]
    with in_precision_of(job), counting_exactly():
        reported = trainer.backward(_row_step, [[samples[i] for i in indices] for indices in own], seq_length=1)
    return step_loss(reported), local_parts(trainer.chunks, lambda p: p.main_grad)


def _row_step(data_iterator: Any, model: Any) -> Any:
    samples = next(data_iterator)
    row = in_one_row(samples)
    logits = model(**row)

    def loss_func(logits: torch.Tensor) -> Any:
        mask = torch.tensor([weight for one in samples for weight in (*one.loss_mask[1:].tolist(), 0.0)] + [0.0])
        logprobs = torch.log_softmax(logits[0], dim=-1).gather(1, row["input_ids"][0].roll(-1)[:, None])[:, 0]
        loss, num_tokens = -(logprobs * mask).sum(), mask.count_nonzero().to(torch.int)
        return loss, num_tokens, {"loss_sum": loss.detach(), "num_tokens": num_tokens}

    return logits, loss_func


def unfolded_gradients(layout: Any, job: Job, samples: Sequence[Sample]) -> tuple[float, list[Any]]:
    """One process, stock specs, sample by sample: loss and gradients, divided by the supervised tokens of the batch.

    With ``job.steps`` the weights after as many AdamW steps on those gradients.
    """
    config = tiny_gpt_config(layout=layout, dtype=job.dtype, **dict(job.config))
    chunks = chunks_of(job, config, stock_spec, follows=False)
    trainer = Trainer.of(chunks, adam_eps=ADAM_EPS)
    with in_precision_of(job):
        for _ in range(job.steps):
            trainer.step(_stock_step, samples, seq_length=1)
        reported = trainer.backward(_stock_step, samples, seq_length=1)
    parts = local_parts(trainer.chunks, lambda p: p.data if job.distributed_optimizer else p.main_grad)
    return step_loss(reported), parts


def _stock_step(data_iterator: Any, model: Any) -> Any:
    sample: Sample = next(data_iterator)
    config, length = get_model_config(model), len(sample)
    padding = -length % row_multiple(1, config.fp8, config.fp8_recipe)
    ids = torch.from_numpy(np.pad(sample.tokens.astype(np.int64), (0, padding))).unsqueeze(0)
    of_ids = torch.from_numpy(sample.loss_mask.astype(np.float64)).unsqueeze(0)
    masks = {"loss_mask": of_ids} if config.mtp_num_layers else {}
    with replaying(model, sample):
        logits = model(ids, torch.arange(length + padding).unsqueeze(0), None, **masks)

    def loss_func(logits: torch.Tensor) -> Any:
        logprobs = torch.log_softmax(logits[0, : length - 1], dim=-1).gather(1, ids[0, 1:length, None])[:, 0]
        mask = torch.from_numpy(sample.loss_mask[1:].copy()).to(logprobs.dtype)
        loss = -(logprobs * mask).sum()
        num_tokens = mask.count_nonzero().to(torch.int)
        return loss, num_tokens, {"loss_sum": loss.detach(), "num_tokens": num_tokens}

    return logits, loss_func
