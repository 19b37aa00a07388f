"""The shell recipes through Megatron-LM itself: its parser, its validation, its estimate; and one of them, made small,
trained, ended by a signal and started again."""

from __future__ import annotations

import os
import re
import signal
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest
from megatron_lm import CPU, Run, require_checkout, search_path

require_checkout()

ROOT = Path(__file__).parents[2]
LAUNCH = ROOT / "recipes" / "launch"
TRACKER = "latest_checkpointed_iteration.txt"
GIB = 1024**3


def environment(**variables: object) -> dict[str, str]:
    fixed = {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore", "PATH": search_path()}
    return os.environ | fixed | {name: str(value) for name, value in variables.items()}


@dataclass(frozen=True, kw_only=True)
class GroupedQueries:
    """Elements of a layer."""

    heads: int
    groups: int
    head_dim: int
    qk_layernorm: bool = False

    def weights(self, hidden: int) -> int:
        return hidden * self.head_dim * (2 * self.heads + 2 * self.groups)

    def kept(self) -> int:
        return (3 + self.qk_layernorm) * self.head_dim * (self.heads + self.groups)

    def again(self) -> int:
        return 0


@dataclass(frozen=True, kw_only=True)
class Latent:
    """Elements of a layer of multi-latent attention with QK layernorm and no latent of queries; its up-projection is
    recomputed."""

    heads: int
    rank: int
    no_position: int
    rotary: int
    value: int

    def weights(self, hidden: int) -> int:
        queries = hidden * self.heads * (self.no_position + self.rotary)
        keys_values = hidden * (self.rank + self.rotary) + self.rank * self.heads * (self.no_position + self.value)
        return queries + keys_values + self.heads * self.value * hidden + self.rank

    def kept(self) -> int:
        return 2 * self.rank + self.rotary + self.heads * self.value

    def again(self) -> int:
        return self.heads * (2 * (self.no_position + self.rotary) + self.value)


@dataclass(frozen=True, kw_only=True)
class Model:
    """A model and how it is cut, in the numbers of its publisher."""

    layers: int
    hidden: int
    attention: GroupedQueries | Latent
    ffn: int
    vocab: int
    tp: int
    pp: int
    fewest_nodes: int = 1
    experts: int = 0
    top_k: int = 0
    ep: int = 1
    dense_layers: int = 0
    dense_ffn: int = 0
    shared_ffn: int = 0

    def weight_bytes(self, ranks: int) -> float:
        """Return the first stage's bytes: bf16 weights, fp32 gradients, and 12 bytes of optimizer over the replicas.

        Without the routers, less than a thousandth, which Megatron's estimate omits too.
        """
        mlp = 3 * self.hidden * self.ffn
        norms = 2 * self.hidden
        blocks = (
            self.layers * (self.attention.weights(self.hidden) + norms + (0 if self.experts else mlp)) + self.hidden
        )
        with_experts = (self.layers - self.dense_layers) if self.experts else 0
        blocks += 3 * self.hidden * (self.dense_layers * self.dense_ffn + with_experts * self.shared_ffn)
        ends = 1 if self.pp > 1 else 2  # embedding and head
        dense = (blocks / self.pp + ends * self.vocab * self.hidden) / self.tp
        routed = with_experts * mlp * self.experts / self.pp / self.ep
        replicas, expert_replicas = ranks / (self.tp * self.pp), ranks / (self.pp * self.ep)
        return dense * (6 + 12 / replicas) + routed * (6 + 12 / expert_replicas)

    def activation_bytes(self, tokens: int) -> float:
        """Return the first stage's bytes in bf16: experts are recomputed, so only one layer's are alive."""
        elements = self.layers * (4 * self.hidden + self.attention.kept()) + self.attention.again()
        if self.experts:
            elements += 3 * self.dense_layers * self.dense_ffn
            elements += self.top_k * (self.hidden + 3 * self.ffn) + 3 * self.shared_ffn
        else:
            elements += self.layers * 3 * self.ffn
        if self.pp == 1:
            elements += 2 * self.hidden  # the last norm's and the head's inputs
        return 2 * elements * tokens / self.tp


MODELS = {
    "llama3_8b": Model(
        layers=32, hidden=4096, attention=GroupedQueries(heads=32, groups=8, head_dim=128), ffn=14336, vocab=128256,
        tp=4, pp=2,
    ),
    "moonlight_16b_a3b": Model(
        layers=27, hidden=2048, attention=Latent(heads=16, rank=512, no_position=128, rotary=64, value=128), ffn=1408,
        vocab=163840, tp=1, pp=1, experts=64, top_k=6, ep=8, dense_layers=1, dense_ffn=11264, shared_ffn=2 * 1408,
    ),
    "qwen3_30b_a3b": Model(
        layers=48, hidden=2048, attention=GroupedQueries(heads=32, groups=4, head_dim=128, qk_layernorm=True), ffn=768,
        vocab=151936, tp=2, pp=2, fewest_nodes=2, experts=128, top_k=8, ep=8,
    ),
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "nodes"),
    [
        ("llama3_8b", 1),
        ("llama3_8b", 4),
        ("moonlight_16b_a3b", 1),
        ("moonlight_16b_a3b", 2),
        ("qwen3_30b_a3b", 2),
        ("qwen3_30b_a3b", 4),
    ],
)
def test_megatron_takes_the_arguments_and_plans_the_job(name: str, nodes: int, tmp_path: Path) -> None:
    """An error of Megatron's parser or validation, or of ours, would leave no plan."""
    recipe, model, ranks = ROOT / "recipes" / f"{name}.sh", MODELS[name], 8 * nodes
    done = subprocess.run(
        [str(LAUNCH / "dry_run.sh"), str(recipe)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=300,
        cwd=tmp_path,
        env=environment(NNODES=nodes),
    )
    assert done.returncode == 0, done.stdout
    assert "emulation" not in done.stdout
    replicas = ranks // (model.tp * model.pp)
    # The shipped rollouts fit the fewest micro-batches that leave no stage idle.
    per_micro_batch = 256 // (replicas * model.pp)
    assert f"\nsizes that the data decides: --micro-batch-size {per_micro_batch} --seq-length 86" in done.stdout
    assert f" a step, in {model.pp} micro-batches on each of " in done.stdout
    assert " empty" not in done.stdout
    assert (
        f"a step, in {re.search(r'(?<=in )[0-9]+', done.stdout)[0]} micro-batches on each of {replicas} " in done.stdout
    )
    assert done.stdout.count("  data-parallel rank ") == replicas
    (ratio,) = re.findall(r"fold ratio (\S+)", done.stdout)
    assert float(ratio) > 2
    assert f"estimate, of {ranks} ranks:" in done.stdout
    (weights,) = re.findall(r"weights, gradients, optimizer: (\S+) GiB", done.stdout)
    assert float(weights) == pytest.approx(model.weight_bytes(ranks) / GIB, rel=5e-3)  # three digits are printed
    ((tokens, activations),) = re.findall(r"at --prefix-tree-max-tokens \((\d+) tokens\): (\S+) GiB", done.stdout)
    assert float(activations) == pytest.approx(model.activation_bytes(int(tokens)) / GIB, rel=5e-3)
    assert ("with balanced routing" in done.stdout) == bool(model.experts)
    assert float(weights) + float(activations) < 0.75 * 80e9 / GIB, (
        "the rest is for the head, NCCL and unbalanced routing"
    )
    if nodes == model.fewest_nodes:
        told = re.findall(r"\S+(?= GiB)", recipe.read_text())
        assert told == [weights, activations]


def test_dry_run_under_torchrun_is_reported_once(tmp_path: Path) -> None:
    done = start(tmp_path, "--prefix-tree-dry-run", GPUS_PER_NODE=2)
    output, _ = done.communicate(timeout=300)
    assert done.returncode == 0, output
    assert output.count("first step: ") == 3, "its tokens, its expected speed-up and its share of the budget"
    assert output.count("first step: expected speed-up ") == 1
    assert "of 2 ranks" in output


SMALL = (
    f"{CPU} --num-layers 2 --hidden-size 32 --ffn-hidden-size 64 --num-attention-heads 4 --num-query-groups 2 "
    "--kv-channels 8 --vocab-size 32768 --tensor-model-parallel-size 1 --pipeline-model-parallel-size 1 "
    "--no-save-optim --no-load-optim --no-load-rng"
).split()


def start(folder: Path, *arguments: str, **variables: object) -> subprocess.Popen[str]:
    """The dense recipe, small enough for this machine, by its own launcher."""
    chosen = {
        "GPUS_PER_NODE": 1,
        "MAX_TOKENS": 2048,
        "MICRO_BATCH_SIZE": 8,
        "GLOBAL_BATCH_SIZE": 16,
        "TRAIN_ITERS": 200,
        "MAX_RESTARTS": 0,
        "SAVE": folder,
    }
    return subprocess.Popen(
        [str(LAUNCH / "torchrun.sh"), str(ROOT / "recipes" / "llama3_8b.sh"), *SMALL, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment(**(chosen | variables)),
    )


def test_a_job_takes_its_sizes_from_the_data(tmp_path: Path) -> None:
    """The budget decides: a larger one makes fewer and larger micro-batches of the same steps."""
    runs = []
    for budget in (900, 16384):
        folder = tmp_path / str(budget)
        job = start(folder, "--exit-interval", "2", MICRO_BATCH_SIZE="", MAX_TOKENS=budget)
        output, _ = job.communicate(timeout=300)
        assert job.returncode == 0, output
        ((size, longest),) = re.findall(r"^sizes that the data decides: \S+ (\d+) --seq-length (\d+)$", output, re.M)
        runs.append((int(size), int(longest), Run(output, 0).losses))
    (small, first, losses), (large, second, others) = runs
    assert small < large == 16
    assert first == second < 900
    assert [*losses] == [*others] == [1, 2]


def test_a_job_ended_by_a_signal_is_continued_by_the_same_command(tmp_path: Path) -> None:
    lines: list[str] = []
    with start(tmp_path) as job:
        assert job.stdout is not None
        for line in job.stdout:
            lines.append(line)
            if re.search(r" iteration +3/", line):
                job.send_signal(signal.SIGTERM)  # as Slurm signals torchrun when time is nearly up
    ended = Run("".join(lines), job.returncode)
    assert ended.status != 0, "for Slurm it is not done"
    saved = int((tmp_path / TRACKER).read_text())
    assert saved == max(ended.losses) >= 3

    with start(tmp_path, "--exit-interval", str(saved + 2)) as job:
        output, _ = job.communicate(timeout=300)
    again = Run(output, job.returncode)
    assert again.status == 0, output
    assert min(again.losses) == saved + 1
    assert again.iterations[saved + 1]["consumed samples"] == 16 * (saved + 1)
