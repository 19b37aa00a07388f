"""A package that looks like flash-attn-4 from outside, for a machine without a GPU: it attends densely."""

from __future__ import annotations

import sys
from pathlib import Path

_FILES = {
    "flash_attn_4-4.0.0b36.dist-info/METADATA": "Metadata-Version: 2.1\nName: flash-attn-4\nVersion: 4.0.0b36\n",
    "cutlass/__init__.py": "from . import cute\nInt32 = int\n",
    "cutlass/cute.py": "jit = lambda function: function\n",
    "flash_attn/__init__.py": "",
    "flash_attn/cute/utils.py": "scalar_to_ssa = lambda value, dtype: value\n",
    "flash_attn/cute/block_sparsity.py": """
from typing import Any, NamedTuple
class BlockSparseTensorsTorch(NamedTuple):
    mask_block_cnt: Any
    mask_block_idx: Any
    full_block_cnt: Any = None
    full_block_idx: Any = None
    cu_total_m_blocks: Any = None
    cu_block_idx_offsets: Any = None
    block_size: Any = None
    dq_write_order: Any = None
    dq_write_order_full: Any = None
    spt: Any = None
""",
    "flash_attn/cute/__init__.py": """
import torch
calls, error = [], 0.0
def flash_attn_func(q, k, v, *, softmax_scale, mask_mod, aux_tensors, block_sparse_tensors, block_sparse_tensors_bwd,
                    deterministic=False):
    calls.append({"deterministic": deterministic, "backward": block_sparse_tensors_bwd})
    q, k, v = (one[0].transpose(0, 1).float() for one in (q, k, v))
    k, v = (one.repeat_interleave(len(q) // len(k), dim=0) for one in (k, v))
    row = torch.arange(q.shape[1])
    seen = (row[None] <= row[:, None]) & (row[:, None] < aux_tensors[0][:len(row)][None])
    scores = (q @ k.transpose(1, 2) * softmax_scale).masked_fill(~seen, float("-inf"))
    out = torch.softmax(scores, dim=-1) @ v * (1 + error)
    return out.transpose(0, 1)[None].bfloat16(), None
""",
}


def install(folder: Path) -> None:
    """Write the package into a folder, which the caller puts in front of ``sys.path``; forget one that was imported."""
    for name, text in _FILES.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    for name in [name for name in sys.modules if name.partition(".")[0] in ("flash_attn", "cutlass")]:
        del sys.modules[name]
