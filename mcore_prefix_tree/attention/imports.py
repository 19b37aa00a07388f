"""The question whether a package that a back-end stands on can be used: one that is installed may still not import."""

from __future__ import annotations

from importlib import import_module

# By module, asked once. torch.compile can follow a look-up here, but not an import.
_FAULTS: dict[str, str | None] = {}


def import_fault(module: str) -> str | None:
    """Return why a module, even of an installed package, cannot be imported, in one line; None if it can."""
    if module not in _FAULTS:
        _FAULTS[module] = _fault(module)
    return _FAULTS[module]


def _fault(module: str) -> str | None:
    try:
        import_module(module)
    except Exception as error:  # from a shared library or other code that runs on import
        return f"{type(error).__name__}: {' '.join(str(error).split())}"
    return None
