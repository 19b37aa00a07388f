"""Every tensor that torch makes, for tests of how large they are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class EachTensor(TorchDispatchMode):
    """Calls a function with each tensor that is a result of torch."""

    def __init__(self, see: Callable[[torch.Tensor], object]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._see = see

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(made):
            if isinstance(leaf, torch.Tensor):
                self._see(leaf)
        return made
