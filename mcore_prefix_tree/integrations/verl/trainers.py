"""verl's V1 trainers that give complete groups to data-parallel ranks, registered by ``register_trainer``.

``trainer.v1.trainer_mode`` names them: ``sync_grouped``, ``colocate_async_grouped``, ``separate_async_grouped``. Each
is verl's trainer without the suffix, except for the order of a step's rows.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import transfer_queue as tq
from verl.trainer.ppo.v1 import PPOTrainerColocateAsync, PPOTrainerSeparateAsync, PPOTrainerSync, register_trainer

from mcore_prefix_tree.integrations.verl.dealing import deal_groups, group_rows

SUFFIX = "_grouped"


class WholeGroups:
    """Mixin for verl's trainers: assigns complete groups to ranks in each mini-batch, by unique tokens."""

    def __init__(self, config: Any) -> None:
        # verl compares the mode with its own names, and looks up settings by it.
        config.trainer.v1.trainer_mode = config.trainer.v1.trainer_mode.removesuffix(SUFFIX)
        super().__init__(config)  # type: ignore[call-arg]

    def _balance_batch(self: Any, batch: Any, metrics: dict[str, Any], *args: Any, **options: Any) -> Any:
        """Pad the batch as verl does, then order its rows; see ``PPOTrainer``."""
        batch = super()._balance_batch(batch, metrics, *args, **options)  # type: ignore[misc]
        ids = tq.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id, select_fields=["input_ids"])
        tokens = [row.numpy().astype(np.int32) for row in ids["input_ids"].unbind()]
        # Keys are {uid}_{session}_{index}; a group has one uid.
        groups = group_rows(tokens, [key.split("_", 1)[0] for key in batch.keys])
        ranks = max(self.actor_rollout_wg._dispatch_info["actor"]) + 1
        settings = self.config.actor_rollout_ref
        mini_batch = settings.actor.ppo_mini_batch_size * settings.rollout.n
        # While only the critic is trained, its mini-batches decide how many rows there are.
        updates = 1 if len(batch) % mini_batch else len(batch) // mini_batch
        dealt = deal_groups(groups, ranks=ranks, mini_batches=updates)
        batch.reorder([row for rank in dealt for step in rank for group in step for row in group.rows])
        loads = [sum(group.unique_tokens for step in rank for group in step) for rank in dealt]
        metrics.update({"fold/rank_unique_tokens/max": max(loads), "fold/rank_unique_tokens/min": min(loads)})
        return batch


@register_trainer("sync" + SUFFIX)
class GroupedTrainerSync(WholeGroups, PPOTrainerSync):  # type: ignore[misc]
    """verl's synchronous trainer with complete groups per rank."""


@register_trainer("colocate_async" + SUFFIX)
class GroupedTrainerColocateAsync(WholeGroups, PPOTrainerColocateAsync):  # type: ignore[misc]
    """verl's asynchronous trainer on the GPUs of the rollouts, with complete groups per rank."""


@register_trainer("separate_async" + SUFFIX)
class GroupedTrainerSeparateAsync(WholeGroups, PPOTrainerSeparateAsync):  # type: ignore[misc]
    """verl's asynchronous trainer on separate GPUs, with complete groups per rank."""
