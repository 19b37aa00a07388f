"""Models of all kinds in Megatron-LM's own loop: losses and weights are those of the stock run, sample by sample."""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from megatron_lm import (
    BATCH,
    CPU,
    ENTRY,
    FOLDED,
    HYBRID,
    ITERATIONS,
    LOSS,
    MODEL,
    STOCK,
    TRAIN,
    UNFOLDED,
    VARIABLE,
    Run,
    Stock,
    assert_same_tensors,
    hybrid_model,
    objective_words,
    only_checkpoint,
    require_checkout,
    trained,
    write_rollouts,
)

from mcore_prefix_tree.mcore.release import HAS_DEPTHS, NEEDS_DEPTHS

require_checkout()

ROOT = Path(os.environ[VARIABLE])
DELTA_NET = (
    "--linear-conv-kernel-dim 4 --linear-key-head-dim 8 --linear-value-head-dim 12 --linear-num-key-heads 2 "
    "--linear-num-value-heads 4"
)
MAMBA = "--mamba-state-dim 8 --mamba-head-dim 12 --mamba-num-groups 2 --mamba-num-heads 4"
EXPERTS = "--num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 32 --moe-token-dispatcher-type alltoall"
UNBALANCED = f"{EXPERTS} --moe-router-load-balancing-type none"
BALANCED = (
    f"{EXPERTS} --moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 0.05 --moe-z-loss-coeff 0.01 "
    "--moe-router-score-function sigmoid --moe-router-enable-expert-bias --moe-router-bias-update-rate 0.01"
)
# Rotary embeddings would number the tokens of a row of samples, and upstream counts no biases under a mask of padding.
COMPARING = (
    f"{EXPERTS} --moe-router-load-balancing-type global_aux_loss --moe-aux-loss-coeff 0.5 --moe-z-loss-coeff 0.01 "
    "--position-embedding-type learned_absolute"
)
# Built like DeepSeek-V3: multi-latent attention, a shared expert, experts chosen with biases.
LATENT = (
    MODEL.replace("--group-query-attention --num-query-groups 2", "--multi-latent-attention")
    + " --q-lora-rank 12 --kv-lora-rank 10 --qk-head-dim 8 --qk-pos-emb-head-dim 4 --v-head-dim 6 "
    f"--rope-type yarn --rotary-scaling-factor 4 {UNBALANCED} --moe-shared-expert-intermediate-size 16 "
    "--moe-router-score-function sigmoid --moe-router-enable-expert-bias"
)
OF_MOE = "--recompute-granularity selective --recompute-modules moe"
DEPTHS = "--mtp-num-layers 2 --mtp-loss-scaling-factor 0.5"
PP2 = "--pipeline-model-parallel-size 2"
TP2 = "--tensor-model-parallel-size 2"


@dataclass(frozen=True, kw_only=True)
class Kind:
    """A job: arguments of both runs, of only one of them, and of only the stock run's first step.

    Attributes:
        pattern: of a hybrid model in the folded run, whose pipeline stages the stock run lacks.
        layouts: more arguments of the folded run, by name; those behind the first run in CI.
        batch: whether the stock run takes a step at once, as formulas of objectives and rows of samples do.
        moments: whether the optimizer's are compared: gradients of decays are the rest of larger sums, in fp32.
    """

    model: str = MODEL
    pattern: str | None = None
    more: str = ""
    stock: tuple[str, ...] = STOCK
    first: str = ""
    rest: str = ""
    layouts: tuple[str, ...] = ("",)
    objective: str | None = None
    batch: bool = False
    last: int = 5
    moments: bool = True
    depths: bool = False


KINDS = {
    "experts": Kind(more=UNBALANCED, layouts=(OF_MOE,)),
    "balanced experts": Kind(more=BALANCED),
    "balanced experts, dpo": Kind(more=BALANCED, objective="dpo", batch=True),
    "balancing that compares samples": Kind(more=COMPARING, batch=True, layouts=("--micro-batch-size 16",), last=3),
    "latent attention, biased experts": Kind(
        model=LATENT,
        stock=(*STOCK, "--spec", "latent_spec", "expert_layer"),
        first="--moe-router-bias-update-rate 0.1",  # biases that are not zero
        rest="--moe-router-bias-update-rate 0",
    ),
    "depths": Kind(more=DEPTHS, layouts=("", PP2), last=3, depths=True),
    "depths of a pattern": Kind(
        pattern="*-|*-/*-/*-", more="--mtp-loss-scaling-factor 0.5", layouts=("", PP2), last=3, depths=True
    ),
    "hybrid experts": Kind(pattern="*E*E", more=UNBALANCED),
    "delta net": Kind(pattern="G-G*", more=f"{DELTA_NET} --moe-token-dispatcher-type alltoall", moments=False),
    "Mamba": Kind(pattern="M-M*", more=f"{MAMBA} --moe-token-dispatcher-type alltoall"),
    "hybrid, grpo": Kind(pattern="*-*-", layouts=(TP2,), objective="grpo", batch=True, last=ITERATIONS),
    "hybrid, critic": Kind(
        pattern="*-*-", layouts=(f"{TP2} --sequence-parallel",), objective="critic", batch=True, last=ITERATIONS
    ),
}
IN_CI = {("hybrid, critic", KINDS["hybrid, critic"].layouts[0]), ("depths", PP2), ("depths of a pattern", PP2)}
Runs = Callable[[str], tuple[Run, Path, str]]


@pytest.fixture(scope="module")
def stock_runs(stock: Stock, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """The stock run of a kind from its second step on, its folder, and its data; once for all layouts."""
    rollouts = tmp_path_factory.mktemp("rollouts") / "rollouts.jsonl"
    write_rollouts(rollouts)

    @functools.cache
    def run(name: str) -> tuple[Run, Path, str]:
        kind, folder = KINDS[name], tmp_path_factory.mktemp("stock")
        model = kind.model if kind.pattern is None else hybrid_model(kind.pattern.replace("|", ""))
        data = stock.data if kind.objective is None else objective_words(rollouts, kind.objective)
        size = f"--micro-batch-size {BATCH}" if kind.batch else ""
        common = (CPU, model, kind.more, TRAIN, UNFOLDED, size, data, f"--save {folder}")
        trained(kind.stock, *common, kind.first, "--exit-interval 1")
        return trained(kind.stock, *common, kind.rest, f"--load {folder} --exit-interval {kind.last}"), folder, data

    return run


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        pytest.param(name, layout, marks=[pytest.mark.ci] if (name, layout) in IN_CI else [])
        for name, kind in KINDS.items()
        for layout in kind.layouts
    ],
)
def test_folded_trains_as_the_stock_run(stock_runs: Runs, tmp_path: Path, name: str, layout: str) -> None:
    kind = KINDS[name]
    if kind.pattern is not None and not (ROOT / "pretrain_hybrid.py").is_file():
        pytest.skip("pretrain_hybrid.py came with core_v0.18")
    if "G" in (kind.pattern or "") and not (ROOT / "megatron/core/ssm/gated_delta_net/gdn.py").is_file():
        pytest.skip("Gated DeltaNet follows a tree since core_v0.19")
    if kind.depths and not HAS_DEPTHS:
        pytest.skip(f"needs {NEEDS_DEPTHS}")
    alone, folder, data = stock_runs(name)
    pattern = (kind.pattern or "").replace("|", "|" if PP2 in layout else "")
    start = only_checkpoint(folder, 1, tmp_path / "start")
    run = trained(
        *(HYBRID if pattern else ENTRY, CPU, hybrid_model(pattern) if pattern else kind.model, kind.more, kind.rest),
        *(TRAIN, FOLDED, data, layout, f"--load {start} --save {tmp_path / 'saved'} --exit-interval {kind.last}"),
        ranks=2 if "parallel-size 2" in layout else 1,
    )
    assert sorted(run.iterations) == sorted(alone.iterations) == list(range(2, kind.last + 1))
    for iteration, figures in alone.iterations.items():
        found = run.iterations[iteration]
        if kind.objective is None or "lm loss" in figures:  # Megatron prints no loss that is not positive
            assert found["lm loss"] == pytest.approx(figures["lm loss"], rel=LOSS, abs=1e-7), iteration
        assert found["fold ratio"] > 1.3
    assert_same_tensors(tmp_path / "saved", folder, kind.last, moments=kind.moments)
    assert len(re.findall(r"mtp_[12] loss: \d", run.output)) == 2 * kind.depths * len(run.iterations)


def test_recipe_of_experts_recomputes_as_here() -> None:
    recipe = (Path(__file__).parents[2] / "recipes" / "qwen3_30b_a3b.sh").read_text()
    assert re.findall(r"--recompute-\S+ \S+", recipe) == re.findall(r"--recompute-\S+ \S+", OF_MOE)


def test_stock_run_continues_from_a_folded_checkpoint(stock: Stock, base: Path, tmp_path: Path) -> None:
    trained(ENTRY, *stock.args(tmp_path), f"--load {base} --exit-interval 3")
    alone = trained(STOCK, CPU, MODEL, TRAIN, UNFOLDED, stock.data, f"--load {tmp_path} --exit-interval 5")
    assert sorted(alone.losses) == [4, 5]
    for iteration, loss in alone.losses.items():
        assert loss == pytest.approx(stock.losses[iteration], rel=LOSS)
