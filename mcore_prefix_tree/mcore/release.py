"""The megatron-core that is imported: whether it is supported, and which layers its release has."""

from __future__ import annotations

import importlib.util
import re
import warnings

import megatron.core

OLDEST = "0.16.1"
# Releases that scripts/versions tests, and the commit of Megatron-LM's main, which calls itself 0.20.0.
RELEASES = ("0.16.1", "0.19.2")
MAIN, MAIN_COMMIT = "0.20.0", "d98e8a64dd"
SUPPORTED = f"megatron-core {', '.join(RELEASES)} and {MAIN} (main at {MAIN_COMMIT}) are tested"
NEEDS_DEPTHS = "megatron-core 0.19 or later"


class MegatronCoreError(ImportError):
    """The installed megatron-core is older than this package works with. The message says which version is needed."""


def installed_version() -> str:
    """Return the version of the ``megatron.core`` that is imported, which need not be the one that pip lists."""
    return str(megatron.core.__version__)


def check_version() -> None:
    """Reject a version older than :data:`OLDEST` with MegatronCoreError, and warn about one newer than the tests'."""
    version = installed_version()
    if _release(version) < _release(OLDEST):
        raise MegatronCoreError(f"megatron-core {version} is too old; {SUPPORTED}")
    if _release(version)[:2] > _release(MAIN)[:2]:
        warnings.warn(
            f"no test of this package has seen megatron-core {version}; {SUPPORTED}, `mcore-prefix-tree verify RECIPE` "
            "compares folded with unfolded on this one",
            stacklevel=2,
        )


def _release(version: str) -> tuple[int, ...]:
    """Return the leading numbers of a version, without ``dev`` or the name of a commit."""
    return tuple(int(number) for number in re.match(r"[\d.]*\d", version)[0].split("."))  # type: ignore[index]


def _has(module: str, name: str = "") -> bool:
    """Return whether megatron.core has a module; with ``name``, whether it is a package that has this module."""
    found = importlib.util.find_spec(f"megatron.core.{module}")
    if found is None or not name:
        return found is not None
    return found.submodule_search_locations is not None and _has(f"{module}.{name}")


# HybridModel came with 0.18; the layers and hooks below came with 0.19.
HAS_HYBRID_MODEL = _has("models.hybrid")
HAS_DELTA_NET = _has("ssm.gated_delta_net", "gdn")
HAS_SPARSE_ATTENTION = _has("transformer.experimental_attention_variant", "dsa_masking")
HAS_DEPTHS = _release(installed_version()) >= (0, 19)
