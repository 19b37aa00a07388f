"""Random draws in a model's forward, found by its modules' rates and torch's generator: folding cannot repeat them."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from functools import cache
from typing import Any

import torch
from torch.nn.modules.dropout import _DropoutNd
from torch.nn.modules.module import register_module_module_registration_hook

# Attributes that hold a rate: dropout, attn_pdrop, layerdrop, drop_path, router_jitter_noise, neftune_noise_alpha, ...
_RATE = re.compile("drop|jitter|noise")
_NOISE = re.compile("jitter|noise")
# Attribute of a model: its modules that have rates.
_HOLDERS = "_prefix_tree_rates"
# Attributes that hold the rate of a class with a telling name, for example DropPath.
_OF_DROPOUT = {"p", "prob", "rate"}

SHARED = "samples that share a token would share its random draw"


def random_part(model: torch.nn.Module) -> str | None:
    """Return a sentence about the modules of a model that draw random numbers as it is now, or None without any.

    Evaluation mode, a rate of 0 or 1 and an adapter that PEFT has switched off draw nothing. A call reads the modules
    that have rates; it looks for these in all modules only if torch has registered a module since the last call.
    """
    found = list(_rates(model))
    if not found:
        return None
    module, name, rate = found[0]
    path = next(path for path, other in model.named_modules(remove_duplicate=False) if other is module)
    more = f", like {len(found) - 1} more," if len(found) > 1 else ""
    return (
        f"{path or type(module).__name__} has {name}={rate:g}{more} and is in training mode: {SHARED}; set it to 0, or "
        "keep the module in evaluation mode"
    )


def drew(model: Any, when: str) -> str:
    """Return a sentence that rejects a model that drew random numbers ``when``, with the rates of its ``config``."""
    settings = vars(getattr(model, "config", drew))
    rates = [f"{name}={rate:g}" for name, rate in settings.items() if _RATE.search(name) and _draws(name, rate)]
    named = f" (its config has {', '.join(rates)})" if rates else ""
    return (
        f"random draws, and the model drew numbers {when}{named}: {SHARED}; set dropout and noise to 0, or "
        "call model.eval()"
    )


def registrations() -> int:
    """Return a number that changes whenever torch registers a module in another, from the first call on.

    What was found in a model before may have changed then. A direct change of ``_modules`` is not registered.
    """
    _watch()
    return _REGISTERED[0]


@cache
def _watch() -> None:
    register_module_module_registration_hook(_count)


def _count(module: torch.nn.Module, name: str, submodule: torch.nn.Module | None) -> None:
    _REGISTERED[0] += 1


_REGISTERED = [0]


def _rates(model: torch.nn.Module) -> Iterator[tuple[torch.nn.Module, str, float]]:
    """Yield the module, attribute and value of every rate that is in effect, in the order of the modules."""
    known = vars(model).get(_HOLDERS)
    if known is None or known[0] != registrations():
        every = [(module, is_tuner) for module, _, is_tuner in _walk(model, into_tuners=False)]
        # Trainers give an embedding its rate of noise when they start.
        late = torch.nn.Embedding
        holders = [one for one in every if one[1] or isinstance(one[0], late) or _rate_names(one[0])]
        known = vars(model)[_HOLDERS] = (registrations(), holders)
    for holder, is_tuner in known[1]:
        for module, active, _ in _walk(holder, into_tuners=True) if is_tuner else [(holder, None, False)]:
            for name in _rate_names(module) if module.training else ():
                value: Any = getattr(module, name, None)
                by_adapter = active is not None and isinstance(value, Mapping)
                values: list[Any] = [value[one] for one in active or () if one in value] if by_adapter else [value]
                yield from ((module, name, float(rate)) for rate in values if _draws(name, rate))


def _walk(
    model: torch.nn.Module, *, into_tuners: bool
) -> Iterator[tuple[torch.nn.Module, Collection[str] | None, bool]]:
    """Yield modules in their order, active adapters inside a layer of PEFT, and whether a module is such a layer."""
    # PEFT's containers hold all adapters by name.
    stack: list[tuple[torch.nn.Module, Collection[str] | None]] = [(model, None)]
    while stack:
        module, active = stack.pop()
        kind: Any = type(module)
        is_tuner = _is_tuner(kind)
        if is_tuner:
            layer: Any = module
            active = () if layer.disable_adapters or getattr(layer, "merged", False) else layer.active_adapters
        yield module, active, is_tuner
        if is_tuner and not into_tuners:
            continue
        children = module._modules
        if active is not None and isinstance(module, torch.nn.ModuleDict):
            children = {name: child for name, child in children.items() if name in active}
        inner = active if isinstance(module, torch.nn.ModuleDict) or is_tuner else None
        stack.extend((child, inner) for child in reversed(children.values()) if child is not None)


def _draws(name: str, rate: Any) -> bool:
    """Return whether the value of an attribute is a rate at which something is drawn."""
    if not isinstance(rate, int | float) or isinstance(rate, bool):
        return False
    return rate > 0 and (rate < 1 or _NOISE.search(name.lower()) is not None)


_NAMES: dict[tuple[type, int], tuple[str, ...]] = {}


def _rate_names(module: torch.nn.Module) -> tuple[str, ...]:
    """Return the attributes of a module that may hold a rate; looked up once for a class and a number of attributes."""
    attributes, kind = vars(module), type(module)
    known = _NAMES.get((kind, len(attributes)))
    if known is None:
        drops = issubclass(kind, _DropoutNd) or "drop" in kind.__name__.lower()
        known = tuple(name for name in attributes if _RATE.search(name.lower()) or (drops and name in _OF_DROPOUT))
        _NAMES[kind, len(attributes)] = known
    return known


@cache
def _is_tuner(kind: type) -> bool:
    """Return whether a class is a layer of PEFT, which names its active adapters."""
    return all(isinstance(getattr(kind, name, None), property) for name in ("active_adapters", "disable_adapters"))


class Draws:
    """Look at the random numbers that torch's generator of a CPU or CUDA device gave since this was made."""

    def __init__(self, device: torch.device) -> None:
        self._generator: torch.Generator | None = None
        if device.type == "cpu":
            self._generator = torch.default_generator
        elif device.type == "cuda":
            self._generator = torch.cuda.default_generators[
                torch.cuda.current_device() if device.index is None else device.index
            ]
        self._before = self._state()

    def any(self, *, coins: int) -> bool:
        """Return whether there were any except ``coins`` single numbers, which stochastic depth draws at any rate."""
        if self._generator is None or torch.equal(self._before, now := self._state()):
            return False
        if self._generator.device.type != "cpu":
            return True
        replay = torch.Generator()
        replay.set_state(self._before)
        return not any(_after_a_coin(replay, now) for _ in range(coins))

    def _state(self) -> torch.Tensor:
        return torch.empty(0) if self._generator is None else self._generator.get_state()


def _after_a_coin(generator: torch.Generator, state: torch.Tensor) -> bool:
    """Return whether a generator has ``state``, uint8 ``[n]``, after one draw of a single number."""
    torch.rand([], generator=generator)
    return torch.equal(generator.get_state(), state)


class LayerDraws:
    """Look for draws between the attention of one layer and that of the next, of a model, by its attention layers."""

    def __init__(self) -> None:
        self._last: tuple[int, bool, Draws] | None = None

    def before(self, layer: int | None) -> bool:
        """Return whether the model drew random numbers since the previous layer's attention; ``layer`` begins now."""
        if self._last is None or layer is None:
            return False
        last, with_grad, draws = self._last
        # Between other calls the caller may have drawn some.
        follows = layer == last + 1 and with_grad == torch.is_grad_enabled()
        return follows and draws.any(coins=1)

    def after(self, layer: int | None, device: torch.device) -> None:
        """Note that the attention of a layer has ended."""
        self._last = None if layer is None else (layer, torch.is_grad_enabled(), Draws(device))
