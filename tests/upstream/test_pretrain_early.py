"""The early check of a command line knows Megatron-LM's arguments as the checkout has them."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from megatron_lm import VARIABLE, require_checkout

from mcore_prefix_tree.arguments.early import EarlyParser
from mcore_prefix_tree.arguments.flags import add_argument_group
from mcore_prefix_tree.utils.errors import Mistakes

require_checkout(trains=False)

# Prints the options, the default and the kind of each argument of Megatron-LM's parser.
PROGRAM = """
import argparse, json
from mcore_prefix_tree.pretrain_gpt import use_megatron_lm
use_megatron_lm(None)
from megatron.training.arguments import add_megatron_arguments
parser = add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))
print(json.dumps([
    [action.dest, action.option_strings, str(action.default), type(action).__name__] for action in parser._actions
]))
"""


@pytest.fixture(scope="module")
def theirs() -> dict[str, tuple[list[str], str, str]]:
    """Options, default and kind of Megatron-LM's arguments, by name."""
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, env=dict(os.environ))
    assert done.returncode == 0, done.stderr
    return {name: (options, default, kind) for name, options, default, kind in json.loads(done.stdout.splitlines()[-1])}


def test_the_checkout_is_the_named_one() -> None:
    assert os.environ[VARIABLE]


def test_early_parser_has_megatrons_options_and_defaults(theirs: dict[str, tuple[list[str], str, str]]) -> None:
    ours = {action.dest: action for action in EarlyParser(add_argument_group, Mistakes())._actions}
    shared = [name for name in ours if name in theirs]
    assert len(shared) > 40
    for name in shared:
        options, default, kind = theirs[name]
        assert set(ours[name].option_strings) <= set(options), name
        assert default == str(ours[name].default) or not (ours[name].default or _is_set(default)), (name, default)
        assert (kind == "_StoreFalseAction") == (name == "gradient_accumulation_fusion"), name


def _is_set(default: str) -> bool:
    return default not in ("None", "False", "0", "0.0", "[]", "")
