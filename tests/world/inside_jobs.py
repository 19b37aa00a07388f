"""A trainer's step with packed rows, in worlds of gloo processes: it knows nothing of folding."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from harness.folded_jobs import (
    ADAM_EPS,
    VOCAB,
    Job,
    chunks_of,
    in_precision_of,
    step_loss,
    stock_spec,
    tree_spec,
    unfolded_gradients,
)
from harness.folded_runs import SAMPLES, Result
from harness.layouts import RECOMPUTE, shallow
from harness.weights import assemble
from harness.worlds import Layout, world

from mcore_prefix_tree import Sample


@dataclass(frozen=True, kw_only=True)
class InsideJob:
    """How the model was built, and the output that the trainer asks for.

    ``reads`` is ``labels``, ``logits``, ``logprobs`` or, by a custom output processor, ``processor``;
    ``packed_attention`` takes packed rows, as TransformerEngine's does; ``pattern`` is that of a HybridModel's layers.
    With ``positions`` of "mrope", some tokens are given as those of pictures. ``max_tokens`` is of a part.
    ``overlaps`` sums gradients of data-parallel ranks as soon as each is there. The rows of ``unlike`` share nothing.
    """

    reads: str = "labels"
    micro_batches: int = 2
    check_first: bool = False
    forward_only: bool = False
    share_embeddings: bool = False
    packed_attention: bool = False
    pattern: str | None = None
    vocab_size: int = VOCAB
    config: tuple[tuple[str, Any], ...] = ()
    double: bool = False
    positions: str = "rope"
    max_tokens: int | None = None
    overlaps: bool = False
    unlike: bool = False


def inside_gradients(layout: Any, job: InsideJob, samples: Sequence[Sample]) -> tuple[float, list[Any], float]:
    """Every rank: the step's loss, its parts of the gradients, and the fold ratio of all ranks."""
    from harness.models import Trainer, tiny_gpt_config
    from harness.weights import local_parts
    from megatron.core import parallel_state
    from megatron.core.utils import unwrap_model

    from mcore_prefix_tree.mcore import fold_inside

    config = tiny_gpt_config(layout=layout, **dict(job.config))
    padded = replace(job, vocab_size=-(-job.vocab_size // layout.tp) * layout.tp)
    spec = packed_spec if job.packed_attention else stock_spec
    chunks = chunks_of(padded, config, spec, positions=job.positions)
    settings = {"check_first": job.check_first, "vocab_size": job.vocab_size, "max_tokens": job.max_tokens}
    chunks = [fold_inside(chunk, **settings) for chunk in chunks]
    trainer = Trainer.of(chunks, adam_eps=ADAM_EPS, overlap_grad_reduce=job.overlaps)
    dp, rank = parallel_state.get_data_parallel_world_size(), parallel_state.get_data_parallel_rank()
    multiple = layout.tp if layout.sequence_parallel else 1
    parts = [samples[start :: dp * job.micro_batches] for start in range(dp * job.micro_batches)]
    batches = [packed(part, multiple) for part in parts[rank * job.micro_batches : (rank + 1) * job.micro_batches]]
    step = functools.partial(train_step, reads=job.reads)
    with in_precision_of(job):
        if job.overlaps:  # DDP learns in a first step how many gradients a parameter has
            trainer.backward(step, [packed([min(samples, key=len)], multiple)] * job.micro_batches, seq_length=1)
            assert not any(unwrap_model(chunk).folding.report().recomputed_tokens for chunk in trainer.chunks)
        reported = trainer.backward(step, batches, seq_length=1, forward_only=job.forward_only)
    reports = [unwrap_model(chunk).folding.report() for chunk in trainer.chunks]
    assert {report.micro_batches for report in reports} == {job.micro_batches}
    assert job.forward_only or all(bool(report.recomputed_tokens) == bool(job.max_tokens) for report in reports)
    assert reports[0].left_alone == (job.micro_batches if job.packed_attention else 0)
    whole = reports[0].over_ranks(parallel_state.get_data_parallel_group(), torch.device("cpu"))
    assert (whole.micro_batches, whole.rows) == (dp * job.micro_batches, len(samples))
    assert whole.logical_tokens == sum(map(len, samples))
    return step_loss(reported), local_parts(trainer.chunks, lambda p: p.main_grad), whole.fold_ratio


def rows_without_a_vocabulary(layout: Any, head: str, samples: Sequence[Sample]) -> dict[str, float]:
    """Every rank: errors of outputs without a vocabulary's head, and of gradients, for each separate row.

    ``head`` is ``none`` for hidden states, of which a rank has a part under sequence parallelism, or ``scalar``.
    """
    from harness.models import tiny_gpt_config
    from megatron.core.models.gpt import GPTModel
    from megatron.core.tensor_parallel import gather_from_sequence_parallel_region

    from mcore_prefix_tree.mcore import fold_inside, with_scalar_head

    config = tiny_gpt_config(layout=layout)
    torch.manual_seed(0)  # ranks hold the same scalar head
    stock, tree = (
        GPTModel(config, spec(config, None), VOCAB, 64, post_process=head == "scalar", position_embedding_type="rope")
        for spec in (stock_spec, tree_spec)
    )
    if head == "scalar":
        stock, tree = with_scalar_head(stock), with_scalar_head(tree)
    tree.double().load_state_dict(stock.double().state_dict())
    fold_inside(tree)
    multiple = layout.tp if layout.sequence_parallel else 1

    def gather_rows(answer: torch.Tensor) -> torch.Tensor:
        """Return ``[T, h]``; ranks make the same of it."""
        if head == "scalar":
            return answer[0]
        if layout.sequence_parallel:
            answer = gather_from_sequence_parallel_region(answer, tensor_parallel_output_grad=False)
        return answer[:, 0]

    def ask(model: Any, rows: Sequence[Sample]) -> torch.Tensor:
        call = packed(rows, multiple)
        params = call["packed_seq_params"] if model is tree else None
        positions = torch.arange(call["input_ids"].shape[1]).unsqueeze(0)
        return gather_rows(model(call["input_ids"], positions, None, packed_seq_params=params))

    answers, errors, start = ask(tree, samples), {}, 0
    for index, sample in enumerate(samples):
        alone, found = ask(stock, [sample])[: len(sample)], answers[start : start + len(sample)]
        errors[f"row {index}"] = float((found - alone).norm() / alone.norm())
        alone.square().sum().backward()
        start += len(sample) + -len(sample) % multiple
    answers.square().sum().backward()
    of_tree = dict(tree.named_parameters())
    for name, parameter in stock.named_parameters():
        expected, found = parameter.grad, of_tree[name].grad
        if getattr(parameter, "sequence_parallel", False):  # each rank has the gradient of its tokens
            torch.distributed.all_reduce(expected)
            torch.distributed.all_reduce(found)
        errors[name] = float((found - expected).norm() / expected.norm())
    return errors


def packed_spec(config: Any, vp_stage: int | None) -> Any:
    """Megatron's local block, whose attention takes packed rows."""
    from megatron.core.transformer.dot_product_attention import DotProductAttention

    from mcore_prefix_tree.cpu.specs import PackedAttention, exchanged

    return exchanged(stock_spec(config, vp_stage), {DotProductAttention: PackedAttention})


def packed(samples: Sequence[Sample], multiple: int) -> dict[str, Any]:
    """Rows in slots of a multiple of tokens; nothing is scored after a row's last token."""
    from megatron.core.packed_seq_params import PackedSeqParams

    from mcore_prefix_tree.mcore import RoutedPackedSeqParams

    def row(values: np.ndarray, length: int) -> np.ndarray:
        return np.pad(values, (0, -length % multiple))

    ids = np.concatenate([row(sample.tokens, len(sample)) for sample in samples]).astype(np.int64)
    labels = np.concatenate([row(np.append(sample.tokens[1:], 0), len(sample)) for sample in samples])
    weights = np.concatenate([row(np.append(sample.loss_mask[1:], 0), len(sample)) for sample in samples])
    lengths = [len(sample) for sample in samples]
    slot_lengths = [n + -n % multiple for n in lengths]
    borders, slots = ([0, *np.cumsum(one)] for one in (lengths, slot_lengths))
    cu, cu_padded = (torch.tensor(np.array(one), dtype=torch.int32) for one in (borders, slots))
    kind, routes = PackedSeqParams, {}
    of_samples = [sample.signals.routes for sample in samples]
    first = next((one for one in of_samples if one is not None), None)
    if first is not None:
        kind = RoutedPackedSeqParams
        found = np.full((len(ids), *first.ids.shape[1:]), -1)
        for slot, one in zip(slots, of_samples, strict=False):
            if one is not None:
                found[slot : slot + len(one.ids)] = one.ids
        routes = {"routed_experts": torch.from_numpy(found)}
    params = kind(
        **routes,
        qkv_format="thd",
        cu_seqlens_q=cu,
        cu_seqlens_kv=cu,
        cu_seqlens_q_padded=cu_padded,
        cu_seqlens_kv_padded=cu_padded,
        max_seqlen_q=max(slot_lengths),
        max_seqlen_kv=max(slot_lengths),
    )
    return {
        "input_ids": torch.from_numpy(ids).unsqueeze(0),
        "labels": torch.from_numpy(labels.astype(np.int64)).unsqueeze(0),
        "weights": torch.from_numpy(weights.astype(np.float64)),
        "packed_seq_params": params,
    }


def train_step(data_iterator: Any, model: Any, *, reads: str) -> Any:
    """``forward_step_func`` of a trainer."""
    from megatron.core.tensor_parallel import gather_from_tensor_model_parallel_region
    from megatron.core.utils import unwrap_model

    from mcore_prefix_tree.mcore.packed import RowLogprobs

    batch = dict(next(data_iterator))
    weights, labels = batch.pop("weights"), batch.pop("labels")
    bare = unwrap_model(model)
    batch |= as_pictures(bare, batch) if bare.position_embedding_type == "mrope" else {"position_ids": None}
    given: dict[str, Any] = {
        "labels": {"labels": labels},
        "logits": {},
        "logprobs": {"output_processor": RowLogprobs(labels=labels)},
        "processor": {"output_processor": logits_of},
    }[reads]
    output = model(attention_mask=None, **batch, **given)

    def loss_func(output: torch.Tensor) -> Any:
        if reads == "labels":
            losses = output[0]
        elif reads == "logprobs":
            losses = -output[0, :, 0]
        else:
            logits = gather_from_tensor_model_parallel_region(output)
            losses = -torch.log_softmax(logits[0], dim=-1).gather(1, labels[0, :, None])[:, 0]
        loss = (losses * weights.to(losses.dtype)).sum()
        num_tokens = weights.count_nonzero().to(torch.int)
        return loss, num_tokens, {"loss_sum": loss.detach(), "num_tokens": num_tokens}

    return output, loss_func


def as_pictures(model: Any, batch: dict[str, Any]) -> dict[str, Any]:
    """Arguments for the same rows, whose larger ids are now tokens of pictures with the embeddings of those ids."""
    from mcore_prefix_tree.mcore import PicturePackedSeqParams

    ids, params = batch["input_ids"], batch["packed_seq_params"]
    place = torch.arange(ids.shape[1])
    first = params.cu_seqlens_q_padded[torch.searchsorted(params.cu_seqlens_q_padded, place, right=True) - 1]
    positions = (place - first).expand(3, 1, -1)  # of text, whose M-RoPE is RoPE
    embeddings = model.embedding(input_ids=ids, position_ids=positions) if model.pre_process else None
    numbers = torch.where(ids[0] >= VOCAB // 2, ids[0], -1)
    params = PicturePackedSeqParams.of(params, numbers)
    return {"position_ids": positions, "decoder_input": embeddings, "packed_seq_params": params}


def logits_of(*, hidden_states: torch.Tensor, output_layer: Any, output_weight: Any, **_: Any) -> torch.Tensor:
    """An output processor that does the same as the model without one."""
    logits: torch.Tensor = output_layer(hidden_states, weight=output_weight)[0]
    return logits.transpose(0, 1)


# Rows that share nothing; the second micro-batch has one row.
UNLIKE = [Sample(tokens=[first, *range(9, 9 + more)]) for first, more in ((3, 6), (2, 4), (1, 0))]


def unfolded_oracle(layout: Layout, job: InsideJob) -> Result:
    """The stock model of as many layers as :func:`inside` has in the layout; run once for all jobs of a model."""
    given = tuple(one for one in job.config if one not in RECOMPUTE and one[0] != "mrope_section")
    config = given if job.pattern else (*shallow(layout), *given)
    of_model = {"share_embeddings": job.share_embeddings, "pattern": job.pattern, "double": job.double}
    return _unfolded(Job(config=config, **of_model), job.packed_attention or job.unlike)


@functools.cache
def _unfolded(job: Job, unlike: bool) -> Result:
    samples = UNLIKE if unlike else SAMPLES
    ((loss, parts),) = world(1).run(unfolded_gradients, Layout(), job, samples, layout=Layout())
    return loss, assemble(parts)


def inside(size: int, layout: Layout, job: InsideJob) -> Result:
    job = job if job.pattern else replace(job, config=(*shallow(layout), *job.config))
    unlike = job.packed_attention or job.unlike
    samples = UNLIKE if unlike else SAMPLES
    results = world(size).run(inside_gradients, layout, job, samples, layout=layout)
    assert all(ratio == 1 if unlike else ratio > 1.1 for _, _, ratio in results)
    return results[0][0], assemble(itertools.chain.from_iterable(parts for _, parts, _ in results))
