"""A package that looks like flash-attn-4 from outside, for a machine without a GPU: it attends densely.

Its forward takes the lists, the mask and the sinks. Its log-sum-exp is the package's: fp32 ``[1, H, P]`` in
nats, with the sink; for a row without a key, -inf or the sink.
"""

from __future__ import annotations

import sys
from pathlib import Path

_FILES = {
    "flash_attn_4-4.0.0b36.dist-info/METADATA": "Metadata-Version: 2.1\nName: flash-attn-4\nVersion: 4.0.0b36\n",
    "cutlass/__init__.py": "from . import cute\nInt32, const_expr = int, bool\n",
    "cutlass/cute.py": "jit, size = lambda function: function, lambda shape: shape[0]\n",
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
def seen_of(lists, mask_mod, tensors, size, device):
    rows, columns = lists.block_size
    row = torch.arange(size, device=device)
    masked, full = torch.zeros(2, size + rows, size + columns, dtype=torch.bool, device=device)
    for tiles, counts, blocks in ((masked, *lists[:2]), (full, *lists[2:4])):
        for block, count in enumerate(counts[0, 0].tolist()):
            for other in blocks[0, 0, block, :count].tolist():
                tiles[block * rows :][:rows, other * columns :][:, :columns] = True
    seen = mask_mod(0, 0, row[None, :, None], row[None, None], None, tensors)[0]
    return full[:size, :size] | masked[:size, :size] & seen
def flash_attn_func(q, k, v, *, softmax_scale, mask_mod, aux_tensors, block_sparse_tensors, block_sparse_tensors_bwd,
                    deterministic=False, learnable_sink=None, return_lse=False):
    calls.append({"deterministic": deterministic, "backward": block_sparse_tensors_bwd, "return_lse": return_lse})
    dtype = q.dtype
    q, k, v = (one[0].transpose(0, 1).double() for one in (q, k, v))
    k, v = (one.repeat_interleave(len(q) // len(k), dim=0) for one in (k, v))
    seen = seen_of(block_sparse_tensors, mask_mod, [one.detach() for one in aux_tensors], q.shape[1], q.device)
    scores = (q @ k.transpose(1, 2) * softmax_scale).masked_fill(~seen, float("-inf"))
    if learnable_sink is not None:  # one more key, without a value
        sink = learnable_sink.double()[:, None, None].expand(-1, q.shape[1], 1)
        scores, v = torch.cat([scores, sink], dim=-1), torch.nn.functional.pad(v, (0, 0, 0, 1))
    lse = scores.logsumexp(dim=-1)
    out = torch.softmax(scores, dim=-1).nan_to_num() @ v * (1 + error)  # a row without a key is zero
    return out.transpose(0, 1)[None].to(dtype).contiguous(), lse[None].float() if return_lse else None
""",
}


def install(folder: Path) -> None:
    """Write the package into a folder, which the caller puts in front of ``sys.path``; forget one that was imported."""
    for name, text in _FILES.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    for name in [name for name in sys.modules if name.partition(".")[0] in ("flash_attn", "cutlass")]:
        del sys.modules[name]
