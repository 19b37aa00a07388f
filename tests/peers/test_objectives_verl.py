"""Losses and gradients of our objectives against the functions that verl trains with, on the same padded batch.

Needs verl: ``pip install --no-deps -r requirements/peers.txt``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

verl = pytest.importorskip("verl.trainer.ppo.core_algos", reason="verl is not installed")
from objective_oracles import World, replace_signals, run_logprobs, run_values  # noqa: E402
from verl.workers.config import ActorConfig  # noqa: E402

from mcore_prefix_tree import Sample, Signals  # noqa: E402
from mcore_prefix_tree.objectives import make_objective  # noqa: E402

GROUPS, ROLLOUTS = 3, 4
COLUMNS = ("old_logprobs", "ref_logprobs", "rollout_logprobs", "values", "returns")
# verl adds 1e-8 to lengths and variances, and 1e-6 to deviations, in fp32 as in fp64.
EXACT, BUT_FOR_EPS = 1e-12, 1e-6


@dataclass(frozen=True, kw_only=True)
class Padded:
    """A batch as verl has it: ``[B, T]`` each, entry t for ``tokens[t + 1]``."""

    world: World
    mask: torch.Tensor
    logprob: torch.Tensor
    entropy: torch.Tensor
    predicted_value: torch.Tensor
    reward: torch.Tensor
    old_logprobs: torch.Tensor
    ref_logprobs: torch.Tensor
    rollout_logprobs: torch.Tensor
    values: torch.Tensor
    returns: torch.Tensor

    @classmethod
    def random(cls, seed: int) -> Padded:
        """Groups of rollouts of one or two turns, some of which begin alike."""
        rng = np.random.default_rng(seed)
        plain = []
        for group in range(GROUPS):
            prompt = [30 + group, *rng.integers(5, size=rng.integers(1, 4)).tolist()]
            for _ in range(ROLLOUTS):
                tokens, mask = list(prompt), [0] * len(prompt)
                for turn in range(rng.integers(1, 3)):
                    if turn:
                        tokens, mask = [*tokens, 7, 8], [*mask, 0, 0]
                    answer = rng.integers(3, size=rng.integers(1, 6)).tolist()
                    tokens, mask = tokens + answer, mask + [1] * len(answer)
                plain.append(Sample(tokens=tokens, loss_mask=mask))
        table = World.of(plain, seed)
        samples = []
        for index, sample in enumerate(plain):
            own = np.array([0.0 if x is None else x.item() for x in table.logprobs(index)])
            scored = sample.loss_mask != 0
            near = {
                name: np.where(scored, np.minimum(own + 0.4 * rng.standard_normal(len(own)), -1e-6), np.nan)
                for name in COLUMNS[:3]
            }
            free = {name: np.where(scored, rng.standard_normal(len(own)), np.nan) for name in COLUMNS[3:]}
            signals = Signals(reward=float(rng.standard_normal()), group=index // ROLLOUTS, **near, **free)
            samples.append(replace_signals(sample, signals, source=f"file:{index}"))
        world = World.of(samples, seed)
        width = max(map(len, samples)) - 1

        def padded(row: Any) -> torch.Tensor:
            values = torch.stack(list(row)) if isinstance(row, list) else torch.tensor(np.nan_to_num(row)).double()
            return torch.nn.functional.pad(values, (0, width - len(values)))

        mask = torch.stack([padded(sample.loss_mask[1:]) for sample in samples])
        reward = torch.zeros_like(mask)
        for index, sample in enumerate(samples):
            reward[index, mask[index].nonzero().max()] = sample.signals.reward
        everyone = range(len(samples))
        return cls(
            world=world,
            mask=mask,
            logprob=torch.stack([padded(world.logprobs(index)[1:]) for index in everyone]),
            entropy=torch.stack([padded(world.entropies(index)[1:]) for index in everyone]),
            # Before each token.
            predicted_value=torch.stack([padded(world.values(index)[:-1]) for index in everyone]),
            reward=reward,
            **{name: torch.stack([padded(getattr(s.signals, name)[1:]) for s in samples]) for name in COLUMNS},
        )

    @property
    def group(self) -> np.ndarray:
        return np.repeat(np.arange(GROUPS), ROLLOUTS)

    def gae(self, reward: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        return verl.compute_gae_advantage_return(
            self.reward if reward is None else reward, self.values, self.mask, gamma=0.97, lam=0.9
        )

    def grpo(self, reward: torch.Tensor | None = None, **options: Any) -> torch.Tensor:
        given = self.reward if reward is None else reward
        return verl.compute_grpo_outcome_advantage(given.clone(), self.mask, self.group, **options)[0]

    def less_kl(self, kind: str) -> torch.Tensor:
        return self.reward - 0.1 * verl.kl_penalty(self.old_logprobs, self.ref_logprobs, kind) * self.mask

    def loss(self, advantage: torch.Tensor, mode: str, which: str = "vanilla", **options: Any) -> torch.Tensor:
        weights = options.pop("weights", None)
        settings = {"clip_ratio_c": 1e9, **options}  # their dual clip has no off
        config = ActorConfig(strategy="fsdp", rollout_n=ROLLOUTS, use_dynamic_bsz=True, **settings)
        return getattr(verl, f"compute_policy_loss_{which}")(
            self.old_logprobs, self.logprob, advantage, self.mask, mode, config, weights
        )[0]

    def mean(self, values: torch.Tensor, mode: str) -> torch.Tensor:
        return verl.agg_loss(values, self.mask, mode)


BY_TOKEN, BY_SAMPLE, SUM = "token-mean", "seq-mean-token-mean", "seq-mean-token-sum"
WHITENED = {"gamma": 0.97, "lam": 0.9, "advantage_eps": 0.0}

# Our objective, its options, verl's result for the same batch, and the tolerance.
POLICIES: dict[str, tuple[str, dict[str, Any], Callable[[Padded], torch.Tensor], float]] = {
    "grpo": ("grpo", {}, lambda b: b.loss(b.grpo(), BY_SAMPLE), BUT_FOR_EPS),
    "dapo": ("dapo", {}, lambda b: b.loss(b.grpo(), BY_TOKEN, clip_ratio_high=0.28), EXACT),
    "dual clip": (
        "dapo",
        {"dual_clip": 1.5},
        lambda b: b.loss(b.grpo(), BY_TOKEN, clip_ratio_high=0.28, clip_ratio_c=1.5),
        EXACT,
    ),
    "dr_grpo": (
        "dr_grpo",
        {"normalise_length": 50},
        lambda b: b.loss(b.grpo(norm_adv_by_std_in_grpo=False), SUM) / 50,
        EXACT,
    ),
    "gspo": (
        "gspo",
        {"clip_eps_low": 0.03, "clip_eps_high": 0.04},
        lambda b: b.loss(b.grpo(), BY_SAMPLE, "gspo", clip_ratio_low=0.03, clip_ratio_high=0.04),
        BUT_FOR_EPS,
    ),
    "cispo": (
        "cispo",
        {"clip_eps_low": 0.2, "clip_eps_high": 0.3},
        lambda b: b.loss(b.grpo(), BY_TOKEN, "cispo", clip_ratio_high=0.3),
        EXACT,
    ),
    "rloo": (
        "rloo",
        {},
        lambda b: b.loss(verl.compute_rloo_outcome_advantage(b.reward.clone(), b.mask, b.group)[0], SUM, "reinforce"),
        EXACT,
    ),
    "truncated tokens": (
        "dapo",
        {"tis_cap": 1.3},
        lambda b: b.loss(
            b.grpo(), BY_TOKEN, clip_ratio_high=0.28, weights=(b.old_logprobs - b.rollout_logprobs).exp().clamp(max=1.3)
        ),
        EXACT,
    ),
    "ppo": ("ppo", WHITENED, lambda b: b.loss(b.gae()[0], BY_TOKEN), BUT_FOR_EPS),
    "entropy": (
        "grpo",
        {"entropy_coef": 0.05},
        lambda b: b.loss(b.grpo(), BY_SAMPLE) - 0.05 * b.mean(b.entropy, BY_SAMPLE),
        BUT_FOR_EPS,
    ),
    **{
        f"{kind} in the loss": (
            "grpo",
            {"kl_coef": 0.1, "kl_estimator": kind},
            lambda b, kind=kind: (
                b.loss(b.grpo(), BY_SAMPLE) + 0.1 * b.mean(verl.kl_penalty(b.logprob, b.ref_logprobs, kind), BY_SAMPLE)
            ),
            BUT_FOR_EPS,
        )
        for kind in ("k2", "k3")
    },
    **{
        f"{kind} in the reward, {name}": (
            name,
            {**options, "kl_coef": 0.1, "kl_in": "reward", "kl_estimator": kind},
            lambda b, kind=kind, of=of: of(b, b.less_kl(kind)),
            BUT_FOR_EPS,
        )
        for kind in ("k1", "k2", "k3")
        for name, options, of in (
            ("ppo", WHITENED, lambda b, reward: b.loss(b.gae(reward)[0], BY_TOKEN)),
            ("grpo", {}, lambda b, reward: b.loss(b.grpo(reward), BY_SAMPLE)),
        )
    },
}


def agree(ours: torch.Tensor, theirs: torch.Tensor, of: torch.Tensor, limit: float) -> None:
    (own,), (other,) = (torch.autograd.grad(loss, of, retain_graph=True) for loss in (ours, theirs))
    assert abs(ours.item() - theirs.item()) <= limit * max(1e-2, abs(theirs.item()))
    assert (own - other).norm() <= limit * other.norm()


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("case", POLICIES)
def test_policy_gradients(case: str, seed: int) -> None:
    name, options, theirs, limit = POLICIES[case]
    batch = Padded.random(seed)
    everyone = list(range(GROUPS * ROLLOUTS))
    loss, _ = run_logprobs(make_objective(name, options), batch.world, [everyone[:5], everyone[5:]])
    agree(loss, theirs(batch), batch.world.logits, limit)


@pytest.mark.parametrize("seed", range(5))
def test_a_critic(seed: int) -> None:
    batch = Padded.random(seed)
    everyone = list(range(GROUPS * ROLLOUTS))
    critic = make_objective("critic", {"gamma": 0.97, "lam": 0.9, "clip_eps": 0.5})
    loss, _ = run_values(critic, batch.world, [everyone[:5], everyone[5:]])
    theirs, _ = verl.compute_value_loss(batch.predicted_value, batch.gae()[1], batch.values, batch.mask, 0.5)
    agree(loss, theirs, batch.world.scalar, EXACT)
