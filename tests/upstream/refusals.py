"""What ``mcore_prefix_tree.pretrain_gpt`` says to many command lines, up to where it would start the job.

``python refusals.py CASES ANSWERS``: two files of JSON, a list of lists of words, and for each what is refused or null.
One process for all of them, because importing Megatron-LM takes seconds.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
import warnings
from pathlib import Path

from mcore_prefix_tree.errors import USER_ERRORS, sentence_of
from mcore_prefix_tree.pretrain_gpt import use_megatron_lm

TWO_RANKS = {"--context-parallel-size", "--expert-model-parallel-size"}


def main(cases: Path, answers: Path) -> None:
    warnings.simplefilter("ignore")
    os.environ["MASTER_ADDR"] = "localhost"
    root = use_megatron_lm(None)
    from mcore_prefix_tree.mcore.pretrain import launch

    launch.emulate_without_gpu(dry_run=True)
    told: list[str | None] = []
    for words in json.loads(cases.read_text()):
        sys.argv = ["pretrain_gpt", *words]
        os.environ["WORLD_SIZE"] = "2" if TWO_RANKS & set(words) else "1"
        try:
            with contextlib.redirect_stdout(io.StringIO()):
                launch.prepare(root)
            told.append(None)
        except USER_ERRORS as error:
            told.append(sentence_of(error))
    answers.write_text(json.dumps(told))


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
