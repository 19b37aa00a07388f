"""Objectives under ``--prefix-tree`` in Megatron-LM's own loop: equal to their formulas on unfolded samples."""

from __future__ import annotations

import functools
import json
from pathlib import Path

import pytest
from harness.commands import write_rows
from megatron_lm import (
    BATCH,
    CPU,
    ENTRY,
    FIRST,
    FOLDED,
    ITERATIONS,
    LOSS,
    MODEL,
    OBJECTIVE_OPTIONS,
    TRAIN,
    StockRuns,
    assert_same_tensors,
    cached_stock_runs,
    megatron,
    objective_words,
    only_checkpoint,
    require_checkout,
    trained,
    write_rollouts,
)

require_checkout()

LAYOUTS = {
    "tp2": (2, "--tensor-model-parallel-size 2"),
    "pp2": (2, "--pipeline-model-parallel-size 2"),
    "dp2": (2, ""),
    "tp2-sp-pp2": (4, "--tensor-model-parallel-size 2 --sequence-parallel --pipeline-model-parallel-size 2"),
}
METRICS = {
    **{"grpo": "clip_fraction", "gspo": "ratio", "dpo": "accuracy", "kto": "reward_chosen", "distill": "jsd"},
    **{"critic": "value_error", "reward_model": "margin"},
}
QUICK = {("grpo", "tp2"), ("dpo", "pp2"), ("kto", "dp2"), ("distill", "tp2"), ("critic", "pp2")}
EVERY = [
    pytest.param(name, layout, id=f"{name}-{layout}", marks=[] if (name, layout) in QUICK else pytest.mark.slow)
    for name in OBJECTIVE_OPTIONS
    for layout in LAYOUTS
]


@pytest.fixture(scope="session")
def rollouts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("rollouts") / "rollouts.jsonl"
    write_rollouts(path)
    return path


@pytest.fixture(scope="session")
def stock_runs(rollouts: Path, tmp_path_factory: pytest.TempPathFactory) -> StockRuns:
    return cached_stock_runs(MODEL, functools.partial(objective_words, rollouts), tmp_path_factory)


@pytest.mark.parametrize(("name", "layout"), EVERY)
def test_every_objective_trains_like_unfolded_samples(
    stock_runs: StockRuns, rollouts: Path, tmp_path: Path, name: str, layout: str
) -> None:
    stock, wanted = stock_runs(name)
    ranks, arguments = LAYOUTS[layout]
    base = only_checkpoint(wanted, FIRST, tmp_path / "base")  # stages draw other weights than one process
    folders = f"--load {base} --save {tmp_path / 'saved'}"
    run = trained(ENTRY, CPU, MODEL, TRAIN, FOLDED, objective_words(rollouts, name), arguments, folders, ranks=ranks)
    assert sorted(run.iterations) == sorted(stock.iterations) == list(range(FIRST + 1, ITERATIONS + 1))
    for iteration, figures in run.iterations.items():
        expected = stock.iterations[iteration]
        if "lm loss" in expected:  # Megatron prints no loss that is not positive
            assert figures["lm loss"] == pytest.approx(expected["lm loss"], rel=LOSS, abs=1e-7), iteration
        assert figures["grad norm"] == pytest.approx(expected["grad norm"], abs=1.1e-3), iteration  # three digits
        assert figures["fold ratio"] > 1.3
    assert any(METRICS[name] in figures for figures in run.iterations.values())
    assert_same_tensors(tmp_path / "saved", wanted, ITERATIONS)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ("--prefix-tree-objective grpo --global-batch-size 6", "steps of --global-batch-size=6 would cut some"),
        pytest.param(
            "--prefix-tree-objective grpo --global-batch-size 64",
            "--global-batch-size=64 is more than the 48 samples",
            marks=pytest.mark.slow,
        ),
        pytest.param("--prefix-tree-objective critics", "invalid choice: 'critics'", marks=pytest.mark.slow),
        pytest.param(
            '--prefix-tree-objective dpo --prefix-tree-objective-options {"betta":1}',
            "options.betta: dpo has no such",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            '--prefix-tree-objective distill --prefix-tree-objective-options {"teacher":"full"}',
            "runs a second model",
            marks=pytest.mark.slow,
        ),
        (
            '--prefix-tree-objective critic --prefix-tree-objective-options {"returns":"given"}',
            "field 'returns' is missing, and returns=given needs it",
        ),
        pytest.param(
            "--prefix-tree-objective grpo --rampup-batch-size 4 4 48",
            "--rampup-batch-size with --prefix-tree-objective",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_mistakes_get_one_sentence(rollouts: Path, arguments: str, says: str) -> None:
    train = TRAIN.replace(f"--global-batch-size {BATCH}", "") if "--global-batch-size" in arguments else TRAIN
    folded = FOLDED.replace("--micro-batch-size 4", "--micro-batch-size 2")
    data = f"--prefix-tree-data-path {rollouts} --prefix-tree-order file"
    run = megatron(ENTRY, CPU, MODEL, train, folded, data, arguments)
    (error,) = [line for line in run.output.splitlines() if line.startswith("error: ")]
    assert says in error
    assert "mcore_prefix_tree/mcore" not in run.output, "no traceback of ours"


def test_missing_field_error_names_the_argument_that_writes_it(rollouts: Path, tmp_path: Path) -> None:
    rows = [json.loads(line) for line in rollouts.read_text().splitlines()]
    for row in rows:
        del row["old_logprobs"]
    write_rows(tmp_path / "bare.jsonl", rows)
    run = megatron(ENTRY, CPU, MODEL, TRAIN, FOLDED, objective_words(tmp_path / "bare.jsonl", "grpo"))
    (error,) = [line for line in run.output.splitlines() if line.startswith("error: ")]
    assert "bare.jsonl:1: field 'old_logprobs' is missing" in error
    assert "`--prefix-tree-score FILE` with the checkpoints that the samples were drawn from writes it" in error


OWN = {"tokens": "input_ids", "group": "task", "reward": "score"}
VERL = {"tokens": "input_ids", "group": "uid", "old_logprobs": "old_log_probs"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "theirs"),
    [(f"--prefix-tree-fields {json.dumps(OWN, separators=(',', ':'))}", OWN), ("--prefix-tree-format verl", VERL)],
    ids=["fields", "format"],
)
def test_renamed_fields_and_groups_that_lie_apart_train_alike(
    words: str, theirs: dict[str, str], rollouts: Path, tmp_path: Path
) -> None:
    rows = [json.loads(line) for line in rollouts.read_text().splitlines()]
    apart = [row for member in range(4) for row in rows[member::4]]
    renamed = [{theirs.get(name, name): value for name, value in row.items()} for row in apart]
    write_rows(tmp_path / "renamed.jsonl", renamed)
    common = (CPU, MODEL, TRAIN, FOLDED, "--exit-interval 2")
    run = trained(ENTRY, *common, objective_words(tmp_path / "renamed.jsonl", "grpo"), words)
    expected = trained(ENTRY, *common, objective_words(rollouts, "grpo"))
    for iteration, figures in expected.iterations.items():
        for name in ("grad norm", METRICS["grpo"], "fold ratio"):
            assert run.iterations[iteration][name] == figures[name], (iteration, name)
    assert len(expected.iterations) == 2
