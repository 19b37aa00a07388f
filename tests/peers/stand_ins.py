"""Replacements for packages that need a GPU, in tests of trainers."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
from types import ModuleType
from typing import Any

import torch

# Modules of trainers for logging, serving or quantization.
PACKAGES = (
    "aiohttp", "datasets", "decord", "fastapi", "hydra", "math_verify", "matplotlib", "megatron.energon", "mlflow",
    "modelopt", "num2words", "nvidia_resiliency_ext", "nvtx", "openai", "prometheus_client", "pynvml", "ray", "swanlab",
    "tensordict", "torchdata", "transformer_engine", "uvicorn", "wandb", "zmq",
)  # fmt: skip


class StandIn(ModuleType):
    """A package with some members."""

    def __init__(self, name: str, **members: Any) -> None:
        super().__init__(name)
        vars(self).update(members, __path__=[], __spec__=importlib.machinery.ModuleSpec(name, None))


class AnyName(StandIn):
    """A package that has every class that it is asked for."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        full = f"{self.__name__}.{name}"
        return type(name, (torch.nn.Module,), {}) if name[0].isupper() else AnyName(full)


class Package(AnyName):
    """A package that has every name, any of which decorates."""

    def __getattr__(self, name: str) -> Any:
        found = super().__getattr__(name)
        return Package(found.__name__) if isinstance(found, AnyName) else found

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return args[0] if args and callable(args[0]) else self


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds stand-ins."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        wanted = any(f"{name}.".startswith(f"{package}.") for package in PACKAGES)
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if wanted else None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> Any:
        return Package(spec.name, __version__="2.9.0")

    def exec_module(self, module: Any) -> None:
        pass
