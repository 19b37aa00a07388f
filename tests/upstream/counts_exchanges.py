"""``pretrain_gpt`` that prints how often its pipeline stages asked each other for shapes."""

from __future__ import annotations

from typing import Any

import prepared_door

asked: list[tuple[Any, ...]] = []


def count() -> None:
    from mcore_prefix_tree.mcore.megatron_lm.start import emulate_without_gpu

    emulate_without_gpu()
    from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator

    upstream = P2PCommunicator._communicate_shapes

    def ask(*args: Any) -> Any:
        asked.append(args)
        return upstream(*args)

    P2PCommunicator._communicate_shapes = ask


if __name__ == "__main__":
    try:
        prepared_door.main(count)
    finally:
        print(f"exchanges: {len(asked)};", flush=True)
