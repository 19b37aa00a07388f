"""The training loop: Megatron's DDP, optimizer, schedule and checkpoints around folded micro-batches."""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from mcore_prefix_tree.data.batches import SampleOrder, SampleStream
from mcore_prefix_tree.data.same import is_other
from mcore_prefix_tree.mcore.engine.calibrate import Calibration, calibrate
from mcore_prefix_tree.mcore.engine.compare import Comparison, compare
from mcore_prefix_tree.mcore.engine.forward_step import forward_step_of
from mcore_prefix_tree.mcore.engine.held_out import Evaluation, HeldOut
from mcore_prefix_tree.mcore.engine.schedule import FoldedStep, folding_of, plan_folded, run_schedule
from mcore_prefix_tree.mcore.engine.totals import Totals, check_finite
from mcore_prefix_tree.mcore.engine.verify import VerifyReport
from mcore_prefix_tree.mcore.trainer import checkpoint
from mcore_prefix_tree.mcore.trainer.ending import EndedError, EndRequest
from mcore_prefix_tree.mcore.trainer.logs import Logs, open_logs
from mcore_prefix_tree.mcore.trainer.retention import remove_older
from mcore_prefix_tree.mcore.trainer.session import Session
from mcore_prefix_tree.mcore.trainer.settings import changed_settings
from mcore_prefix_tree.mcore.trainer.teacher import TeacherModel
from mcore_prefix_tree.objectives import Objective
from mcore_prefix_tree.plan import Ahead
from mcore_prefix_tree.recipe import Recipe, RecipeError
from mcore_prefix_tree.sample import Sample

_CALIBRATION_STEPS = 4


class DivergedError(ValueError):
    """A gradient that no optimizer should see. The message names the step."""


@dataclass(frozen=True, kw_only=True)
class StepReport:
    """One step.

    Attributes:
        iteration: from 1.
        loss: of the recipe's objective; for plain supervised training the mean negative log-likelihood of the step's
            supervised tokens, in nats.
        grad_norm: before clipping; None where Megatron does not compute it.
        lr: learning rate of the step.
        samples: logical samples.
        logical_tokens: of these.
        physical_tokens: computed, over all ranks, without padding.
        plan_seconds: on the host, for planning and folding, while the step before computed.
        seconds: of the step itself.
        metrics: means that the objective reports, over the whole step.
    """

    iteration: int
    loss: float
    grad_norm: float | None
    lr: float
    samples: int
    logical_tokens: int
    physical_tokens: int
    plan_seconds: float
    seconds: float
    metrics: Mapping[str, float] = field(default_factory=dict)

    @property
    def fold_ratio(self) -> float:
        """Logical over physical tokens."""
        return self.logical_tokens / self.physical_tokens


class Reporter(Protocol):
    """What a training run tells; called on the main rank only."""

    def message(self, text: str) -> None:
        """Something worth a line."""

    def reading(self, done: int, total: int) -> None:
        """So many bytes of the data have been gone through, before training."""

    def verified(self, report: VerifyReport) -> None:
        """The first batch was compared."""

    def started(self, first: int, last: int) -> None:
        """Steps ``first`` to ``last`` follow."""

    def step(self, report: StepReport) -> None:
        """A step is done."""

    def evaluated(self, evaluation: Evaluation) -> None:
        """The samples that are held out were gone through."""

    def compared(self, comparison: Comparison) -> None:
        """The last batch was run folded and unfolded."""


@dataclass(frozen=True, kw_only=True, eq=False)
class _PlannedStep:
    iteration: int
    samples: list[Sample]
    folded: FoldedStep
    seconds: float


class Trainer:
    """One process's part of a training run.

    Args:
        recipe: the job's.
        objective: the recipe's.
        place: this rank's.
        order: of the samples.
        chunks: bare model chunks; they are wrapped in Megatron's DDP.
        teacher: the second model of an objective that has one.
        held_out: what to evaluate the weights on now and then.
    """

    def __init__(
        self,
        recipe: Recipe,
        objective: Objective,
        place: Session,
        order: SampleOrder,
        chunks: list[torch.nn.Module],
        *,
        teacher: TeacherModel | None = None,
        held_out: HeldOut | None = None,
    ) -> None:
        self._recipe, self._objective, self._place, self._order = recipe, objective, place, order
        self._teacher, self._held_out = teacher, held_out
        self._data_from = 0  # steps before the first of the order
        self._folding = folding_of(recipe, place)
        self._forward_step = forward_step_of(objective, fused_head=recipe.fused_head)
        self._totals = Totals(place, has_metrics=not objective.is_weighted_sum)
        options = recipe.optimizer
        ddp_config = DistributedDataParallelConfig(
            grad_reduce_in_fp32=place.config.bf16, use_distributed_optimizer=options.use_distributed_optimizer
        )
        self._chunks = [DistributedDataParallel(place.config, ddp_config, chunk) for chunk in chunks]
        self._optimizer = get_megatron_optimizer(
            OptimizerConfig(
                optimizer="adam",
                lr=options.lr,
                min_lr=options.min_lr,
                weight_decay=options.weight_decay,
                adam_beta1=options.adam_beta1,
                adam_beta2=options.adam_beta2,
                clip_grad=options.clip_grad,
                bf16=place.config.bf16,
                params_dtype=place.config.params_dtype,
                use_distributed_optimizer=options.use_distributed_optimizer,
            ),
            self._chunks,
        )
        place.config.finalize_model_grads_func = finalize_model_grads
        place.config.grad_scale_func = self._optimizer.scale_loss
        batch = recipe.batch.per_step
        # As in Megatron-LM the schedule counts samples; or groups, where steps are so many of those. What the recipe
        # says now wins over what a checkpoint says.
        self._scheduler = OptimizerParamScheduler(
            self._optimizer,
            init_lr=0.0,
            max_lr=options.lr,
            min_lr=options.min_lr,
            lr_warmup_steps=options.lr_warmup_steps * batch,
            lr_decay_steps=recipe.train_iters * batch,
            lr_decay_style=options.lr_decay_style,
            start_wd=options.weight_decay,
            end_wd=options.weight_decay,
            wd_incr_steps=recipe.train_iters * batch,
            wd_incr_style="constant",
            use_checkpoint_opt_param_scheduler=False,
            override_opt_param_scheduler=True,
        )

    def train(self, saved: int | None, reporter: Reporter, *, new_data: bool = False) -> None:
        """From a saved iteration, or from the start, to ``train_iters``.

        Args:
            saved: the iteration, None for the start.
            reporter: is told.
            new_data: where the order is not that of the saved run, it begins here.

        Raises:
            EndedError: a signal ended it before; the step was finished, and saved if there is a folder for it.
        """
        recipe = self._recipe
        done = 0 if saved is None else self._resume(saved, reporter, new_data=new_data)
        self._check_steps(done)
        if self._place.is_main:
            reporter.started(done + 1, recipe.train_iters)
        consumed, workers = (done - self._data_from) * recipe.batch.per_step, recipe.data.num_workers
        # The next step is read and planned while this one computes.
        with (
            open_logs(recipe.log, done=done, say=reporter.message) as log,
            self._order.stream(consumed, num_workers=workers) as stream,
            Ahead(partial(self._plan, stream), first=done + 1, last=recipe.train_iters + 1) as steps,
        ):
            if saved is None and self._is_time_to_evaluate(done):
                self._evaluate(done, log, reporter)
            # Before the first step there is nothing to save, and a signal ends the run at once.
            with EndRequest() as end_request:
                for planned in steps:
                    self._complete(planned, end_request, log, reporter)
        if recipe.compare:
            comparison = self.compare(recipe.train_iters, repeats=1)
            if self._place.is_main:
                reporter.compared(comparison)

    def _complete(self, planned: _PlannedStep, end_request: EndRequest, log: Logs, reporter: Reporter) -> None:
        """Do one step and what is due after it: evaluate, save, end."""
        report = self._step(planned)
        if self._place.is_main:
            log.step(report)
            reporter.step(report)
        ended_by = end_request.agreed(self._place.device)
        if not ended_by and self._is_time_to_evaluate(report.iteration):
            self._evaluate(report.iteration, log, reporter)
            ended_by = end_request.agreed(self._place.device)
        if self._is_time_to_save(report.iteration) or (ended_by and self._recipe.checkpoint.save is not None):
            self._save(report.iteration, reporter)
            ended_by = ended_by or end_request.agreed(self._place.device)
        if ended_by:
            if self._place.is_main:
                reporter.message(self._how_it_ended(ended_by, report.iteration))
            raise EndedError(ended_by)

    def _check_steps(self, done: int) -> None:
        """Check the steps after so many before the first of them; streamed samples are not there to look at."""
        if self._order.is_streamed or not self._objective.looks_at_steps:
            return
        batch = self._recipe.batch.per_step
        with self._order.stream((done - self._data_from) * batch) as stream:
            for iteration in range(done + 1, self._recipe.train_iters + 1):
                self._objective.check_step(iteration, stream.take(batch))

    def _evaluate(self, iteration: int, log: Logs, reporter: Reporter) -> None:
        assert self._held_out is not None
        evaluation = self._held_out.evaluate(self._chunks, iteration, teacher=self._teacher)
        if self._place.is_main:
            log.evaluation(evaluation)
            reporter.evaluated(evaluation)

    def compare(self, iteration: int, *, repeats: int) -> Comparison:
        """Forward and backward of one iteration's batch, folded and unfolded."""
        return compare(self._chunks, self._samples(iteration), self._recipe, self._place, repeats=repeats)

    def calibrate(self, *, repeats: int) -> Calibration:
        """Time micro-batches of the first few steps' samples."""
        samples = self._order.take(0, min(_CALIBRATION_STEPS * self._recipe.batch.per_step, self._order.per_epoch))
        return calibrate(self._chunks, samples, self._recipe, self._place, repeats=repeats)

    def _samples(self, iteration: int) -> list[Sample]:
        batch = self._recipe.batch.per_step
        # Of a finished run that is told of new data, the last step's are not there any more.
        return self._order.take(max(0, iteration - 1 - self._data_from) * batch, batch)

    def _progress(self, iteration: int) -> checkpoint.Progress:
        batch = self._recipe.batch
        return checkpoint.Progress(
            iteration=iteration,
            consumed_samples=self._order.samples_before((iteration - self._data_from) * batch.per_step),
            data_from=self._data_from,
            global_batch_size=batch.global_batch_size,
            groups_per_step=batch.groups_per_step,
            seed=self._recipe.seed,
            order=self._recipe.data.order,
            samples_per_epoch=self._order.samples_per_epoch,
            checksums=self._order.checksums,
        )

    def _resume(self, saved: int, reporter: Reporter, *, new_data: bool) -> int:
        folder = self._recipe.checkpoint.save
        assert folder is not None
        source = checkpoint.iteration_folder(folder, saved)
        if self._place.is_main and (changed := changed_settings(source, self._recipe)):
            # Before it is read: a model that does not fit may be one of them.
            reporter.message(f"changed since {source}: {', '.join(changed)}")
        progress = checkpoint.load(folder, saved, self._chunks, self._optimizer, self._scheduler)
        self._data_from = progress.data_from
        told = f"resumed from {source}"
        other = self._other_data(progress)
        if other is not None and not new_data:
            raise RecipeError(
                f"checkpoint {source} {other}; the data would not continue where it stopped: change it back, or "
                "say --new-data, to begin with the first of the data"
            )
        if new_data and other is None and is_other(progress.checksums, self._order.checksums) is False:
            # A job that is started again with the same words must not begin its data again.
            told += ", which was trained on these data already: they go on where it stopped"
        elif new_data:
            self._data_from = saved
        if self._place.is_main:
            reporter.message(told)
        return saved

    def _other_data(self, progress: checkpoint.Progress) -> str | None:
        """What a checkpoint has otherwise than this run, if the data would not continue where it stopped."""
        for name, now in vars(self._progress(progress.iteration)).items():
            before = getattr(progress, name)
            if name == "checksums":
                if is_other(before, now):
                    return f"is of other samples than data.path={self._recipe.data.path} gives, though of as many"
            elif before != now:
                return f"was written with {name}={before}, this run has {name}={now}"
        return None

    def _save(self, iteration: int, reporter: Reporter) -> None:
        options = self._recipe.checkpoint
        assert options.save is not None
        progress = self._progress(iteration)
        checkpoint.save(options.save, self._chunks, self._optimizer, self._scheduler, progress, recipe=self._recipe)
        if options.keep_last is not None and self._place.is_main:
            remove_older(options.save, iteration, keep=options.keep_last, say=reporter.message)

    def _how_it_ended(self, number: int, iteration: int) -> str:
        folder = self._recipe.checkpoint.save
        ended = f"ended by {signal.Signals(number).name} after step {iteration}"
        if folder is None:
            return f"{ended}; nothing is saved, because checkpoint.save is not set"
        return f"{ended}, which is saved in {checkpoint.iteration_folder(folder, iteration)}; go on with --resume"

    def _is_time_to_save(self, iteration: int) -> bool:
        options = self._recipe.checkpoint
        return options.save is not None and (
            iteration % options.save_interval == 0 or iteration == self._recipe.train_iters
        )

    def _is_time_to_evaluate(self, iteration: int) -> bool:
        return self._held_out is not None and (
            iteration % self._recipe.validation.eval_interval == 0 or iteration == self._recipe.train_iters
        )

    def step(self, iteration: int, samples: list[Sample]) -> StepReport:
        """One optimizer step on samples that are not read from the data, such as rollouts of the weights as they are.

        Args:
            iteration: from 1.
            samples: of all ranks; however many, the schedule of the learning rate advances by one step.
        """
        return self._step(self._plan_samples(iteration, samples))

    def _plan(self, stream: SampleStream, iteration: int) -> _PlannedStep:
        return self._plan_samples(iteration, stream.take(self._recipe.batch.per_step))

    def _plan_samples(self, iteration: int, samples: list[Sample]) -> _PlannedStep:
        started = time.perf_counter()
        folded = plan_folded(samples, self._objective, self._folding, self._place)
        if self._teacher is not None:
            self._teacher.plan(folded.micro_batches)
        return _PlannedStep(iteration=iteration, samples=samples, folded=folded, seconds=time.perf_counter() - started)

    def _step(self, planned: _PlannedStep) -> StepReport:
        started = time.perf_counter()
        samples, folded = planned.samples, planned.folded.micro_batches
        for chunk in self._chunks:
            chunk.zero_grad_buffer()
        self._optimizer.zero_grad()
        if self._teacher is not None:
            folded = self._teacher.teach(folded)
        reported = run_schedule(self._chunks, folded, self._forward_step)
        if not self._objective.is_weighted_sum:
            # Before the optimizer sees its gradient.
            check_finite(reported, planned.folded.sample_index, samples, self._place)
        self._check_gradients(planned)
        lr = self._optimizer.param_groups[0]["lr"]
        succeeded, grad_norm, _ = self._optimizer.step()
        assert succeeded, "only loss scaling skips steps, and there is none"
        self._scheduler.step(increment=self._recipe.batch.per_step)
        loss, physical, metrics = self._totals.of(
            reported,
            physical_tokens=sum(batch.layout.physical_tokens for batch in planned.folded.micro_batches),
            known=planned.folded.metrics,
        )
        return StepReport(
            iteration=planned.iteration,
            loss=loss,
            grad_norm=None if grad_norm is None else float(grad_norm),
            lr=float(lr),
            samples=len(samples),
            logical_tokens=sum(len(sample) for sample in samples),
            physical_tokens=physical,
            plan_seconds=planned.seconds,
            seconds=time.perf_counter() - started,
            metrics=metrics,
        )

    def _check_gradients(self, planned: _PlannedStep) -> None:
        """Let all ranks refuse a step with a gradient that is not finite, before the optimizer sees it.

        Raises:
            DivergedError: some rank's is not.
        """
        grads = [weight.main_grad for chunk in self._chunks for weight in chunk.parameters() if weight.requires_grad]
        largest = torch.nn.utils.get_total_norm(grads, norm_type=math.inf)
        bad = (~torch.isfinite(largest)).to(device=self._place.device, dtype=torch.int)
        dist.all_reduce(bad, op=dist.ReduceOp.MAX)
        if int(bad):
            raise DivergedError(
                f"step {planned.iteration}: a gradient is NaN or infinite; the weights have diverged, or a loss is "
                "larger than the model's dtype can hold. Nothing of this step was applied or saved; lower optimizer.lr "
                "or set optimizer.clip_grad"
            )
