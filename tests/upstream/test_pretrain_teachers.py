"""Second models under ``--prefix-tree`` in Megatron-LM's own loop: equal to the formulas on unfolded samples."""

from __future__ import annotations

import functools
import json
from pathlib import Path

import numpy as np
import pytest
from harness.commands import run_command
from harness.train_jobs import train
from harness.xtoken_recipes import WORDS, make_tokenizers
from megatron_lm import (
    BATCH,
    CPU,
    ENTRY,
    FIRST,
    FOLDED,
    ITERATIONS,
    LOSS,
    MODEL,
    TRAIN,
    VOCAB,
    StockRuns,
    assert_same_tensors,
    cached_stock_runs,
    megatron,
    only_checkpoint,
    require_checkout,
    trained,
    write_rollouts,
)

from mcore_prefix_tree.data import load_tokenizer

require_checkout()
pytest.importorskip("transformers")

TP2, PP2 = "--tensor-model-parallel-size 2", "--pipeline-model-parallel-size 2"
LAYOUTS = {
    "tp2": (2, TP2),
    "tp2-whole": (2, f"{TP2} --prefix-tree-teacher-tensor-model-parallel-size 1"),
    "pp2": (2, PP2),
    "dp2": (2, ""),
    "dp2-shared": (2, "--prefix-tree-teacher-tensor-model-parallel-size 2"),
    "tp2-sp-pp2": (4, f"{TP2} --sequence-parallel {PP2}"),
}
OPTIONS = {
    "p_kl": {"mode": "p_kl", "top_k": 40, "ce_weight": 0.5},
    "reverse": {"mode": "p_kl", "temperature": 1.5, "reverse": True},
}
TEACHER = """
data: {{path: {data}, tokenizer: {tokenizer}}}
model: {{num_layers: 2, hidden_size: 48, num_attention_heads: 4, num_query_groups: 2, ffn_hidden_size: 48}}
batch: {{global_batch_size: 6, max_tokens: 200}}
optimizer: {{lr: 1e-2}}
train_iters: 8
compare: false
verify: {{enabled: false}}
attention_backend: path
checkpoint: {{save: {save}, save_interval: 8}}
"""


def write_texts(path: Path, tokenizer: Path) -> None:
    """Write trees of words in a tokenizer's tokens, three steps' worth."""
    rng, encoder = np.random.default_rng(0), load_tokenizer(str(tokenizer))
    with path.open("w") as stream:
        for _ in range(3 * BATCH // 4):
            root = " ".join(rng.choice(WORDS, size=4))
            for _ in range(4):
                tokens = encoder.encode_text(f"{root} {' '.join(rng.choice(WORDS, size=int(rng.integers(2, 5))))}")
                mask = rng.choice([0.0, 0.5, 1.0], size=len(tokens), p=[0.2, 0.2, 0.6]).tolist()
                stream.write(json.dumps({"tokens": tokens, "loss_mask": mask}) + "\n")


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two tokenizers, the student's data, a projection, and a teacher that was trained for some steps."""
    made = tmp_path_factory.mktemp("teachers")
    make_tokenizers(made)
    for name in ("student", "teacher"):
        write_texts(made / f"{name}.jsonl", made / name)
    recipe = made / "teacher.yaml"
    recipe.write_text(
        TEACHER.format(data=made / "teacher.jsonl", tokenizer=made / "teacher", save=made / "teacher_runs")
    )
    train(recipe)
    return made


def words(folder: Path, name: str, **changes: object) -> str:
    """Arguments of a run that learns from the teacher."""
    options = json.dumps(OPTIONS[name] | {"projection": str(folder / "w.safetensors")} | changes, separators=(",", ":"))
    size = load_tokenizer(str(folder / "student")).vocab_size
    return (
        f"--prefix-tree-data-path {folder / 'student.jsonl'} --prefix-tree-order file --prefix-tree-tokenizer "
        f"{folder / 'student'} --padded-vocab-size {size + size % 2} --vocab-size {size} "
        f"--prefix-tree-objective xtoken --prefix-tree-objective-options {options} "
        f"--prefix-tree-teacher {folder / 'teacher.yaml'}"
    )


STUDENT = MODEL.replace(f"--padded-vocab-size {VOCAB} --vocab-size {VOCAB}", "")


@pytest.fixture(scope="session")
def stock_runs(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> StockRuns:
    return cached_stock_runs(STUDENT, functools.partial(words, folder), tmp_path_factory)


CUT = "--prefix-tree --prefix-tree-max-tokens 14 --prefix-tree-over-budget carry --micro-batch-size 1"


def check(stock_runs: StockRuns, tmp_path: Path, name: str, layout: str, given: str, *, folded: str = FOLDED) -> None:
    stock, wanted = stock_runs(name)
    ranks, arguments = LAYOUTS[layout]
    base = only_checkpoint(wanted, FIRST, tmp_path / "base")  # stages draw other weights than one process
    folders = f"--load {base} --save {tmp_path / 'saved'}"
    run = trained(ENTRY, CPU, STUDENT, TRAIN, folded, given, arguments, folders, ranks=ranks)
    assert sorted(run.iterations) == sorted(stock.iterations) == list(range(FIRST + 1, ITERATIONS + 1))
    for iteration, figures in run.iterations.items():
        assert figures["lm loss"] == pytest.approx(stock.iterations[iteration]["lm loss"], rel=LOSS), iteration
        assert figures["fold ratio"] > 1.3
        assert "kd" in figures
    assert_same_tensors(tmp_path / "saved", wanted, ITERATIONS)


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        ("p_kl", "tp2"),
        pytest.param("p_kl", "pp2", marks=pytest.mark.ci),
        pytest.param("p_kl", "dp2-shared", marks=pytest.mark.ci),
    ],
)
def test_a_teacher_with_another_tokenizer(
    stock_runs: StockRuns, folder: Path, tmp_path: Path, name: str, layout: str
) -> None:
    check(stock_runs, tmp_path, name, layout, words(folder, name))


@pytest.mark.parametrize(
    ("name", "layout"), [("reverse", "pp2"), *(pytest.param("p_kl", way, marks=pytest.mark.slow) for way in LAYOUTS)]
)
def test_trees_above_the_budget(stock_runs: StockRuns, folder: Path, tmp_path: Path, name: str, layout: str) -> None:
    check(stock_runs, tmp_path, name, layout, words(folder, name), folded=CUT)


@pytest.mark.parametrize("layout", [pytest.param("pp2", marks=pytest.mark.ci)])
def test_rows_that_the_teacher_exported(stock_runs: StockRuns, folder: Path, tmp_path: Path, layout: str) -> None:
    rows, recipe = tmp_path / "rows.parquet", tmp_path / "student.yaml"
    size = load_tokenizer(str(folder / "teacher")).vocab_size
    options = OPTIONS["reverse"] | {"projection": str(folder / "w.safetensors")}
    recipe.write_text(
        TEACHER.format(data=folder / "student.jsonl", tokenizer=folder / "student", save="null")
        + f"objective: {{name: xtoken, teacher_recipe: {folder / 'teacher.yaml'}, options: {json.dumps(options)}}}\n"
    )
    export = ["xtoken", "export-teacher", str(recipe), "--top-k", str(size), "--output", str(rows)]
    run_command(*export, code=0)
    given = words(folder, "reverse", teacher="top_k").replace(str(folder / "student.jsonl"), str(rows))
    check(stock_runs, tmp_path, "reverse", layout, given)


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param("dp2-shared", marks=pytest.mark.ci),
        *(pytest.param(layout, marks=pytest.mark.slow) for layout in ("tp2", "pp2", "tp2-sp-pp2")),
    ],
)
def test_a_teacher_of_the_same_vocabulary_is_its_rows(tmp_path: Path, layout: str) -> None:
    """One process reads rows of the full vocabulary; the ranks ask the model."""
    data, rows, recipe = tmp_path / "rollouts.jsonl", tmp_path / "rows.parquet", tmp_path / "teacher.yaml"
    write_rollouts(data)
    text = TEACHER.format(data=data, tokenizer="null", save=tmp_path / "runs")
    # A teacher nearly as unsure as a new student leaves a divergence of 0.03 between logarithms of 5: fp32 rounds it
    # to no more than six digits. This one is surer.
    sure = f"model: {{vocab_size: {VOCAB}, transformer: {{init_method_std: 0.3}}, "
    recipe.write_text(text.replace("model: {", sure))
    train(recipe)
    scored = ["score", str(recipe), "--teacher-top-k", str(VOCAB), "--output", str(rows)]
    run_command(*scored, code=0)

    def given(path: Path, **options: str) -> str:
        chosen = json.dumps({"divergence": "reverse_kl"} | options, separators=(",", ":"))
        files = f"--prefix-tree-data-path {path} --prefix-tree-order file"
        return f"{files} --prefix-tree-objective distill --prefix-tree-objective-options {chosen}"

    common = (ENTRY, CPU, MODEL, TRAIN, FOLDED, given(rows), f"--save {tmp_path / 'alone'}")
    trained(*common, f"--exit-interval {FIRST}")
    stock = trained(*common, f"--load {tmp_path / 'alone'}")
    ranks, arguments = LAYOUTS[layout]
    base = only_checkpoint(tmp_path / "alone", FIRST, tmp_path / "base")
    asked = f"{given(data, teacher='full')} --prefix-tree-teacher {recipe}"
    folders = f"--load {base} --save {tmp_path / 'saved'}"
    run = trained(ENTRY, CPU, MODEL, TRAIN, FOLDED, asked, arguments, folders, ranks=ranks)
    for iteration, figures in run.iterations.items():
        assert figures["lm loss"] == pytest.approx(stock.iterations[iteration]["lm loss"], rel=LOSS), iteration
        assert figures["lm loss"] > 1
    assert_same_tensors(tmp_path / "saved", tmp_path / "alone", ITERATIONS)


@pytest.mark.parametrize(
    ("changes", "arguments", "says"),
    [
        (
            {},
            "--prefix-tree-teacher-tensor-model-parallel-size 3",
            "=3 does not divide the 1 ranks of a pipeline stage",
        ),
        pytest.param(
            {"top_k": 10**6}, "", "--prefix-tree-objective-options.top_k=1000000 is more than the", marks=pytest.mark.ci
        ),
        pytest.param(
            {"projection": None},
            "",
            "--prefix-tree-objective-options.projection is missing, which mode=p_kl reads",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            {}, "--prefix-tree-no-fused-head", "--prefix-tree-no-fused-head keeps all logits", marks=pytest.mark.slow
        ),
        pytest.param({}, "--prefix-tree-teacher none.yaml", "none.yaml", marks=pytest.mark.slow),
    ],
)
def test_mistakes_get_one_sentence(folder: Path, changes: dict[str, object], arguments: str, says: str) -> None:
    run = megatron(ENTRY, CPU, STUDENT, TRAIN, FOLDED, words(folder, "p_kl", **changes), arguments)
    (error,) = [line for line in run.output.splitlines() if line.startswith("error: ")]
    assert says in error
    assert "mcore_prefix_tree/mcore" not in run.output, "no traceback of ours"
