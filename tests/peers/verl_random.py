"""A rollout backend for verl that answers at random: ``actor_rollout_ref.rollout.name=random``.

It goes in by verl's registries of rollouts, like ``verl_cpu`` through ``VERL_USE_EXTERNAL_MODULES``. The k-th answer to
a prompt depends on nothing but the prompt and k, so that two jobs train on the same rows.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import ray
from verl.checkpoint_engine.base import CheckpointEngine, CheckpointEngineRegistry
from verl.workers.rollout import base
from verl.workers.rollout.base import BaseRollout
from verl.workers.rollout.replica import RolloutReplica, RolloutReplicaRegistry, TokenOutput

VOCAB, FIRST = 128, 7  # the words of verl_jobs.model_folder


class Server:
    """A server in an actor of Ray's."""

    def __init__(self) -> None:
        self.asked: Counter[tuple[int, ...]] = Counter()
        self.steps: int | None = None

    async def generate(self, request_id: str, *, prompt_ids: list[int], **_: Any) -> TokenOutput:
        prompt = tuple(map(int, prompt_ids))
        self.asked[prompt] += 1
        rng = np.random.default_rng([*prompt, self.asked[prompt]])
        ids = rng.integers(FIRST, VOCAB, size=rng.integers(3, 12)).tolist()
        steps = {"global_steps": self.steps}
        return TokenOutput(
            token_ids=ids, log_probs=[-1.0] * len(ids), stop_reason="completed", num_preempted=0, extra_fields=steps
        )

    async def set_global_steps(self, steps: int) -> None:
        self.steps = steps

    async def _nothing(self, *_: Any, **__: Any) -> None:
        pass

    wake_up = sleep = clear_kv_cache = release_kv_cache = resume_kv_cache = _nothing
    abort_all_requests = resume_generation = start_profile = stop_profile = _nothing


class Replica(RolloutReplica):  # type: ignore[misc]
    async def launch_servers(self) -> None:
        name = f"random_server_{self.replica_rank}"
        server = ray.remote(Server).options(name=name, num_cpus=0, max_concurrency=64).remote()
        self.servers, self._server_handle, self._server_address = [server], server, f"127.0.0.1:{self.replica_rank}"


class Adapter(BaseRollout):  # type: ignore[misc]
    """A rank's end of the weights' way to the server, which needs none."""

    def __init__(self, *args: Any, replica_rank: int = 0, **options: Any) -> None:
        super().__init__(*args, **options)
        self.replica_rank, self.is_leader_rank = replica_rank, True

    async def resume(self, tags: list[str]) -> None:
        pass

    async def release(self) -> None:
        pass

    async def update_weights(self, weights: Any, global_steps: int | None = None, **_: Any) -> None:
        for _name, _weight in weights:  # export them as verl does
            pass
        if global_steps is not None:
            await ray.get_actor(f"random_server_{self.replica_rank}").set_global_steps.remote(global_steps)


@CheckpointEngineRegistry.register("random")
class Nowhere(CheckpointEngine):  # type: ignore[misc]
    """The weights' way to servers on other GPUs, which verl has none of for CPUs: exports and drops them."""

    def __init__(self, bucket_size: int, is_master: bool = False) -> None:
        pass

    def prepare(self) -> dict[str, Any]:
        return {}

    @classmethod
    def build_topology(cls, actors: int, rollouts: int, metadata: list[Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        return {}, {}

    def init_process_group(self) -> None:
        pass

    finalize = init_process_group

    async def send_weights(self, weights: Any, global_steps: int | None = None) -> None:
        for _name, _weight in weights:
            pass

    def receive_weights(self, global_steps: int | None = None) -> Any:
        return iter(())


base._ROLLOUT_REGISTRY["random", "async"] = f"{__name__}.Adapter"
RolloutReplicaRegistry.register("random", lambda: Replica)
