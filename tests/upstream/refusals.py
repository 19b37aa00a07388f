"""Errors of ``add_prefix_tree_args`` for many command lines, up to the point at which Megatron-LM would start the job.

``python refusals.py CASES ANSWERS``: two files of JSON, a list of lists of words, and for each the error or null.
A word NAME=VALUE is of the environment; GPUS=2 are GPUs that this process pretends to see. One process for all of them,
because importing Megatron-LM takes seconds.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import sys
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from unittest import mock

from mcore_prefix_tree.pretrain_gpt import use_megatron_lm

TWO_RANKS = {"--context-parallel-size", "--expert-model-parallel-size", "--tensor-model-parallel-size"}


def main(cases: Path, answers: Path) -> None:
    warnings.simplefilter("ignore")
    os.environ["MASTER_ADDR"] = "localhost"
    use_megatron_lm(None)
    from mcore_prefix_tree.mcore.megatron_lm import start

    start.emulate_without_gpu(dry_run=True)
    told: list[str | None] = []
    from megatron.training.arguments import parse_args

    from mcore_prefix_tree.mcore.megatron_lm.command_line import add_prefix_tree_args

    door = partial(parse_args, partial(add_prefix_tree_args, args_defaults={}, scores=True))
    for words in json.loads(cases.read_text()):
        variables = dict(word.split("=") for word in words if re.match("[A-Z_]+=", word))
        sys.argv = ["pretrain_gpt", *(word for word in words if word.partition("=")[0] not in variables)]
        variables.setdefault("WORLD_SIZE", "2" if TWO_RANKS & set(words) else "1")
        with mock.patch.dict(os.environ, variables), seeing_gpus(int(variables.get("GPUS", "0"))):
            told.append(refusal(door))
    answers.write_text(json.dumps(told))


def refusal(parse: Callable[[], object]) -> str | None:
    said = io.StringIO()
    # A rank that does not speak first waits to be ended; a dry run would read the data.
    alone = mock.patch.multiple("mcore_prefix_tree.utils.errors", _PATIENCE_S=0, _PATIENCE_ELSEWHERE_S=0)
    dry = mock.patch("mcore_prefix_tree.mcore.megatron_lm.dry_run.dry_run", return_value="")
    try:
        with alone, dry, contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(said):
            parse()
    except SystemExit:
        pass
    return said.getvalue().removeprefix("error: ").rstrip("\n") or None


@contextlib.contextmanager
def seeing_gpus(count: int) -> Iterator[None]:
    if not count:
        yield
        return
    with mock.patch.multiple("torch.cuda", is_available=lambda: True, device_count=lambda: count):
        yield


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
