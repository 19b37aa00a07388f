"""The table of trainers' hooks: those of the trainers that are here are in place, and one that moved is named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import trainer_hooks
from trainer_hooks import Hook, hooks, main, moved, root_of

SOURCE = """
class Engine:
    def step(self, batch, *, loss):
        return self.provider
"""


@pytest.mark.parametrize("trainer", list(hooks()))
def test_hooks_are_in_place(trainer: str) -> None:
    root = root_of(trainer)
    if root is None:
        pytest.skip(f"{trainer} is neither installed nor checked out")
    assert moved(trainer, root) == []


@pytest.mark.parametrize(
    ("hook", "missing"),
    [
        (("engine.py", "Engine.step", ("batch", "loss"), ("self.provider",), ""), ""),
        (("engine.py", "", (), ("class Engine",), ""), ""),
        (("moved.py", "Engine.step", (), (), ""), "no such file"),
        (("engine.py", "Engine.forward", (), (), ""), "no Engine.forward"),
        (("engine.py", "Engine.step", ("data",), (), ""), "parameter data"),
        (("engine.py", "Engine.step", (), ("self.model",), ""), "text 'self.model'"),
    ],
)
def test_a_hook_that_moved_is_named(tmp_path: Path, hook: tuple[Any, ...], missing: str) -> None:
    (tmp_path / "engine.py").write_text(SOURCE)
    assert Hook(*hook).check(tmp_path)[1] == missing


def test_the_command_fails_for_a_checkout_without_the_hooks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(trainer_hooks, "root_of", lambda _: None)
    assert main([]) == 0
    assert main([f"slime={tmp_path}"]) == 1
    lines = [line for line in capsys.readouterr().out.splitlines() if "MOVED" in line]
    assert len(lines) == len(hooks()["slime"])
    assert lines[0].startswith("slime: slime/backends/megatron_utils/model_provider.py get_model_provider_func")
