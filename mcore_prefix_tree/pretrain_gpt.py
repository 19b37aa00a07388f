"""Megatron-LM's ``pretrain_gpt.py`` with one more flag: ``python -m mcore_prefix_tree.pretrain_gpt --help``.

Under ``torchrun``, Slurm or ``mpirun``, with every argument of ``pretrain_gpt.py``. Without ``--prefix-tree`` that
script itself is run.
"""

from __future__ import annotations

import argparse
import os
import runpy
import sys
from collections.abc import Sequence

from mcore_prefix_tree.mcore.arguments import add_prefix_tree_args, check_unused
from mcore_prefix_tree.mcore.pretrain.checkout import use_megatron_lm

USER_ERROR = 2


def main(argv: Sequence[str]) -> None:
    """Run with the command line's arguments.

    Raises:
        SystemExit: with status 2 for arguments that cannot be used, before anything is started.
    """
    # Abbreviations are off, as in Megatron's parser, or "--prefix" would mean something.
    early = argparse.ArgumentParser(allow_abbrev=False, add_help=False)
    known, rest = add_prefix_tree_args(early).parse_known_args(argv)
    try:
        root = use_megatron_lm(known.megatron_lm_path)
        if not known.prefix_tree and not {"-h", "--help"} & set(rest):
            check_unused(known)
    except ValueError as error:
        _refuse(error)
    # Only now is it known which megatron there is to import.
    from mcore_prefix_tree.mcore.pretrain import launch

    launch.emulate_without_gpu()
    if not known.prefix_tree and not {"-h", "--help"} & set(rest):
        script = root / "pretrain_gpt.py"
        sys.argv = [str(script), *rest]
        runpy.run_path(str(script), run_name="__main__")
        return
    try:
        job = launch.prepare(root)
    except (ValueError, OSError, NotImplementedError, ImportError) as error:
        _refuse(error)
    job.run()


def _refuse(error: Exception) -> None:
    # Under torchrun every rank meets the same mistake: once a machine is enough.
    if os.environ.get("LOCAL_RANK", "0") == "0":
        sys.stderr.write(f"error: {' '.join(str(error).split())}\n")
    raise SystemExit(USER_ERROR) from error


if __name__ == "__main__":
    main(sys.argv[1:])
