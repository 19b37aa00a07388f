"""``pretrain_gpt`` that fails if Megatron would free an output that gloo may still be sending."""

from __future__ import annotations

from typing import Any

import prepared_door


def check_freed(output: Any, deallocate_pipeline_outputs: bool = False) -> None:
    assert output is None or not deallocate_pipeline_outputs, "this output may still be sent"


def exchange() -> None:
    from mcore_prefix_tree.mcore.megatron_lm.start import emulate_without_gpu

    emulate_without_gpu()
    from megatron.core.pipeline_parallel import schedules

    schedules.deallocate_output_tensor = check_freed


if __name__ == "__main__":
    prepared_door.main(exchange)
