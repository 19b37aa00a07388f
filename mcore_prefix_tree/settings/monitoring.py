"""The keys of a recipe that watch a run: its logs, its held-out samples, and its comparison with unfolded steps."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator
from pydantic.dataclasses import dataclass
from pydantic_core import PydanticCustomError

from mcore_prefix_tree.settings.section import STRICT, DataPath, LocalPath, PositiveFloat, PositiveInt, Section


def _json_lines(name: str) -> str:
    if not name.endswith(".jsonl"):
        raise PydanticCustomError("not_json_lines", "give a name that ends in .jsonl, the format of the file")
    return name


@dataclass(frozen=True, kw_only=True, config=STRICT)
class LogConfig(Section):
    """Files that ``train`` logs every step to, for programs; the main rank writes them, as soon as a step is done.

    A resumed run continues in the same places. Files lose the steps after its checkpoint, W&B receives them again. A
    run that starts with the first step empties its files. ``tensorboard`` and ``wandb`` are extras.

    Attributes:
        metrics: file that ends in ``.jsonl``, made with its folder: one JSON object per step, with ``iteration``,
            ``loss``, ``grad_norm``, ``lr``, ``samples``, ``logical_tokens``, ``physical_tokens``, both per second,
            ``fold_ratio``, ``seconds``, ``plan_seconds``, ``carried_tokens`` that ran forward once more,
            ``carried_bytes`` that are held of their keys, values, states and gradients, and in ``metrics`` those of the
            objective; null is no number. Each evaluation of ``validation`` is a separate object, with ``iteration``,
            ``validation_loss``, ``validation_metrics`` and ``validation_seconds``. None writes none.
        tensorboard: folder for TensorBoard: the same under ``loss``, ``grad_norm``, ``lr``, ``fold_ratio``,
            ``tokens_per_second/...``, ``seconds/...``, ``objective/...`` and ``validation/...``. None writes none.
        wandb: project of Weights & Biases, which receives the same under the same names, and the recipe. The id of its
            run is kept in ``checkpoint.save``; ``WANDB_MODE=offline`` keeps the numbers in files. None sends none.
    """

    metrics: Annotated[str, AfterValidator(_json_lines), LocalPath] | None = None
    tensorboard: Annotated[str | None, LocalPath] = None
    wandb: str | None = None


def _no_standard_input(path: str | list[str] | None) -> str | list[str] | None:
    if "-" in ([path] if isinstance(path, str) else path or []):
        raise PydanticCustomError("standard_input", "standard input is for data.path; name a file")
    return path


@dataclass(frozen=True, kw_only=True, config=STRICT)
class ValidationConfig(Section):
    """Held-out samples: the objective's loss on all of them is reported, and the model does not learn from them.

    They are read as ``data`` sets, except ``data.streaming``: memory holds them. The loss has one normaliser for all of
    them, so that it does not depend on how many are computed together.

    Attributes:
        path: held-out files, given as in ``data.path``, without standard input; None validates nothing.
        eval_interval: number of steps between two evaluations. There is one before the first step and one after the
            last, too. A signal that ends the run skips the evaluation of its step.
    """

    path: Annotated[str | list[str] | None, AfterValidator(_no_standard_input), DataPath] = None
    eval_interval: PositiveInt = 100


@dataclass(frozen=True, kw_only=True, config=STRICT)
class VerifyConfig(Section):
    """Folded against unfolded on the first batch.

    Attributes:
        enabled: whether ``train`` compares them first. The loss is the supervised one for every objective, or for a
            critic or reward model half the mean square of its values.
        tolerance: largest relative error of folded against unfolded that passes. None measures both against a wider run
            of the same weights (float32 for bfloat16, float64 for float32) and allows 3 times the unfolded run's own
            error, in float32 at least 1e-6. For float64 it allows 3 times the error of a float32 run, scaled to the
            digits of float64, and at least 1e-12 (1e-5 for models with parts that upstream computes in float32, for
            example the MoE router).
    """

    enabled: bool = True
    tolerance: PositiveFloat | None = None
