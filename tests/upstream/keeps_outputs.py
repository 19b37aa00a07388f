"""``pretrain_gpt`` that fails where Megatron would free an output that gloo may still be sending."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mcore_prefix_tree import pretrain_gpt

use_megatron_lm = pretrain_gpt.use_megatron_lm


def check_freed(output: Any, deallocate_pipeline_outputs: bool = False) -> None:
    assert output is None or not deallocate_pipeline_outputs, "this output may still be sent"


def with_check(path: str | None) -> Path:
    """Put the checkout on the path; only then is there a megatron.core to import."""
    root = use_megatron_lm(path)
    from mcore_prefix_tree.mcore.megatron_lm.launch import emulate_without_gpu

    emulate_without_gpu()
    from megatron.core.pipeline_parallel import schedules

    schedules.deallocate_output_tensor = check_freed
    return root


if __name__ == "__main__":
    pretrain_gpt.use_megatron_lm = with_check
    pretrain_gpt.main()
