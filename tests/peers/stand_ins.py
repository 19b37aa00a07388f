"""What takes the place of packages that need a GPU, in tests of trainers."""

from __future__ import annotations

import importlib.machinery
from types import ModuleType
from typing import Any


class StandIn(ModuleType):
    """A package with some members."""

    def __init__(self, name: str, **members: Any) -> None:
        super().__init__(name)
        vars(self).update(members, __path__=[], __spec__=importlib.machinery.ModuleSpec(name, None))
