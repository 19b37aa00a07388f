"""Objectives spelled out sample by sample and token by token, in plain Python over fp64 scalars."""

from __future__ import annotations

import functools
import math
import random
import zlib
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from harness.kept_sets import within_sets

from mcore_prefix_tree import FlatLayout, Sample, Signals, fold
from mcore_prefix_tree.objectives import (
    KTO,
    Critic,
    Distillation,
    LossOutput,
    PolicyGradient,
    Preference,
    RewardModel,
    Targets,
)
from mcore_prefix_tree.signals import Teacher

VOCAB = 41

Scalars = list[torch.Tensor | None]  # of one sample; entry t scores tokens[t], None at the first


@dataclass(frozen=True, kw_only=True)
class World:
    """A model that is a table: one row of logits (and one scalar) for every unique token."""

    samples: list[Sample]
    layout: FlatLayout
    logits: torch.Tensor
    scalar: torch.Tensor

    @classmethod
    def of(cls, samples: list[Sample], seed: int) -> World:
        layout = fold(samples)
        generator = torch.Generator().manual_seed(seed)
        logits = torch.randn(layout.padded_size, VOCAB, generator=generator, dtype=torch.float64).requires_grad_()
        scalar = torch.randn(layout.padded_size, generator=generator, dtype=torch.float64).requires_grad_()
        return cls(samples=samples, layout=layout, logits=logits, scalar=scalar)

    def distributions(self, index: int) -> Scalars:
        """Log-probabilities over the vocabulary from which each token of a sample is predicted."""
        rows = [torch.log_softmax(self.logits[flat], dim=0) for flat in self.layout.sample_tokens(index).tolist()]
        return [None, *rows[:-1]]

    def logprobs(self, index: int) -> Scalars:
        tokens = self.samples[index].tokens.tolist()
        return [
            None if row is None else row[token] for row, token in zip(self.distributions(index), tokens, strict=True)
        ]

    def entropies(self, index: int) -> Scalars:
        return [None if row is None else -(row.exp() * row).sum() for row in self.distributions(index)]

    def values(self, index: int) -> list[torch.Tensor]:
        """After each token."""
        return [self.scalar[flat] for flat in self.layout.sample_tokens(index).tolist()]

    def part(self, indices: Sequence[int]) -> tuple[FlatLayout, torch.Tensor]:
        """The layout of one micro-batch, and where each of its tokens is in the table."""
        layout = fold([self.samples[index] for index in indices], pad_to_multiple_of=3)
        table_row = torch.zeros(layout.padded_size, dtype=torch.int64)
        for local, index in enumerate(indices):
            table_row[layout.sample_tokens(local)] = torch.from_numpy(self.layout.sample_tokens(index).astype(np.int64))
        return layout, table_row


@dataclass(frozen=True)
class Alone:
    """A model in place of the table: ``logits_of(tokens)`` runs one sample by itself."""

    logits_of: Callable[[Sequence[int]], torch.Tensor]
    samples: Sequence[Sample]
    logits: torch.Tensor = field(default_factory=lambda: torch.zeros(1, dtype=torch.float64))  # starts a sum

    @functools.cached_property
    def _distributions(self) -> list[torch.Tensor]:
        return [
            torch.log_softmax(within_sets(self.logits_of(sample.tokens.tolist()), sample), dim=-1)
            for sample in self.samples
        ]

    def distributions(self, index: int) -> Scalars:
        return [None, *self._distributions[index][:-1]]

    def logprobs(self, index: int) -> Scalars:
        rows = self._distributions[index]
        return [None, *(rows[t, token] for t, token in enumerate(self.samples[index].tokens[1:].tolist()))]

    def entropies(self, index: int) -> Scalars:
        rows = self._distributions[index][:-1]
        return [None, *(-(row.exp() * row.masked_fill(row == -math.inf, 0)).sum() for row in rows)]


@dataclass(frozen=True)
class ValuesAlone:
    """A critic in place of the table: ``values_of(tokens)`` runs one sample by itself, ``[n]``."""

    values_of: Callable[[Sequence[int]], torch.Tensor]
    samples: Sequence[Sample]
    scalar: torch.Tensor = field(default_factory=lambda: torch.zeros(1, dtype=torch.float64))  # starts a sum

    @functools.cached_property
    def _values(self) -> list[torch.Tensor]:
        return [self.values_of(sample.tokens.tolist()) for sample in self.samples]

    def values(self, index: int) -> list[torch.Tensor]:
        return list(self._values[index])


def scored_positions(sample: Sample) -> list[int]:
    return [t for t in range(1, len(sample)) if sample.loss_mask[t] != 0]


def random_cut(units: Sequence[Sequence[int]], parts: int, rng: random.Random) -> list[list[int]]:
    """Micro-batches, some of which may be empty."""
    cut: list[list[int]] = [[] for _ in range(parts)]
    for unit in units:
        cut[rng.randrange(parts)] += unit
    for part in cut:
        rng.shuffle(part)
    return cut


def with_signals(samples: Sequence[Sample], seed: int, *, table_seed: int) -> list[Sample]:
    """Inputs that an objective may read, with the log-probabilities of the world's model."""
    rng = np.random.default_rng(seed)
    world = World.of(list(samples), table_seed)
    made = []
    for index, sample in enumerate(samples):
        n = len(sample)
        own = np.array([0.0 if x is None else x.item() for x in world.logprobs(index)])

        def near(own: np.ndarray, scale: float, n: int = n, mask: np.ndarray = sample.loss_mask) -> np.ndarray:
            values = own + scale * rng.standard_normal(n)
            return np.where(mask != 0, values, np.nan)

        def near_logprobs(own: np.ndarray, scale: float) -> np.ndarray:
            return np.minimum(near(own, scale), 0.0)

        turns = np.count_nonzero(np.diff([0, *(t in scored_positions(sample) for t in range(n))]) == 1)
        reward = float(rng.choice([0.0, 1.0, 0.1])) if index % 3 else rng.choice([0.0, 1.0, 0.3], size=turns)
        made.append(
            replace_signals(
                sample,
                Signals(
                    reward=reward,
                    group=int(index // 2 % max(1, len(samples) // 4)),
                    advantage=near(np.zeros(n), 1.0),
                    old_logprobs=near_logprobs(own, 0.3),
                    ref_logprobs=near_logprobs(own, 0.5),
                    rollout_logprobs=near_logprobs(own, 0.5),
                    values=near(np.zeros(n), 1.0),
                    returns=near(np.zeros(n), 1.0),
                    pair=index // 2,
                    chosen=bool(index % 2),
                    label=bool(rng.integers(2)),
                    mismatched=index == 0,
                ),
                source=f"file:{index}",
            )
        )
    return made


def replace_signals(sample: Sample, signals: Signals, *, source: str | None = None) -> Sample:
    return Sample(
        tokens=sample.tokens,
        loss_mask=sample.loss_mask,
        merge_key=sample.merge_key,
        source=source or sample.source,
        signals=signals,
    )


def changed(sample: Sample, **fields: object) -> Sample:
    return replace_signals(sample, replace(sample.signals, **fields))


def with_teachers(samples: Sequence[Sample], k: int, seed: int) -> list[Sample]:
    """A teacher that is a function of the path, as a model is."""
    made = []
    for sample in samples:
        ids, logprobs = np.zeros((len(sample), k), dtype=np.int32), np.zeros((len(sample), k), dtype=np.float32)
        for t in range(1, len(sample)):
            path = np.random.default_rng(
                [seed, zlib.crc32(repr(sample.merge_key).encode()), *sample.tokens[:t].tolist()]
            )
            row = path.standard_normal(VOCAB)
            row -= math.log(np.exp(row).sum())
            ids[t] = path.permutation(VOCAB)[:k]
            logprobs[t] = row[ids[t]]
        made.append(changed(sample, teacher=Teacher(token_ids=ids, logprobs=logprobs)))
    return made


def token_weights(samples: Sequence[Sample], by: str, length: float | None) -> tuple[dict[tuple[int, int], float], int]:
    """The weight of each (sample, position), and the divisor."""
    positions = [scored_positions(sample) for sample in samples]
    weights = {}
    for index, own in enumerate(positions):
        for t in own:
            mask = float(samples[index].loss_mask[t])
            if by == "token":
                weights[index, t] = mask
            elif by == "sample":
                weights[index, t] = mask / len(own)
            elif by == "sample_sum":
                weights[index, t] = mask / (length or 1)
            else:
                members = [j for j in range(len(samples)) if unit_of(samples, j, by) == unit_of(samples, index, by)]
                weights[index, t] = mask / sum(len(positions[j]) for j in members)
    if by == "token":
        return weights, sum(map(len, positions))
    if by in ("group", "rollout"):
        return weights, len({unit_of(samples, i, by) for i, own in enumerate(positions) if own})
    return weights, sum(1 for own in positions if own)


def unit_of(samples: Sequence[Sample], index: int, by: str) -> Hashable:
    """The group, or the rollout, of a sample."""
    signals = samples[index].signals
    return signals.group if by == "group" else index if signals.rollout is None else (signals.group, signals.rollout)


def is_equal(samples: Sequence[Sample], index: int) -> bool:
    """Whether a sample's group has equal rewards, or one rollout."""
    members = [j for j, other in enumerate(samples) if other.signals.group == samples[index].signals.group]
    rewards = {float(r) for j in members for r in np.atleast_1d(samples[j].signals.reward)}
    return len(rewards) == 1 or len({unit_of(samples, j, "rollout") for j in members}) == 1


def turns_of(sample: Sample) -> list[list[int]]:
    """The positions of each unbroken run of scored tokens."""
    found: list[list[int]] = []
    for t in scored_positions(sample):
        if found and found[-1][-1] == t - 1:
            found[-1].append(t)
        else:
            found.append([t])
    return found


def sequences(samples: Sequence[Sample], level: str) -> dict[tuple[int, int], list[tuple[int, int]]]:
    """The tokens, sample and position, of the rollout or turn that each scored token belongs to."""
    together: dict[Hashable, list[tuple[int, int]]] = {}
    for index, sample in enumerate(samples):
        for number, turn in enumerate(turns_of(sample)):
            is_part = level == "turn" and sample.signals.turn is None
            key = (index, number) if is_part else index if level == "turn" else unit_of(samples, index, "rollout")
            together.setdefault(key, []).extend((index, t) for t in turn)
    return {token: own for own in together.values() for token in own}


def kl(d: torch.Tensor | float, kind: str) -> torch.Tensor | float:
    if kind == "k1":
        return d
    if kind == "k2":
        return d * d / 2
    return (torch.exp(-d) if isinstance(d, torch.Tensor) else math.exp(-d)) - 1 + d


def advantages(config: PolicyGradient, samples: Sequence[Sample]) -> dict[tuple[int, int], float]:
    positions = [scored_positions(sample) for sample in samples]

    def penalty(index: int, t: int) -> float:
        if not (config.kl_coef and config.kl_in == "reward"):
            return 0.0
        signals = samples[index].signals
        return config.kl_coef * kl(float(signals.old_logprobs[t]) - float(signals.ref_logprobs[t]), config.estimator)

    def turns(index: int) -> list[list[int]]:
        return turns_of(samples[index])

    result: dict[tuple[int, int], float] = {}
    if config.advantage == "given":
        for index, own in enumerate(positions):
            for t in own:
                given = samples[index].signals.advantage
                result[index, t] = given if isinstance(given, float) else float(given[t])
    elif config.advantage == "gae":
        for index, own in enumerate(positions):
            reward = {t: -penalty(index, t) for t in own}
            given = samples[index].signals.reward
            if own and isinstance(given, float):
                reward[own[-1]] += given
            elif own:
                for value, turn in zip(given, turns(index), strict=True):
                    reward[turn[-1]] += value
            after, following = 0.0, 0.0
            for t in reversed(own):
                value = float(samples[index].signals.values[t])
                after = reward[t] + config.gamma * following - value + config.gamma * config.lam * after
                following = value
                result[index, t] = after
    else:
        rewards: list[list[float]] = []
        for index in range(len(samples)):
            given = samples[index].signals.reward
            if isinstance(given, float):
                rewards.append([given - sum(penalty(index, t) for t in positions[index])])
            else:
                own_turns = turns(index)
                rewards.append(
                    [value - sum(penalty(index, t) for t in turn) for value, turn in zip(given, own_turns, strict=True)]
                )
        for index in range(len(samples)):
            group = samples[index].signals.group
            pool = [r for j, own in enumerate(rewards) if samples[j].signals.group == group for r in own]
            others = [
                r for j, own in enumerate(rewards) if samples[j].signals.group == group and j != index for r in own
            ]
            compared = []
            for r in rewards[index]:
                if config.advantage == "reward":
                    compared.append(r)
                elif max(pool) == min(pool):
                    compared.append(0.0)
                elif config.advantage == "leave_one_out":
                    compared.append(r - sum(others) / len(others))
                else:
                    mean = sum(pool) / len(pool)
                    scale = 1.0
                    if config.advantage in ("group_mean_std", "group_mean_batch_std"):
                        everyone = pool if config.advantage == "group_mean_std" else [x for own in rewards for x in own]
                        centre = sum(everyone) / len(everyone)
                        variance = sum((x - centre) ** 2 for x in everyone) / (len(everyone) - 1)
                        scale = math.sqrt(variance) + config.advantage_eps
                    compared.append((r - mean) / scale)
            if isinstance(samples[index].signals.reward, float):
                for t in positions[index]:
                    result[index, t] = compared[0]
            else:
                for number, turn in enumerate(turns(index)):
                    for t in turn:
                        result[index, t] = sum(compared[number:])
    if config.whiten:
        values = list(result.values())
        if len(values) < 2:
            return dict.fromkeys(result, 0.0)
        mean = sum(values) / len(values)
        std = math.sqrt(sum((x - mean) ** 2 for x in values) / (len(values) - 1))
        result = {key: (x - mean) / (std + config.advantage_eps) for key, x in result.items()}
    return result


def sft_loss(objective: Any, world: World | Alone) -> torch.Tensor:
    """The weighted negative log-likelihood, token by token."""
    weights, divisor = token_weights(world.samples, objective.normalise, None)
    return sum((-weight * world.logprobs(i)[t] for (i, t), weight in weights.items()), world.logits.sum() * 0) / divisor


def policy_loss(config: PolicyGradient, world: World) -> torch.Tensor:
    """The step's loss, divided."""
    samples = world.samples
    taught = [index for index in range(len(samples)) if not (config.filter_groups and is_equal(samples, index))]
    own, divisor = token_weights([samples[index] for index in taught], config.normalise, config.normalise_length)
    weights = {(taught[index], t): weight for (index, t), weight in own.items()}
    advantage = advantages(config, samples)
    total = world.logits.sum() * 0
    logprobs = [world.logprobs(index) for index in range(len(samples))]
    sequence = sequences(samples, config.ratio_level)

    def old(index: int, t: int) -> torch.Tensor | float:
        return logprobs[index][t].detach() if config.on_policy else float(samples[index].signals.old_logprobs[t])

    def engine(index: int, t: int) -> float:
        return float(samples[index].signals.rollout_logprobs[t])

    def mean_over_mask(values: Callable[[int, int], Any], tokens: list[tuple[int, int]]) -> Any:
        masks = {(i, t): float(samples[i].loss_mask[t]) for i, t in tokens}
        return sum(mask * values(i, t) for (i, t), mask in masks.items()) / (sum(masks.values()) or 1.0)

    ratios = {}
    for tokens in sequence.values():
        if tokens[0] not in ratios:
            ratios[tokens[0]] = (
                mean_over_mask(lambda i, t: logprobs[i][t].item() - float(old(i, t)), tokens),
                mean_over_mask(lambda i, t: engine(i, t) - logprobs[i][t].item(), tokens),
                torch.exp(mean_over_mask(lambda i, t: logprobs[i][t] - old(i, t), tokens) + torch.zeros(())),
                math.exp(sum(float(old(i, t)) - engine(i, t) for i, t in tokens)),
            )
    for index, sample in enumerate(samples):
        own, entropy, signals = logprobs[index], world.entropies(index), sample.signals
        for t in scored_positions(sample):
            mean_diff, moved, of_sequence, sequence_tis = ratios[sequence[index, t][0]]
            a = advantage[index, t]
            token_ratio = torch.exp(own[t] - old(index, t))
            ratio = token_ratio
            if config.surrogate_level == "sequence":
                ratio = math.exp(mean_diff) * torch.exp(own[t] - own[t].detach())
            low, high = 1 - config.clip_eps_low, 1 + config.clip_eps_high
            clipped = min(max(ratio.item(), low), high)
            if config.surrogate == "reinforce":
                loss = -a * own[t]
            elif config.surrogate == "cispo":
                loss = -clipped * a * own[t]
            else:
                # min(r A, clip(r) A): the clipped one, a constant, wherever it is smaller.
                loss = (
                    -ratio * a if ratio.item() * a <= clipped * a else torch.tensor(-clipped * a, dtype=torch.float64)
                )
                if config.dual_clip is not None and a < 0 and loss.item() > -config.dual_clip * a:
                    loss = torch.tensor(-config.dual_clip * a, dtype=torch.float64)
            if config.tis_cap is not None:
                by_token = math.exp(float(old(index, t)) - engine(index, t))
                weight = by_token if config.tis_level == "token" else sequence_tis
                if config.tis_mode == "mask":
                    weight = weight if config.tis_floor <= weight <= config.tis_cap else 0.0
                loss = loss * max(config.tis_floor, min(weight, config.tis_cap)) if weight else loss * 0
            if config.off_policy_mask is not None and a < 0 and moved > config.off_policy_mask:
                loss = loss * 0
            if config.kl_coef and config.kl_in == "loss":
                divergence = kl(own[t] - float(signals.ref_logprobs[t]), config.estimator)
                loss = (
                    loss
                    + config.kl_coef
                    * divergence
                    * {None: 1.0, "token": token_ratio, "sequence": of_sequence}[config.kl_importance]
                )
            if config.entropy_coef:
                loss = loss - config.entropy_coef * entropy[t]
            total = total + weights.get((index, t), 0.0) * loss
    return total / max(1, divisor)


def run(
    world: World, targets: Targets, cut: Sequence[Sequence[int]], loss_of_part: Callable[..., LossOutput]
) -> tuple[torch.Tensor, list[LossOutput]]:
    """The step's loss over micro-batches, divided once; ``loss_of_part(layout, table rows, indices)``."""
    outputs = [loss_of_part(*world.part(indices), indices) for indices in cut]
    return sum(output.loss for output in outputs) / max(1, targets.divisor), outputs


def run_logprobs(
    objective: object, world: World, cut: Sequence[Sequence[int]]
) -> tuple[torch.Tensor, list[LossOutput]]:
    """An objective that reads log-probabilities and entropies."""
    targets = objective.targets(world.samples)

    def of_part(layout: FlatLayout, table_row: torch.Tensor, indices: Sequence[int]) -> LossOutput:
        logprob, entropy = flat_logprobs(world, layout, table_row)
        return objective.loss(logprob, entropy, targets.rows(layout, indices))

    return run(world, targets, cut, of_part)


def run_values(objective: object, world: World, cut: Sequence[Sequence[int]]) -> tuple[torch.Tensor, list[LossOutput]]:
    """An objective that reads a scalar after each token."""
    targets = objective.targets(world.samples)

    def of_part(layout: FlatLayout, table_row: torch.Tensor, indices: Sequence[int]) -> LossOutput:
        return objective.loss(world.scalar[table_row], None, targets.rows(layout, indices))

    return run(world, targets, cut, of_part)


def flat_logprobs(world: World, layout: FlatLayout, table_row: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """``[P]`` each, by torch's own log_softmax."""
    rows = torch.log_softmax(world.logits[table_row], dim=1)
    predictor = torch.from_numpy(layout.predictor.astype(np.int64))
    has = predictor >= 0
    logprob = rows.new_zeros(layout.padded_size)
    logprob = logprob.index_put((has.nonzero()[:, 0],), rows[predictor[has], torch.from_numpy(layout.input_ids)[has]])
    return logprob, -(rows.exp() * rows).sum(dim=1)


def naive_divergence(p: torch.Tensor, q: torch.Tensor, kind: str, beta: float) -> torch.Tensor:
    """From probabilities, as the formulas are written."""
    if kind == "forward_kl":
        return (p * torch.log(p / q)).sum()
    if kind == "reverse_kl":
        return (q * torch.log(q / p)).sum()
    m = beta * p + (1 - beta) * q
    return beta * (p * torch.log(p / m)).sum() + (1 - beta) * (q * torch.log(q / m)).sum()


def top_k_loss(objective: Distillation, world: World) -> torch.Tensor:
    weights, divisor = token_weights(world.samples, objective.normalise, None)
    total = world.logits.sum() * 0
    for index, sample in enumerate(world.samples):
        rows, teacher = world.distributions(index), sample.signals.teacher
        for t in scored_positions(sample):
            p = torch.tensor(teacher.logprobs[t].tolist(), dtype=torch.float64).exp()
            q = rows[t].exp()[torch.tensor(teacher.token_ids[t].tolist())]
            p, q = (torch.cat([x, 1 - x.sum()[None]]) for x in (p, q))
            total = total + weights[index, t] * naive_divergence(p, q, objective.divergence, objective.jsd_beta)
    return total / max(1, divisor)


def full_loss(objective: Distillation, world: World, teacher: World) -> torch.Tensor:
    """The same from a second model's full distributions for the same samples."""
    weights, divisor = token_weights(world.samples, objective.normalise, None)
    total = world.logits.sum() * 0
    for index in range(len(world.samples)):
        student, taught = world.distributions(index), teacher.distributions(index)
        for t in [t for of, t in weights if of == index]:
            p, q = taught[t].detach().exp(), student[t].exp()
            total = total + weights[index, t] * naive_divergence(p, q, objective.divergence, objective.jsd_beta)
    return total / max(1, divisor)


def sigmoid(x: torch.Tensor) -> torch.Tensor:
    return 1 / (1 + torch.exp(-x))


def pair_loss(objective: Preference, world: World) -> torch.Tensor:
    """Mean over pairs; sample 2q is rejected and 2q + 1 chosen."""
    total = world.logits.sum() * 0
    for rejected in range(0, len(world.samples), 2):
        score, nll = {}, {}
        for index in (rejected, rejected + 1):
            sample, own = world.samples[index], world.logprobs(index)
            weight = sum(float(sample.loss_mask[t]) for t in scored_positions(sample))
            s = n = 0
            for t in scored_positions(sample):
                ref = float(sample.signals.ref_logprobs[t]) if objective.reference else 0.0
                s = s + float(sample.loss_mask[t]) * (own[t] - ref)
                n = n - float(sample.loss_mask[t]) * own[t] / weight
            score[index], nll[index] = (s / weight if objective.average else s), n
        w, lose = score[rejected + 1], score[rejected]
        if objective.link == "ipo":
            loss = (w - lose - 1 / (2 * objective.beta)) ** 2
        elif objective.link == "hinge":
            loss = torch.relu(1 - objective.beta * (w - lose))
        elif objective.link == "odds_ratio":
            odds = [torch.exp(s) / (1 - torch.exp(s)) for s in (w, lose)]
            loss = -objective.beta * torch.log(sigmoid(torch.log(odds[0] / odds[1])))
        else:
            x = objective.beta * (w - lose) - objective.gamma
            eps = objective.label_smoothing
            loss = -(1 - eps) * torch.log(sigmoid(x)) - eps * torch.log(1 - sigmoid(x))
        total = total + loss + objective.nll_coef * nll[rejected + 1]
    return total / max(1, len(world.samples) // 2)


def kto_loss(objective: KTO, world: World) -> torch.Tensor:
    point = 0.0
    measuring = [s for s in world.samples if s.signals.mismatched]
    if objective.reference_point == "mismatched":
        for sample in measuring:
            for t in scored_positions(sample):
                difference = float(sample.signals.old_logprobs[t]) - float(sample.signals.ref_logprobs[t])
                point += float(sample.loss_mask[t]) * difference / len(measuring)
        point = max(0.0, point)
    total, count = world.logits.sum() * 0, 0
    for index, sample in enumerate(world.samples):
        if sample.signals.mismatched:
            continue
        own, r = world.logprobs(index), 0
        for t in scored_positions(sample):
            r = r + float(sample.loss_mask[t]) * (own[t] - float(sample.signals.ref_logprobs[t]))
        r = torch.as_tensor(r, dtype=torch.float64)
        if sample.signals.label:
            total = total + objective.desirable_weight * (1 - sigmoid(objective.beta * (r - point)))
        else:
            total = total + objective.undesirable_weight * (1 - sigmoid(objective.beta * (point - r)))
        count += 1
    return total / max(1, count)


def check_cuts(
    expected: torch.Tensor,
    leaf: torch.Tensor,
    units: Sequence[Sequence[int]],
    seed: int,
    loss_of: Callable[[list[list[int]]], torch.Tensor],
) -> None:
    """Loss and gradient are the oracle's, for the step as one micro-batch and cut into three."""
    (wanted,) = torch.autograd.grad(expected, leaf)
    for parts in (1, 3):
        loss = loss_of(random_cut(units, parts, random.Random(seed)))
        (grad,) = torch.autograd.grad(loss, leaf)
        assert abs(loss.item() - expected.item()) <= 1e-12 * max(1.0, abs(expected.item()))
        assert (grad - wanted).norm() <= 1e-12 * max(1e-3, wanted.norm())


def critic_loss(objective: Critic, world: World) -> torch.Tensor:
    weights, divisor = token_weights(world.samples, objective.normalise, None)
    total = world.scalar.sum() * 0
    estimated = {}
    if objective.returns == "gae":
        config = PolicyGradient(
            advantage="gae",
            gamma=objective.gamma,
            lam=objective.lam,
            kl_in="reward",
            kl_coef=objective.kl_coef,
            kl_estimator=objective.kl_estimator,
        )
        estimated = advantages(config, world.samples)
    for index, sample in enumerate(world.samples):
        values = world.values(index)
        for t in scored_positions(sample):
            old = float(sample.signals.values[t])
            target = estimated[index, t] + old if objective.returns == "gae" else float(sample.signals.returns[t])
            value = values[t - 1]  # of the state that the token is chosen in
            loss = (value - target) ** 2
            if objective.clip_eps is not None:
                near = old + torch.clamp(value - old, -objective.clip_eps, objective.clip_eps)
                loss = torch.maximum(loss, (near - target) ** 2)
            total = total + weights[index, t] * loss / 2
    return total / max(1, divisor)


def reward_model_loss(objective: RewardModel, world: World) -> torch.Tensor:
    """Mean over pairs; sample 2q is rejected and 2q + 1 chosen."""
    total = world.scalar.sum() * 0
    for rejected in range(0, len(world.samples), 2):
        lose, win = (world.values(index)[-1] for index in (rejected, rejected + 1))
        total = total - torch.log(1 / (1 + torch.exp(lose - win))) + objective.center_coef * (win + lose) ** 2
    return total / max(1, len(world.samples) // 2)
