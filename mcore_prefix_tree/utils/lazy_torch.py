"""torch, imported when it is first used: recipes are read and samples are planned without it, and it takes seconds."""

from __future__ import annotations

from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist
    import torch.nn.functional as F
else:

    class _Lazy(ModuleType):
        """A module that is imported when its first attribute is asked for."""

        def __getattr__(self, name: str) -> Any:
            value = getattr(import_module(self.__name__), name)
            setattr(self, name, value)  # the next look-up does not come here
            return value

    torch, dist, F = map(_Lazy, ("torch", "torch.distributed", "torch.nn.functional"))

__all__ = ["F", "dist", "torch"]
