"""Checkpoints: their contents, and a stopped run that resumes as if it had not been stopped."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pyarrow.feather
import pyarrow.parquet
import pytest
import torch
from harness.commands import run_command, write_rows
from harness.train_jobs import (
    BATCH,
    assert_same_bits,
    batch_of,
    built,
    checkpoint_content,
    logits_of,
    rows,
    stock_model,
    train,
    world_of_one,
    write_job,
)
from megatron.core import dist_checkpointing

from mcore_prefix_tree.mcore.checkpoints import checkpoint
from mcore_prefix_tree.mcore.checkpoints.checkpoint import exclusive_save
from mcore_prefix_tree.sample import SampleError
from mcore_prefix_tree.settings import RecipeError, load_recipe

TRACKER = "latest_checkpointed_iteration.txt"


Run = tuple[Path, Path, list[float]]  # a recipe, the folder that it saved in, its losses


def saving(folder: Path, *more: str) -> list[str]:
    return [f"checkpoint.save={folder}", "checkpoint.save_interval=2", *more]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Six steps, saved after 2, 4 and 6."""
    folder = tmp_path_factory.mktemp("undisturbed")
    recipe = write_job(folder)
    return recipe, folder / "saved", train(recipe, *saving(folder / "saved")).losses


def test_checkpoints_have_megatrons_layout(undisturbed: Run) -> None:
    _, saved, _ = undisturbed
    assert sorted(path.name for path in saved.iterdir()) == ["iter_0000002", "iter_0000004", "iter_0000006", TRACKER]
    assert (saved / TRACKER).read_text() == "6"
    assert (saved / "iter_0000004" / "metadata.json").exists()
    progress = checkpoint_content(saved, 4)["progress"]
    assert [*progress.pop("checksums")] == ["read"]
    assert progress == {
        "iteration": 4,
        "consumed_samples": 4 * BATCH,
        "global_batch_size": BATCH,
        "groups_per_step": None,
        "seed": 1234,
        "order": "shuffled",
        "samples_per_epoch": 16,
        "data_from": 0,
    }


def test_last_step_saves_with_any_interval(job: Path, tmp_path: Path) -> None:
    train(job, f"checkpoint.save={tmp_path / 'saved'}", "checkpoint.save_interval=100", "train_iters=3")
    assert sorted(path.name for path in (tmp_path / "saved").iterdir()) == ["iter_0000003", TRACKER]


@pytest.mark.parametrize("keep_last", [(), ("checkpoint.keep_last=1",)], ids=["all", "only the last"])
def test_interrupted_run_resumes_with_the_same_bits(undisturbed: Run, tmp_path: Path, keep_last: Any) -> None:
    recipe, reference, losses = undisturbed
    saved = tmp_path / "saved"
    kept = ["iter_0000002", "iter_0000004", "iter_0000006"]
    interrupted = train(recipe, *saving(saved, *keep_last), stop_after=5)
    assert interrupted.losses == losses[:5]
    assert sorted(path.name for path in saved.iterdir()) == [*kept[1 if keep_last else 0 : 2], TRACKER]
    assert (saved / TRACKER).read_text() == "4"
    resumed = train(recipe, *saving(saved, *keep_last), resume=True)
    assert resumed.spans == [(5, 6)]
    assert resumed.told == [f"resumed from {saved / 'iter_0000004'}"]
    assert resumed.losses == losses[4:]
    assert sorted(path.name for path in saved.iterdir()) == [*kept[2 if keep_last else 0 :], TRACKER]
    assert_same_bits(checkpoint_content(saved, 6), checkpoint_content(reference, 6))


def test_a_half_written_checkpoint_is_ignored_and_overwritten(undisturbed: Run, tmp_path: Path) -> None:
    recipe, reference, losses = undisturbed
    saved = tmp_path / "saved"
    shutil.copytree(reference, saved)
    (saved / TRACKER).write_text("2\n")
    shutil.rmtree(saved / "iter_0000006")
    for path in (saved / "iter_0000004").iterdir():
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    (saved / "iter_0000004" / "__7_0.distcp").write_text("of a rank that no longer is")
    (saved / ".iter_0000004.saving").touch()
    resumed = train(recipe, *saving(saved), resume=True)
    assert resumed.spans == [(3, 6)]
    assert resumed.losses == losses[2:]
    assert {path.name for path in (saved / "iter_0000004").iterdir()} == {
        path.name for path in (reference / "iter_0000004").iterdir()
    }
    for iteration in (4, 6):
        assert_same_bits(checkpoint_content(saved, iteration), checkpoint_content(reference, iteration))


def test_resuming_a_finished_run_trains_nothing(undisturbed: Run, tmp_path: Path) -> None:
    recipe, reference, _ = undisturbed
    shutil.copytree(reference, tmp_path / "saved")
    result = run_command("train", recipe, *saving(tmp_path / "saved"), "--resume", code=0)
    assert result.stdout.splitlines()[1:] == [  # after the choice of auto
        f"resumed from {tmp_path / 'saved' / 'iter_0000006'}",
        "nothing to train: train_iters=6 are done",
        f"saved: {tmp_path / 'saved' / 'iter_0000006'}",
    ]
    fewer = run_command("train", recipe, *saving(tmp_path / "saved"), "--resume", "train_iters=4")
    assert fewer.stdout.splitlines()[-1] == f"saved: {tmp_path / 'saved' / 'iter_0000006'}"


def test_more_steps_can_be_asked_of_a_finished_run(undisturbed: Run, tmp_path: Path) -> None:
    recipe, reference, _ = undisturbed
    shutil.copytree(reference, tmp_path / "saved")
    changed = ("train_iters=8", "optimizer.lr=5e-3", "optimizer.min_lr=0", "optimizer.adam_beta1=0.5")
    notes = train(recipe, *saving(tmp_path / "saved", *changed), resume=True)
    assert notes.spans == [(7, 8)]
    assert (tmp_path / "saved" / TRACKER).read_text() == "8"
    # The recipe's present settings count.
    fresh = train(recipe, *changed)
    assert [report.lr for report in notes.reports] == [report.lr for report in fresh.reports[6:]]
    groups = checkpoint_content(tmp_path / "saved", 8)["optimizer"]["param_groups"]
    assert {group["betas"] for group in groups} == {(0.5, 0.95)}


def test_changed_settings_of_a_resumed_run_are_reported(undisturbed: Run, tmp_path: Path) -> None:
    recipe, reference, _ = undisturbed
    saved = tmp_path / "saved"
    shutil.copytree(reference, saved)
    changed = ["train_iters=7", "objective.options.normalise=sample", "checkpoint.save_interval=7", "compare=false"]
    notes = train(recipe, *saving(saved), *changed, resume=True)
    assert notes.spans == [(7, 7)]
    assert notes.told == [
        f"changed since {saved / 'iter_0000006'}: train_iters 6 -> 7, objective.options.normalise None -> sample",
        f"resumed from {saved / 'iter_0000006'}",
    ]
    assert load_recipe(saved / "iter_0000007" / "recipe.yaml").train_iters == 7
    (saved / "iter_0000007" / "recipe.yaml").unlink()  # another program writes none
    notes = train(recipe, *saving(saved), *changed, "train_iters=8", resume=True)
    assert notes.told == [f"resumed from {saved / 'iter_0000007'}"]


def test_folder_is_locked_by_one_run_at_a_time(job: Path, tmp_path: Path) -> None:
    saved = tmp_path / "saved"
    with world_of_one(load_recipe(job)):
        checkpoint.make_folder(saved)
        claim = exclusive_save(saved)
        claim.__enter__()
    result = run_command("train", job, *saving(saved), code=2)
    assert result.stderr == (
        f"error: checkpoint.save={saved}: another run is saving there at this moment; wait for its end or choose "
        "another folder\n"
    )
    claim.__exit__(None, None, None)
    assert train(job, *saving(saved), stop_after=1).spans == [(1, 6)]


def test_resuming_from_nothing_starts_at_the_first_step(undisturbed: Run, tmp_path: Path) -> None:
    recipe, _, losses = undisturbed
    notes = train(recipe, *saving(tmp_path / "empty"), resume=True, stop_after=1)
    assert notes.spans == [(1, 6)]
    assert notes.told == []
    assert notes.losses == losses[:1]


def test_a_folder_that_holds_a_checkpoint_is_not_written_into(undisturbed: Run) -> None:
    recipe, saved, _ = undisturbed
    before = {path: path.stat().st_mtime_ns for path in saved.rglob("*")}
    result = run_command("train", recipe, *saving(saved), code=2)
    assert result.stderr == (
        f"error: checkpoint.save={saved} already holds iteration 6; "
        "continue it with --resume or choose another folder\n"
    )
    assert {path: path.stat().st_mtime_ns for path in saved.rglob("*")} == before


def test_resume_needs_a_folder(job: Path) -> None:
    result = run_command("train", job, "--resume")
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr == "error: --resume needs checkpoint.save, the folder to resume from\n"


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("seed=7", "{saved} was written with seed=1234, this run has seed=7"),
        ("data.order=file", "{saved} was written with order=shuffled, this run has order=file"),
        ("batch.global_batch_size=5", "{saved} was written with global_batch_size=6, this run has global_batch_size=5"),
        ("data.path={fewer}", "{saved} was written with samples_per_epoch=16, this run has samples_per_epoch=15"),
        ("model.hidden_size=64", "the weights in {saved} were trained with model.hidden_size=32"),
        ("model.num_layers=3", "the weights in {saved} were trained with model.num_layers=2"),
        ("model.add_bias_linear=true", "the weights in {saved} were trained with model.add_bias_linear=False"),
        ("model.dtype=bfloat16", "checkpoint {saved} is damaged or does not fit this recipe's"),
    ],
)
def test_forbidden_changes_are_rejected_by_name(undisturbed: Run, tmp_path: Path, override: str, says: str) -> None:
    recipe, saved, _ = undisturbed
    fewer = write_rows(tmp_path / "fewer.jsonl", rows()[:-1])
    with pytest.raises(RecipeError) as error:
        train(recipe, *saving(saved, override.format(fewer=fewer), "train_iters=9"), resume=True)
    assert says.format(saved=saved / "iter_0000006") in str(error.value)


@pytest.mark.parametrize("streaming", ["data.streaming=false", "data.streaming=true"])
def test_as_many_other_samples_are_refused(job: Path, tmp_path: Path, streaming: str) -> None:
    first = train(job, *saving(tmp_path / "saved", streaming), stop_after=3)
    assert first.spans == [(1, 6)]
    other = write_rows(tmp_path / "other.jsonl", [*rows()[1:], rows()[0]])
    with pytest.raises(RecipeError) as error:
        train(job, *saving(tmp_path / "saved", streaming, f"data.path={other}"), resume=True)
    holds = f"holds as many samples as data.path={other} gives, but not the same, or not in the same groups"
    assert f"{holds}; the data would not" in str(error.value)


def test_new_data_start_at_their_first_sample_on_request(job: Path, tmp_path: Path) -> None:
    """Optimizer and steps continue; and that run resumes as any other."""
    assert train(job, *saving(tmp_path / "first", "train_iters=2")).spans == [(1, 2)]
    shutil.copytree(tmp_path / "first", tmp_path / "second")
    other = write_rows(tmp_path / "other.jsonl", rows()[::-1][:11])
    options = [f"data.path={other}", "train_iters=8"]
    straight = train(job, *saving(tmp_path / "first", *options), resume=True, new_data=True)
    assert straight.spans == [(3, 8)]
    assert straight.reports[0].logical_tokens == sum(map(len, batch_of(load_recipe(job, options), 1)))

    train(job, *saving(tmp_path / "second", *options), resume=True, new_data=True, stop_after=6)
    shutil.copytree(tmp_path / "second", tmp_path / "again")
    rest = train(job, *saving(tmp_path / "second", *options), resume=True)
    assert rest.spans == [(5, 8)]
    assert rest.losses == straight.losses[2:]
    # As by a scheduler, which starts a job again with the words that it was started with.
    again = train(job, *saving(tmp_path / "again", *options), resume=True, new_data=True)
    assert again.losses == rest.losses
    known = "which was trained on these data already: they continue where it stopped"
    assert [known in text for text in again.messages if text.startswith("resumed from")] == [True]
    assert not any(known in text for text in (*rest.messages, *straight.messages))
    # Samples that were read in another way are not recognised: the user decides.
    streamed = [f"data.path={other}", "train_iters=3", "data.streaming=true", "data.num_workers=0"]
    shutil.copytree(tmp_path / "first" / "iter_0000002", tmp_path / "third" / "iter_0000002")
    (tmp_path / "third" / "latest_checkpointed_iteration.txt").write_text("2")
    unknown = train(job, *saving(tmp_path / "third", *streamed), resume=True, new_data=True)
    assert unknown.reports[0].loss == pytest.approx(straight.reports[0].loss, rel=1e-6)

    done = train(job, *saving(tmp_path / "second", *options, "compare=true"), resume=True, new_data=True)
    assert (done.spans, len(done.comparisons)) == ([(9, 8)], 1)
    result = run_command("train", job, *saving(tmp_path / "fourth"), "--new-data")
    assert result.stderr == "error: --new-data goes with --resume: a run that begins has no other data\n"


def test_stock_model_loads_a_checkpoint(undisturbed: Run) -> None:
    recipe_file, saved, _ = undisturbed
    recipe = load_recipe(recipe_file)
    with world_of_one(recipe) as place, torch.no_grad():
        tree, stock = built(recipe, place), stock_model(recipe, place)
        samples = batch_of(recipe, 1)
        untrained = logits_of(stock, samples[0].tokens.tolist())
        for model in (stock, tree):
            loaded = dist_checkpointing.load({"model": model.sharded_state_dict()}, str(saved / "iter_0000006"))
            model.load_state_dict(loaded["model"], strict=True)
        for sample in samples:
            tokens = sample.tokens.tolist()
            assert torch.equal(logits_of(stock, tokens), logits_of(tree, tokens))
        assert not torch.allclose(logits_of(stock, samples[0].tokens.tolist()), untrained)


def test_tree_model_loads_a_stock_checkpoint(job: Path, tmp_path: Path) -> None:
    recipe = load_recipe(job)
    (tmp_path / "stock").mkdir()
    with world_of_one(recipe) as place, torch.no_grad():
        stock, tree = stock_model(recipe, place), built(recipe, place)
        dist_checkpointing.save({"model": stock.sharded_state_dict()}, str(tmp_path / "stock"))
        loaded = dist_checkpointing.load({"model": tree.sharded_state_dict()}, str(tmp_path / "stock"))
        tree.load_state_dict(loaded["model"], strict=True)
        for sample in batch_of(recipe, 1):
            tokens = sample.tokens.tolist()
            assert torch.equal(logits_of(stock, tokens), logits_of(tree, tokens))


def cut_in_half(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


@pytest.mark.parametrize(
    ("name", "damage", "says"),
    [
        (TRACKER, lambda path: path.write_text("soon"), "{file} holds 'soon' instead of an iteration"),
        (TRACKER, lambda path: path.write_text(""), "{file} holds '' instead of an iteration"),
        (TRACKER, lambda path: path.write_bytes(b"\xff\xb2"), r"{file} holds '\\xff\\xb2' instead of an iteration"),
        (TRACKER, lambda path: path.write_text("5"), "{saved} holds iter_0000006, but its tracker names 5"),
        ("iter_0000006", shutil.rmtree, "names iteration 6, but {file} does not exist"),
        ("iter_0000006/metadata.json", Path.unlink, "checkpoint {saved}/iter_0000006 is damaged or"),
        ("iter_0000006/common.pt", cut_in_half, "{file} was not opened: it is damaged"),
        ("iter_0000006/.metadata", Path.unlink, "checkpoint {saved}/iter_0000006 is damaged or"),
        ("iter_0000006/__0_0.distcp", cut_in_half, "{file} is damaged"),
        ("iter_0000006/__0_0.distcp", Path.unlink, "{file} is missing; restore it"),
    ],
)
def test_damaged_checkpoint_error_names_the_file(
    undisturbed: Run, tmp_path: Path, name: str, damage: object, says: str
) -> None:
    recipe, reference, _ = undisturbed
    saved = tmp_path / "saved"
    shutil.copytree(reference, saved)
    if name.endswith("common.pt") and not (saved / name).exists():
        pytest.skip("this megatron-core keeps the state common to all ranks in the other files")
    damage(saved / name)
    with pytest.raises(RecipeError) as error:
        train(recipe, *saving(saved), resume=True)
    assert says.format(file=saved / name, saved=saved) in str(error.value)


def test_a_checkpoint_of_another_program_is_refused(job: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def save_without_progress(state: dict[str, Any], folder: str, **how: Any) -> None:
        dist_checkpointing.save({key: value for key, value in state.items() if key != "progress"}, folder, **how)

    with monkeypatch.context() as other_program:
        other_program.setattr(checkpoint, "dist_checkpointing", SimpleNamespace(save=save_without_progress))
        train(job, *saving(tmp_path / "saved"), stop_after=3)
    with pytest.raises(RecipeError, match="iter_0000002 does not say how far in the data it is"):
        train(job, *saving(tmp_path / "saved"), resume=True)


@pytest.mark.parametrize(
    ("form", "workers"),
    [("jsonl", 0), ("jsonl", 2), ("parquet", 2), pytest.param("arrow", 2, marks=pytest.mark.slow)],
)
def test_streamed_data_are_the_same_data_and_resume_in_the_middle_of_an_epoch(
    undisturbed: Run, tmp_path: Path, form: str, workers: int
) -> None:
    """Bit for bit as with samples in memory; steps 3 and 6 reach over the end of an epoch."""
    recipe, reference, losses = undisturbed
    streamed = ["data.streaming=true", f"data.num_workers={workers}"]
    table, data = pa.Table.from_pylist(rows()), tmp_path / f"rows.{form}"
    if form == "parquet":
        pyarrow.parquet.write_table(table, data, row_group_size=3)
    elif form == "arrow":
        pyarrow.feather.write_feather(table, data, chunksize=3, compression="lz4")
    if data.exists():
        streamed.append(f"data.path={data}")
    first = train(recipe, *saving(tmp_path / "saved", *streamed), stop_after=3)
    second = train(recipe, *saving(tmp_path / "saved", *streamed), resume=True)
    assert second.spans == [(3, 6)]
    assert first.losses[:2] + second.losses == losses
    contents = [checkpoint_content(folder, 6) for folder in (tmp_path / "saved", reference)]
    for content in contents:
        content["progress"].pop("checksums")  # streamed samples have others
    assert_same_bits(*contents)


@pytest.mark.parametrize("streaming", ["false", "true"])
def test_skipped_lines_are_reported_before_and_after_training(tmp_path: Path, streaming: str) -> None:
    (tmp_path / "good").mkdir()
    good = train(write_job(tmp_path / "good"), "batch.over_budget=repeat")
    recipe = write_job(tmp_path, [{"tokens": [99]}, *rows(), {"tokens": list(range(50))}, {}])
    options = ("data.on_error=skip", f"data.streaming={streaming}", "batch.over_budget=repeat")
    notes = train(recipe, *options)
    assert notes.losses == good.losses
    before, after = notes.told
    kinds = "1 outside the vocabulary, 1 too long, 1 malformed"
    assert before.startswith(f"skipped 3 bad samples ({kinds}): {tmp_path / 'data.jsonl'}:1: field 'tokens' has 99")
    assert after == f"not trained on: {before}"
    assert "data.jsonl:18: the sample has 50 tokens, but batch.max_tokens is 40" in before
    assert "data.jsonl:19: has none" in before
    with pytest.raises(SampleError, match=r"data\.jsonl:1: field 'tokens' has 99"):
        train(recipe, f"data.streaming={streaming}")
