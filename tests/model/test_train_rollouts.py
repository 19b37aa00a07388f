"""GRPO on agents' conversations: one sample per turn, groups of unequal sizes, complete groups in every step."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from harness.commands import run_command, write_rows
from harness.marks import quick
from harness.train_jobs import (
    FLOAT64,
    assert_resumes,
    check_steps,
    logits_of,
    stock_twin,
    train,
    world_of_one,
    write_job,
)
from objective_oracles import Alone, changed, policy_loss
from rollouts import as_samples, rollouts

from mcore_prefix_tree import Sample, SampleError
from mcore_prefix_tree.data import EncodedTurn, LineOptions, iter_sample_groups
from mcore_prefix_tree.data.batches import SampleOrder
from mcore_prefix_tree.data.grouping import whole_groups
from mcore_prefix_tree.objectives import make_objective
from mcore_prefix_tree.settings import Recipe, RecipeError, command_checks, load_recipe, sample_source

# Turns of each rollout of each prompt: 5 prompts, 12 rollouts, 35 turns.
SHAPE = ((1, 6, 2), (3, 3), (1, 5, 1, 4), (2, 6), (1,))
PER_STEP = 2
ON_POLICY = {"on_policy": True, "alone": "zero", "entropy_coef": 0.01}
GROUPS = ("batch.global_batch_size=null", f"batch.groups_per_step={PER_STEP}", "batch.max_tokens=60")
BY_GROUP = (*GROUPS, "data.tokenizer=letters", "data.expand_turns=true", "optimizer.lr_warmup_steps=2")


class Letters:
    """A token a letter, and one for the end of each assistant message."""

    name, vocab_size = "letters", 64

    def encode_turns(self, messages: Sequence[Any], tools: Sequence[Any] = ()) -> list[EncodedTurn]:
        tokens: list[int] = []
        turns = []
        for message in messages:
            start = len(tokens)
            tokens += [ord(letter) - ord("a") + 1 for letter in message.content]
            if message.role == "assistant":
                tokens.append(63)
                turns.append(EncodedTurn(tokens=np.array(tokens, dtype=np.int32), start=max(start, 1)))
        return turns

    def decode(self, tokens: Sequence[int]) -> str:
        return "".join(chr(token + ord("a") - 1) for token in tokens)


@pytest.fixture(autouse=True)
def letters(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sample_source, "load_tokenizer", lambda name, kwargs: Letters())
    monkeypatch.setattr(command_checks, "check_tokenizer_named", lambda name, kwargs: None)


def conversations(shape: Sequence[Sequence[int]] = SHAPE) -> list[dict[str, Any]]:
    rng = np.random.default_rng(0)

    def text(longest: int) -> str:
        return "".join(chr(ord("a") + letter) for letter in rng.integers(0, 26, size=rng.integers(2, longest)))

    rows: list[dict[str, Any]] = []
    for group, turns_of_each in enumerate(shape):
        prompt = text(8)
        for turns in turns_of_each:
            messages = [{"role": "user", "content": prompt}]
            for turn in range(turns):
                if turn:
                    messages.append({"role": "user", "content": text(4)})
                messages.append({"role": "assistant", "content": text(5)})
            rows.append({"messages": messages, "group": group, "reward": float(rng.choice([0.0, 0.5, 1.0]))})
    return rows


def options(objective: str = "grpo", **more: Any) -> list[str]:
    return [f"objective.name={objective}", f"objective.options={json.dumps(ON_POLICY | more)}"]


def complete_rollouts(recipe: Recipe, iteration: int) -> list[Sample]:
    """The rollouts of a step, one sample each, from only the documented order."""
    lines = iter_sample_groups(recipe.data.path, LineOptions(tokenizer=Letters()))
    groups = whole_groups(list(lines), "group", step=None, setting="the test")
    order = SampleOrder(
        groups, seed=recipe.seed, order=recipe.data.order, by_line=True, step=PER_STEP, whole_steps=True
    )
    samples = order.take((iteration - 1) * PER_STEP, PER_STEP)
    return [changed(sample, rollout_logprobs=np.zeros(len(sample))) for sample in samples]  # the oracle reads them


@pytest.mark.parametrize("name", ["grpo", "dapo", "rloo"])
def test_sample_per_turn_trains_like_sample_per_rollout(tmp_path: Path, name: str) -> None:
    """Losses, gradient norms and rewards of six steps in fp64 equal AdamW on complete, unfolded rollouts."""
    by = {"grpo": ("sample", "rollout"), "dapo": ("token", "token"), "rloo": ("sample", "rollout")}[name]
    job = write_job(tmp_path, conversations())
    recipe = load_recipe(job, [*BY_GROUP, *FLOAT64, *options(name, normalise=by[1])])
    notes = train(recipe)
    assert len({report.samples for report in notes.reports}) > 2, "steps of unequal numbers of samples"
    with world_of_one(recipe) as place:
        model = stock_twin(recipe, place)

        def step(report: Any) -> torch.Tensor:
            samples = complete_rollouts(recipe, report.iteration)
            assert report.metrics["reward"] == pytest.approx(np.mean([s.signals.reward for s in samples]))
            objective = make_objective(name, ON_POLICY | {"normalise": by[0]})
            return policy_loss(objective, Alone(partial(logits_of, model), samples))

        # A difference of terms of about log(64): if it is near 0, their digits count.
        check_steps(recipe, notes.reports, list(model.parameters()), step, least=1e-9)


def test_steps_and_schedule_count_groups(tmp_path: Path) -> None:
    """Warm-up and decay are those of a run whose steps count samples: both count steps."""
    job = write_job(tmp_path, conversations())
    notes = train(job, *BY_GROUP, *options())
    plain = ("batch.global_batch_size=4", "batch.max_tokens=60", "data.tokenizer=letters")
    samples = train(job, *plain, "optimizer.lr_warmup_steps=2")
    assert [report.lr for report in notes.reports] == pytest.approx([report.lr for report in samples.reports])
    turns = [sum(rollouts) for rollouts in SHAPE]
    assert sum(report.samples for report in notes.reports[:2]) in {sum(turns) - left_out for left_out in turns}
    assert any("each epoch skips 1 group: steps take complete groups" in text for text in notes.messages)


@pytest.mark.parametrize("stop", quick(3, of=[1, 3]))
def test_resumed_run_continues_at_the_right_group(tmp_path: Path, stop: int) -> None:
    job = write_job(tmp_path, conversations())
    overrides = [*BY_GROUP, *options("gspo", filter_groups=True)]
    saved = [*overrides, f"checkpoint.save={tmp_path / 'cut'}"]
    whole, last = assert_resumes(job, tmp_path, *overrides, stop_after=stop + 1)
    assert last["progress"]["consumed_samples"] == sum(report.samples for report in whole.reports)
    assert (last["progress"]["groups_per_step"], last["progress"]["global_batch_size"]) == (PER_STEP, None)
    with pytest.raises(RecipeError, match="was written with groups_per_step=2, this run has groups_per_step=1"):
        train(job, *saved, "batch.groups_per_step=1", "train_iters=9", resume=True)


def test_streamed_groups_train_as_those_in_memory(tmp_path: Path) -> None:
    """Also after a stop in the middle of an epoch; and nothing that is missing is found only there."""
    job = write_job(tmp_path, token_rows())
    overrides = [*GROUPS, *options(), "checkpoint.save_interval=1"]
    held = train(job, *overrides)
    streamed = [*overrides, "data.streaming=true", f"checkpoint.save={tmp_path / 'streamed'}"]
    first = train(job, *streamed, "data.num_workers=1", stop_after=4)
    rest = train(job, *streamed, "data.num_workers=0", resume=True)
    assert first.losses[:3] + rest.losses == held.losses
    content = token_rows()
    del content[-2]["reward"]
    lacking = write_rows(tmp_path / "lacking.jsonl", content)
    with pytest.raises(SampleError, match=rf"lacking.jsonl:{len(content) - 1}: field 'reward' is missing"):
        train(job, *overrides, "data.streaming=true", f"data.path={lacking}", stop_after=1)


def token_rows() -> list[dict[str, Any]]:
    """The same turns as lines of tokens that name their rollout."""
    rows = []
    for line, row in enumerate(conversations()):
        tokens: list[int] = []
        for message in row["messages"]:
            start = len(tokens)
            tokens = tokens + [ord(letter) - ord("a") + 1 for letter in message["content"]]
            if message["role"] == "assistant":
                mask = [0.0] * start + [1.0] * (len(tokens) - start)
                rows.append(row | {"tokens": tokens, "loss_mask": mask, "rollout": line})
                del rows[-1]["messages"]
    return rows


def test_scores_of_groups_give_ratios_of_1_to_the_bit(tmp_path: Path) -> None:
    """``score`` plans the groups of a step together, as the run that reads them does: here, its second step."""
    job = write_job(tmp_path, token_rows())
    plain = [*GROUPS, "data.order=file", "attention_backend=path", f"checkpoint.save={tmp_path / 'runs'}"]
    plain += ["optimizer.lr_warmup_steps=0"]
    train(job, *plain, *options(), "train_iters=1")
    scored = tmp_path / "scored.jsonl"
    run_command("score", job, *plain, *options(), "--output", scored, code=0)
    assert len(scored.read_text().splitlines()) == len(token_rows())
    grpo = ["objective.name=grpo", "objective.options={alone: zero}", f"data.path={scored}", "train_iters=3"]
    second, third = (report.metrics for report in train(job, *plain, *grpo, resume=True).reports)
    assert (second["ratio"], second["kl_old"], second["clip_fraction"]) == (1.0, 0.0, 0.0)
    assert third["kl_old"] > 0


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (
            (*BY_GROUP, "objective.name=sft"),
            r"groups_per_step=2: objective\.name=sft with its options takes each sample separately",
        ),
        ((*BY_GROUP, *options(), "batch.groups_per_step=6"), r"batch\.groups_per_step=6 is more than the 5 groups"),
    ],
)
def test_contradictory_settings_are_rejected(tmp_path: Path, overrides: tuple[str, ...], says: str) -> None:
    job = write_job(tmp_path, conversations())
    with pytest.raises(RecipeError, match=says):
        train(job, *overrides)


def test_error_of_unequal_groups_names_the_way_out(tmp_path: Path) -> None:
    job = write_job(tmp_path, conversations())
    with pytest.raises(SampleError, match=r"jsonl:4 turn 0: group 1 has 6 samples and group 0 has 9 sam.*per_step"):
        train(job, "batch.max_tokens=60", "data.tokenizer=letters", "data.expand_turns=true", *options())


OF_SEQUENCES = [
    ("gspo", {"filter_groups": True}),
    ("gspo", {"ratio_level": "turn"}),
    ("grpo", {"tis_cap": 1.05, "tis_level": "sequence", "off_policy_mask": 0.005, "normalise": "rollout"}),
    ("cispo", {"surrogate_level": "sequence", "kl_coef": 0.3, "kl_importance": "sequence"}),
]


@pytest.mark.parametrize(
    ("name", "given"), OF_SEQUENCES, ids=[f"{name}{i}" for i, (name, _) in enumerate(OF_SEQUENCES)]
)
def test_a_line_per_turn_trains_like_a_line_per_rollout(tmp_path: Path, name: str, given: dict[str, Any]) -> None:
    """Ratios of sequences, in several micro-batches and in chunks of trees that hold one turn of many."""
    forms = as_samples(rollouts(SHAPE, 1, vocab=64), 1, scale=0.1, around=-math.log(64))
    settings = [*GROUPS, "data.order=file", "train_iters=2", f"objective.name={name}"]
    settings.append(f"objective.options={json.dumps({'alone': 'zero'} | given)}")
    lines, *others = (
        train(write_job(tmp_path, rows_of(form)), *settings, *FLOAT64, f"batch.max_tokens={budget}")
        for form, budget in [(forms[0], 4096), (forms[1], 50), (forms[1], 12)]
    )
    for turns, is_cut in zip(others, (False, True), strict=True):
        assert turns.losses == pytest.approx(lines.losses, rel=1e-12)
        norms = [report.grad_norm for report in lines.reports]
        assert [report.grad_norm for report in turns.reports] == pytest.approx(norms, rel=1e-11)
        for one, other in zip(turns.reports, lines.reports, strict=True):
            assert one.metrics == pytest.approx(other.metrics, rel=1e-10)
            assert (one.carried_tokens > 0) == is_cut
            assert one.physical_tokens > 50, "several micro-batches"


def rows_of(samples: Sequence[Sample]) -> list[dict[str, Any]]:
    """Return the lines of a file with these samples."""
    columns = ("old_logprobs", "ref_logprobs", "rollout_logprobs")
    return [
        {"tokens": sample.tokens.tolist(), "loss_mask": sample.loss_mask.tolist()}
        | {name: getattr(sample.signals, name).tolist() for name in columns}
        | {name: getattr(sample.signals, name) for name in ("reward", "group", "rollout", "turn")}
        for sample in samples
    ]
