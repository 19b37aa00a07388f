"""Megatron-LM's ``pretrain_gpt.py`` with one more flag: ``python -m mcore_prefix_tree.pretrain_gpt --help``.

It runs under ``torchrun``, Slurm or ``mpirun``, with every argument of ``pretrain_gpt.py``. Without ``--prefix-tree``
it runs that script itself. ``pretrain_hybrid`` is the same for ``pretrain_hybrid.py``.
"""

from __future__ import annotations

import argparse
import os
import re
import runpy
import sys
import warnings
from collections.abc import Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

from mcore_prefix_tree.arguments.flags import readable_arguments, render_help
from mcore_prefix_tree.arguments.refusals import check_unused
from mcore_prefix_tree.utils.errors import USER_ERROR, end_without_stacks
from mcore_prefix_tree.utils.ranks import adopt_ranks

VARIABLE = "MEGATRON_LM_PATH"
GPT, HYBRID, RL = "pretrain_gpt.py", "pretrain_hybrid.py", "train_rl.py"
_PATTERNS = {"--hybrid-layer-pattern", "--hybrid-override-pattern"}


def main(script: str = GPT, starter: str = "mcore_prefix_tree.mcore.megatron_lm.start") -> None:
    """Run with the command line's arguments: Megatron-LM's ``script``, or with the flag ``run`` of module ``starter``.

    Raises:
        SystemExit: status 2, for arguments that cannot be used, or with the help for none at all; 0 after ``--help``.
    """
    # Megatron's parser is in the checkout, and this argument names the checkout.
    parser = argparse.ArgumentParser(allow_abbrev=False, add_help=False)
    parser.add_argument("--megatron-lm-path")
    known, rest = parser.parse_known_args()
    folded = "--prefix-tree" in rest
    with readable_arguments():
        if not sys.argv[1:] or {"-h", "--help"} & set(rest):
            print(render_help(script, rl=script == RL), end="", flush=True)
            raise SystemExit(0 if rest else USER_ERROR)
        root = use_megatron_lm(known.megatron_lm_path)
        if script == HYBRID and not (root / HYBRID).is_file():
            raise ValueError(f"{root} has no {HYBRID}, which came with core_v0.18; check out core_v0.19.0")
        if folded:
            _check_kind(script, rest)
        dry_run = "--prefix-tree-dry-run" in rest
        if folded and not dry_run:
            adopt_ranks(os.environ)
        if not folded:
            check_unused(rest)
        with warnings.catch_warnings():
            if folded and (dry_run or os.environ.get("LOCAL_RANK", "0") != "0"):
                # One rank per machine reports missing optional packages; a dry run does not need them.
                warnings.simplefilter("ignore")
            # Only now is it known which megatron there is to import.
            from mcore_prefix_tree.mcore.megatron_lm.start import emulate_without_gpu
        emulate_without_gpu(dry_run=dry_run)
        if folded:
            end_without_stacks()
            import_module(starter).run(root)
            return
    sys.argv = [str(root / script), *rest]
    runpy.run_path(sys.argv[0], run_name="__main__")


def use_megatron_lm(path: str | None) -> Path:
    """Put a checkout of Megatron-LM first on ``sys.path`` and return its folder.

    It comes first, because ``megatron.training`` and ``megatron.core`` must be of one version, as when the checkout's
    own ``pretrain_gpt.py`` runs; and because ``megatron.training`` compiles the data helpers of ``megatron.core`` with
    a Makefile that the wheel lacks. Without a path, ``MEGATRON_LM_PATH`` is taken, or else the importable
    ``megatron.training``.

    Raises:
        ValueError: there is no Megatron-LM there, or it is for a newer Python.
    """
    given = path or os.environ.get(VARIABLE)
    if given is None:
        spec = find_spec("megatron") and find_spec("megatron.training")
        found = None if spec is None or spec.origin is None else Path(spec.origin).resolve().parents[2]
        # Newer wheels have megatron.training, but not the sources that it compiles when it starts.
        if found is None or not (found / "pretrain_gpt.py").is_file():
            raise ValueError(
                "Megatron-LM is missing: the megatron-core wheel lacks parts of it; clone "
                "https://github.com/NVIDIA/Megatron-LM at core_v0.16.1, core_v0.19.0 or main and name it with "
                "--megatron-lm-path DIR"
            )
        root = found
    else:
        root = Path(given).resolve()
        if not (root / "megatron" / "training" / "training.py").is_file():
            raise ValueError(
                f"{'--megatron-lm-path' if path else VARIABLE}: {root} is not a checkout of Megatron-LM: it has no "
                "megatron/training"
            )
    _check_python(root)
    imported = getattr(sys.modules.get("megatron.core"), "__file__", None)
    assert imported is None or Path(imported).is_relative_to(root), f"{imported} was imported before {root} was named"
    sys.path.insert(0, str(root))
    return root


def _check_kind(script: str, arguments: Sequence[str]) -> None:
    """Raise ValueError if ``--hybrid-layer-pattern`` is given to ``pretrain_gpt.py``, or missing for the other."""
    names = {argument.partition("=")[0] for argument in arguments}
    given = names & _PATTERNS
    if script == GPT and given:
        raise ValueError(
            f"{given.pop()} is an argument of {HYBRID}; {script} ignores it: start the job with "
            "-m mcore_prefix_tree.pretrain_hybrid"
        )
    if script == HYBRID and not given and "--use-checkpoint-args" not in names:
        raise ValueError(
            f"{HYBRID} needs --hybrid-layer-pattern, such as '*-*-'; -m mcore_prefix_tree.pretrain_gpt trains a GPT"
        )


def _check_python(root: Path) -> None:
    project = root / "pyproject.toml"
    if not project.is_file():
        return
    needed = re.search(r"""^requires-python\s*=\s*["']>=\s*(\d+)\.(\d+)""", project.read_text(), re.MULTILINE)
    if needed is not None and sys.version_info < (int(needed[1]), int(needed[2])):
        running = f"{sys.version_info.major}.{sys.version_info.minor}"
        raise ValueError(f"{root} needs Python {needed[1]}.{needed[2]} or newer, this is {running}")


if __name__ == "__main__":
    main()
