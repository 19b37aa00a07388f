"""Find Megatron-LM, the part of Megatron that is not on PyPI: ``megatron.training``."""

from __future__ import annotations

import importlib.metadata
import inspect
import os
import sys
from importlib.util import find_spec
from pathlib import Path

from mcore_prefix_tree.mcore.arguments import ArgumentError

VARIABLE = "MEGATRON_LM_PATH"


def use_megatron_lm(path: str | None) -> Path:
    """Put a checkout of Megatron-LM first on ``sys.path`` and say where it is.

    First, because ``megatron.training`` and ``megatron.core`` have to be of one version, as when the checkout's own
    ``pretrain_gpt.py`` runs; and because ``megatron.training`` compiles the data helpers of ``megatron.core`` with a
    Makefile that the wheel lacks.

    Args:
        path: of the checkout; None takes ``MEGATRON_LM_PATH``, or else whatever ``megatron.training`` can be imported.

    Raises:
        ArgumentError: there is no Megatron-LM there, or another ``megatron.core`` was imported already.
    """
    given = path or os.environ.get(VARIABLE)
    if given is None:
        root = _importable()
    else:
        root = Path(given).resolve()
        if not (root / "megatron" / "training" / "training.py").is_file():
            raise ArgumentError(
                f"{'--megatron-lm-path' if path else VARIABLE}: {root} is no checkout of Megatron-LM, it has no "
                "megatron/training"
            )
    loaded = sys.modules.get("megatron.core")
    if loaded is not None and not str(loaded.__file__).startswith(str(root)):
        raise ArgumentError(
            f"megatron.core was already imported from {Path(str(loaded.__file__)).parent}, but Megatron-LM is {root}; "
            "start with python -m mcore_prefix_tree.pretrain_gpt"
        )
    if sys.path[0] != str(root):
        sys.path.insert(0, str(root))
    return root


def _importable() -> Path:
    spec = find_spec("megatron")
    found = spec is not None and find_spec("megatron.training")
    if not found or found.origin is None:
        raise ArgumentError(
            "megatron.training is not installed: the megatron-core wheel lacks it. Clone "
            "https://github.com/NVIDIA/Megatron-LM at core_v0.16.1 and name it with --megatron-lm-path DIR"
        )
    return Path(found.origin).resolve().parents[2]


def check_megatron_lm(root: Path) -> str | None:
    """Import the checkout and see that its ``pretrain`` is the one this package calls.

    Returns:
        A line worth telling the user, if the checkout's megatron.core is not the version that pip installed.

    Raises:
        ArgumentError: the checkout is of a version whose ``pretrain`` takes other arguments.
    """
    import megatron.core
    import megatron.training

    version = megatron.core.__version__
    expected = ["train_valid_test_dataset_provider", "model_provider", "model_type", "forward_step_func"]
    parameters = list(inspect.signature(megatron.training.pretrain).parameters)
    if parameters[:4] != expected or not {"extra_args_provider", "args_defaults"} <= set(parameters):
        raise ArgumentError(
            f"{root} is Megatron-LM {version}, whose pretrain() takes other arguments than that of core_v0.16.1, which "
            "--prefix-tree is written for; check out core_v0.16.1 or core_v0.17.1"
        )
    try:
        installed = importlib.metadata.version("megatron-core")
    except importlib.metadata.PackageNotFoundError:
        return None
    if installed == version:
        return None
    return f"megatron.core {version} of {root} is used, not the installed {installed}"
