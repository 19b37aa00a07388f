"""Runs of Megatron-LM on this machine's CPU, with their logs and checkpoints."""

from __future__ import annotations

import functools
import importlib.util
import json
import os
import re
import socket
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from harness.commands import write_rows
from harness.forked_ranks import launch

VARIABLE = "MEGATRON_LM_PATH"
VOCAB = 128
ITERATIONS = 20
BATCH = 16
# Losses are logged with seven digits.
LOSS, WEIGHTS = 2e-6, 1e-5
FIRST = 1  # the iteration whose checkpoint of the stock run others start from
HERE = Path(__file__).parent
ENTRY, HYBRID = (("-m", f"mcore_prefix_tree.{name}") for name in ("pretrain_gpt", "pretrain_hybrid"))
STOCK, STOCK_RL, RL = ((str(HERE / name),) for name in ("stock_unfolded.py", "rl_stock.py", "rl_door.py"))
# Imports of this package's and this folder's programs. Others may bring a separate Megatron-LM.
IMPORTS = ("mcore_prefix_tree.mcore.megatron_lm.start", "transformers", "triton", "torch._dynamo", "torch._inductor")

CPU = (
    "--transformer-impl local --no-rope-fusion --no-bias-dropout-fusion --no-bias-swiglu-fusion "
    "--no-masked-softmax-fusion --no-gradient-accumulation-fusion --no-persist-layer-norm "
    "--distributed-backend gloo --use-cpu-initialization"
)
MODEL = (
    "--num-layers 4 --hidden-size 32 --num-attention-heads 4 --group-query-attention --num-query-groups 2 "
    "--seq-length 64 --max-position-embeddings 64 --swiglu --normalization RMSNorm --position-embedding-type rope "
    "--disable-bias-linear --untie-embeddings-and-output-weights --attention-dropout 0 --hidden-dropout 0 "
    f"--padded-vocab-size {VOCAB} --vocab-size {VOCAB}"
)
HYBRID_LAYERS = "--spec mcore_prefix_tree.cpu.hybrid hybrid_stack --hybrid-layer-pattern"
# AdamW divides a gradient by its own size: with a tiny eps, entries that are zero up to rounding move the weights by
# rounding errors blown up to the learning rate, in any two runs whatsoever.
TRAIN = (
    f"--train-iters {ITERATIONS} --global-batch-size {BATCH} --lr 1e-3 --min-lr 1e-4 --lr-decay-style cosine "
    "--lr-warmup-iters 2 --adam-eps 1e-3 --log-interval 1 --eval-interval 1000 --save-interval 1000 "
    "--ckpt-format torch_dist"
)
FOLDED = "--prefix-tree --prefix-tree-max-tokens 400 --micro-batch-size 4"
WEIGHTS_ONLY = "--finetune --no-load-optim --no-load-rng"
UNFOLDED = "--calculate-per-token-loss --dataloader-type external --tokenizer-type NullTokenizer --micro-batch-size 1"


def hybrid_model(pattern: str) -> str:
    """Arguments of the model with these layers."""
    return MODEL.replace("--num-layers 4", f"{HYBRID_LAYERS} {pattern}")


@dataclass(frozen=True)
class Run:
    """Output and exit status of a run."""

    output: str
    status: int

    @property
    def iterations(self) -> dict[int, dict[str, float]]:
        """The figures of each iteration's log line."""
        found = {}
        for line in self.output.splitlines():
            if match := re.search(r" iteration +(\d+)/ *\d+ \|(.*)\|", line):  # another rank's text may follow
                pairs = [part.rsplit(":", 1) for part in match[2].split("|") if ":" in part]
                found[int(match[1])] = {name.strip(): float(value) for name, value in pairs}
        return found

    @property
    def losses(self) -> dict[int, float]:
        """Return the loss of each iteration.

        Megatron prints a process's first iteration without resetting its sums: the second line is the mean of both.
        """
        losses = {iteration: figures["lm loss"] for iteration, figures in self.iterations.items()}
        first = min(losses, default=0)
        if first + 1 in losses:
            losses[first + 1] = 2 * losses[first + 1] - losses[first]
        return losses

    def validation_loss(self, iteration: int) -> float:
        """Return the loss of the evaluation after an iteration."""
        (line,) = [line for line in self.output.splitlines() if f"validation loss at iteration {iteration} |" in line]
        assert "fold ratio" not in line
        return float(line.split("lm loss value:")[1].split("|")[0])


def require_checkout(*, trains: bool = True) -> None:
    """Skip the calling module without a checkout; one that ``trains`` compiles Megatron-LM's helpers."""
    if VARIABLE not in os.environ:
        pytest.skip(f"{VARIABLE} names no checkout of Megatron-LM", allow_module_level=True)
    require_packages("triton", *(["pybind11"] if trains else ()))


def runs_ahead() -> bool:
    """Return whether pipeline stages of the checkout's loop can run a pass before a step: since core_v0.19."""
    return "p2p_communicator" in (Path(os.environ[VARIABLE]) / "megatron" / "training" / "training.py").read_text()


def require_packages(*names: str) -> None:
    """Fail if a package is missing: naming a checkout requests its tests."""
    missing = [name for name in names if importlib.util.find_spec(name) is None]
    if missing:
        pytest.fail(f"{', '.join(missing)} missing; pip install -r requirements/megatron-lm.txt", pytrace=False)


def search_path() -> str:
    """``PATH`` for runs of Megatron-LM: it compiles a helper for the python3 and the python3-config that come first."""
    return os.pathsep.join([str(Path(sys.executable).parent), sysconfig.get_config_var("BINDIR"), os.environ["PATH"]])


def megatron(
    program: tuple[str, ...], *arguments: str, ranks: int = 1, timeout_s: float = 400, fork: bool = True
) -> Run:
    """Run a program with Megatron's arguments, as torchrun starts it; words of the arguments are split at blanks.

    On a CPU the ranks of this package's and this folder's programs are forked; torchrun starts others, or, with
    ``fork=False``, any.
    """
    known = program[:2] in (ENTRY, HYBRID) or Path(program[0]).parent == HERE
    if fork and known and not torch.cuda.is_available():
        status, output, _ = _forked(
            [*program, *_words(arguments)], ranks=ranks, timeout_s=timeout_s, alone_is_rank=True
        )
        return Run(output, status)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    result = subprocess.run(
        [*launcher, *program, *_words(arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout_s,
        env=_environment(),
    )
    return Run(result.stdout, result.returncode)


def _forked(
    command: list[str], *, ranks: int = 1, timeout_s: float, alone_is_rank: bool = False
) -> tuple[int, str, str]:
    """Run a command line on ranks that find Megatron-LM and this package imported."""
    return launch(
        ranks,
        command,
        environment=_environment(),
        timeout_s=timeout_s,
        imports=IMPORTS,
        path=(os.environ[VARIABLE], str(HERE)),
        alone_is_rank=alone_is_rank,
        one_stream=True,
    )


def under_open_mpi(program: tuple[str, ...], *arguments: str, ranks: int, timeout_s: float = 400) -> list[Run]:
    """The same, with each rank started as ``mpirun`` does it, on one machine: returns each one's output."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        meet = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
    started = [
        subprocess.Popen(
            [sys.executable, *program, *_words(arguments)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=_environment()
            | meet
            | {f"OMPI_COMM_WORLD_{name}": str(rank) for name in ("RANK", "LOCAL_RANK")}
            | {f"OMPI_COMM_WORLD_{name}": str(ranks) for name in ("SIZE", "LOCAL_SIZE")},
        )
        for rank in range(ranks)
    ]
    try:
        return [Run(rank.communicate(timeout=timeout_s)[0], rank.returncode) for rank in started]
    finally:
        for rank in started:
            rank.kill()


def _words(arguments: tuple[str, ...]) -> list[str]:
    return [word for argument in arguments for word in argument.split()]


def _environment() -> dict[str, str]:
    # For --spec: modules of this folder.
    modules = os.pathsep.join(filter(None, [str(HERE), os.environ.get("PYTHONPATH")]))
    settings = {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore", "PATH": search_path(), "PYTHONPATH": modules}
    return os.environ | settings


def trained(program: tuple[str, ...], *arguments: str, ranks: int = 1, fork: bool = True) -> Run:
    """A run that has to end well; see :func:`megatron`."""
    run = megatron(program, *arguments, ranks=ranks, fork=fork)
    assert run.status == 0, run.output[-8000:]
    return run


def saved_tensors(folder: Path, iteration: int) -> dict[str, torch.Tensor]:
    """Full tensors of a checkpoint of any parallel layout, read by the checkout's own megatron.core."""
    with tempfile.NamedTemporaryFile() as file:
        command = [str(HERE / "saved_tensors.py"), str(folder / f"iter_{iteration:07d}"), file.name]
        if torch.cuda.is_available():
            environment = os.environ | {"CUDA_VISIBLE_DEVICES": ""}  # on the CPU, too
            subprocess.run([sys.executable, *command], check=True, capture_output=True, env=environment)
        else:
            status, output, _ = _forked(command, timeout_s=200)
            assert status == 0, output
        loaded: dict[str, torch.Tensor] = torch.load(file.name)
    return loaded


def assert_same_tensors(
    actual: Path, expected: Path, iteration: int, *, padded: bool = False, moments: bool = True
) -> None:
    """Two checkpoints hold the same weights and optimizer state, up to rounding in fp32.

    ``padded``: the vocabulary of the first has padding, which the second lacks; ``moments``: whether those of the
    optimizer are compared.
    """
    tensors, wanted = (saved_tensors(folder, iteration) for folder in (actual, expected))
    assert tensors.keys() == wanted.keys()
    assert len(wanted) > 20
    for name, tensor in wanted.items():
        if name.startswith("optimizer.state.exp_avg") and not moments:
            continue
        found = tensors[name][: len(tensor)] if padded and tensor.ndim else tensors[name]
        error = torch.linalg.vector_norm(found - tensor) / torch.linalg.vector_norm(tensor)
        assert error <= WEIGHTS, f"{name}: {error:.1e}"


def only_checkpoint(source: Path, iteration: int, folder: Path) -> Path:
    """``folder``, with one iteration's checkpoint of ``source`` as its latest."""
    name = f"iter_{iteration:07d}"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).symlink_to(source / name)
    (folder / "latest_checkpointed_iteration.txt").write_text(str(iteration))
    return folder


@dataclass(frozen=True)
class Stock:
    """The oracle: its data, its checkpoints, its losses and counts."""

    data: str
    folder: Path
    losses: dict[int, float]
    iterations: dict[int, dict[str, float]]

    def args(self, tmp_path: Path) -> tuple[str, ...]:
        """Return the arguments of a folded run of the same samples."""
        return CPU, MODEL, TRAIN, FOLDED, self.data, f"--save {tmp_path}"


def train_unfolded(model: str, root: Path) -> Stock:
    """Twenty iterations of a stock model, a sample at a time, with checkpoints after the first and at the end."""
    write_samples(root / "samples.jsonl")
    data = f"--prefix-tree-data-path {root / 'samples.jsonl'} --prefix-tree-order file"
    common = (CPU, model, TRAIN, UNFOLDED, data, f"--save {root / 'saved'}")
    first = trained(STOCK, *common, f"--exit-interval {FIRST}")
    rest = trained(STOCK, *common, f"--load {root / 'saved'}")
    losses = first.losses | rest.losses
    assert sorted(losses) == list(range(1, ITERATIONS + 1))
    return Stock(data, root / "saved", losses, first.iterations | rest.iterations)


def write_samples(path: Path, count: int = 200, scale: int = 1) -> None:
    """Trees that branch twice, with duplicates, strict prefixes, samples of one token and of 43 times ``scale``."""
    rng = np.random.default_rng(0)

    def tokens(low: int, high: int) -> list[int]:
        return rng.integers(0, VOCAB, size=scale * rng.integers(low, high)).tolist()

    rows: list[dict[str, object]] = []
    while len(rows) < count:
        prompt = tokens(8, 24)
        for _ in range(rng.integers(1, 4)):
            turn = prompt + tokens(1, 10)
            for _ in range(rng.integers(1, 4)):
                path_tokens = turn + tokens(1, 12)
                mask = [0.0] * len(prompt) + rng.choice([0.0, 0.5, 1.0], size=len(path_tokens) - len(prompt)).tolist()
                rows.append({"tokens": path_tokens, "loss_mask": mask})
        rows += [{"tokens": path_tokens}, {"tokens": prompt}, {"tokens": prompt[:1]}]
    write_rows(path, rows[:count])


OBJECTIVE_OPTIONS = {
    "grpo": {"kl_coef": 0.05, "entropy_coef": 0.01, "clip_eps_low": 0.05, "clip_eps_high": 0.05},
    "gspo": {},
    "dpo": {},
    "kto": {"desirable_weight": 1.3, "beta": 0.4},
    "distill": {"divergence": "jsd", "jsd_beta": 0.3, "normalise": "sample"},
    "critic": {"gamma": 0.9, "lam": 0.8, "clip_eps": 0.1},
    "reward_model": {"center_coef": 0.01},
}


def write_rollouts(path: Path) -> None:
    """Groups of four completions of one prompt, neighbours are pairs; signals for every objective."""
    rng = np.random.default_rng(0)
    rows = []
    for group in range(3 * BATCH // 4):
        prompt = rng.integers(0, VOCAB, size=rng.integers(8, 24)).tolist()
        for member in range(4):
            tokens = prompt + rng.integers(0, VOCAB, size=rng.integers(2, 12)).tolist()
            length = len(tokens)
            mask = [0.0] * len(prompt) + rng.choice([0.5, 1.0], size=length - len(prompt)).tolist()

            def near(scale: float, length: int = length) -> list[float]:
                return np.minimum(-np.log(VOCAB) + scale * rng.standard_normal(length), 0.0).tolist()

            ids = [rng.permutation(VOCAB)[:4].tolist() for _ in range(length)]
            likely = np.log(rng.dirichlet(np.ones(6), size=length)[:, :4]).tolist()
            rows.append(
                {
                    "tokens": tokens,
                    "loss_mask": mask,
                    "reward": float(rng.choice([0.0, 0.3, 1.0])),
                    "group": group,
                    "old_logprobs": near(0.1),
                    "ref_logprobs": near(0.3),
                    "rollout_logprobs": near(0.1),
                    "pair": len(rows) // 2,
                    "chosen": bool(member % 2),
                    "label": bool(len(rows) % 3),
                    "mismatched": len(rows) % 7 == 0,
                    "values": (0.3 * rng.standard_normal(length)).tolist(),
                    "teacher": {"token_ids": ids, "logprobs": likely},
                }
            )
    write_rows(path, rows)


StockRuns = Callable[[str], tuple[Run, Path]]


def cached_stock_runs(model: str, words: Callable[[str], str], folders: pytest.TempPathFactory) -> StockRuns:
    """Return what runs an objective on unfolded samples, once for all layouts; from the second iteration on."""

    @functools.cache
    def run(name: str) -> tuple[Run, Path]:
        folder = folders.mktemp(name)
        whole = UNFOLDED.replace("--micro-batch-size 1", f"--micro-batch-size {BATCH}")
        common = (CPU, model, TRAIN, whole, words(name), f"--save {folder}")
        trained(STOCK, *common, f"--exit-interval {FIRST}")
        return trained(STOCK, *common, f"--load {folder}"), folder

    return run


def objective_words(rollouts: Path, name: str) -> str:
    options = json.dumps(OBJECTIVE_OPTIONS[name], separators=(",", ":"))
    data = f"--prefix-tree-data-path {rollouts} --prefix-tree-order file"
    return f"{data} --prefix-tree-objective {name} --prefix-tree-objective-options {options}"
