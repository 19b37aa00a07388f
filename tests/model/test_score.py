"""``mcore-prefix-tree score``: written scores equal the stock model's on unfolded samples, and can be trained on."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from harness import torchrun_jobs
from harness.commands import run_command
from harness.kept_sets import within_sets
from harness.train_jobs import BATCH, logits_of, rows, stock_model, train, world_of_one, write_job

from mcore_prefix_tree.data import FieldNames, read_samples
from mcore_prefix_tree.data.write import make_row, rows_file
from mcore_prefix_tree.mcore.checkpoints import checkpoint
from mcore_prefix_tree.mcore.loop import score_recipe
from mcore_prefix_tree.mcore.loop.score_recipe import run_score
from mcore_prefix_tree.settings import load_recipe
from mcore_prefix_tree.settings.score_section import ScoreConfig

FLOAT64 = ("model.dtype=float64", "optimizer.clip_grad=0")
EXTRA = [
    {"tokens": [5, 6, 7, 8], "loss_mask": [0, 0, 1, 1], "temperature": 0.5, "reward": 2.0, "group": "a"},
    {"tokens": [5, 6, 7, 9], "loss_mask": [0, 1, 1, 1], "temperature": 0.5, "merge_key": "policy-7"},
    {"tokens": [5, 6, 9], "loss_mask": [0, 0, 0], "pair": 1, "chosen": False, "rollout_logprobs": [None, None, None]},
    {"tokens": [5, 6, 9], "advantage": [0, -1.5, 0.25], "label": False},
    {"tokens": [5, 6, 9, 8], "sampling_mask": {"token_ids": [9, 3, 8, 2, 6, 5], "offsets": [0, 0, 0, 2, 6]}},
    {"tokens": [5, 6, 9], "sampling_mask": [None, None, [9]], "temperature": 0.5},
    {"tokens": [5, 6, 9], "sampling_mask": [None, [6, 1], [9, 7, 6]]},
]


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A recipe whose run has saved iterations 1 and 2."""
    path = write_job(tmp_path_factory.mktemp("score"), [*rows(), *EXTRA])
    saving = f"checkpoint: {{save: {path.parent / 'runs'}, save_interval: 1}}\n"
    path.write_text(path.read_text().replace("train_iters: 6", "train_iters: 2") + saving)
    train(path, *FLOAT64)
    return path


@pytest.fixture(scope="module")
def reference(job: Path) -> Path:
    """The folder of another run."""
    folder = job.parent / "reference"
    train(job, *FLOAT64, "train_iters=2", "optimizer.lr=0.1", f"checkpoint.save={folder}")
    return folder


def written(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def score_unfolded(job: Path, folder: Path) -> list[tuple[np.ndarray, np.ndarray]]:
    """Each line's log-probabilities and entropies from the untouched stock model with a checkpoint's weights."""
    recipe = load_recipe(job, FLOAT64)
    found = []
    with world_of_one(recipe) as place:
        model = stock_model(recipe, place)
        checkpoint.load_weights(folder, 2, [model], model=recipe.model)
        for sample in read_samples(recipe.data.path):
            with torch.no_grad():
                logits = within_sets(logits_of(model, sample.tokens.tolist()), sample)
                scores = torch.log_softmax(logits / sample.temperature, dim=-1)[:-1]
            labels = torch.tensor(sample.tokens[1:].tolist(), dtype=torch.int64)
            entropy = -(scores.exp() * scores.masked_fill(scores == -torch.inf, 0)).sum(dim=1)
            found.append((scores.gather(1, labels[:, None])[:, 0].numpy(), entropy.numpy()))
    return found


def as_array(values: list[float | None]) -> np.ndarray:
    return np.array(values, dtype=np.float64)


@pytest.mark.parametrize("head", ["fused_head=true", "fused_head=false"])
@pytest.mark.parametrize("all_tokens", [False, True])
def test_scores_equal_unfolded_samples(job: Path, reference: Path, tmp_path: Path, all_tokens: bool, head: str) -> None:
    output = tmp_path / "scored.jsonl"
    flags = ["--all-tokens"] if all_tokens else []
    result = run_command("score", job, *FLOAT64, head, "--output", output, "--reference", reference, *flags, code=0)
    of_policy, of_reference = score_unfolded(job, job.parent / "runs"), score_unfolded(job, reference)
    samples, lines = read_samples(job.parent / "data.jsonl"), written(output)
    assert len(lines) == len(samples) > 2 * BATCH
    scored_tokens = 0
    for line, sample, policy, other in zip(lines, samples, of_policy, of_reference, strict=True):
        assert (line["source"], line["tokens"]) == (sample.source, sample.tokens.tolist())
        scored = np.ones(len(sample), bool) if all_tokens else sample.loss_mask != 0
        scored[0] = False
        scored_tokens += scored.sum()
        for column, values in (("old_logprobs", policy[0]), ("entropy", policy[1]), ("ref_logprobs", other[0])):
            row = as_array(line[column])
            assert np.array_equal(np.isfinite(row), scored)
            np.testing.assert_allclose(row[1:][scored[1:]], values[scored[1:]], rtol=1e-11)
    assert f"{len(samples):,} samples, {scored_tokens:,} scored tokens by iteration 2 and the reference's 2;" in (
        result.output
    )


def test_score_prints_only_the_result(job: Path, tmp_path: Path) -> None:
    """Neither are torch's warnings of how Megatron calls it."""
    done = torchrun_jobs.run(1, "score", job, "--output", tmp_path / "scored.jsonl")
    assert (done.code, done.err) == (0, "")
    assert len(done.out.splitlines()) == 1


def test_the_file_is_data_to_train_on(job: Path, reference: Path, tmp_path: Path) -> None:
    """All fields of the data are kept, and the log-probabilities are read to the bit."""
    output = tmp_path / "scored.jsonl"
    run_score(load_recipe(job), ScoreConfig(output=str(output), reference=str(reference)))
    before, after = read_samples(job.parent / "data.jsonl"), read_samples(output)
    for line, old, new in zip(written(output), before, after, strict=True):
        assert np.array_equal(old.tokens, new.tokens)
        assert np.array_equal(old.loss_mask, new.loss_mask)
        assert old.merge_key == new.merge_key
        for name, column in (("old_logprobs", new.signals.old_logprobs), ("ref_logprobs", new.signals.ref_logprobs)):
            assert np.array_equal(column, as_array(line[name]).astype(np.float32), equal_nan=True)
        without = replace(new.signals, old_logprobs=None, ref_logprobs=None)
        assert repr(without) == repr(old.signals)
    again = tmp_path / "again.jsonl"
    with rows_file(again) as writer:
        writer.add([make_row(sample) for sample in after])
    assert [repr(sample.signals) for sample in read_samples(again)] == [repr(sample.signals) for sample in after]


def test_without_a_reference_and_entropies(job: Path, tmp_path: Path) -> None:
    output = tmp_path / "scored.jsonl"
    run_command("score", job, "--no-entropy", "--output", output, code=0)
    assert all({"entropy", "ref_logprobs"}.isdisjoint(line) for line in written(output))
    report, is_main = run_score(load_recipe(job), ScoreConfig(output=str(tmp_path / "more.jsonl")))
    assert is_main
    assert [line["old_logprobs"] for line in written(tmp_path / "more.jsonl")] == [
        line["old_logprobs"] for line in written(output)
    ], "asking for entropies changes no bit"
    assert report.reference_iteration is None
    assert report.physical_tokens < report.logical_tokens
    assert report.samples == len(written(output))


def test_signals_of_the_objective_are_not_required(job: Path, tmp_path: Path) -> None:
    """GRPO needs old log-probabilities and groups, and this data has neither."""
    plain, grpo = tmp_path / "plain.jsonl", tmp_path / "grpo.jsonl"
    run_score(load_recipe(job), ScoreConfig(output=str(plain)))
    run_score(load_recipe(job, ["objective.name=grpo"]), ScoreConfig(output=str(grpo)))
    assert plain.read_bytes() == grpo.read_bytes()


def test_how_many_samples_are_planned_together_changes_nothing_but_rounding(job: Path, tmp_path: Path) -> None:
    found = []
    for size in (1, 5, 1000):
        output = tmp_path / f"{size}.jsonl"
        recipe = load_recipe(job, [*FLOAT64, f"batch.global_batch_size={size}"])
        run_score(recipe, ScoreConfig(output=str(output)))
        found.append(np.concatenate([as_array(line["old_logprobs"]) for line in written(output)]))
    for other in found[1:]:
        np.testing.assert_allclose(other, found[0], rtol=1e-11)


def test_bad_weights_name_the_sample_and_leave_no_file(
    job: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = tmp_path / "scored.jsonl"
    output.write_text("earlier content of it\n")
    load: Callable[..., None] = checkpoint.load_weights

    def broken(folder: Any, iteration: int, chunks: Any, **options: Any) -> None:
        load(folder, iteration, chunks, **options)
        with torch.no_grad():
            chunks[0].embedding.word_embeddings.weight[6] = float("nan")

    monkeypatch.setattr(score_recipe.checkpoint, "load_weights", broken)
    result = run_command("score", job, "--output", output, code=2)
    assert "the log-probability of token" in result.stderr
    assert "data.jsonl:" in result.stderr
    assert output.read_text() == "earlier content of it\n"
    assert [path.name for path in tmp_path.iterdir()] == ["scored.jsonl"]


@pytest.mark.parametrize("name", ["scored.parquet", "scored.arrow"])
def test_tables_hold_the_same_rows_as_lines(job: Path, reference: Path, tmp_path: Path, name: str) -> None:
    """In the data's order, with columns that only some samples have; and they are data to train on."""
    lines, table = tmp_path / "scored.jsonl", tmp_path / name
    for output in (lines, table):
        run_command("score", job, "--output", output, "--reference", reference, code=0)
    content = pq.read_table(table) if name.endswith(".parquet") else pa.ipc.open_file(table).read_all()
    rows = [{column: value for column, value in row.items() if value is not None} for row in content.to_pylist()]
    assert rows == written(lines)
    for one, other in zip(read_samples(lines), read_samples(table), strict=True):
        assert repr(one.signals) == repr(other.signals)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(["scored.jsonl", name])
    losses = [
        train(job, f"data.path={path}", "objective.name=sft", "checkpoint.save=null", "train_iters=2").losses
        for path in (lines, table)
    ]
    assert losses[0] == losses[1]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("checkpoint.save=null",), "scoring needs checkpoint.save, the folder of the checkpoints to score with"),
        (
            ("checkpoint.save={folder}/nowhere",),
            "nowhere holds no checkpoint; train first, or name the folder of a run",
        ),
        (("--reference", "{folder}"), "holds no checkpoint; train first"),
        (("--reference", "{runs}/iter_0000001"), "is a checkpoint itself; name the folder that it is in"),
        (("model.hidden_size=64",), "were trained with model.hidden_size=32, and this recipe has 64"),
        (("attention_backend=nonsense",), "nonsense"),
        (("batch.groups_per_step=2",), "batch: give either global_batch_size"),
        (("data.path={folder}/nowhere.jsonl",), "nowhere.jsonl: no such file"),
    ],
)
def test_mistakes_are_one_sentence(job: Path, tmp_path: Path, arguments: tuple[str, ...], says: str) -> None:
    filled = [argument.format(folder=tmp_path, runs=job.parent / "runs") for argument in arguments]
    result = run_command("score", job, *filled, "--output", tmp_path / "out.jsonl", code=2)
    assert says in result.stderr
    assert len(result.stderr.splitlines()) == 1
    assert not list(tmp_path.iterdir())


def test_the_data_are_not_replaced(job: Path, tmp_path: Path) -> None:
    data = job.parent / "data.jsonl"
    before = data.read_bytes()
    (tmp_path / "link.jsonl").symlink_to(data)
    for output in (data, tmp_path / "link.jsonl"):
        result = run_command("score", job, "--output", output, code=2)
        assert f"--output {output}: is read by this command, which would replace it; name another file" in result.stderr
    assert data.read_bytes() == before


def test_missing_pyarrow_is_reported_before_the_run(job: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    result = run_command("score", job, "--output", tmp_path / "out.parquet", "model.hidden_size=64", code=2)
    assert result.stderr == (
        f"error: {tmp_path / 'out.parquet'}: Parquet and Arrow files need pyarrow: pip install 'pyarrow>=16'\n"
    )


def test_unknown_output_suffix_is_rejected_before_the_run(job: Path, tmp_path: Path) -> None:
    output = tmp_path / "out.csv"
    result = run_command("score", job, "--output", output, "model.hidden_size=64")
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith(f"error: --output {output}: give a name that ends in .jsonl, ")
    assert not output.exists()


def test_help_names_read_and_replaced_files() -> None:
    said = " ".join(run_command("score", "--help", env={"COLUMNS": "400"}).stdout.replace("│", " ").split())
    assert "An existing file is replaced once all samples are scored." in said
    assert "checkpoint.save is the folder of a run, in the recipe or given here; it is only read." in said


def test_missing_output_folder_is_rejected_before_the_run(job: Path, tmp_path: Path) -> None:
    result = run_command("score", job, "--output", tmp_path / "no" / "out.jsonl", code=2)
    assert "its folder does not exist or cannot be written to; create it" in result.stderr


@pytest.mark.parametrize("name", ["scored.jsonl", "scored.parquet"])
def test_the_file_keeps_its_other_fields_and_names(job: Path, tmp_path: Path, name: str) -> None:
    """And the same recipe reads it: its names are those of ``data.fields``."""
    line = '{"ids": [5, 6, 7, 8], "task": "b", "score": 1.0, "extra": {"b": 1.50, "a": [null]}, "entropy": [9]}'
    (tmp_path / "in.jsonl").write_text(f"{line}\n{line.replace('7', '8')}\n")
    fields = "data.fields={tokens: ids, group: task, reward: score}"
    path = f"data.path={tmp_path / 'in.jsonl'}"
    run_command("score", job, fields, path, "--no-entropy", "--output", tmp_path / name, code=0)
    if name.endswith(".jsonl"):
        rows = written(tmp_path / name)
        assert '"extra": {"b": 1.50, "a": [null]}' in (tmp_path / name).read_text()
    else:
        rows = pq.read_table(tmp_path / name).to_pylist()
    assert [row["extra"] for row in rows] == [{"b": 1.5, "a": [None]}] * 2
    assert [list(row["ids"]) for row in rows] == [[5, 6, 7, 8], [5, 6, 8, 8]]
    columns = {"ids", "task", "score", "extra", "loss_mask", "source", "old_logprobs"}
    assert all(row.keys() == columns for row in rows)
    given = FieldNames(given={"tokens": "ids", "group": "task", "reward": "score"})
    signals = [one.signals for one in read_samples(tmp_path / name, names=given)]
    lengths = [0 if one.old_logprobs is None else len(one.old_logprobs) for one in signals]
    assert [(one.group, one.reward) for one in signals] == [("b", 1.0)] * 2
    assert lengths == [4, 4]
