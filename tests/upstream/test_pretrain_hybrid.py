"""Megatron-LM's ``pretrain_hybrid.py``, folded: equal to the stock HybridModel on the same samples, one by one."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import transformers
from harness.commands import run_process
from megatron_lm import (
    CPU,
    ENTRY,
    FIRST,
    FOLDED,
    HYBRID,
    HYBRID_LAYERS,
    ITERATIONS,
    LOSS,
    MODEL,
    TRAIN,
    VARIABLE,
    Run,
    Stock,
    assert_same_tensors,
    hybrid_model,
    objective_words,
    only_checkpoint,
    require_checkout,
    train_unfolded,
    trained,
    write_rollouts,
)

require_checkout()

ROOT = Path(os.environ[VARIABLE])
DELTA_NET = (
    "--linear-conv-kernel-dim 4 --linear-key-head-dim 8 --linear-value-head-dim 12 --linear-num-key-heads 2 "
    "--linear-num-value-heads 4"
)
MAMBA = "--mamba-state-dim 8 --mamba-head-dim 12 --mamba-num-groups 2 --mamba-num-heads 4"
HAS_DELTA_NET = (ROOT / "megatron" / "core" / "ssm" / "gated_delta_net" / "gdn.py").is_file()
HAS_SCRIPT = (ROOT / "pretrain_hybrid.py").is_file()
needs_script = pytest.mark.skipif(not HAS_SCRIPT, reason="pretrain_hybrid.py came with core_v0.18")
READS_GPTS = (ROOT / "megatron" / "core" / "dist_checkpointing" / "gpt_checkpoint_interop.py").is_file()
reads_gpts = pytest.mark.skipif(not READS_GPTS, reason="HybridModel loads a GPT's checkpoint since core_v0.19")


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> Stock:
    """Attention and MLPs."""
    return train_unfolded(hybrid_model("*-*-"), tmp_path_factory.mktemp("hybrid"))


def check(run: Run, stock: Stock, folder: Path) -> None:
    assert sorted(run.losses) == list(range(FIRST + 1, ITERATIONS + 1))
    for iteration, loss in run.losses.items():
        assert loss == pytest.approx(stock.losses[iteration], rel=LOSS), iteration
        assert run.iterations[iteration]["fold ratio"] > 1.3
    assert_same_tensors(folder, stock.folder, ITERATIONS)


@needs_script
@pytest.mark.parametrize(
    ("ranks", "pattern", "layout"),
    [
        pytest.param(2, "*-*-", "--tensor-model-parallel-size 2 --recompute-granularity selective", id="tp2-selective"),
        pytest.param(2, "*-*|-", "--pipeline-model-parallel-size 2", id="pp2"),
    ],
)
def test_resumed_from_the_stock_run_in_another_layout(
    hybrid: Stock, tmp_path: Path, ranks: int, pattern: str, layout: str
) -> None:
    base = only_checkpoint(hybrid.folder, FIRST, tmp_path / "base")
    folders = f"--load {base} --save {tmp_path / 'saved'}"
    run = trained(HYBRID, CPU, hybrid_model(pattern), TRAIN, FOLDED, hybrid.data, folders, layout, ranks=ranks)
    check(run, hybrid, tmp_path / "saved")


@reads_gpts
def test_checkpoint_of_a_gpt_continues_as_a_hybrid_model(stock: Stock, base: Path, tmp_path: Path) -> None:
    """Weights and optimizer: the losses stay those of the unfolded GPT."""
    layout = f"--load {base} --save {tmp_path} --tensor-model-parallel-size 2"
    run = trained(HYBRID, CPU, hybrid_model("*-*-*-*-"), TRAIN, FOLDED, stock.data, layout, ranks=2)
    assert sorted(run.losses) == list(range(FIRST + 1, ITERATIONS + 1))
    for iteration, loss in run.losses.items():
        assert loss == pytest.approx(stock.losses[iteration], rel=LOSS), iteration


@reads_gpts
@pytest.mark.ci
def test_critic_starts_from_a_gpt_in_either_model(base: Path, tmp_path: Path) -> None:
    write_rollouts(tmp_path / "rollouts.jsonl")
    given = f"{objective_words(tmp_path / 'rollouts.jsonl', 'critic')} --pretrained-checkpoint {base} --exit-interval 3"
    programs = {ENTRY: MODEL, HYBRID: hybrid_model("*-*-*-*-")}
    gpt, hybrid = (trained(program, CPU, kind, TRAIN, FOLDED, given) for program, kind in programs.items())
    assert sorted(hybrid.losses) == [1, 2, 3]
    assert hybrid.losses == pytest.approx(gpt.losses, rel=LOSS)


@needs_script
def test_recurrent_layers_do_not_see_the_budget(tmp_path: Path) -> None:
    """With a loss of whole samples on two stages: a pass before each step keeps states, too."""
    if not HAS_DELTA_NET:
        pytest.skip("Gated DeltaNet follows a tree since core_v0.19")
    path, model = tmp_path / "rollouts.jsonl", f"{hybrid_model('MG|*-')} {DELTA_NET} {MAMBA}"
    write_rollouts(path)
    words = (objective_words(path, "dpo"), "--prefix-tree --micro-batch-size 1 --pipeline-model-parallel-size 2")
    wide, cut = (
        trained(HYBRID, CPU, model, TRAIN, *words, f"--prefix-tree-max-tokens {size} --exit-interval 3", ranks=2).losses
        for size in ("1000", "24 --prefix-tree-over-budget carry")
    )
    assert cut == pytest.approx(wide, rel=LOSS)


@needs_script
def test_dry_run(hybrid: Stock) -> None:
    run = trained(HYBRID, CPU, hybrid_model("*-*-"), TRAIN, FOLDED, hybrid.data, "--prefix-tree-dry-run")
    assert "first step: expected speed-up " in run.output


NEW = [
    (HYBRID, f"{HYBRID_LAYERS} *E", "--hybrid-layer-pattern *E has layers of experts, E, but no --num-experts"),
    (HYBRID, "--num-layers 4", "pretrain_hybrid.py needs --hybrid-layer-pattern, such as '*-*-'; -m mcore_prefix_tree"),
    (
        ENTRY,
        f"{HYBRID_LAYERS} *-*-",
        "--hybrid-layer-pattern is an argument of pretrain_hybrid.py; pretrain_gpt.py ignores it: start",
    ),
    (
        HYBRID,
        f"{HYBRID_LAYERS} *-*- --prefix-tree-hf FOLDER",
        "--prefix-tree-hf with --hybrid-layer-pattern: its weights are",
    ),
    (HYBRID, "--hybrid-layer-pattern *-", "--hybrid-layer-pattern without --spec: Megatron-Core's own hybrid layers"),
    (
        HYBRID,
        f"{HYBRID_LAYERS} *-*- --context-parallel-size 2",
        "prefix-tree training does not support --context-parallel-size 2",
    ),
]
OLD = [
    (HYBRID, "--num-layers 4", "has no pretrain_hybrid.py, which came with core_v0.18; check out core_v0.19.0"),
    (ENTRY, "--hybrid-override-pattern M-*-", "--hybrid-override-pattern is an argument of pretrain_hybrid.py"),
    (
        ENTRY,
        "--num-layers 4 --is-hybrid-model",
        "--is-hybrid-model: name the layers with --hybrid-layer-pattern of core_",
    ),
    (
        ("-m", "mcore_prefix_tree.train_rl"),
        "--perform-rl-step",
        "the train_rl.py of this checkout is older than that of core_v0.19.0",
    ),
]


@pytest.mark.parametrize(("entry", "arguments", "sentence"), NEW if HAS_SCRIPT else OLD)
def test_rejected_settings_get_one_sentence(
    entry: tuple[str, ...], arguments: str, sentence: str, tmp_path: Path
) -> None:
    if "FOLDER" in arguments:
        config = transformers.LlamaConfig(
            architectures=["LlamaForCausalLM"], num_hidden_layers=4, hidden_size=64, vocab_size=64
        )
        transformers.LlamaForCausalLM(config).save_pretrained(tmp_path)
    rest = MODEL.replace("--num-layers 4", arguments.replace("FOLDER", str(tmp_path)))
    command = f"{CPU} {rest} {TRAIN} {FOLDED} --prefix-tree-data-path /dev/null --prefix-tree-dry-run"
    if "without --spec" in sentence:
        command = command.replace(" --prefix-tree-dry-run", "")
    done = run_process(
        [sys.executable, *entry, *command.split()],
        env={"MASTER_ADDR": "localhost", "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"},
        timeout=300,
    )
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert sentence in line
    assert done.returncode == 2
