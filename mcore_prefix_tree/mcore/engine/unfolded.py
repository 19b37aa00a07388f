"""The unfolded side of every comparison: each sample by itself through the stock forward, without a tree."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from megatron.core.tensor_parallel import gather_from_tensor_model_parallel_region
from megatron.core.utils import get_model_config

from mcore_prefix_tree.mcore.engine.job import Job
from mcore_prefix_tree.mcore.ranks import everyone
from mcore_prefix_tree.mcore.seam.experts import replay_again, replaying
from mcore_prefix_tree.sample import Sample
from mcore_prefix_tree.utils.memory import available_bytes
from mcore_prefix_tree.utils.upload import upload


@dataclass(frozen=True, kw_only=True, eq=False)
class StockBatch:
    """One sample as stock Megatron takes it, padded at its end if sequence parallelism needs that."""

    input_ids: torch.Tensor  # int64 [1, n]
    position_ids: torch.Tensor  # int64 [1, n]
    labels: torch.Tensor  # int64 [1, n], the next token; 0 at the end
    loss_mask: torch.Tensor  # float32 [n], the label's loss mask; 0 at the end
    length: int  # length of the sample, without padding; 0 for a batch that is only padding
    temperature: float  # divisor of the logits
    # The ids that labels were drawn from, int64 [2, K], a label's index above each id; a label with none was drawn from
    # the whole vocabulary.
    kept: torch.Tensor
    # Integers [n, layers, top-k], the experts of each token, -1 where the model routes; None without.
    routes: torch.Tensor | None
    depth_mask: torch.Tensor  # float32 [1, n], loss_mask for multi-token prediction; 0 if it is not trained

    @classmethod
    def from_sample(
        cls, sample: Sample | None, *, multiple: int, device: torch.device, trains_depths: bool = False
    ) -> StockBatch:
        """Make a batch of one sample; ``None`` gives one of padding, for a rank with fewer samples than the others."""
        length = 0 if sample is None else len(sample)
        size = -(-max(length, 1) // multiple) * multiple
        tokens = np.zeros(size + 1, dtype=np.int64)
        mask = np.zeros(size + 1, dtype=np.float32)
        if sample is not None:
            tokens[:length], mask[:length] = sample.tokens, sample.loss_mask
        kept = np.empty((2, 0), dtype=np.int64)
        if sample is not None and sample.signals.sampling_mask is not None:
            sets = sample.signals.sampling_mask
            kept = np.stack([np.repeat(np.arange(-1, length - 1), sets.sizes), sets.token_ids.astype(np.int64)])
            kept = kept[:, kept[0] >= 0]
        routes = None
        if sample is not None and sample.signals.routes is not None:
            ids = sample.signals.routes.ids
            routes = upload(np.pad(ids, ((0, size - length), (0, 0), (0, 0)), constant_values=-1), device)
        return cls(
            input_ids=upload(tokens[:-1], device).unsqueeze(0),
            position_ids=torch.arange(size, device=device).unsqueeze(0),
            labels=upload(tokens[1:], device).unsqueeze(0),
            loss_mask=upload(mask[1:], device),
            length=length,
            temperature=1.0 if sample is None else sample.temperature,
            kept=upload(kept, device),
            routes=routes,
            depth_mask=upload(mask[None, 1:] * trains_depths, device),
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class UnfoldedStep:
    """One rank's part of a step, sample by sample, on the device; ``sample_index`` is empty for padding."""

    sample_index: tuple[tuple[int, ...], ...]
    micro_batches: list[StockBatch]


def plan_unfolded(samples: Sequence[Sample], job: Job) -> UnfoldedStep:
    """Deal the samples to the data-parallel ranks in turn, one per micro-batch."""
    folding = job.folding
    multiple = folding.micro_batch_multiple
    rounds = -(-len(samples) // folding.dp_size)
    rounds = -(-rounds // multiple) * multiple
    mine = tuple(
        (index,) if index < len(samples) else ()
        for index in range(job.dp_rank, rounds * folding.dp_size, folding.dp_size)
    )
    return UnfoldedStep(
        sample_index=mine,
        micro_batches=[
            StockBatch.from_sample(
                samples[indices[0]] if indices else None,
                multiple=folding.padding.multiple,
                device=folding.device,
                trains_depths=folding.depths > 0,
            )
            for indices in mine
        ],
    )


def why_stock_does_not_fit(samples: Sequence[Sample], job: Job, *, companion: torch.dtype | None = None) -> str | None:
    """Return the reason if stock attention cannot hold its dense scores of the longest sample, else None.

    Megatron's ``DotProductAttention`` keeps them, ``[heads / tp, n, n]``, for backward in every layer of the stage, and
    works on more of them in one layer at a time. So does TransformerEngine's in float32: its attention that keeps none
    takes only half precision. ``companion`` is another dtype in which the samples run too.
    """
    config = job.config
    of_model = _bytes_per_score(config) if job.is_local or not config.bf16 else 0
    bytes_per_score = max(of_model, companion.itemsize if companion else 0)
    if not bytes_per_score:
        return None
    whose = "Megatron's local attention" if job.is_local else "TransformerEngine's attention in float32"
    longest = max(samples, key=len)
    layers = -(-config.num_layers // config.pipeline_model_parallel_size) + 2
    heads = -(-config.num_attention_heads // config.tensor_model_parallel_size)
    needed = layers * heads * len(longest) ** 2 * bytes_per_score
    # Ranks of one machine see slightly different figures; they have to come to one answer.
    available = min(everyone(available_bytes(job.folding.device)))
    if needed <= available:
        return None
    return (
        f"{whose} needs about {needed / 2**30:.0f} GiB for the {len(longest)} tokens of {longest.source}, and "
        f"{available / 2**30:.0f} GiB are available"
    )


def _bytes_per_score(config: Any) -> int:
    """Return the bytes that dense attention keeps per score for backward."""
    if config.bf16 and config.attention_softmax_in_fp32:
        # The softmax's own output, and the copy of it that multiplies the values.
        return torch.float32.itemsize + torch.bfloat16.itemsize
    return int(config.params_dtype.itemsize)


def stock_forward(model: Any, batch: StockBatch, labels: torch.Tensor | None = None) -> torch.Tensor:
    """Run the stock forward, causal by itself; return logits ``[1, n, V / tp]``, or with labels losses ``[1, n]``."""
    masks: dict[str, torch.Tensor] = {}
    if get_model_config(model).mtp_num_layers:
        # Without labels upstream takes the ids', and a mask of ids.
        masks["loss_mask"] = batch.depth_mask.roll(1) if labels is None else batch.depth_mask
    with replaying(model, batch.routes):
        output: torch.Tensor = model(
            input_ids=batch.input_ids, position_ids=batch.position_ids, attention_mask=None, labels=labels, **masks
        )
    if batch.routes is not None:
        replay_again(model, batch.routes, output)
    return output


def stock_logprobs(logits: torch.Tensor, batch: StockBatch) -> tuple[torch.Tensor, torch.Tensor]:
    """Return each label's log-probability and each prediction's entropy, ``[n]`` each, from logits ``[1, n, V / tp]``.

    Plain torch over all columns keeps fp64, which the comparison needs; Megatron's cross-entropy computes in fp32.
    """
    whole = gather_from_tensor_model_parallel_region(logits.squeeze(0))
    wide = whole.to(torch.promote_types(whole.dtype, torch.float32)) / batch.temperature
    if batch.kept.shape[1]:
        label, token_id = batch.kept
        drops = torch.zeros_like(wide, dtype=torch.bool).index_fill(0, label, True)
        wide = wide.masked_fill(drops.index_put((label, token_id), torch.zeros_like(drops[0, 0])), -torch.inf)
    logprobs = torch.log_softmax(wide, dim=-1)
    probabilities = logprobs.exp()
    # 0 log 0 is 0, also of a logit of -inf.
    entropy = -(probabilities * logprobs.masked_fill(probabilities == 0, 0)).sum(dim=1)
    return logprobs.gather(1, batch.labels.T).squeeze(1), entropy
