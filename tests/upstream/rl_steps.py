"""One step of ``train_rl.py`` in fp64, by the checkout's own forward step on each unfolded trajectory, and folded.

``torchrun rl_steps.py ANSWERS ROLLOUTS ARGUMENTS``, on one rank: of the rollouts with that name, writes how far apart
both are, by name, and the terms of the loss. Both run under Megatron's own schedule, which does the backward passes.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import rl_stock  # puts the checkout on the path, and has its CPU emulated
import torch
import train_rl
from harness.in_double import AllInDouble, error_of, with_any_weights
from megatron.core.num_microbatches_calculator import (
    get_num_microbatches,
    reconfigure_num_microbatches_calculator,
)
from megatron.core.pipeline_parallel.schedules import forward_backward_no_pipelining
from megatron.rl.rl_utils import get_logprobs, get_rl_runtime_state
from megatron.rl.sequence_packing_utils import load_packed_data_by_index, pack_all_trajectories
from megatron.training import get_args, get_tokenizer
from megatron.training.arguments import parse_and_validate_args
from megatron.training.training import initialize_megatron
from rl_rollouts import PAD

from mcore_prefix_tree.mcore.megatron_lm.rl.policy_model import rl_model_provider
from mcore_prefix_tree.mcore.megatron_lm.rl.rl_forward_step import FoldedForwardStep, add_rl_arguments

Gradients = dict[str, torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class Rollouts:
    """N trajectories, padded to s tokens: ``[N, s]``, which are generated, bool ``[N, s]``, and advantages ``[N]``."""

    tokens: torch.Tensor
    generated: torch.Tensor
    advantages: torch.Tensor

    @classmethod
    def shared(cls, count: int, length: int, vocab: int) -> Rollouts:
        """Groups of four on a prompt; three of each begin their answers alike, and one is another's beginning."""
        draw = torch.Generator().manual_seed(3)

        def text(low: int, high: int) -> list[int]:
            size = int(torch.randint(low, high, (), generator=draw))
            return torch.randint(PAD + 1, vocab - 1, (size,), generator=draw).tolist()

        tokens = torch.full((count, length), PAD)
        generated = torch.zeros(count, length, dtype=torch.bool)
        for row in range(count):
            if row % 4 == 0:
                prompt, begun, whole = text(5, 15), text(3, 9), text(1, 9)
            answer = [text(4, 20), begun + text(1, 12), begun + whole + text(1, 6), begun + whole][row % 4]
            end = len(prompt) + len(answer)
            tokens[row, :end] = torch.tensor(prompt + answer)
            generated[row, len(prompt) : end] = True
        return cls.rewarded(tokens, generated)

    @classmethod
    def unshared(cls, count: int, length: int, vocab: int) -> Rollouts:
        """Halves and quarters of a row in turn, none of which begin alike.

        Sorted by length they fill full bins, but not in the order of their tokens.
        """
        draw = torch.Generator().manual_seed(4)
        tokens = torch.randint(PAD + 1, vocab - 1, (count, length), generator=draw)
        tokens[:, 0] = PAD + 1 + torch.arange(count)
        behind = torch.arange(length) >= torch.tensor([length // 2, length // 4]).repeat(count // 2)[:, None]
        return cls.rewarded(tokens.masked_fill(behind, PAD), ~behind & (torch.arange(length) > 3))

    @classmethod
    def rewarded(cls, tokens: torch.Tensor, generated: torch.Tensor) -> Rollouts:
        """With drawn advantages, of both signs."""
        draw = torch.Generator().manual_seed(5)
        advantages = torch.randn(len(tokens), dtype=torch.float64, generator=draw)
        return cls(tokens=tokens, generated=generated, advantages=advantages)


def main(answers: Path, name: str, words: Sequence[str]) -> None:
    sys.argv = ["train_rl.py", *words]
    parse_and_validate_args(extra_args_provider=add_rl_arguments, args_defaults={})
    initialize_megatron()
    args = get_args()
    args.params_dtype = torch.float64
    get_tokenizer()._tokenizer._pad_id = PAD
    with AllInDouble():
        stock, tree = rl_stock.model_provider().double(), rl_model_provider().double()
        with_any_weights(stock)
        tree.load_state_dict(stock.state_dict())
        rollouts = getattr(Rollouts, name)(args.global_batch_size, args.seq_length, args.vocab_size)
        make = in_bins if args.rl_use_sequence_packing else in_rows
        told, singly, together = make(stock, tree, rollouts)
        expected, wanted = stepped(train_rl.forward_step, stock, singly)
        reports, found = stepped(FoldedForwardStep(), tree, together)
    told |= {name: error_of(reports[name], pair) for name, pair in expected.items()}
    told |= {f"gradient of {name}": error_of(found[name], gradient) for name, gradient in wanted.items()}
    terms = {name: float(pair[0] / pair[1]) for name, pair in expected.items()}
    sums, uniques = reports["fold ratio"].tolist()
    answers.write_text(json.dumps({"errors": told, "terms": terms, "fold ratio": sums / uniques}))


Batches = list[Any]


def in_rows(stock: Any, tree: Any, rollouts: Rollouts) -> tuple[dict[str, float], Batches, Batches]:
    """How far the log-probabilities are apart; the micro-batches of one row for stock, and those for folding."""
    size = get_args().micro_batch_size
    positions = torch.arange(rollouts.tokens.shape[1]).expand_as(rollouts.tokens)

    def logprobs(model: Any, size: int) -> torch.Tensor:
        rows = zip(rollouts.tokens.split(size), positions.split(size), strict=True)
        return torch.cat([get_logprobs(model, tokens, at, no_grad=True) for tokens, at in rows])

    expected, scored = logprobs(stock, 1), rollouts.generated[:, 1:]
    told = {"log-probabilities": error_of(logprobs(tree, size)[scored], expected[scored])}
    old, reference, inference = apart(expected)
    columns = (rollouts.tokens, rollouts.advantages, old, rollouts.generated.double(), positions, reference, inference)

    def batches(size: int) -> Batches:
        return [list(batch) for batch in zip(*(column.split(size) for column in columns), strict=True)]

    return told, batches(1), batches(size)


def in_bins(stock: Any, tree: Any, rollouts: Rollouts) -> tuple[dict[str, float], Batches, Batches]:
    """The same, of bins; in one of them the stock attention keeps its trajectories apart."""
    args = get_args()
    state = get_rl_runtime_state()
    state.packing_context = context = pack_all_trajectories(
        rollouts.tokens,
        rollouts.generated,
        None,
        rollouts.advantages,
        args.seq_length,
        args.rl_sequence_packing_max_sequences_per_bin,
        args.rl_sequence_packing_algo,
    )
    bins = range(len(context.packed_trajs))

    def logprobs(model: Any) -> torch.Tensor:
        found = []
        for number in bins:
            tokens, _, _, _, positions, *_, params = load_packed_data_by_index(number, context, True)
            found.append(get_logprobs(model, tokens, positions, no_grad=True, packed_seq_params=params))
        return torch.cat(found)

    expected, scored = logprobs(stock), context.packed_loss_mask[:, 1:] > 0
    told = {"log-probabilities": error_of(logprobs(tree)[scored], expected[scored])}
    context.old_logprobs, context.ref_logprobs, context.packed_inference_logprobs = apart(expected)
    # As the loop does, whose steps are of bins then.
    reconfigure_num_microbatches_calculator(0, None, len(bins), 1, 1)
    numbers = [[torch.tensor([number])] for number in bins]
    return told, numbers, numbers


def apart(logprobs: torch.Tensor) -> Iterator[torch.Tensor]:
    """Log-probabilities of other models: far enough that ratios are clipped and corrections truncated."""
    draw = torch.Generator().manual_seed(9)
    for _ in range(3):
        yield logprobs + 0.2 * torch.randn(logprobs.shape, dtype=logprobs.dtype, generator=draw)


def stepped(forward_step: Callable[..., Any], model: Any, batches: Batches) -> tuple[Gradients, Gradients]:
    """The logs of a step, summed over its micro-batches, and the gradients."""
    args = get_args()
    reconfigure_num_microbatches_calculator(0, None, len(batches), 1, 1)
    reports = forward_backward_no_pipelining(
        forward_step_func=forward_step,
        data_iterator=iter(batches),
        model=model,
        num_microbatches=get_num_microbatches(),
        seq_length=args.seq_length,
        micro_batch_size=args.micro_batch_size,
    )
    summed = {name: torch.stack([report[name] for report in reports]).sum(0) for name in reports[0]}
    gradients = {}
    for name, weight in model.named_parameters():
        assert weight.grad is not None, name
        gradients[name] = weight.grad
    return summed, gradients


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3:])
