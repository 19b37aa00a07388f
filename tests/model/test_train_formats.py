"""Training on data as people have it: the same losses as on the same samples written as ``tokens`` in order."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from harness.commands import run_command, write_rows
from harness.train_jobs import FLOAT64, rows_with_signals, train, write_job

from mcore_prefix_tree.data import load_tokenizer, read_samples
from mcore_prefix_tree.data.write import make_row

SAMPLES_BY_GROUP = "batch.global_batch_size=null"
STEPS = ("train_iters=2", "batch.max_tokens=400", "batch.global_batch_size=4", *FLOAT64)


def test_trl_preferences_train_as_their_tokens_do(tmp_path: Path) -> None:
    user = [{"role": "user", "content": "2 + 3"}]
    said = [[{"role": "assistant", "content": text}] for text in ("5", "6, I think")]
    given = [
        {"prompt": user, "chosen": said[0], "rejected": said[1]},
        {"chosen": [*user, *said[1]], "rejected": [*user, *said[0]]},
        {"prompt": "2 + 3 =", "chosen": " 5", "rejected": " 6"},
        {"chosen": "2 + 3 = five", "rejected": "2 + 3 = six"},
    ]
    recipe = write_job(tmp_path, given)
    tokens = [make_row(one) for one in read_samples(tmp_path / "data.jsonl", tokenizer=load_tokenizer())]
    assert [len({row["pair"] for row in tokens}), len(tokens)] == [4, 8]
    path = write_rows(tmp_path / "tokens.jsonl", [json.loads(json.dumps(row, default=list_of)) for row in tokens])
    preferring = (*STEPS, "objective.name=orpo", "model.vocab_size=32768", "data.order=file")
    theirs = train(recipe, *preferring, "data.tokenizer=mistral-v7").losses
    assert theirs == train(recipe, *preferring, f"data.path={path}").losses
    assert len(theirs) == 2


def list_of(array: object) -> object:
    return array.tolist()  # type: ignore[attr-defined]


def test_groups_that_lie_apart_train_as_neighbours_do(tmp_path: Path) -> None:
    """The same steps, also where the job is resumed. Streaming refuses such groups."""
    neighbours = rows_with_signals(neighbours=3)
    apart = [row for member in range(3) for row in neighbours[member::3]]
    recipe = write_job(tmp_path, apart)
    path = write_rows(tmp_path / "sorted.jsonl", neighbours)
    steps = (*STEPS, "train_iters=3", "data.num_workers=0")
    grpo = (*steps, "objective.name=grpo", "batch.groups_per_step=2", "batch.global_batch_size=null")
    given = train(recipe, *grpo).losses
    assert len(given) == 3
    assert given == train(recipe, *grpo, f"data.path={path}").losses
    saving = (*grpo, f"checkpoint.save={tmp_path / 'runs'}", "checkpoint.save_interval=1")
    assert train(recipe, *saving, stop_after=2).losses == given[:2]
    assert train(recipe, *saving, resume=True).losses == given[1:], "the second step was not saved yet"


def test_names_on_the_command_line(tmp_path: Path) -> None:
    line = {"ids": [1, 2, 3], "task": "a"}
    path = write_rows(tmp_path / "renamed.jsonl", [line, line | {"ids": [1, 2, 4]}])
    given = run_command("inspect", path, "--fields", '{"tokens": "ids", "group": "task"}', code=0)
    plain = write_rows(tmp_path / "plain.jsonl", [{"tokens": [1, 2, 3]}, {"tokens": [1, 2, 4]}])
    assert given.output.splitlines()[-3:] == run_command("inspect", plain).output.splitlines()[-3:]
    for fields, says in (
        ("[3]", "--fields: '[3]' is not a JSON object"),
        ('{"grop": "a"}', "--fields: 'grop' is not a"),
    ):
        failed = run_command("plan", path, "--max-tokens", "9", "--fields", fields)
        assert failed.exit_code != 0
        assert says in failed.output


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("form", ["jsonl", "parquet"])
def test_rows_of_other_trainers_train_as_their_tokens_do(tmp_path: Path, streaming: bool, form: str) -> None:
    """Labels and padding, fields as long as the response, prompt and response apart: one loss, in SFT and in GRPO."""
    prompt, answers = [5, 6, 7], [[8, 9, 10], [8, 11], [12], [13, 14]]
    plain, given = [], []
    for place, answer in enumerate(answers):
        tokens, scores = prompt + answer, [-0.5 * (at + 1) for at in range(len(answer))]
        mask = [1] * (len(answer) - 1) + [place % 2]
        ids = {"reward": float(place), "group": "q"}
        plain.append({"tokens": tokens, "loss_mask": [0] * 3 + mask, "old_logprobs": [None] * 3 + scores, **ids})
        labels = [-100] * 3 + [token if scored else -100 for token, scored in zip(answer, mask, strict=True)]
        padding = 4 - len(answer)
        given.append(
            {
                "input_ids": [0, 0, *tokens, *[0] * padding],
                "attention_mask": [0, 0, *[1] * len(tokens), *[0] * padding],
                "labels": [-100, -100, *labels, *[-100] * padding],
                "response_mask": mask + [0] * padding,
                "old_log_probs": scores + [0.0] * padding,
                **ids,
            }
        )
    recipe, path = write_job(tmp_path, plain), tmp_path / f"given.{form}"
    write_rows(path, given)
    if form == "parquet":
        pq.write_table(pa.Table.from_pylist(given), path)
    names = f"data.path={path}", "data.fields={tokens: input_ids, old_logprobs: old_log_probs}"
    steps = (*STEPS, "data.order=file", f"data.streaming={str(streaming).lower()}", "data.num_workers=0")
    for objective in (("objective.name=sft",), ("objective.name=grpo", "batch.groups_per_step=1", SAMPLES_BY_GROUP)):
        losses = train(recipe, *steps, *objective).losses
        assert losses == train(recipe, *steps, *objective, *names).losses
        assert len(losses) == 2
