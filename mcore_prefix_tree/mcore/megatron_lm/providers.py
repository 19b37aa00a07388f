"""The data provider for Megatron-LM's ``pretrain``; and a script's own providers, or those of folding."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from megatron.training import get_args, get_timers, print_rank_0

from mcore_prefix_tree.arguments.flags import SPELLINGS, read_recipe, readable_arguments
from mcore_prefix_tree.data import FieldNames
from mcore_prefix_tree.data.batches import SampleOrder
from mcore_prefix_tree.data.source import Source
from mcore_prefix_tree.mcore.engine.folding import Folding
from mcore_prefix_tree.mcore.engine.job import Job
from mcore_prefix_tree.mcore.engine.sample_checks import check_samples
from mcore_prefix_tree.mcore.engine.step_hook import StepHook
from mcore_prefix_tree.mcore.megatron_lm.argument_checks import config_in_provider
from mcore_prefix_tree.mcore.megatron_lm.build_model import tree_model_provider, with_head
from mcore_prefix_tree.mcore.megatron_lm.command_line import add_prefix_tree_args
from mcore_prefix_tree.mcore.megatron_lm.job_from_arguments import (
    device_of_this_rank,
    load_hook,
    make_folding_from_args,
    make_job_from_args,
    make_objective_from_args,
    vocab_size_without_padding,
)
from mcore_prefix_tree.mcore.megatron_lm.loop_forward_step import tree_forward_step
from mcore_prefix_tree.mcore.megatron_lm.resume import consumed_before
from mcore_prefix_tree.mcore.megatron_lm.step_batches import (
    DealtStep,
    StepDealer,
    StepIterator,
    check_steps,
    current_size,
    evaluation_size,
    is_constant,
)
from mcore_prefix_tree.mcore.ranks import all_ranks
from mcore_prefix_tree.objectives import Objective
from mcore_prefix_tree.settings.sample_source import make_source as source_of_recipe
from mcore_prefix_tree.utils.choices import Order
from mcore_prefix_tree.utils.errors import spell, spelled

__all__ = ["add_prefix_tree_args", "prefix_tree_providers"]

Provider = Callable[..., Any]


def read_order(
    args: argparse.Namespace, paths: Sequence[str], order: Order, objective: Objective, *, validates: bool = False
) -> SampleOrder:
    """Read the samples of the files, in the order that steps take them; report the skipped ones.

    Raises:
        SampleError: the data is bad, or a sample lacks a field that the objective reads or is longer than the arguments
            allow; the message names file, line and argument. Or ranks read different samples.
        ValueError: there are fewer samples than a step of complete groups takes.
    """
    names = FieldNames(given=args.prefix_tree_fields, may_lack=validates)
    check = None if objective.is_weighted_sum else partial(check_samples, objective)
    whole = make_folding_from_args(args, objective, device=device_of_this_rank()).over_budget == "repeat"
    source = make_source_from_args(args, paths, order, objective, names=names, whole_samples=whole)
    with spelled({"data.path": "validation.path"} if validates else {}):
        samples, skipped = source.read(check=check, progress=ReadingProgress())
    if skipped:
        print_rank_0(f"> {spell(str(skipped), SPELLINGS)}")
    return samples


def make_source_from_args(
    args: argparse.Namespace,
    paths: Sequence[str],
    order: Order,
    objective: Objective | None,
    *,
    names: FieldNames,
    whole_samples: bool = True,
) -> Source:
    """Return the source of the files' samples; without an objective it reads no group, rollout or pair."""
    recipe = read_recipe(args)
    recipe = replace(
        recipe,
        data=replace(recipe.data, path=list(paths), order=order),
        model=replace(recipe.model, vocab_size=vocab_size_without_padding(args)),
    )
    limits = {"--seq-length": args.seq_length}
    return source_of_recipe(
        recipe, objective, ranks=all_ranks(), names=names, limits=limits, whole_samples=whole_samples
    )


def training_order(args: argparse.Namespace, objective: Objective) -> SampleOrder:
    """Read the training samples, in the order that steps take them."""
    return read_order(args, args.prefix_tree_data_path, args.prefix_tree_order, objective)


def validation_order(args: argparse.Namespace, objective: Objective) -> SampleOrder:
    """Read the validation samples, in the order of their files."""
    return read_order(args, args.prefix_tree_valid_data_path, "file", objective, validates=True)


class ReadingProgress:
    """Progress of reading, printed as a line for every tenth."""

    def __init__(self) -> None:
        self._tenths = 0

    def __call__(self, done: int, total: int) -> None:
        if 10 * done // total > self._tenths:
            self._tenths = 10 * done // total
            print_rank_0(f"> reading data: {self._tenths}0 %")


def training_seconds() -> float:
    """Return wall-clock seconds without those that Megatron's timers gave to evaluation and checkpoints."""
    timers = get_timers()
    paused = sum(timers(name, log_level=0).active_time() for name in ("eval-time", "save-checkpoint"))
    return time.perf_counter() - float(paused)


class TreeDatasetsProvider:
    """Megatron's ``train_valid_test_datasets_provider``: iterators over folded micro-batches, on every rank.

    Megatron calls it once for each model chunk of a rank; the chunks share their data and plans.
    """

    # All pipeline stages and tensor-parallel ranks read the data themselves and make the same plan.
    is_distributed = True

    def __init__(self) -> None:
        self._training: StepDealer | None = None
        self._consumed_before = self._evaluated_before = 0  # samples, of other data than these
        self._validation: StepDealer | None = None
        self._objective: Objective | None = None
        self._hook: StepHook | None = None

    @readable_arguments()
    def __call__(
        self, train_val_test_num_samples: Sequence[int | None], vp_stage: int | None = None
    ) -> tuple[StepIterator | None, StepIterator | None, None]:
        """Return iterators for training and validation, and none for the test.

        Raises:
            SystemExit: status 2, with one sentence: the data is bad, a step does not fit its micro-batches, or the job
                resumes with other samples than it had.
        """
        args = get_args()
        config_in_provider(args)
        device = device_of_this_rank()
        chunks = args.virtual_pipeline_model_parallel_size or 1
        objective = self._objective = self._objective or make_objective_from_args(args)
        folding = make_folding_from_args(args, objective, device=device)
        train = None
        if not args.skip_train:
            if self._training is None:
                order = self._training_order(args, folding, objective, train_val_test_num_samples[0] or 0)
                self._training = StepDealer(
                    order,
                    self._job(args, objective, order),
                    chunks=chunks,
                    num_workers=args.num_workers,
                    clock=training_seconds,
                )
            consumed = args.consumed_train_samples - self._consumed_before
            train = StepIterator(self._training, consumed=consumed, size=lambda: current_size(args))
        if not args.prefix_tree_valid_data_path:
            if args.eval_iters:
                print_rank_0("> no --prefix-tree-valid-data-path: nothing is evaluated")
            args.eval_iters = 0
            return train, None, None
        consumed = 0 if args.skip_train else args.consumed_valid_samples
        self._evaluated_before = args.consumed_valid_samples - consumed
        if self._validation is None:
            order = validation_order(args, objective)
            if not order.is_streamed:
                end = train_val_test_num_samples[1] or 0
                check_steps(order, lambda _: evaluation_size(args), folding, objective, consumed=consumed, end=end)
            # Training has chosen before: validation runs the same back-end.
            job = self._job(args, objective, order)
            self._validation = StepDealer(order, job, chunks=chunks, num_workers=args.num_workers)
        return train, StepIterator(self._validation, consumed=consumed, size=lambda: evaluation_size(args)), None

    @readable_arguments()
    def begin_step(self, student: Sequence[torch.nn.Module]) -> None:
        """Run the work before the step that Megatron's loop is in; see :meth:`DealtStep.begin`."""
        self._step().begin(student)

    def list_sizes(self) -> list[torch.Size]:
        """Return ``[batch, length]`` of each micro-batch of the step that Megatron's loop is in."""
        return self._step().list_sizes()

    def _step(self) -> DealtStep:
        """Return the step of the loop, which counts samples; evaluation is what it runs without gradients."""
        args = get_args()
        if torch.is_grad_enabled():
            assert self._training is not None, "the loop trains"
            return self._training.step_after(args.consumed_train_samples - self._consumed_before, current_size(args))
        assert self._validation is not None, "the loop evaluates"
        return self._validation.step_after(args.consumed_valid_samples - self._evaluated_before, evaluation_size(args))

    def _job(self, args: argparse.Namespace, objective: Objective, order: SampleOrder) -> Job:
        """Return a job; training and validation share one hook, with its teachers."""
        job = make_job_from_args(args, objective, lambda: order.take(0, args.global_batch_size))
        if self._hook is None:
            self._hook = load_hook(args, job, order, say=print_rank_0)
        return replace(job, hook=self._hook)

    def _training_order(
        self, args: argparse.Namespace, folding: Folding, objective: Objective, end: int
    ) -> SampleOrder:
        """Read the training samples, and check everything about their steps that is known before the first."""
        order = training_order(args, objective)
        print_rank_0(f"> {order.samples_per_epoch} samples an epoch from {args.prefix_tree_data_path}")
        self._consumed_before = consumed_before(args, order)
        # Streamed data would be read and encoded once more, which a dry run does for who wants to know: here a step
        # that does not fit is reported when it is planned, while the one before computes.
        if is_constant(args) and not order.is_streamed:
            check_steps(
                order,
                lambda _: current_size(args),
                folding,
                objective,
                consumed=args.consumed_train_samples - self._consumed_before,
                end=end - self._consumed_before,
            )
        return order


def prefix_tree_providers(
    datasets_provider: Provider, model_provider: Provider | None, forward_step: Provider
) -> tuple[Provider, Provider, Provider]:
    """Return a script's own three providers without ``--prefix-tree``, and the folding ones with it, for ``pretrain``.

    Megatron calls the data provider on every rank under the flag; without it on the ranks that the script's own asks
    for with ``is_distributed``. ``model_provider`` is None if, since core_v0.19, a ``ModelConfig`` builds the model.
    """
    folded = TreeDatasetsProvider()

    class _Datasets:
        @property
        def is_distributed(self) -> bool:
            return bool(getattr(datasets_provider, "is_distributed", False)) or bool(get_args().prefix_tree)

        def __call__(self, num_samples: Sequence[int | None], vp_stage: int | None = None) -> Any:
            provider = folded if get_args().prefix_tree else datasets_provider
            return provider(num_samples) if vp_stage is None else provider(num_samples, vp_stage=vp_stage)

    @readable_arguments()
    def model(*args: Any, **kwargs: Any) -> Any:
        arguments = get_args()
        # --attention-backend tree: Megatron-Core is patched (patches/README.md), the script's own layers follow it.
        native = model_provider is not None and arguments.attention_backend.name == "tree"
        if arguments.prefix_tree and not native:
            return tree_model_provider(*args, **kwargs)
        if arguments.prefix_tree:
            config_in_provider(arguments)
        assert model_provider is not None, "without --prefix-tree the script's ModelConfig builds its model"
        stock = model_provider(*args, **kwargs)
        return with_head(arguments, stock) if arguments.prefix_tree else stock

    def step(data_iterator: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
        return (tree_forward_step if get_args().prefix_tree else forward_step)(data_iterator, model, *args, **kwargs)

    return _Datasets(), model, step
