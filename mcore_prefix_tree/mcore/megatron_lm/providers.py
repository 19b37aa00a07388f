"""Functions that Megatron-LM's ``pretrain`` takes for data, model and forward step; and a script's own, or these."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from megatron.core.rerun_state_machine import get_rerun_state_machine
from megatron.core.utils import StragglerDetector
from megatron.training import get_args, get_timers, print_rank_0

from mcore_prefix_tree.arguments.flags import SPELLINGS, read_recipe, readable_arguments
from mcore_prefix_tree.arguments.refusals import has_scalar_head
from mcore_prefix_tree.cpu.specs import cpu_spec, interleaving
from mcore_prefix_tree.data import FieldNames
from mcore_prefix_tree.data.batches import SampleOrder
from mcore_prefix_tree.data.source import Source
from mcore_prefix_tree.mcore.engine.folding import Folding
from mcore_prefix_tree.mcore.engine.forward_step import divisor_part, for_model, for_schedule, tree_forward
from mcore_prefix_tree.mcore.engine.job import Job, StepHook
from mcore_prefix_tree.mcore.engine.resolve import check_samples
from mcore_prefix_tree.mcore.megatron_lm.argument_checks import config_in_provider
from mcore_prefix_tree.mcore.megatron_lm.command_line import add_prefix_tree_args
from mcore_prefix_tree.mcore.megatron_lm.hf_arguments import load_weights
from mcore_prefix_tree.mcore.megatron_lm.job_from_arguments import (
    device_of_this_rank,
    load_hook,
    make_folding_from_args,
    make_job_from_args,
    make_objective_from_args,
    vocab_size_without_padding,
)
from mcore_prefix_tree.mcore.megatron_lm.pretrain_forms import build_model, hybrid_pattern
from mcore_prefix_tree.mcore.megatron_lm.resume import consumed_before, head_starts_new
from mcore_prefix_tree.mcore.megatron_lm.step_batches import (
    DealtStep,
    StepDealer,
    StepMicroBatch,
    check_steps,
    current_size,
    evaluation_size,
    is_constant,
)
from mcore_prefix_tree.mcore.ranks import all_ranks
from mcore_prefix_tree.mcore.seam.layer_specs import is_hybrid_stack, with_prefix_tree
from mcore_prefix_tree.mcore.seam.micro_batch import MicroBatch
from mcore_prefix_tree.mcore.seam.multi_token import with_multi_token
from mcore_prefix_tree.mcore.seam.output_layer import with_edge_head, with_vocab_size
from mcore_prefix_tree.mcore.seam.scalar_output_layer import start_new_head, with_scalar_head
from mcore_prefix_tree.mcore.seam.validation import check_model, check_step
from mcore_prefix_tree.objectives import Objective
from mcore_prefix_tree.settings.sample_source import make_source as source_of_recipe
from mcore_prefix_tree.utils.choices import Order
from mcore_prefix_tree.utils.errors import spell, spelled
from mcore_prefix_tree.utils.upload import upload

__all__ = ["add_prefix_tree_args", "prefix_tree_providers"]

Provider = Callable[..., Any]
# What Megatron's schedule takes of a loss function: the loss, its divisor, and logged values.
Reported = tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]


def read_order(
    args: argparse.Namespace, objective: Objective, folding: Folding, *, validates: bool = False
) -> SampleOrder:
    """Read the training samples in the order that steps take them, or those of validation; report the skipped ones.

    Raises SampleError, with file, line and argument, for bad data, a missing field, a sample that is too long, or
    ranks that read other samples; ValueError for fewer samples than a step of complete groups takes.
    """
    paths, order = args.prefix_tree_data_path, args.prefix_tree_order
    if validates:
        paths, order = args.prefix_tree_valid_data_path, "file"
    names = FieldNames(given=args.prefix_tree_fields, format=args.prefix_tree_format, may_lack=validates)
    check = partial(check_samples, objective)
    is_whole = folding.over_budget == "repeat"
    source = make_source_from_args(args, paths, order, objective, names=names, whole_samples=is_whole)
    with spelled({"data.path": "validation.path"} if validates else {}):
        samples, skipped = source.read(check=check, progress=ReadingProgress())
    for told in filter(None, (str(skipped), skipped.not_read)):
        print_rank_0(f"> {spell(told, SPELLINGS)}")
    return samples


def make_source_from_args(
    args: argparse.Namespace,
    paths: Sequence[str],
    order: Order,
    objective: Objective | None,
    *,
    names: FieldNames,
    whole_samples: bool,
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
    ) -> tuple[Iterator[StepMicroBatch] | None, Iterator[StepMicroBatch] | None, None]:
        """Return iterators for training and validation, none for the test; exit with status 2 for bad data or sizes."""
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
            train = self._training.iterate(consumed=consumed, size=lambda: current_size(args))
        if not args.prefix_tree_valid_data_path:
            if args.eval_iters:
                print_rank_0("> no --prefix-tree-valid-data-path: nothing is evaluated")
            args.eval_iters = 0
            return train, None, None
        consumed = 0 if args.skip_train else args.consumed_valid_samples
        self._evaluated_before = args.consumed_valid_samples - consumed
        if self._validation is None:
            order = read_order(args, objective, folding, validates=True)
            if not order.is_streamed:
                end = train_val_test_num_samples[1] or 0
                check_steps(order, lambda _: evaluation_size(args), folding, objective, consumed=consumed, end=end)
            # Training has chosen before: validation runs the same back-end.
            job = self._job(args, objective, order)
            self._validation = StepDealer(order, job, chunks=chunks, num_workers=args.num_workers)
        return train, self._validation.iterate(consumed=consumed, size=lambda: evaluation_size(args)), None

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
            self._hook = load_hook(args, job, order)
        return replace(job, hook=self._hook)

    def _training_order(
        self, args: argparse.Namespace, folding: Folding, objective: Objective, end: int
    ) -> SampleOrder:
        """Read the training samples, and check everything about their steps that is known before the first."""
        order = read_order(args, objective, folding)
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


@readable_arguments()
def tree_model_provider(*ends: bool, config: Any = None, **stage: Any) -> Any:
    """Return the model of the arguments, with stock state-dict keys; exit with status 2 if folding rejects it."""
    args = get_args()
    checked = config_in_provider(args)
    model = tree_model(args, config or checked, *ends, **stage)
    if args.prefix_tree_hf is not None:
        load_weights(args, model)
    return model


def tree_model(
    args: argparse.Namespace,
    config: Any,
    pre_process: bool = True,
    post_process: bool = True,
    *,
    vp_stage: int | None = None,
    pg_collection: Any = None,
) -> Any:
    """Return a model of these arguments and of this ``TransformerConfig``, which is set for this machine in place."""
    on_gpu = torch.cuda.is_available()

    def exchange(spec: Any) -> Any:
        if args.transformer_impl != "transformer_engine" and not on_gpu and not is_hybrid_stack(spec):
            # The emulation is for experiments, also with layers that upstream lacks on a CPU.
            spec = cpu_spec(spec, config, vp_stage)
        return with_prefix_tree(spec)

    print_rank_0(f"building {'GPT' if hybrid_pattern(args) is None else 'hybrid'} model, tree-capable ...")
    vars(config).update(interleaving(config.virtual_pipeline_model_parallel_size, on_gpu=on_gpu))
    if has_scalar_head(args):  # its embedding is read from a tied checkpoint all the same
        args = argparse.Namespace(**vars(args) | {"untie_embeddings_and_output_weights": True})
    stage = {"pre_process": pre_process, "post_process": post_process, "vp_stage": vp_stage}
    model = build_model(args, config, exchange, **stage, pg_collection=pg_collection)
    check_model(model)
    if not has_scalar_head(args):
        with_multi_token(model)
    return with_head(args, model)


def with_head(args: argparse.Namespace, model: Any) -> Any:
    """Return a stage, changed in place, with the output layer of the job's objective; all ranks call it together."""
    if not has_scalar_head(args):
        with_vocab_size(model, vocab_size_without_padding(args))
        return with_edge_head(model) if args.prefix_tree_fused_head else model
    with_scalar_head(model)
    source = head_starts_new(args)
    if source is not None:
        print_rank_0(f"> the weights start from {source}, with a new scalar head")
        start_new_head(model)
        # A HybridModel would take the optimizer of a GPT even with --finetune, and that has nothing for this head.
        get_args().no_load_optim = True
    return model


@readable_arguments()
def tree_forward_step(
    data_iterator: Iterator[StepMicroBatch], model: Any
) -> tuple[torch.Tensor, Callable[[torch.Tensor], Reported]]:
    """Run one pipeline stage's forward of the next folded micro-batch; return its output and loss function."""
    check_step(model)
    timers = get_timers()
    timers("batch-generator", log_level=2).start()
    with straggler_timers(data=True):
        micro_batch = next(data_iterator)
    timers("batch-generator").stop()
    with straggler_timers():
        batch = for_model(micro_batch.take(model), model)
        output = tree_forward(model, batch, micro_batch.readout)
    return output, partial(_loss, micro_batch, batch)


def straggler_timers(*, data: bool = False) -> AbstractContextManager[Any]:
    """Return the timers of ``--log-straggler``, which nothing starts without it; ``data`` marks a block that fetches.

    Megatron's context logs the stack of any error that ends it early, for example Ctrl-C or a mistake reported in one
    sentence.
    """
    return StragglerDetector()(bdata=data) if get_args().log_straggler else nullcontext()


def _loss(micro_batch: StepMicroBatch, batch: MicroBatch, output: torch.Tensor) -> Reported:
    """Return the loss of the stage's output, local logits ``[1, P, V / tp]`` by default."""
    found = micro_batch.readout.read(output, batch)
    loss = found.loss
    if get_args().check_for_nan_in_loss_and_grad:
        get_rerun_state_machine().validate_result(
            result=loss,
            rejection_func=lambda loss: ~torch.isfinite(loss),
            message="found NaN or Inf in the loss of a folded micro-batch",
            tolerance=0.0,
            fatal=True,
        )
    report = {"lm loss": torch.stack([loss.detach().float(), loss.new_full((), divisor_part(batch)).float()])}
    report |= {name: pair.float() for name, pair in found.metrics.items()}
    figures = micro_batch.figures
    if figures:
        pairs = upload(np.array(list(figures.values()), dtype=np.float32), output.device)
        report |= dict(zip(figures, pairs.unbind(), strict=True))
    return *for_schedule(batch, loss), report


def prefix_tree_providers(
    datasets_provider: Provider, model_provider: Provider | None, forward_step: Provider
) -> tuple[Provider, Provider, Provider]:
    """Return a script's own three providers without ``--prefix-tree``, and the folding ones with it, for ``pretrain``.

    ``model_provider`` is None if, since core_v0.19, a ``ModelConfig`` builds the model.
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
