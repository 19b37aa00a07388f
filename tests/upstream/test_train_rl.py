"""``train_rl.py`` with ``--prefix-tree``: equal to the loop's own forward step on unfolded trajectories."""

from __future__ import annotations

import functools
import json
import os
from pathlib import Path

import pytest
from megatron_lm import (
    CPU,
    HERE,
    HYBRID_LAYERS,
    LOSS,
    MODEL,
    RL,
    STOCK_RL,
    VARIABLE,
    VOCAB,
    Run,
    assert_same_tensors,
    hybrid_model,
    megatron,
    require_checkout,
    require_packages,
    trained,
)

require_checkout()
INFERENCE = Path(os.environ[VARIABLE]) / "megatron" / "inference" / "utils.py"
if not INFERENCE.is_file() or "def add_inference_args(" not in INFERENCE.read_text():
    pytest.skip("train_rl.py of this checkout is older than core_v0.19", allow_module_level=True)
require_packages("wandb", "openai", "fastapi", "uvicorn", "httpx")
event_accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")

ITERATIONS, COLLECTION = 20, 4  # rollouts are made anew after each COLLECTION
TRAIN = (
    f"--train-iters {ITERATIONS} --lr 3e-3 --min-lr 1e-4 --lr-decay-style cosine --lr-warmup-iters 1 --adam-eps 1e-3 "
    "--log-interval 1 --eval-interval 1000 --eval-iters 0 --save-interval 1000 --ckpt-format torch_dist "
    "--tokenizer-type NullTokenizer"
)
# Four prompts of six rollouts have 32 turns, of which a step takes 16. All terms of the loss are on, and bind.
LOOP = (
    "--perform-rl-step --grpo-prompts-per-step 4 --grpo-group-size 6 --global-batch-size 12 --grpo-iterations 2 "
    "--grpo-clamp-eps-lower 0.1 --grpo-clamp-eps-upper 0.2 --grpo-kl-beta 0.05 --grpo-entropy-term-weight 0.01 "
    "--rl-inference-logprobs-is-correction --rl-importance-sampling-truncation-coef 1.2 --inference-max-seq-length 64"
)
PER_TOKEN = "--calculate-per-token-loss"
PACKED = f"--rl-use-sequence-packing {PER_TOKEN}"
HYBRID_MODEL = hybrid_model("*-*-")
# How each run's loss is normalised; its model; and its layout: ranks, and arguments of only the folded run.
MODES = {"rows": PER_TOKEN, "mean-of-micro-batches": "", "bins": PACKED, "hybrid": PER_TOKEN}
MODELS = dict.fromkeys(MODES, MODEL) | {"hybrid": HYBRID_MODEL}
LAYOUTS = {
    "one": (1, ""),
    "tp2-sp": (2, "--tensor-model-parallel-size 2 --sequence-parallel"),
    "pp2": (2, "--pipeline-model-parallel-size 2"),
    "pp2-cut": (2, "--pipeline-model-parallel-size 2 --hybrid-layer-pattern *-*|-"),
    # A step of main's loop has all of a collection's turns, which have to divide into its micro-batches.
    "dp2": (2, "--micro-batch-size 1"),
}
# The stock attention does not support micro-batches of several trajectories, so both sides have one if they matter.
FOLDED = {
    "rows": "--micro-batch-size 2",
    "mean-of-micro-batches": "--micro-batch-size 1",
    "bins": "--micro-batch-size 1",
    "hybrid": "--micro-batch-size 2",
}
QUICK = {("rows", "tp2-sp"), ("rows", "pp2"), ("bins", "dp2"), ("hybrid", "tp2-sp")}
EVERY = [
    pytest.param(mode, layout, id=f"{mode}-{layout}", marks=[] if (mode, layout) in QUICK else pytest.mark.slow)
    for mode in MODES
    for layout in LAYOUTS
    if layout not in ({"pp2"} if mode == "hybrid" else {"pp2-cut"})
]
EXPERTS = "--num-experts 4 --moe-token-dispatcher-type alltoall --moe-router-load-balancing-type none"
# Rollouts of rl_steps.py, a model, and the arguments of their step.
STEPS = {
    "rows": ("shared", MODEL, f"--micro-batch-size 2 {PER_TOKEN}"),
    "mean-of-micro-batches": ("shared", MODEL, "--micro-batch-size 1"),
    "bins": ("shared", MODEL, f"--micro-batch-size 1 {PACKED}"),
    # The planner finds no room in so few, and folds each as it is.
    "full-bins": ("unshared", MODEL, f"--micro-batch-size 1 {PACKED}"),
    "experts": ("shared", f"{MODEL} {EXPERTS}", f"--micro-batch-size 2 {PER_TOKEN}"),
    "hybrid": ("shared", HYBRID_MODEL, f"--micro-batch-size 2 {PER_TOKEN}"),
    "hybrid-bins": ("shared", HYBRID_MODEL, f"--micro-batch-size 1 {PACKED}"),
    "hybrid-logits": ("shared", HYBRID_MODEL, f"--micro-batch-size 2 {PER_TOKEN} --prefix-tree-no-fused-head"),
}
LOGGED = {"lm loss", "rl/kl_term", "rl/pi_over_pi_old", "rl/entropy_term"}


def figures(folder: Path) -> dict[str, dict[int, float]]:
    """A run's values for TensorBoard, by name and iteration."""
    events = event_accumulator.EventAccumulator(str(folder))
    events.Reload()
    return {name: {event.step: event.value for event in events.Scalars(name)} for name in events.Tags()["scalars"]}


@pytest.fixture(scope="session")
def base(tmp_path_factory: pytest.TempPathFactory) -> functools._lru_cache_wrapper[Path]:
    """Make a model's weights to start from: a pipeline's stages draw others than one process."""

    @functools.cache
    def run(model: str) -> Path:
        folder = tmp_path_factory.mktemp("base")
        start = TRAIN.replace(f"--train-iters {ITERATIONS}", f"--train-iters {COLLECTION}")
        trained(STOCK_RL, CPU, model, start, LOOP, PER_TOKEN, "--micro-batch-size 1", f"--save {folder}")
        return folder

    return run


def loop(program: tuple[str, ...], model: str, base: Path, folder: Path, *arguments: str, ranks: int = 1) -> Run:
    start = (
        f"--load {base} --finetune --no-load-optim --no-load-rng --save {folder} --tensorboard-dir {folder / 'logs'}"
    )
    return trained(program, CPU, model, TRAIN, LOOP, start, *arguments, ranks=ranks)


@pytest.fixture(scope="session")
def stock_steps(
    base: functools._lru_cache_wrapper[Path], tmp_path_factory: pytest.TempPathFactory
) -> functools._lru_cache_wrapper[Path]:
    """Run the checkout's own steps once for all layouts; bins and averages depend on the ranks."""

    @functools.cache
    def run(mode: str, ranks: int) -> Path:
        folder, model = tmp_path_factory.mktemp("alone"), MODELS[mode]
        loop(STOCK_RL, model, base(model), folder, MODES[mode], "--micro-batch-size 1", ranks=ranks)
        return folder

    return run


@pytest.mark.parametrize(("mode", "layout"), EVERY)
def test_folded_rollouts_train_like_unfolded_trajectories(
    stock_steps: functools._lru_cache_wrapper[Path],
    base: functools._lru_cache_wrapper[Path],
    tmp_path: Path,
    mode: str,
    layout: str,
) -> None:
    (ranks, arguments), model = LAYOUTS[layout], MODELS[mode]
    wanted = stock_steps(mode, ranks if layout == "dp2" else 1)  # the loop deals other trajectories to a step then
    asked = (MODES[mode], FOLDED[mode], arguments, "--prefix-tree")
    run = loop(RL, model, base(model), tmp_path, *asked, ranks=ranks)
    found, expected = figures(tmp_path / "logs"), figures(wanted / "logs")
    assert found.keys() - expected.keys() <= {"fold ratio", "fold ratio vs samples"}
    for name in sorted({name for name in expected if name.startswith("rl/")} | LOGGED | {"grad-norm", "mean_reward"}):
        assert found[name].keys() == expected[name].keys(), name
        assert len(found[name]) == ITERATIONS, name
        for iteration, value in expected[name].items():
            # Terms of both signs and of size 1 add up to the loss, so its rounding is theirs.
            assert found[name][iteration] == pytest.approx(value, rel=LOSS, abs=LOSS), (name, iteration)
    assert max(expected["rl/kl_term"].values()) > 1e-3
    assert max(expected["rl/truncated_from_below"].values()) > 0.01
    assert max(found["fold ratio"].values()) > 1.3
    assert "fold ratio" in run.output
    assert_same_tensors(tmp_path, wanted, ITERATIONS)


@pytest.mark.parametrize("arguments", ["", pytest.param("--prefix-tree-no-fused-head", marks=pytest.mark.slow)])
def test_padding_of_the_vocabulary_has_no_probability(
    stock_steps: functools._lru_cache_wrapper[Path],
    base: functools._lru_cache_wrapper[Path],
    tmp_path: Path,
    arguments: str,
) -> None:
    """The checkout's own steps, on a vocabulary without padding, are the oracle."""
    wanted, padded = stock_steps("rows", 1), MODEL.replace(f"--padded-vocab-size {VOCAB}", "--padded-vocab-size 200")
    assert padded != MODEL
    ranks, layout = LAYOUTS["tp2-sp"]
    asked = (MODES["rows"], FOLDED["rows"], layout, "--prefix-tree", arguments)
    loop(RL, padded, base(MODEL), tmp_path, *asked, ranks=ranks)
    found, expected = figures(tmp_path / "logs"), figures(wanted / "logs")
    for name in sorted(LOGGED | {"grad-norm"}):
        assert len(found[name]) == ITERATIONS, name
        for iteration, value in expected[name].items():
            assert found[name][iteration] == pytest.approx(value, rel=LOSS, abs=LOSS), (name, iteration)
    assert_same_tensors(tmp_path, wanted, ITERATIONS, padded=True)


@pytest.mark.parametrize("case", STEPS)
def test_a_step_in_double_precision(case: str, tmp_path: Path) -> None:
    """Losses, all that is logged, every gradient and the results of get_logprobs."""
    rollouts, model, arguments = STEPS[case]
    loop = LOOP.replace("--grpo-iterations 2", "")
    run = megatron(
        (str(HERE / "rl_steps.py"), str(tmp_path / "answers"), rollouts),
        *(CPU, model, TRAIN, loop, "--rerun-mode disabled --prefix-tree", arguments),
    )
    assert run.status == 0, run.output[-4000:]
    found = json.loads((tmp_path / "answers").read_text())
    assert {name: error for name, error in found["errors"].items() if not error < 1e-12} == {}
    assert {"log-probabilities", "gradient of embedding.word_embeddings.weight"} | LOGGED <= found["errors"].keys()
    assert min(found["terms"][f"rl/{term}"] for term in ("kl_term", "truncated_from_above", "truncated_from_below")) > 0
    assert found["fold ratio"] == pytest.approx(1) if rollouts == "unshared" else found["fold ratio"] > 2


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ("--context-parallel-size 2", "--context-parallel-size 2: a tree is not split"),
        pytest.param(
            "--rl-training-cuda-graphs --cuda-graph-impl local", "--rl-training-cuda-graphs", marks=pytest.mark.slow
        ),
        pytest.param("--num-layers-per-virtual-pipeline-stage 1", "virtual pipeline stages", marks=pytest.mark.slow),
        pytest.param(
            "--fp8-format hybrid --fp8-recipe tensorwise",
            "--fp8-format hybrid: train_rl.py wraps",
            marks=pytest.mark.slow,
        ),
        pytest.param("--fp16", "--fp16: not proven", marks=pytest.mark.slow),
    ],
)
def test_unsupported_settings_get_one_sentence(arguments: str, says: str) -> None:
    model = MODEL.replace("--num-layers 4", "") if HYBRID_LAYERS in arguments else MODEL
    run = megatron(RL, CPU, model, TRAIN, LOOP, PER_TOKEN, "--micro-batch-size 1 --prefix-tree", arguments)
    (error,) = [line for line in run.output.splitlines() if line.startswith("error: ")]
    assert says in error
    assert "mcore_prefix_tree/mcore" not in run.output, "no traceback of ours"


@pytest.mark.slow
def test_files_belong_to_the_other_door() -> None:
    without = LOOP.replace("--perform-rl-step", "")
    run = megatron(RL, CPU, MODEL, TRAIN, without, "--micro-batch-size 1 --prefix-tree")
    assert "error: --prefix-tree needs --perform-rl-step here" in run.output
