"""The command of docs/howto/megatron-lm.md for a CPU runs as printed, and its output equals the page's."""

from __future__ import annotations

import shlex

import pytest
from megatron_lm import ENTRY, megatron, require_checkout
from page_outputs import difference
from page_runs import blocks_of
from pages import ROOT

require_checkout()


def test_command_for_a_cpu_prints_the_pages_output(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    (block,) = (one for one in blocks_of(ROOT / "docs/howto/megatron-lm.md") if "gloo" in one.commands[0])
    words = shlex.split(block.commands[0])
    assert words[:5] == ["torchrun", "--nproc-per-node", "1", *ENTRY]
    run = megatron(ENTRY, shlex.join(words[7:]))
    assert run.status == 0, run.output
    assert block.shown is not None
    assert difference(block.shown, run.output.splitlines()) is None
    at = words.index("--prefix-tree-tokenizer")
    without = megatron(ENTRY, shlex.join([*words[7:at], *words[at + 2 :], "--vocab-size", "32768"]))
    assert without.status == 2
    assert "field 'messages' needs a tokenizer; set --prefix-tree-tokenizer, or give 'tokens'" in without.output
