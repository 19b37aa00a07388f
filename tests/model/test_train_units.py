"""Units that a step never splits: a sample's numbers do not depend on its neighbours, for example in shuffled data."""

from __future__ import annotations

import functools
import itertools
import json
from collections.abc import Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

import numpy as np
import pytest
from harness.commands import run_command, write_rows
from harness.marks import mostly_in_ci, quick
from harness.train_jobs import FLOAT64, VOCAB, Notes, train, world_of_one, write_job
from rollouts import Rollout, mask, rollouts

from mcore_prefix_tree.mcore.loop.resolve_recipe import Data, read_data
from mcore_prefix_tree.objectives import KTO, OBJECTIVES, PolicyGradient, Targets, make_objective
from mcore_prefix_tree.objectives.advantages import ADVANTAGES
from mcore_prefix_tree.settings import ObjectiveConfig, Recipe, load_recipe
from mcore_prefix_tree.settings.bind_objective import make_bound_objective

# Turns of each rollout of each group: 6 groups, 16 rollouts, 28 turns.
SHAPE = ((1, 3, 2), (2, 2), (1, 4, 1, 2), (3, 1), (1,), (2, 1, 1, 1))
UNITS = ("batch.global_batch_size=null", "batch.groups_per_step=2")
SAMPLES = ("batch.global_batch_size=4",)


def signals_of(rollout: Rollout, seed: int) -> dict[str, list[float]]:
    """Everything per token that an objective may read."""
    rng = np.random.default_rng(seed)
    n = len(rollout.tokens)
    logprobs = {f"{name}_logprobs": (-3 + 0.5 * rng.standard_normal(n)).tolist() for name in ("old", "ref", "rollout")}
    return logprobs | {name: rng.standard_normal(n).tolist() for name in ("values", "returns", "advantage")}


def lines(*, by_turn: bool) -> list[dict[str, Any]]:
    """One line per turn, or per rollout with every turn scored; in every other group each turn has a reward."""
    rows: list[dict[str, Any]] = []
    made = (rollouts(SHAPE, 3, vocab=VOCAB, per_turn=per_turn) for per_turn in (False, True))
    for number, both in enumerate(zip(*made, strict=True)):
        rollout = both[both[0].group % 2]
        signals = signals_of(rollout, number)
        ids = {"reward": rollout.reward, "group": f"prompt {rollout.group}", "label": number % 3 == 0}
        if not by_turn:
            whole = mask(len(rollout.tokens), rollout.turns)
            rows.append({"tokens": rollout.tokens, "loss_mask": whole, **signals, **ids, "mismatched": number % 4 == 0})
            continue
        for turn, (start, end) in enumerate(rollout.turns):
            own = {name: values[:end] for name, values in signals.items()}
            rows.append({"tokens": rollout.tokens[:end], "loss_mask": mask(end, [(start, end)]), **own, **ids})
            rows[-1] |= {"mismatched": turn == 0, "rollout": rollout.number, "turn": turn}
            if len(rollout.turns) == 1 and number % 2:
                del rows[-1]["rollout"], rows[-1]["turn"]  # one by itself
    for number, row in enumerate(rows):
        row["teacher"] = {"token_ids": [[1, 2]] * len(row["tokens"]), "logprobs": [[-1.0, -2.0]] * len(row["tokens"])}
        row |= {"pair": number // 2, "chosen": bool(number % 2)}
    return rows


def values_of(hint: Any) -> list[Any]:
    """Every value of a setting of few values."""
    if hint is bool:
        return [False, True]
    if get_origin(hint) is Literal:
        return list(get_args(hint))
    return [value for part in get_args(hint) for value in values_of(part)]


def settings_of(name: str) -> Iterator[dict[str, Any]]:
    """Every value of every setting, and any two of them together, a divergence among them."""
    kind, _ = OBJECTIVES[name]
    hints = get_type_hints(kind)
    choices = {field.name: values_of(hints[field.name]) for field in fields(kind)}
    if kind is PolicyGradient:
        choices |= {"advantage": list(ADVANTAGES), "alone": ["zero"]}  # there is a group of one rollout
    single = [{option: value} for option, values in choices.items() for value in values]
    pairs = [one | other for one, other in itertools.combinations(single, 2)] if name in FIRST else []
    divergence = {"kl_coef": 0.1} if "kl_coef" in choices else {}
    alone = {"alone": "zero"}
    made = set()
    for bases in ((alone, {}), (divergence | alone, divergence, alone, {})):
        for options in ({}, *single, *pairs) if divergence in bases else ({}, *single):
            for one in (base | options for base in bases):
                try:
                    objective = make_objective(name, one)
                except ValueError:
                    continue  # the settings contradict each other
                if objective not in made:
                    made.add(objective)
                    yield one
                break


# The objective of each class that is tried with any two settings; presets are tried with one more.
FIRST = {kind: name for name, (kind, _) in reversed(OBJECTIVES.items())}.values()


@functools.cache
def loaded(job: Path, *overrides: str) -> Recipe:
    return load_recipe(job, overrides)


def read(job: Path, place: Any, section: ObjectiveConfig, *overrides: str) -> tuple[Data, int]:
    """The data as a run reads them, in steps of complete units if the objective has any, and the size of a step."""
    for size in (UNITS, SAMPLES):
        recipe = replace(loaded(job, *size, *overrides), objective=section)
        objective = make_bound_objective(recipe)
        if recipe.batch.groups_per_step is None or objective.grouped_by is not None:
            return read_data(replace(place, recipe=recipe), objective, checked=True), recipe.batch.per_step
    raise AssertionError


def told(targets: Targets) -> dict[str, dict[str, np.ndarray]]:
    """Values that a step's losses read of each sample, by source and name; full columns for the two of a pair."""
    scored = targets.scored
    per_token = {"weight": targets.weight, **targets.columns}
    found = {}
    for index, sample in enumerate(scored.samples):
        own = slice(scored.cu_lens[index], scored.cu_lens[index + 1])
        found[sample.source] = {name: np.asarray(values[own]) for name, values in per_token.items()}
        found[sample.source] |= {name: np.atleast_1d(values[index]) for name, values in targets.sample_columns.items()}
        found[sample.source]["count"] = targets.count[index : index + 1]
        pair = [scored.samples[other].source for other in targets.pairs[(targets.pairs == index).any(1)].ravel()]
        found[sample.source]["pair"] = np.array(pair)
    return found


def is_of_the_step(objective: Any, name: str) -> Literal["scaled", "moved", "free"] | None:
    """How the documented statistics of a full step may change a column: by a factor, by a constant too, or freely."""
    if isinstance(objective, PolicyGradient) and name == "advantage":
        if objective.whiten:
            return "moved"
        return "scaled" if ADVANTAGES[objective.advantage].deviation == "step" else None
    return "free" if isinstance(objective, KTO) and name == "reference_point" else None


def same(step: np.ndarray, whole: np.ndarray, change: str | None) -> bool:
    """Whether one column of a step is that of the full batch, but for a change that is the same for all of it."""
    if change is None or whole.dtype.kind == "U":
        return bool(np.array_equal(step, whole) or np.allclose(step, whole, rtol=1e-12, atol=1e-14))
    if change == "free":
        return True
    known = np.stack([whole, np.ones_like(whole) * (change == "moved")], axis=1)
    fitted, *_ = np.linalg.lstsq(known, step, rcond=None)
    return fitted[0] >= 0 and np.allclose(known @ fitted, step, atol=1e-9)


# xtoken reads two tokenizers: its own tests cut its steps in every way.
@pytest.mark.parametrize(
    "name", mostly_in_ci("sft", "grpo", "dpo", of=[name for name in OBJECTIVES if name != "xtoken"])
)
def test_sample_trains_equally_with_any_neighbours(tmp_path: Path, name: str) -> None:
    """All settings, over every step of a shuffled epoch as the recipe's reader deals them: against one step of all."""
    turns, wholes = (write_rows(tmp_path / f"{by_turn}.jsonl", lines(by_turn=by_turn)) for by_turn in (True, False))
    job = write_job(tmp_path)
    with world_of_one(load_recipe(job)) as place:
        for options in settings_of(name):
            objective: Any = make_objective(name, options)
            reads_whole_rollouts = "gae" in (getattr(objective, "advantage", None), getattr(objective, "returns", None))
            teacher = str(job) if getattr(objective, "teacher", None) == "full" else None
            section = ObjectiveConfig(name=name, options=options, teacher_recipe=teacher)
            data, per_step = read(job, place, section, f"data.path={wholes if reads_whole_rollouts else turns}")
            of_all = told(objective.targets([sample for group in data.order.groups for sample in group]))
            for step in range(data.order.per_epoch // per_step):
                of_step = told(objective.targets(data.order.take(step * per_step, per_step)))
                for column in next(iter(of_step.values())):
                    one, other = (
                        np.concatenate([known[source][column] for source in of_step]) for known in (of_step, of_all)
                    )
                    assert same(one, other, is_of_the_step(objective, column)), (options, column, list(of_step))


# Options of each objective for one line per rollout, and the units per step.
WHOLE: dict[str, tuple[dict[str, Any], int]] = {
    "sft": ({}, 4),
    "reinforce": ({"kl_coef": 0.1, "kl_in": "reward"}, 4),
    "grpo": ({"advantage": "group_mean_batch_std", "alone": "zero"}, 3),
    "critic": ({"returns": "given"}, 4),
}


@pytest.mark.parametrize("name", quick("sft", of=WHOLE))
def test_line_per_turn_trains_like_line_per_rollout(tmp_path: Path, name: str) -> None:
    """Six shuffled steps and held-out data; of streamed files too, resumed in the middle of an epoch."""
    options, units = WHOLE[name]
    job = write_job(tmp_path)

    def run(*more: str, by_turn: bool, **how: Any) -> Notes:
        by = {"normalise": "rollout" if by_turn else "sample"}
        path = write_rows(tmp_path / f"{by_turn}.jsonl", lines(by_turn=by_turn))
        counted = "groups_per_step" if by_turn or name == "grpo" else "global_batch_size"  # a line is a rollout
        size = ("batch.global_batch_size=null", f"batch.{counted}={units}", "batch.max_tokens=80")
        objective = (f"objective.name={name}", f"objective.options={json.dumps(options | by)}")
        data = (f"data.path={path}", f"validation.path={path}")
        return train(job, *FLOAT64, *objective, *size, *data, *more, **how)

    def told(notes: Notes) -> list[tuple[float, float]]:
        held_out = [(evaluation.loss, 0.0) for evaluation in notes.evaluations if evaluation.iteration == 6]
        return [*((report.loss, report.grad_norm) for report in notes.reports), *held_out]

    whole = np.array(told(run(by_turn=False)))
    streamed = ("data.streaming=true", f"checkpoint.save={tmp_path / 'run'}", "checkpoint.save_interval=1")
    began = told(run(*streamed, by_turn=True, stop_after=4))[:3]
    for found in (told(run(by_turn=True)), began + told(run(*streamed, by_turn=True, resume=True))):
        np.testing.assert_allclose(np.array(found)[:, 0], whole[:, 0], rtol=1e-9, atol=1e-9)
        np.testing.assert_allclose(np.array(found)[:, 1], whole[:, 1], rtol=1e-6)  # Megatron's are in fp32


@pytest.mark.parametrize("per_turn", [False, True], ids=["a reward a rollout", "a reward a turn"])
@pytest.mark.parametrize(
    ("options", "differ"),
    [
        ({"advantage": "group_mean_std", "whiten": False}, True),
        ({"advantage": "group_mean_std", "whiten": False}, False),
        ({"advantage": "group_mean_batch_std", "whiten": False}, True),
        ({"advantage": "group_mean_batch_std", "whiten": False}, False),
        ({"advantage": "leave_one_out", "whiten": True}, False),
        ({"advantage": "reward", "whiten": True}, False),
    ],
)
def test_equal_rewards_give_exactly_0_without_eps(
    tmp_path: Path, options: dict[str, Any], differ: bool, per_turn: bool
) -> None:
    """0.1 thrice has a mean and a deviation from rounding; nothing of a group reaches those that follow."""
    if per_turn and options["advantage"] == "reward":
        return  # the remaining return differs from turn to turn
    rewards = [[0.1] * 3, [0.1, 0.7, 0.1] if differ else [0.1] * 3, [0.1] * 3]
    content = [
        {"tokens": [1, 2, 3, 4, number], "loss_mask": [0, 1, 0, 1, 1], "group": group, "reward": reward}
        for group, of_group in enumerate(rewards)
        for number, reward in enumerate(of_group)
    ]
    if per_turn:
        content = [row | {"reward": [0.1, row["reward"]]} for row in content]
    job = write_job(tmp_path, content)
    given = {"advantage_eps": 0, "on_policy": True, **options}
    with world_of_one(load_recipe(job)) as place:
        data, _ = read(job, place, ObjectiveConfig(name="grpo", options=given))
    samples = [sample for group in data.order.groups for sample in group]
    advantage = make_objective("grpo", given).targets(samples).columns["advantage"].reshape(3, 9)
    assert not advantage[[0, 2]].any()
    assert np.isfinite(advantage).all()
    assert advantage[1].any() == differ
    notes = train(job, "objective.name=grpo", f"objective.options={json.dumps(given)}", "batch.global_batch_size=9")
    assert np.isfinite(notes.losses).all()


def test_command_line_deals_complete_rollouts(tmp_path: Path) -> None:
    job = write_job(tmp_path, lines(by_turn=True))
    rollout = ("objective.options={normalise: rollout}", "batch.max_tokens=80", "train_iters=3")
    done = run_command("train", job, *rollout, "batch.global_batch_size=null", "batch.groups_per_step=5", code=0)
    told = " ".join(done.output.split())
    assert "each epoch skips 1 rollout: steps take complete rollouts, and a step of 5 does not divide all" in told
    done = run_command("train", job, *rollout, "batch.global_batch_size=4")
    assert done.exit_code != 0
    told = " ".join(done.output.split())
    assert "rollout 1 has 3 samples and rollout 0 has 1 sample; a step of batch.global_batch_size=4 takes" in told
