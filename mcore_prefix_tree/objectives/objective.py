"""The protocols of objectives: a loss, and its requirements on the step around it."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Protocol

from pydantic import AfterValidator, ConfigDict
from pydantic_core import PydanticCustomError

from mcore_prefix_tree.layout import FlatLayout
from mcore_prefix_tree.objectives.metrics import LossOutput
from mcore_prefix_tree.objectives.scored import By, counted_as_one
from mcore_prefix_tree.objectives.scored_rows import LossRows, Targets, Terms
from mcore_prefix_tree.sample import Sample
from mcore_prefix_tree.signals import GroupedBy
from mcore_prefix_tree.utils.lazy_torch import torch

# Of every objective: a misspelt option is an error, and so is an option that is not a finite number.
STRICT = ConfigDict(extra="forbid", allow_inf_nan=False)


def known_name(known: Iterable[str]) -> AfterValidator:
    """Accept only known names, and reject others in pydantic's words for a ``Literal``."""
    names = tuple(known)
    *but_last, last = map(repr, names)

    def check(name: str) -> str:
        if name not in names:
            expected = {"expected": f"{', '.join(but_last)} or {last}"}
            raise PydanticCustomError("literal_error", "Input should be {expected}", expected)
        return name

    return AfterValidator(check)


def refuse_unused(objective: Any, settings: Iterable[tuple[str, bool, str]]) -> None:
    """Raise ValueError for the first setting that is set without effect.

    ``settings`` are the name of each, whether it has an effect with the others, and which of those would give it one.
    """
    fields = type(objective).__pydantic_fields__
    for name, has_effect, without in settings:
        value = getattr(objective, name)
        if not has_effect and value != fields[name].default:
            raise ValueError(f"{name}={value} has no effect without {without}; remove it")


# Output of the last pipeline stage that a loss is computed from: a weighted sum of log-probabilities, or each token's;
# values of a scalar head; divergences from a teacher's distributions; losses of chunks of text.
Output = Literal["weighted_sum", "logprobs", "values", "divergences", "chunks"]


@dataclass(frozen=True, kw_only=True)
class SecondModels:
    """Teachers that an objective learns from."""

    asked: bool  # whether each step runs their models; if not, the samples bring their rows
    same_vocabulary: bool  # whether the teacher has the student's vocabulary; if not, each has a separate tokenizer


class Objective(Protocol):
    """Loss that a recipe's samples are trained with. Subclasses change the defaults."""

    has_scalar_head: ClassVar[bool] = False  # whether the model ends in a scalar head, whose values the loss reads
    reports_entropy: ClassVar[bool] = False  # whether to report the entropy, also if the loss does not read it
    starts_from_policy: ClassVar[bool] = False  # whether training starts from a policy that somebody trained before
    scored_as: ClassVar[str] = "old_logprobs"  # field of the samples that score writes with a model of this objective
    # For fields that samples may lack, by name, a way out other than a command that writes them.
    remedies: ClassVar[Mapping[str, str]] = {}

    @property
    def output(self) -> Output:
        """Return the output of the last pipeline stage."""
        return "values" if self.has_scalar_head else "logprobs"

    @property
    def second_models(self) -> SecondModels | None:
        """Return which second models the loss reads, if any."""
        return None

    @property
    def terms(self) -> Terms:
        """Return the group of entries that each term of the loss reads."""
        return "row"

    @property
    def sums_edges(self) -> bool:
        """Return whether the loss is a sum over scored tokens, or a few in a row, that read nothing else of a sample.

        Parts of a sample can then be in different micro-batches.
        """
        return False

    @property
    def reads_scores(self) -> bool:
        """Return whether all that the loss reads of the model are numbers of tokens, which a pass before can give.

        Parts of a sample can then be in different micro-batches, although the loss reads whole samples.
        """
        return False

    @property
    def grouped_by(self) -> GroupedBy | None:
        """Return which samples have to be in one step."""
        return None

    @property
    def is_weighted_sum(self) -> bool:
        """Return whether the loss is ``sft_loss``, which reads no sample by itself and needs no targets."""
        return self.output == "weighted_sum"

    @property
    def renderings(self) -> Sequence[Any]:
        """Return the tokenizers, other than the model's own, in whose chat formats conversations are read."""
        return ()

    @property
    def step_check(self) -> Callable[[int, Sequence[Sample]], None] | None:
        """Return the check, by step number, that only all samples of a step allow; it raises SampleError."""
        return None

    def check(self, samples: Sequence[Sample]) -> None:
        """Check all groups, rollouts or pairs before the first step; raises SampleError as :meth:`targets` does."""
        self.targets(samples)

    def together(self, samples: Sequence[Sample]) -> list[Hashable] | None:
        """Return the argument of ``plan_step(together=...)``: a pair's loss needs both sides in one micro-batch."""
        return [sample.signals.pair for sample in samples] if self.grouped_by == "pair" else None

    def targets(self, samples: Sequence[Sample]) -> Targets:
        """Compute the losses' inputs other than the model's output, from all samples of a step, on the host.

        Raises:
            SampleError: a sample lacks a field that the loss reads, or contradicts the others of its group.
        """

    def rows(
        self, targets: Targets, layout: FlatLayout, indices: Sequence[int], *, device: torch.device | str = "cpu"
    ) -> LossRows:
        """Return the part of one micro-batch; see :meth:`Targets.rows`."""
        return targets.rows(layout, indices, device=device)


class TokenObjective(Objective, Protocol):
    """Objective whose loss reads a number of each token: a log-probability, or a value."""

    @property
    def reads_scores(self) -> bool:
        return self.output in ("logprobs", "values")

    def loss(self, scores: torch.Tensor, entropy: torch.Tensor | None, rows: Any) -> LossOutput:
        """Return the weighted sum over a micro-batch.

        Args:
            scores: ``[P]`` log-probabilities or values; ``[E]`` log-probabilities if ``rows`` has separate edges.
            entropy: ``[P]``, entropy of the distribution that each token predicts; None if it is not computed.
            rows: result of :meth:`rows`.
        """


class SummedObjective(TokenObjective, Protocol):
    """Objective whose loss is a sum over tokens, each with the weight that ``normalise`` gives it."""

    normalise: By

    @property
    def sums_edges(self) -> bool:
        return True

    @property
    def grouped_by(self) -> GroupedBy | None:
        return counted_as_one(self.normalise)
