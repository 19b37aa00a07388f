"""The loss of ``train_rl.py`` as an objective of folded micro-batches: its own function, token by token.

Legend: P padded tokens, K scored tokens of a micro-batch.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from mcore_prefix_tree.mcore.megatron_lm.rl.script import Script
from mcore_prefix_tree.mcore.megatron_lm.rl.trajectories import INFERENCE, OLD, REFERENCE, Trajectory
from mcore_prefix_tree.objectives import LossOutput, Objective, Targets
from mcore_prefix_tree.objectives.scored import ScoredTokens
from mcore_prefix_tree.objectives.scored_rows import Rows
from mcore_prefix_tree.sample import Sample

_MASK, _ADVANTAGE = "loss_mask", "advantage"


@dataclass(frozen=True, kw_only=True, eq=False)
class ScriptLoss(LossOutput):
    """The weighted sum, and the arguments of the script's ``loss_func``, ``[K]`` each."""

    terms: tuple[torch.Tensor, ...]


@dataclass(frozen=True, kw_only=True, eq=False)
class ScriptObjective(Objective):
    """``calculate_grpo_loss`` of the checkout, with the arguments that ``train_rl.py`` gives it.

    Its terms belong to single tokens, so each token of a trajectory is a separate row. ``dtypes`` are those in which
    the loop keeps each kind of log-probabilities, and computes with them.
    """

    script: Script
    args: argparse.Namespace
    dtypes: Mapping[str, torch.dtype]

    def step_targets(
        self, samples: Sequence[Sample], trajectories: Sequence[Trajectory], weight: Sequence[float]
    ) -> Targets:
        """Return the targets of a step's losses; ``weight`` is that of each trajectory's tokens, all ranks together."""
        scored = ScoredTokens.of(samples)
        columns = {name: np.concatenate([one.columns[name] for one in trajectories]) for name in self.dtypes}
        columns[_MASK] = scored.mask
        columns[_ADVANTAGE] = np.array([one.advantage for one in trajectories])[scored.sample]
        return Targets(
            scored=scored,
            weight=scored.mask * np.asarray(weight)[scored.sample],
            count=np.zeros(len(samples), dtype=np.int64),  # Megatron's micro-batches know their own divisors
            columns=columns,
        )

    def targets(self, samples: Sequence[Sample]) -> Targets:
        raise NotImplementedError("the targets of the loss come with the loop's own micro-batches; see step_targets")

    def loss(self, scores: torch.Tensor, entropy: torch.Tensor | None, rows: Rows) -> ScriptLoss:
        """Return the loss of scores ``[K]``."""
        args, columns = self.args, rows.columns
        of_loop = self.dtypes[OLD]
        given = {name: columns[name].to(dtype)[:, None] for name, dtype in self.dtypes.items()}
        losses, *terms = self.script.grpo_loss(
            # Rounded as the loop's own are: without a step between, the ratio of both is 1.
            current_logprobs=scores[rows.token].to(of_loop)[:, None],
            old_logprobs=given[OLD],
            ref_logprobs=given[REFERENCE],
            advantages=columns[_ADVANTAGE].to(of_loop),
            clamp_eps_lower=args.grpo_clamp_eps_lower,
            clamp_eps_upper=args.grpo_clamp_eps_upper,
            kl_beta=args.grpo_kl_beta,
            entropy_weight=args.grpo_entropy_term_weight,
            inference_logprobs=given.get(INFERENCE),
            is_truncation_coef=args.rl_importance_sampling_truncation_coef,
        )
        per_token = losses[:, 0]
        wide = per_token.to(torch.promote_types(per_token.dtype, torch.float32))
        reported = (columns[_MASK].float(), *(term[:, 0].detach() for term in terms), per_token.detach())
        return ScriptLoss(loss=torch.dot(wide, rows.weight.to(wide.dtype)), terms=reported)
