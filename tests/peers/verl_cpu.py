"""verl's full jobs on a CPU: ``VERL_USE_EXTERNAL_MODULES=verl_cpu`` loads this in every process that imports verl.

It replaces GPU-only parts before verl imports it: TransformerEngine's layers (``te_stand_in``), the
emulation of ``torch.cuda``, a platform of verl's whose collectives are gloo, and packages that Megatron-Bridge imports
without need here. verl, Megatron-Bridge and Megatron-Core are as they are installed.

``VERL_CPU_DTYPE=float32`` makes verl's Megatron engine compute in float32, which its configuration refuses.
"""

from __future__ import annotations

import os
import sys
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import stand_ins
import te_stand_in
import torch
import torch.nn.functional as F

from mcore_prefix_tree.cpu.emulation import enable

torch.set_num_threads(1)


class PackedAttention(te_stand_in.DotProductAttention):
    """Causal attention for rows that are not folded, so that verl's own engine runs too."""

    def forward(self, query: Any, key: Any, value: Any, *_: Any, **options: Any) -> Any:
        """``[T, heads, size]`` in rows to ``[T, heads * size]``, or ``[length, batch, heads, size]``."""
        cu_seqlens = options.get("cu_seqlens_q_padded")
        cu_seqlens = options.get("cu_seqlens_q") if cu_seqlens is None else cu_seqlens
        if cu_seqlens is None:
            rows = self._attend(*(x.permute(1, 2, 0, 3) for x in (query, key, value)))
            return rows.permute(2, 0, 1, 3).flatten(2)
        rows = [
            self._attend(*(x[start:end].transpose(0, 1).unsqueeze(0) for x in (query, key, value)))
            for start, end in pairwise(cu_seqlens.tolist())
        ]
        return torch.cat([row.squeeze(0).transpose(0, 1) for row in rows]).flatten(1)

    @staticmethod
    def _attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)


def _put_transformer_engine() -> None:
    from transformer_engine import pytorch

    linear = te_stand_in.Linear.__init__

    def sized(self: Any, in_features: int, out_features: int, *args: Any, **options: Any) -> None:
        """Megatron-Bridge's LoRA and Megatron's text of a module read what TransformerEngine's layers keep."""
        linear(self, in_features, out_features, *args, **options)
        self.in_features, self.out_features = in_features, out_features
        self.use_bias, self.tp_size = self.bias is not None, options.get("tp_size", 1)

    te_stand_in.Linear.__init__ = sized  # type: ignore[method-assign]
    pytorch.DotProductAttention = PackedAttention


def _put_gpu() -> None:
    """Answer verl's calls of ``torch.cuda``, in addition to Megatron-Core's."""
    enable()
    empty = torch.empty
    torch.empty = lambda *args, pin_memory=False, **options: empty(*args, **options)  # type: ignore[assignment]
    torch.Tensor.pin_memory = lambda self, *_, **__: self  # type: ignore[method-assign]
    device = SimpleNamespace(major=9, minor=0, total_memory=1, name="cpu")
    answers = {
        "set_device": None,
        "device_count": 1,
        "mem_get_info": (1, 1),
        "get_device_name": "cpu",
        "get_device_properties": device,
        "ipc_collect": None,
    }
    for name, answer in answers.items():
        setattr(torch.cuda, name, lambda *_, answer=answer, **__: answer)
    torch.cuda.manual_seed_all = torch.default_generator.manual_seed


def _put_platform() -> None:
    from verl.plugin.platform import PlatformRegistry, set_platform
    from verl.plugin.platform.platform_cuda import PlatformCUDA

    @PlatformRegistry.register(platform="emulated")
    class PlatformEmulated(PlatformCUDA):  # type: ignore[misc]
        def communication_backend_name(self) -> str:
            return "gloo"

        def is_platform_available(self, use_smi_check: bool = False) -> bool:
            return True

    set_platform(PlatformEmulated())


def _put_dtype(dtype: str) -> None:
    from verl.workers.config.engine import McoreEngineConfig

    check = McoreEngineConfig.__post_init__

    def checked(self: Any) -> None:
        check(self)
        object.__setattr__(self, "dtype", dtype)

    McoreEngineConfig.__post_init__ = checked


_put_transformer_engine()
# verl asks Megatron-Bridge's training loop for a configuration, whose imports only the loop needs.
stand_ins.PACKAGES = (
    "megatron.energon", "modelopt", "nvidia_resiliency_ext", "qwen_vl_utils", "webdataset", "num2words", "decord",
)  # fmt: skip
sys.meta_path.append(stand_ins.Finder())  # last: only for missing packages
_put_gpu()
_put_platform()
if "VERL_CPU_DTYPE" in os.environ:
    _put_dtype(os.environ["VERL_CPU_DTYPE"])
