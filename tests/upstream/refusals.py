"""What ``mcore_prefix_tree.pretrain_gpt`` says to many command lines, up to where it would start the job.

``python refusals.py CASES ANSWERS``: two files of JSON, a list of lists of words, and for each what is refused or null.
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
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from unittest import mock

from mcore_prefix_tree.errors import USER_ERRORS, sentence_of
from mcore_prefix_tree.pretrain_gpt import use_megatron_lm

TWO_RANKS = {"--context-parallel-size", "--expert-model-parallel-size", "--tensor-model-parallel-size"}


def main(cases: Path, answers: Path) -> None:
    warnings.simplefilter("ignore")
    os.environ["MASTER_ADDR"] = "localhost"
    root = use_megatron_lm(None)
    from mcore_prefix_tree.mcore.pretrain import launch

    launch.emulate_without_gpu(dry_run=True)
    told: list[str | None] = []
    for words in json.loads(cases.read_text()):
        variables = dict(word.split("=") for word in words if re.match("[A-Z_]+=", word))
        sys.argv = ["pretrain_gpt", *(word for word in words if word.partition("=")[0] not in variables)]
        variables["WORLD_SIZE"] = "2" if TWO_RANKS & set(words) else "1"
        with mock.patch.dict(os.environ, variables), seeing_gpus(int(variables.get("GPUS", "0"))):
            told.append(refusal(launch, root))
    answers.write_text(json.dumps(told))


def refusal(launch: ModuleType, root: Path) -> str | None:
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            launch.prepare(root)
    except USER_ERRORS as error:
        return sentence_of(error)
    return None


@contextlib.contextmanager
def seeing_gpus(count: int) -> Iterator[None]:
    if not count:
        yield
        return
    with mock.patch.multiple("torch.cuda", is_available=lambda: True, device_count=lambda: count):
        yield


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
