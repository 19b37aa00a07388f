"""Folded jobs of ``train_rl.py``: the forward step that ``pretrain`` gets in place of the script's own.

A step of the loop stays as many micro-batches per rank as ``get_num_microbatches()``. Sums over a step do not depend on
the cut. A micro-batch's number of tokens does, and is that of Megatron-LM's own micro-batch.

Without ``--calculate-per-token-loss`` Megatron-LM takes the mean over the tokens of each of its micro-batches. Then a
trajectory's tokens weigh one over the tokens of the micro-batch that Megatron-LM had put it into.
"""

from __future__ import annotations

import argparse
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate, chain, pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.num_microbatches_calculator import get_num_microbatches
from megatron.training import get_args, get_timers

from mcore_prefix_tree.arguments.flags import add_rl_argument_group, readable_arguments
from mcore_prefix_tree.arguments.refusals import ArgumentError, check_rl_arguments
from mcore_prefix_tree.mcore.engine.folding import Folding
from mcore_prefix_tree.mcore.engine.forward_step import for_model, tree_forward
from mcore_prefix_tree.mcore.engine.job import Job
from mcore_prefix_tree.mcore.engine.step_planner import fold_micro_batches
from mcore_prefix_tree.mcore.megatron_lm.argument_checks import as_config, check_machine
from mcore_prefix_tree.mcore.megatron_lm.command_line import CheckedParser
from mcore_prefix_tree.mcore.megatron_lm.job_from_arguments import device_of_this_rank, make_job_from_args
from mcore_prefix_tree.mcore.megatron_lm.pretrain_forms import check_layers, check_megatron_lm, run_pretrain
from mcore_prefix_tree.mcore.megatron_lm.providers import Reported, straggler_timers
from mcore_prefix_tree.mcore.megatron_lm.rl.policy_model import rl_model_provider
from mcore_prefix_tree.mcore.megatron_lm.rl.rl_objective import (
    LoopMicroBatch,
    ScriptLoss,
    ScriptObjective,
    load_loss_func,
    read_micro_batch,
)
from mcore_prefix_tree.mcore.megatron_lm.start import say_which_megatron_core
from mcore_prefix_tree.mcore.outputs import Readout
from mcore_prefix_tree.mcore.seam.micro_batch import MicroBatch
from mcore_prefix_tree.mcore.seam.validation import check_config
from mcore_prefix_tree.objectives import LossOutput
from mcore_prefix_tree.plan import BudgetError
from mcore_prefix_tree.sample import Sample
from mcore_prefix_tree.utils.errors import naming_memory


@dataclass(frozen=True, kw_only=True, eq=False)
class FoldedMicroBatch:
    """A folded micro-batch, on the host, and the one of the loop whose place it takes."""

    batch: MicroBatch
    readout: Readout[LossOutput]
    loops: LoopMicroBatch
    # Number of tokens in the step's trajectories, without padding and tokens after their last scored one; and the
    # number of unique ones among them, an ancestor counted once per micro-batch that needs it.
    folded: tuple[float, float]


class FoldedForwardStep:
    """``forward_step_func`` for ``pretrain``, over the data iterator that Megatron-LM's loop makes."""

    def __init__(self) -> None:
        self._job: Job | None = None
        self._dealt: deque[FoldedMicroBatch] = deque()

    @readable_arguments()
    def __call__(
        self, data_iterator: Iterator[Any], model: Any, loss_only: bool = False
    ) -> tuple[torch.Tensor, Callable[[torch.Tensor], Reported]]:
        """Run one pipeline stage's forward of the next folded micro-batch; return its output and loss function."""
        from megatron.rl.rl_utils import get_rl_runtime_state

        timers = get_timers()
        timers("batch-generator", log_level=2).start()
        with straggler_timers(data=True):
            if not self._dealt:
                _forget_rotary_tables(model)
                self._dealt.extend(self._deal(data_iterator, get_args()))
            dealt = self._dealt.popleft()
        timers("batch-generator").stop()
        get_rl_runtime_state().increment_sequences(dealt.loops.sequences)
        with straggler_timers():
            batch = for_model(dealt.batch.on(device_of_this_rank()), model)
            output = tree_forward(model, batch, dealt.readout)
        return output, partial(_loss, dealt, batch)

    def _deal(self, data_iterator: Iterator[Any], args: argparse.Namespace) -> list[FoldedMicroBatch]:
        """Take a step of the loop, and return this rank's micro-batches of it, folded."""
        packed, corrects = args.rl_use_sequence_packing, args.rl_inference_logprobs_is_correction
        count = get_num_microbatches()
        mine = [read_micro_batch(next(data_iterator), packed=packed, corrects=corrects) for _ in range(count)]
        ranks, rank = _gather_all_ranks(mine), parallel_state.get_data_parallel_rank()
        if self._job is None:
            # The model provider has resolved the back-end: there is no first step to look at.
            self._job = make_job_from_args(args, ScriptObjective(args=args, dtypes={}), lambda: [])
        objective = ScriptObjective(args=args, dtypes=mine[0].dtypes)
        job = replace(self._job, objective=objective, divides_by_tokens=False)
        per_token, own = args.calculate_per_token_loss, list(chain(*ranks))
        weight = [1.0 if per_token else 1 / batch.tokens for batch in own for _ in batch.trajectories]
        trajectories = [one for batch in own for one in batch.trajectories]
        samples = [
            Sample(tokens=one.tokens, loss_mask=one.loss_mask, source=f"trajectory {number}")
            for number, one in enumerate(trajectories)
        ]
        cut, unique = _cut(samples, ranks, job.folding)
        folded = (sum(map(len, samples)), unique)
        batches = fold_micro_batches(samples, cut[rank], job, objective.step_targets(samples, trajectories, weight))
        return [
            FoldedMicroBatch(batch=batch, readout=job.readout, loops=loops, folded=folded)
            for batch, loops in zip(batches, mine, strict=True)
        ]


def _gather_all_ranks(mine: Sequence[LoopMicroBatch]) -> list[Sequence[LoopMicroBatch]]:
    """Return the micro-batches of every data-parallel rank: trajectories may share, however the loop dealt them."""
    size = parallel_state.get_data_parallel_world_size()
    if size == 1:
        return [mine]
    found: list[Any] = [None] * size
    dist.all_gather_object(found, mine, group=parallel_state.get_data_parallel_group())
    return found


def _cut(
    samples: Sequence[Sample], ranks: Sequence[Sequence[LoopMicroBatch]], folding: Folding
) -> tuple[list[Sequence[Sequence[int]]], int]:
    """Plan a step: return the trajectories' indices per rank and micro-batch, and the number of unique tokens."""
    count = len(ranks[0])
    try:
        plan = folding.plan(samples, micro_batches=count)
    except BudgetError:
        # Megatron-LM has packed its bins to the brim: they stay, each folded by itself. All ranks decide alike.
        borders = [0, *accumulate(len(batch.trajectories) for loops in ranks for batch in loops)]
        bins = [range(start, end) for start, end in pairwise(borders)]
        tokens = sum(folding.physical_tokens([samples[index] for index in chosen]) for chosen in bins if chosen)
        return [bins[start : start + count] for start in range(0, len(bins), count)], tokens
    return list(plan.micro_batches), sum(map(sum, plan.physical_tokens))


def _forget_rotary_tables(model: Any) -> None:
    """Empty the caches of rotary embeddings, as ``train_rl.py`` does: they may hold tensors of inference."""
    for module in model.modules():
        for name in ("_forward", "forward"):
            getattr(getattr(module, name, None), "cache_clear", lambda: None)()


def _loss(dealt: FoldedMicroBatch, batch: MicroBatch, output: torch.Tensor) -> Reported:
    """Return the summed loss of the output ``[1, P, ...]``, its divisor and logged values; both add up over a step."""
    found = dealt.readout.read(output, batch)
    assert isinstance(found, ScriptLoss), "the objective returns a ScriptLoss"
    *_, reported = load_loss_func()(*found.terms)
    tokens = torch.full((), dealt.loops.tokens, dtype=torch.float32, device=output.device)
    report = {name: torch.stack([pair[0], tokens]) for name, pair in reported.items()}
    # The step's ratio; every micro-batch says the same.
    report["fold ratio"] = torch.tensor(dealt.folded, dtype=torch.float32, device=output.device)
    divisor = tokens.int() if get_args().calculate_per_token_loss else torch.ones_like(tokens).int()
    return found.loss, divisor, report


def check_command_line(args: argparse.Namespace) -> None:
    """Check a job before Megatron-LM starts anything; raise ArgumentError, or the error of a part that it checks."""
    check_megatron_lm()
    check_rl_arguments(args)
    check_layers(args)
    if args.fp8:
        raise ArgumentError(
            f"--fp8-format {args.fp8}: train_rl.py wraps TransformerEngine's layers for inference, which is not proven "
            "exact with folding yet; remove it"
        )
    check_config(as_config(args))
    check_machine(args)
    load_loss_func()


def add_rl_arguments(
    parser: argparse.ArgumentParser, args_defaults: Mapping[str, Any] | None = None
) -> argparse.ArgumentParser:
    """Return a parser with the arguments of ``train_rl.py`` and of ``--prefix-tree``, which checks the job too."""
    try:
        from megatron.inference.utils import add_inference_args
    except ImportError as error:
        raise ArgumentError(
            "the train_rl.py of this checkout is older than that of core_v0.19.0, which --prefix-tree trains: "
            f"{error}; check out core_v0.19.0"
        ) from error
    parser = add_inference_args(parser)
    return CheckedParser(
        parser, add_rl_argument_group, lambda parsed, _: check_command_line(parsed), script="train_rl.py"
    )


def run(root: Path) -> None:
    """Train with the ``pretrain`` of the checkout at ``root``; exit with status 2 if the job cannot run."""
    say_which_megatron_core(root)
    with naming_memory(lambda: "the job does not fit; lower --micro-batch-size or --seq-length"):
        # The loop brings its own data.
        run_pretrain(None, rl_model_provider, FoldedForwardStep(), add_arguments=add_rl_arguments)
