"""``--prefix-tree-score``: from a checkpoint of Megatron-LM, the file that ``mcore-prefix-tree score`` writes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from copy import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from harness.commands import run_command
from megatron_lm import (
    BATCH,
    CPU,
    ENTRY,
    FOLDED,
    LOSS,
    MODEL,
    STOCK,
    TRAIN,
    UNFOLDED,
    VOCAB,
    Run,
    megatron,
    require_checkout,
    search_path,
    trained,
    write_rollouts,
)

from mcore_prefix_tree.data.packed_arrays import pack_array, unpack_array
from mcore_prefix_tree.mcore.release import installed_version

require_checkout()

TP2, PP2 = "--tensor-model-parallel-size 2", "--pipeline-model-parallel-size 2"
LAYOUTS = {"tp2": (2, TP2), "pp2": (2, PP2), "dp2": (2, ""), "tp2-sp-pp2": (4, f"{TP2} --sequence-parallel {PP2}")}
EXPERTS = "--num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 32 --moe-router-load-balancing-type none"
# As MODEL.
RECIPE = f"""
data: {{path: DATA}}
model:
  {{num_layers: 4, hidden_size: 32, num_attention_heads: 4, num_query_groups: 2, ffn_hidden_size: 64,
   vocab_size: {VOCAB}, max_position_embeddings: 64, untie_embeddings_and_output_weights: true, transformer: MORE}}
batch: {{global_batch_size: {BATCH}, max_tokens: 400}}
optimizer: {{lr: 1e-3}}
train_iters: 1
"""
KINDS = {
    "policy": "",
    "critic": "--prefix-tree-objective critic",
    "reward_model": "--prefix-tree-objective reward_model",
    "experts": f"{EXPERTS} --moe-token-dispatcher-type alltoall",
}
MORE = {
    "experts": "{num_moe_experts: 4, moe_router_topk: 2, moe_ffn_hidden_size: 32, moe_router_load_balancing_type: none}"
}


class Models:
    """Checkpoints of Megatron-LM after two steps, and the output of ``mcore-prefix-tree score`` with them."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.data = folder, folder / "rollouts.jsonl"
        write_rollouts(self.data)
        self.samples = f"--prefix-tree-data-path {self.data}"

    def saved(self, kind: str) -> Path:
        folder = self.folder / kind
        if not folder.exists():
            save = f"--save {folder} --exit-interval 2 --prefix-tree-order file"
            if kind in ("policy", "reference"):
                trained(STOCK, CPU, MODEL, TRAIN, UNFOLDED, self.samples, save, f"--seed {len(kind)}")
            else:
                trained(ENTRY, CPU, MODEL, TRAIN, FOLDED, self.samples, save, KINDS[kind])
        return folder

    def scored(self, kind: str, *options: str) -> list[dict[str, Any]]:
        recipe, output = self.folder / f"{kind}.yaml", self.folder / "scored.jsonl"
        text = RECIPE.replace("DATA", str(self.data)).replace("MORE", MORE.get(kind, "{}"))
        name = kind if kind in ("critic", "reward_model") else "sft"
        recipe.write_text(f"{text}objective: {{name: {name}}}\n")
        saved = f"checkpoint.save={self.saved(kind)}"
        run_command("score", recipe, saved, "--output", output, *options, code=0)
        return lines(output)


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return Models(tmp_path_factory.mktemp("models"))


def score(models: Models, kind: str, output: Path, *arguments: str, ranks: int = 1) -> Run:
    common = (CPU, MODEL, KINDS[kind], "--prefix-tree --prefix-tree-max-tokens 400", models.samples)
    sizes = f"--global-batch-size {BATCH} --load {models.saved(kind)}"
    return megatron(ENTRY, *common, sizes, f"--prefix-tree-score {output}", *arguments, ranks=ranks)


def assert_same_file(actual: list[dict[str, Any]], expected: list[dict[str, Any]], *columns: str) -> None:
    """Compare every field; a value of a scalar head, which may be next to zero, by the size of those of the file."""
    assert len(actual) == len(expected) > 2 * BATCH
    for line, wanted in zip(actual, expected, strict=True):
        assert list(line) == list(wanted), "the same fields in the same order"
        for column in wanted:
            if column in columns:
                found, other = (np.array(each[column], dtype=np.float64) for each in (line, wanted))
                scale = max_of(expected, column) if column in ("values", "reward") else 0.05
                np.testing.assert_allclose(found, other, rtol=LOSS, atol=LOSS * scale, equal_nan=True)
                assert np.isfinite(other).any()
            else:
                assert line[column] == wanted[column], column


def max_of(rows: list[dict[str, Any]], column: str) -> float:
    return max(float(np.nanmax(np.abs(np.array(row[column], dtype=np.float64)))) for row in rows)


@pytest.mark.parametrize(
    ("kind", "layout", "columns"),
    [
        ("policy", "tp2", ("old_logprobs", "entropy", "ref_logprobs")),
        ("critic", "pp2", ("values",)),
        pytest.param("policy", "pp2", ("old_logprobs", "entropy", "ref_logprobs"), marks=pytest.mark.ci),
        pytest.param("critic", "tp2", ("values",), marks=pytest.mark.ci),
        pytest.param("reward_model", "tp2-sp-pp2", ("reward",), marks=pytest.mark.ci),
    ],
)
def test_the_file_is_that_of_score(
    models: Models, tmp_path: Path, kind: str, layout: str, columns: tuple[str, ...]
) -> None:
    ranks, arguments = LAYOUTS[layout]
    reference: tuple[str, ...] = ()
    if "ref_logprobs" in columns:
        reference = ("--reference", str(models.saved("reference")))
        arguments += f" --prefix-tree-score-reference {models.saved('reference')}"
    expected = models.scored(kind, *reference)
    run = score(models, kind, tmp_path / "out.jsonl", arguments, ranks=ranks)
    assert run.status == 0, run.output[-8000:]
    assert run.output.count("scored tokens by iteration 2") == 1, "one rank speaks"
    assert_same_file(lines(tmp_path / "out.jsonl"), expected, *columns)
    assert [path.name for path in tmp_path.iterdir()] == ["out.jsonl"]


@pytest.mark.parametrize(
    ("kind", "options", "layout"),
    [
        pytest.param("policy", ("--all-tokens", "--no-entropy"), TP2, marks=pytest.mark.ci),
        pytest.param("experts", (), "--expert-model-parallel-size 2", marks=pytest.mark.ci),
        pytest.param("policy", ("--no-entropy",), f"{PP2} --prefix-tree-streaming", marks=pytest.mark.slow),
        pytest.param("experts", ("--record-routes",), PP2, marks=pytest.mark.ci),
    ],
    ids=["all-tokens", "experts", "streaming", "routes"],
)
def test_options_are_those_of_score(
    models: Models, tmp_path: Path, kind: str, options: tuple[str, ...], layout: str
) -> None:
    ours = " ".join(f"--prefix-tree-score-{option.removeprefix('--')}" for option in options)
    run = score(models, kind, tmp_path / "out.jsonl", ours, layout, ranks=2)
    assert run.status == 0, run.output[-8000:]
    assert_same_file(lines(tmp_path / "out.jsonl"), models.scored(kind, *options), "old_logprobs", "entropy")


def test_routes_of_the_data_are_replayed(models: Models, tmp_path: Path) -> None:
    """Every token goes to the experts after those that the model would choose, behind both doors."""
    routed = copy(models)
    routed.data = tmp_path / "routed.jsonl"
    routed.samples = f"--prefix-tree-data-path {routed.data}"
    unrouted = models.scored("experts", "--record-routes")
    with routed.data.open("w") as stream:
        for line in unrouted:
            chosen = unpack_array(line["routed_experts"], "routed_experts")
            other = np.where(chosen < 0, -1, (chosen + 1) % 4).astype(np.int8)
            stream.write(json.dumps(line | {"routed_experts": pack_array(other)}) + "\n")
    expected = routed.scored("experts")
    run = score(routed, "experts", tmp_path / "out.jsonl", f"{TP2} --sequence-parallel", ranks=2)
    assert run.status == 0, run.output[-8000:]
    assert_same_file(lines(tmp_path / "out.jsonl"), expected, "old_logprobs", "entropy")
    assert any(line["old_logprobs"] != other["old_logprobs"] for line, other in zip(expected, unrouted, strict=True))


@pytest.mark.parametrize(
    "arguments",
    [
        "--make-vocab-size-divisible-by 96",
        pytest.param("--padded-vocab-size 300 --prefix-tree-no-fused-head", marks=pytest.mark.ci),
        pytest.param("--padded-vocab-size 300 --tokenizer-type NullTokenizer", marks=pytest.mark.ci),
    ],
)
def test_padding_of_the_vocabulary_has_no_probability(models: Models, tmp_path: Path, arguments: str) -> None:
    unpadded = f"--padded-vocab-size {VOCAB} --vocab-size {VOCAB}"
    assert unpadded in MODEL
    # In core_v0.16 this tokenizer has a token more, the end of a document.
    size = VOCAB - 1 if "NullTokenizer" in arguments and installed_version().startswith("0.16") else VOCAB
    model = MODEL.replace(unpadded, f"--vocab-size {size} {arguments}")
    common = (CPU, model, "--prefix-tree --prefix-tree-max-tokens 400", models.samples, TP2)
    sizes = f"--global-batch-size {BATCH} --load {models.saved('policy')}"
    run = megatron(ENTRY, *common, sizes, f"--prefix-tree-score {tmp_path / 'out.jsonl'}", ranks=2)
    assert run.status == 0, run.output[-8000:]
    assert_same_file(lines(tmp_path / "out.jsonl"), models.scored("policy"), "old_logprobs", "entropy")


@pytest.mark.ci
def test_rows_of_a_teacher(models: Models, tmp_path: Path) -> None:
    """In a table; the model's arguments are those of its checkpoint."""
    expected = models.scored("policy", "--teacher-top-k", "3")
    output = tmp_path / "out.parquet"
    common = (CPU, "--seq-length 64 --max-position-embeddings 64 --use-checkpoint-args", models.samples)
    sizes = f"--prefix-tree --prefix-tree-max-tokens 400 --global-batch-size {BATCH} --load {models.saved('policy')}"
    asked = f"--prefix-tree-score {output} --prefix-tree-score-teacher-top-k 3"
    run = megatron(ENTRY, *common, sizes, asked, f"--vocab-size {VOCAB}", TP2, ranks=2)
    assert run.status == 0, run.output[-8000:]
    import pyarrow.parquet as pq

    rows = pq.read_table(output).to_pylist()
    assert len(rows) == len(expected)
    for row, wanted in zip(rows, expected, strict=True):
        assert row["teacher"]["token_ids"] == wanted["teacher"]["token_ids"]
        for found, other in zip(row["teacher"]["logprobs"], wanted["teacher"]["logprobs"], strict=True):
            assert (found is None) == (other is None)  # a token that is not scored
            np.testing.assert_allclose(found or [], other or [], rtol=LOSS, atol=1e-7)


@pytest.mark.slow
def test_an_interrupted_run_leaves_nothing(models: Models, tmp_path: Path) -> None:
    rows = models.data.read_text()
    (tmp_path / "many.jsonl").write_text(rows * 200)
    output = tmp_path / "out" / "scored.jsonl"
    output.parent.mkdir()
    words = f"{CPU} {MODEL} --prefix-tree --prefix-tree-max-tokens 400 --prefix-tree-data-path {tmp_path}/many.jsonl"
    words += f" --global-batch-size {BATCH} --load {models.saved('policy')} --prefix-tree-score {output}"
    settings = {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore", "PATH": search_path()}
    job = subprocess.Popen(
        [sys.executable, *ENTRY, *words.split()],
        env=os.environ | settings | {"MASTER_ADDR": "localhost", "MASTER_PORT": "0"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        deadline = time.monotonic() + 120
        while not list(output.parent.iterdir()):
            assert time.monotonic() < deadline, "it writes"
            assert job.poll() is None, job.communicate()[0][-4000:]
            time.sleep(0.1)
        job.send_signal(signal.SIGINT)
        assert job.wait(60) == 130
        assert not list(output.parent.iterdir())
    finally:
        job.kill()
        job.communicate()


@pytest.mark.slow
def test_checkpoints_that_do_not_fit(models: Models, tmp_path: Path) -> None:
    """For example a language model for a critic, a critic for a language model, or another size."""
    for kind, arguments, says in (
        ("policy", "--prefix-tree-objective critic", "holds a language model, without a scalar head to score with"),
        ("critic", "--prefix-tree-objective sft", "does not fit the model that the arguments describe"),
        ("policy", "--ffn-hidden-size 96", "does not fit the model that the arguments describe"),
    ):
        run = score(models, kind, tmp_path / "out.jsonl", arguments)
        (error,) = {line for line in run.output.splitlines() if line.startswith("error: ")}
        assert f"--load {models.saved(kind)} {says}" in error
        assert "mcore_prefix_tree/mcore" not in run.output, "no traceback of ours"
        assert not list(tmp_path.iterdir())
