"""The training loop: Megatron's DDP, optimizer, schedule and checkpoints around folded micro-batches."""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Protocol

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from mcore_prefix_tree.data.fingerprint import CHECKSUMS, are_new_data, difference
from mcore_prefix_tree.mcore.checkpoints import checkpoint
from mcore_prefix_tree.mcore.checkpoints.retention import remove_older
from mcore_prefix_tree.mcore.checkpoints.saved_recipe import changed_settings
from mcore_prefix_tree.mcore.engine.comparison import ROUNDS, Comparison, compare
from mcore_prefix_tree.mcore.engine.evaluation import Evaluation, HeldOut, Totals, check_finite
from mcore_prefix_tree.mcore.engine.layer_graphs import layer_graphs
from mcore_prefix_tree.mcore.engine.pipeline import run_schedule
from mcore_prefix_tree.mcore.engine.step_planner import FoldedStep, StepPlanner, fold_step
from mcore_prefix_tree.mcore.engine.verification import VerifyReport
from mcore_prefix_tree.mcore.loop.logs import Logs, open_logs
from mcore_prefix_tree.mcore.loop.resolve_recipe import Resolved
from mcore_prefix_tree.mcore.loop.session import EndedError, EndRequest
from mcore_prefix_tree.mcore.ranks import is_main_rank
from mcore_prefix_tree.mcore.seam.multi_token import take_logged_losses
from mcore_prefix_tree.sample import Sample
from mcore_prefix_tree.settings import RecipeError


class DivergedError(ValueError):
    """A gradient is not finite. The message names the step."""


@dataclass(frozen=True, kw_only=True)
class StepReport:
    """Report of one step."""

    iteration: int  # number of the step, from 1
    # Loss of the recipe's objective; for plain supervised training the mean negative log-likelihood of the step's
    # supervised tokens, in nats.
    loss: float
    grad_norm: float | None  # norm of the gradient before clipping; None if Megatron does not compute it
    lr: float
    samples: int
    logical_tokens: int
    physical_tokens: int  # number of tokens computed, over all ranks, without padding
    plan_seconds: float  # seconds that the host took for planning and folding, while the step before computed
    seconds: float
    carried_tokens: int = 0  # number of tokens that ran forward once more, for chunks that read their keys and values
    carried_bytes: int = 0  # most memory that their keys, values, states and gradients take on a rank, by the plan
    metrics: Mapping[str, float] = field(default_factory=dict)  # means that the objective reports, over the entire step

    @property
    def fold_ratio(self) -> float:
        """Ratio of logical to physical tokens."""
        return self.logical_tokens / self.physical_tokens


class Reporter(Protocol):
    """Listener to a training run; called on the main rank only."""

    def message(self, text: str) -> None:
        """Show a line of text."""

    def reading(self, done: int, total: int) -> None:
        """Show how many bytes of the data have been read, before training."""

    def comparing(self, what: str, done: int, total: int) -> None:
        """Show the progress of verifying the first batch, or of comparing the speed of the last."""

    def verified(self, report: VerifyReport) -> None:
        """Report the comparison of the first batch."""

    def started(self, first: int, last: int) -> None:
        """Report that steps ``first`` to ``last`` follow."""

    def step(self, report: StepReport) -> None:
        """Report a step that is done."""

    def evaluated(self, evaluation: Evaluation) -> None:
        """Report an evaluation of the held-out samples."""

    def compared(self, comparison: Comparison) -> None:
        """Report the comparison of the last batch, folded and unfolded."""

    def finished(self, checkpoint: str | None) -> None:
        """Report that all steps are done, and the folder of the last one's checkpoint, if there is one."""


@dataclass(frozen=True, kw_only=True)
class _StepSize:
    """Number of samples in a step, or of its groups."""

    samples: int


class Trainer:
    """One process's part of a training run. ``chunks`` are bare; they are wrapped in Megatron's DDP."""

    def __init__(self, run: Resolved, chunks: list[torch.nn.Module], *, held_out: HeldOut | None = None) -> None:
        self._recipe, self._job, self._order, self._held_out = run.recipe, run.job, run.order, held_out
        self._data_from = 0  # steps before the first of the order
        self._totals = Totals(run.job, trains=True)
        recipe, config, options = run.recipe, run.job.config, run.recipe.optimizer
        ddp_config = DistributedDataParallelConfig(
            grad_reduce_in_fp32=config.bf16, use_distributed_optimizer=options.use_distributed_optimizer
        )
        self._chunks = [DistributedDataParallel(config, ddp_config, chunk) for chunk in chunks]
        self._optimizer = get_megatron_optimizer(
            OptimizerConfig(
                optimizer="adam",
                bf16=config.bf16,
                params_dtype=config.params_dtype,
                **{name: value for name, value in vars(options).items() if not name.startswith("lr_")},
            ),
            self._chunks,
        )
        config.finalize_model_grads_func = finalize_model_grads
        config.grad_scale_func = self._optimizer.scale_loss
        batch = recipe.batch.per_step
        self._size = _StepSize(samples=batch)
        total, warmup = recipe.train_iters * batch, options.lr_warmup_fraction
        # As in Megatron-LM the schedule counts samples; or groups, if steps do. The current recipe overrides
        # the schedule of a checkpoint.
        self._scheduler = OptimizerParamScheduler(
            self._optimizer,
            init_lr=0.0,
            max_lr=options.lr,
            min_lr=options.min_lr,
            lr_warmup_steps=options.lr_warmup_steps * batch if warmup is None else warmup * total,
            lr_decay_steps=total,
            lr_decay_style=options.lr_decay_style,
            start_wd=options.weight_decay,
            end_wd=options.weight_decay,
            wd_incr_steps=total,
            wd_incr_style="constant",
            use_checkpoint_opt_param_scheduler=False,
            override_opt_param_scheduler=True,
        )

    def train(self, saved: int | None, reporter: Reporter, *, new_data: bool = False) -> None:
        """Train from a saved iteration, or from the start, to ``train_iters``; ``reporter`` is called after each step.

        With ``new_data``, an order that is not that of the saved run begins here. Raises EndedError if a signal ended
        training early; the step was finished, and saved if there is a folder for it.
        """
        recipe = self._recipe
        done = 0 if saved is None else self._resume(saved, reporter, new_data=new_data)
        self._check_steps(done)
        if is_main_rank():
            reporter.started(done + 1, recipe.train_iters)
        with (
            self._graphs(),
            open_logs(
                recipe.log, done=done, say=reporter.message, folder=recipe.checkpoint.save, settings=asdict(recipe)
            ) as log,
            StepPlanner[_StepSize](
                self._order,
                lambda samples, _: fold_step(samples, self._job),
                num_workers=recipe.data.num_workers,
                consumed=self._consumed(done + 1),
            ) as planner,
        ):
            if saved is None and self._is_time_to_evaluate(done):
                self._evaluate(done, log, reporter)
            # Before the first step there is nothing to save, and a signal ends the run at once.
            with EndRequest() as end_request:
                for iteration in range(done + 1, recipe.train_iters + 1):
                    step = planner.step(self._consumed(iteration), self._size, is_last=iteration == recipe.train_iters)
                    self._complete(iteration, step, end_request, log, reporter)
        if recipe.compare:
            progress = partial(reporter.comparing, "compare") if is_main_rank() else None
            comparison = self.compare(recipe.train_iters, progress=progress)
            if is_main_rank():
                reporter.compared(comparison)

    def _complete(
        self, iteration: int, folded: FoldedStep, end_request: EndRequest, log: Logs, reporter: Reporter
    ) -> None:
        """Do one step and the work due after it: evaluate, save, end."""
        report = self._step(iteration, folded)
        if is_main_rank():
            log.step(report)
            reporter.step(report)
        ended_by = end_request.agreed(self._job.folding.device)
        if not ended_by and self._is_time_to_evaluate(report.iteration):
            self._evaluate(report.iteration, log, reporter)
            ended_by = end_request.agreed(self._job.folding.device)
        options = self._recipe.checkpoint
        if options.save is not None and (ended_by or self._is_due(report.iteration, options.save_interval)):
            self._save(report.iteration, reporter)
            ended_by = ended_by or end_request.agreed(self._job.folding.device)
        if ended_by:
            if is_main_rank():
                reporter.message(self._how_it_ended(ended_by, report.iteration))
            raise EndedError(ended_by)

    def _check_steps(self, done: int) -> None:
        """Check all steps after the first ``done`` ones before they run; streamed samples are not there to check."""
        check = self._job.objective.step_check
        if self._order.is_streamed or check is None:
            return
        with self._order.stream(self._consumed(done + 1)) as stream:
            for iteration in range(done + 1, self._recipe.train_iters + 1):
                check(iteration, stream.take(self._size.samples))

    def _evaluate(self, iteration: int, log: Logs, reporter: Reporter) -> None:
        assert self._held_out is not None
        evaluation = self._held_out.evaluate(self._chunks, iteration)
        if is_main_rank():
            log.evaluation(evaluation)
            reporter.evaluated(evaluation)

    def compare(
        self, iteration: int, *, repeats: int = ROUNDS, progress: Callable[[int, int], None] | None = None
    ) -> Comparison:
        """Run forward and backward of one iteration's batch, folded and unfolded."""
        # Of a finished run with new data, the last step's are not there any more.
        samples = self._order.take(max(0, self._consumed(iteration)), self._size.samples)
        with self._graphs():
            return compare(self._chunks, samples, self._job, repeats=repeats, progress=progress)

    def _graphs(self) -> AbstractContextManager[None]:
        return layer_graphs(self._chunks, self._optimizer, self._job.folding.padding.buckets)

    def _consumed(self, iteration: int) -> int:
        """Return the number of samples, or of groups, of the data before a step."""
        return (iteration - 1 - self._data_from) * self._recipe.batch.per_step

    def _progress(self, iteration: int) -> checkpoint.Progress:
        batch = self._recipe.batch
        return checkpoint.Progress(
            iteration=iteration,
            consumed_samples=self._order.samples_before(self._consumed(iteration + 1)),
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
        changed = ", ".join(changed_settings(source, asdict(self._recipe)))
        if is_main_rank() and changed:
            reporter.message(f"changed since {source}: {changed}")
        try:
            progress = checkpoint.load(
                folder, saved, self._chunks, self._optimizer, self._scheduler, model=self._recipe.model
            )
        except checkpoint.UnfitCheckpointError as error:
            raise RecipeError(f"{error}{changed and f'; changed since it was saved: {changed}'}") from error
        self._data_from = progress.data_from
        told = f"resumed from {source}"
        before, now = vars(progress), vars(self._progress(progress.iteration))
        other = difference(before, now)
        if other is not None and not new_data:
            how = f"was written with {other}={before[other]}, this run has {other}={now[other]}"
            if other == CHECKSUMS:
                given = f"data.path={self._recipe.data.path}"
                how = f"holds as many samples as {given} gives, but not the same, or not in the same groups"
            raise RecipeError(
                f"checkpoint {source} {how}; the data would not continue where it stopped: change it back, or say "
                "--new-data, to begin with the first of the data"
            )
        if new_data and not are_new_data(before, now):
            # A job that is started again with the same words must not begin its data again.
            told += ", which was trained on these data already: they continue where it stopped"
        elif new_data:
            self._data_from = saved
        if is_main_rank():
            reporter.message(told)
        return saved

    def _save(self, iteration: int, reporter: Reporter) -> None:
        options = self._recipe.checkpoint
        assert options.save is not None
        progress = self._progress(iteration)
        checkpoint.save(
            options.save, self._chunks, self._optimizer, self._scheduler, progress, settings=asdict(self._recipe)
        )
        if options.keep_last is not None and is_main_rank():
            remove_older(options.save, iteration, keep=options.keep_last, say=reporter.message)

    def _how_it_ended(self, number: int, iteration: int) -> str:
        folder = self._recipe.checkpoint.save
        ended = f"ended by {signal.Signals(number).name} after step {iteration}"
        if folder is None:
            return f"{ended}; nothing is saved, because checkpoint.save is not set"
        return f"{ended}, which is saved in {checkpoint.iteration_folder(folder, iteration)}; continue with --resume"

    def _is_time_to_evaluate(self, iteration: int) -> bool:
        return self._held_out is not None and self._is_due(iteration, self._recipe.validation.eval_interval)

    def _is_due(self, iteration: int, interval: int) -> bool:
        return iteration % interval == 0 or iteration == self._recipe.train_iters

    def step(self, iteration: int, samples: list[Sample]) -> StepReport:
        """Run one optimizer step on samples from another source, for example rollouts of the current weights.

        The learning-rate schedule advances by one step, however many samples there are; ``iteration`` counts from 1.
        """
        return self._step(iteration, fold_step(samples, self._job))

    def _step(self, iteration: int, folded: FoldedStep) -> StepReport:
        started = time.perf_counter()
        for chunk in self._chunks:
            chunk.zero_grad_buffer()
        self._optimizer.zero_grad()
        taught = self._job.hook.before_step(folded.micro_batches, self._job.forward(self._chunks))
        take_logged_losses()  # of what else ran the model, for example a verification
        reported = run_schedule(self._chunks, taught, self._job.forward_step)
        # Before the optimizer sees its gradient.
        check_finite(reported, folded.sample_index, folded.samples, self._job)
        self._check_gradients(iteration)
        lr = self._optimizer.param_groups[0]["lr"]
        succeeded, grad_norm, _ = self._optimizer.step()
        assert succeeded, "only loss scaling skips steps, and nothing is scaled"
        self._scheduler.step(increment=self._recipe.batch.per_step)
        loss, metrics = self._totals.of(reported, folded.metrics)
        return StepReport(
            iteration=iteration,
            loss=loss,
            grad_norm=None if grad_norm is None else float(grad_norm),
            lr=float(lr),
            samples=len(folded.samples),
            logical_tokens=folded.logical_tokens,
            physical_tokens=folded.physical_tokens,
            carried_tokens=folded.carried_tokens,
            carried_bytes=folded.carried_bytes,
            plan_seconds=folded.seconds,
            seconds=time.perf_counter() - started,
            metrics=metrics,
        )

    def _check_gradients(self, iteration: int) -> None:
        """Let all ranks reject a step with a non-finite gradient (DivergedError), before the optimizer sees it."""
        grads = [weight.main_grad for chunk in self._chunks for weight in chunk.parameters() if weight.requires_grad]
        largest = torch.nn.utils.get_total_norm(grads, norm_type=math.inf)
        bad = (~torch.isfinite(largest)).to(device=self._job.folding.device, dtype=torch.int)
        dist.all_reduce(bad, op=dist.ReduceOp.MAX)
        if int(bad):
            raise DivergedError(
                f"step {iteration}: a gradient is NaN or infinite; the weights have diverged, or a loss is "
                "larger than the model's dtype can hold. Nothing of this step was applied or saved; lower optimizer.lr "
                "or set optimizer.clip_grad"
            )
