"""A training job small enough for a test: data, recipe, and an observer that records reports."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch

from harness.checkpoints import plain_content
from harness.commands import write_rows
from mcore_prefix_tree import Sample
from mcore_prefix_tree.data import iter_sample_groups
from mcore_prefix_tree.data.batches import SampleOrder
from mcore_prefix_tree.data.grouping import whole_groups
from mcore_prefix_tree.mcore.loop.jobs import run_train
from mcore_prefix_tree.settings import Recipe, load_recipe
from mcore_prefix_tree.settings.command_checks import CHECKS

VOCAB = 64
BATCH = 6
PAIRED = ("dpo", "ipo", "simpo", "orpo")
RECIPE = f"""
model:
  num_layers: 2
  hidden_size: 32
  num_attention_heads: 4
  num_query_groups: 2
  ffn_hidden_size: 48
  vocab_size: {VOCAB}
batch: {{global_batch_size: {BATCH}, max_tokens: 40}}
optimizer: {{lr: 1e-2, lr_warmup_steps: 1, min_lr: 1e-3}}
train_iters: 6
compare: false
verify: {{enabled: false}}
"""
FLOAT64 = ("model.dtype=float64", "optimizer.clip_grad=0")


def rows(seed: int = 0) -> list[dict[str, Any]]:
    """Two-level trees with a duplicate, a strict prefix, a lone token, and masks from 0 to 1."""
    rng = np.random.default_rng(seed)

    def run(length: int) -> Any:
        return rng.integers(1, VOCAB, size=length).tolist()

    made: list[dict[str, Any]] = []
    for _ in range(3):
        root = run(6)
        for _ in range(2):
            trunk = root + run(4)
            for _ in range(2):
                tokens = trunk + run(int(rng.integers(2, 7)))
                made.append({"tokens": tokens, "loss_mask": rng.choice([0.0, 0.5, 1.0], size=len(tokens)).tolist()})
    made.append(made[0])
    made.append({"tokens": made[1]["tokens"][:8]})
    made.append({"tokens": [3]})
    made.append({"tokens": run(9)})
    return made  # 16 samples in 16 lines: batches of 6 reach over the end of an epoch


def write_job(folder: Path, content: Sequence[dict[str, Any]] | None = None) -> Path:
    """A recipe file with its data in the same folder."""
    data = write_rows(folder / "data.jsonl", rows() if content is None else content)
    recipe = folder / "recipe.yaml"
    recipe.write_text(f"data: {{path: {data}}}\n{RECIPE}")
    return recipe


@dataclass
class Notes:
    """A reporter that keeps everything."""

    messages: list[str] = field(default_factory=list)
    read: list[tuple[int, int]] = field(default_factory=list)
    spans: list[tuple[int, int]] = field(default_factory=list)
    reports: list[Any] = field(default_factory=list)
    evaluations: list[Any] = field(default_factory=list)
    verifications: list[Any] = field(default_factory=list)
    comparisons: list[Any] = field(default_factory=list)
    progress: list[tuple[str, int, int]] = field(default_factory=list)
    saved_in: list[str | None] = field(default_factory=list)
    stop_after: int | None = None

    def message(self, text: str) -> None:
        self.messages.append(text)

    @property
    def told(self) -> list[str]:
        """The messages without the choice of ``auto``, which depends on measurements, and the source of the weights."""
        return [text for text in self.messages if not text.startswith(("attention backend ", "the weights are new"))]

    def reading(self, done: int, total: int) -> None:
        self.read.append((done, total))

    def comparing(self, what: str, done: int, total: int) -> None:
        self.progress.append((what, done, total))

    def finished(self, checkpoint: str | None) -> None:
        self.saved_in.append(checkpoint)

    def verified(self, report: Any) -> None:
        self.verifications.append(report)

    def started(self, first: int, last: int) -> None:
        self.spans.append((first, last))

    def step(self, report: Any) -> None:
        self.reports.append(report)
        if report.iteration == self.stop_after:
            raise KeyboardInterrupt

    def evaluated(self, evaluation: Any) -> None:
        self.evaluations.append(evaluation)

    def compared(self, comparison: Any) -> None:
        self.comparisons.append(comparison)

    @property
    def losses(self) -> list[float]:
        return [report.loss for report in self.reports]


def train(
    recipe: Path | Recipe,
    *overrides: str,
    resume: bool = False,
    new_data: bool = False,
    stop_after: int | None = None,
) -> Notes:
    """``run_train`` in this process; ``stop_after`` interrupts it as Ctrl-C after that step would."""
    notes = Notes(stop_after=stop_after)
    loaded = recipe if isinstance(recipe, Recipe) else load_recipe(recipe, overrides, CHECKS["train"])
    try:
        run_train(loaded, notes, resume=resume, new_data=new_data)
    except KeyboardInterrupt:
        assert stop_after is not None
    return notes


@contextmanager
def world_of_one(recipe: Recipe) -> Iterator[Any]:
    """The session that the trainer would open."""
    from mcore_prefix_tree.mcore.loop.session import session

    with session(recipe) as place:
        yield place


def resolved(recipe: Recipe, place: Any) -> Any:
    """The job as ``train`` resolves it."""
    from mcore_prefix_tree.mcore.loop.resolve_recipe import read_data, resolve
    from mcore_prefix_tree.settings.bind_objective import make_bound_objective

    objective = make_bound_objective(recipe)
    joined = replace(place, recipe=recipe)  # a test may change it after it was joined
    return resolve(joined, objective, read_data(joined, objective))


def built(recipe: Recipe, place: Any) -> torch.nn.Module:
    """The model as ``train`` starts with it."""
    from mcore_prefix_tree.mcore.models.build_gpt import build_chunks

    (chunk,) = build_chunks(
        recipe.model,
        place.config,
        vocab_size=VOCAB,
        device=place.device,
        scalar_head=recipe.objective.has_scalar_head,
        fused_head=recipe.fused_head,
    )
    return chunk


def stock_model(recipe: Recipe, place: Any) -> torch.nn.Module:
    """The same model from megatron-core only, with separate weights."""
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

    torch.manual_seed(99)
    settings = {
        "vocab_size": VOCAB,
        "max_sequence_length": recipe.model.max_position_embeddings,
        "position_embedding_type": "rope",
        "share_embeddings_and_output_weights": False,
    }
    pattern = recipe.model.hybrid_layer_pattern
    if pattern is None:
        model = GPTModel(place.config, get_gpt_layer_local_spec(normalization="RMSNorm"), **settings)
    else:
        from megatron.core.models.hybrid.hybrid_model import HybridModel

        from mcore_prefix_tree.cpu.hybrid import hybrid_stack

        model = HybridModel(place.config, hybrid_stack, hybrid_layer_pattern=pattern, **settings)
    return cast("torch.nn.Module", model.to(place.config.params_dtype))


def stock_twin(recipe: Recipe, place: Any) -> torch.nn.Module:
    """The stock model with the weights that ``train`` starts with."""
    initial = built(recipe, place).state_dict()
    model = stock_model(recipe, place)
    model.load_state_dict(initial)
    return model


def check_steps(
    recipe: Recipe,
    reports: Sequence[Any],
    weights: Sequence[torch.Tensor],
    loss_of: Callable[[Any], torch.Tensor],
    *,
    least: float = 1e-12,
) -> None:
    """Take the reported steps with AdamW on a stock model's weights: losses and gradient norms are equal.

    Args:
        recipe: of the run.
        reports: of its steps.
        weights: of the stock model.
        loss_of: the loss of a report's step, by the stock model.
        least: difference of losses that counts.
    """
    optimizer = torch.optim.AdamW(
        [
            {"params": [p for p in weights if p.ndim > 1], "weight_decay": recipe.optimizer.weight_decay},
            {"params": [p for p in weights if p.ndim == 1], "weight_decay": 0.0},
        ],
        betas=(recipe.optimizer.adam_beta1, recipe.optimizer.adam_beta2),
    )
    assert len(reports) == 6
    for report in reports:
        for group in optimizer.param_groups:
            group["lr"] = report.lr
        optimizer.zero_grad()
        loss = loss_of(report)
        assert report.loss == pytest.approx(loss.item(), rel=1e-9, abs=least)
        loss.backward()
        norm = torch.linalg.vector_norm(torch.stack([cast("torch.Tensor", p.grad).norm() for p in weights]))
        assert report.grad_norm == pytest.approx(norm.item(), rel=1e-6)  # Megatron's is in fp32
        optimizer.step()


def logits_of(model: torch.nn.Module, tokens: Sequence[int]) -> torch.Tensor:
    """``[n, VOCAB]`` of one sample through the stock forward."""
    ids = torch.tensor([list(tokens)])
    output: torch.Tensor = model(ids, torch.arange(len(ids[0]))[None], None)
    return output[0]


def stock_loss(model: torch.nn.Module, samples: Sequence[Sample]) -> torch.Tensor:
    """Mean negative log-likelihood over the supervised tokens, each sample by itself."""
    total, count = torch.zeros((), dtype=torch.float64), 0
    for sample in samples:
        logprobs = torch.log_softmax(logits_of(model, sample.tokens.tolist()), dim=-1)[:-1]
        labels = torch.from_numpy(sample.tokens[1:].astype(np.int64))
        weights = torch.from_numpy(sample.loss_mask[1:].copy()).to(logprobs.dtype)
        total = total - (logprobs.gather(1, labels[:, None])[:, 0] * weights).sum()
        count += int((weights > 0).sum())
    return total / count


def batch_of(recipe: Recipe, iteration: int) -> list[Sample]:
    """The samples of a step, from only the documented order: objectives of pairs and of groups take complete ones."""
    size, name = recipe.batch.global_batch_size, recipe.objective.name
    assert size is not None
    lines: Any = list(iter_sample_groups(recipe.data.path))
    by: Any = "pair" if name in (*PAIRED, "reward_model") else "group" if name in ("grpo", "dapo") else None
    if recipe.objective.options.get("normalise") == "group":
        by = "group"
    if by is not None:
        lines = whole_groups(lines, by, step=size, setting="the test")
    order = SampleOrder(
        lines, seed=recipe.seed, order=recipe.data.order, step=size, **({"whole_steps": True} if by else {})
    )
    return order.take((iteration - 1) * size, size)


def checkpoint_content(folder: Path, iteration: int) -> dict[str, Any]:
    """Everything in a checkpoint, put together from its shards, in a world of one."""
    from mcore_prefix_tree.cpu.emulation import single_process

    with single_process():
        return plain_content(folder / f"iter_{iteration:07d}")


def assert_same_bits(actual: dict[str, Any], expected: dict[str, Any]) -> None:
    """Two checkpoints hold the same, tensors bit for bit."""
    assert actual.keys() == expected.keys()
    tensors = [name for name, value in expected.items() if isinstance(value, torch.Tensor)]
    assert len(tensors) > 20
    different = [name for name in tensors if not torch.equal(actual[name], expected[name])]
    assert not different
    for name in expected.keys() - set(tensors):
        assert repr(actual[name]) == repr(expected[name])


def assert_resumes(
    job: Path, folder: Path, *options: str, stop_after: int, interval: int = 1
) -> tuple[Notes, dict[str, Any]]:
    """A run that stops in a step and is resumed ends as one that does not; returns that, and what it saved."""
    saving = (*options, f"checkpoint.save_interval={interval}")
    whole = train(job, *saving, f"checkpoint.save={folder / 'whole'}")
    cut, saved = f"checkpoint.save={folder / 'cut'}", (stop_after - 1) // interval * interval
    train(job, *saving, cut, stop_after=stop_after)
    rest = train(job, *saving, cut, resume=True)
    assert [report.iteration for report in rest.reports] == list(range(saved + 1, len(whole.losses) + 1))
    assert rest.losses == whole.losses[saved:]
    content, undisturbed = (checkpoint_content(folder / name, len(whole.losses)) for name in ("cut", "whole"))
    assert_same_bits(content, undisturbed)
    return whole, content


GROUPS = 5  # of three: a step of six takes two, and one is dropped from each epoch
GRPO = {"kl_coef": 0.05, "entropy_coef": 0.01, "clip_eps_low": 0.05, "clip_eps_high": 0.05}


def rows_with_signals(seed: int = 0, *, neighbours: int) -> list[dict[str, Any]]:
    """Prompts with two turns, of which the second one is shared by some; every signal, near a new model's values."""
    rng = np.random.default_rng(seed)
    made = []
    for number in range(GROUPS * 3 // neighbours):
        prompt, turn = (rng.integers(1, VOCAB, size=size).tolist() for size in (5, 3))
        for member in range(neighbours):
            tokens = prompt + (turn if member else []) + rng.integers(1, VOCAB, size=2 + member).tolist()
            mask = [0.0] * 5 + rng.choice([0.5, 1.0], size=len(tokens) - 5).tolist()
            made.append(
                {
                    "tokens": tokens,
                    "loss_mask": mask,
                    "reward": float(rng.choice([0.0, 0.25, 1.0])),
                    "group": f"prompt {number}",
                    "old_logprobs": (-math.log(VOCAB) + 0.1 * rng.standard_normal(len(tokens))).tolist(),
                    "ref_logprobs": (-math.log(VOCAB) + 0.3 * rng.standard_normal(len(tokens))).tolist(),
                    "rollout_logprobs": [0.0] * len(tokens),
                    "pair": number,
                    "chosen": member == 1,
                    "label": bool(rng.integers(2)),
                    "mismatched": member == 0 and number % 2 == 0,
                }
            )
    return made


def objective_job(folder: Path, name: str, options: dict[str, Any] | None = None) -> tuple[Path, list[str]]:
    """A recipe file and the overrides that choose the objective."""
    neighbours = 2 if name in PAIRED else 3
    job = write_job(folder, rows_with_signals(neighbours=neighbours)[: GROUPS * 3 // neighbours * neighbours])
    return job, [f"objective.name={name}", f"objective.options={json.dumps(options or {})}"]
