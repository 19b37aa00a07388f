"""The page "GRPO on your own model": its commands for a machine without a GPU make the rewarded behaviour rise.

Needs Megatron-Bridge, and with it Python 3.12: see requirements/bridge.txt.
"""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path

import numpy as np
import pytest
from pages import commands_of

if importlib.util.find_spec("megatron.bridge") is None:  # importing it needs a stand-in
    pytest.skip("Megatron-Bridge is not installed", allow_module_level=True)
pytest.importorskip("transformers")
from harness.torchrun_jobs import PROGRAM
from hf_jobs import run_ranks

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "howto" / "grpo-own-model.md"


def rewards_in(rollouts: Path) -> np.ndarray:
    return np.array([json.loads(line)["reward"] for line in rollouts.read_text().splitlines()])


@pytest.mark.ci
def test_commands_of_the_page_raise_the_reward(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = re.search(r"```json\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert prompts is not None
    (tmp_path / "prompts.jsonl").write_text(prompts[1])
    monkeypatch.chdir(tmp_path)
    for folder in ("recipes", "examples"):
        (tmp_path / folder).symlink_to(ROOT / folder)
    ran = [words for words in commands_of(PAGE) if "tiny" in " ".join(words)]
    for program, *words in ran:
        target = (words.pop(0),) if program == "python" else PROGRAM
        run_ranks(1, *words, program=target, code=0)
    assert [words[1] for words in ran if words[0] != "python"] == ["verify", "score", "train"]
    before, after = (rewards_in(tmp_path / name) for name in ("rollouts.jsonl", "after.jsonl"))
    assert len(before) == len(after) == 256
    error = np.sqrt(before.var() / len(before) + after.var() / len(after))
    assert after.mean() - before.mean() > 5 * error
