"""The source patches on copies of upstream releases: they apply by git, and come off to the byte."""

from __future__ import annotations

import ast
import re
import shutil
from itertools import groupby
from pathlib import Path

import pytest
from harness.wheels import wheel
from sources import MEGATRON, PATCHES, TRANSFORMER_ENGINE, apply_patches, content, installed_core, megatron_core

ALL = [pytest.param(patch, id=patch.name) for patches in PATCHES.values() for patch in patches]


def changed_by(patch: Path) -> list[str]:
    return re.findall(r"^diff --git a/(\S+) b/\1$", patch.read_text(), flags=re.MULTILINE)


@pytest.mark.parametrize("project", PATCHES)
def test_apply_and_revert(project: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    if project == "megatron-lm":
        megatron_core(None if installed_core() == MEGATRON else MEGATRON, tmp_path, request.config.cache)
        only = "megatron/core/*"
    else:
        package = "transformer_engine/pytorch"
        only = f"{package}/*"
        shutil.copytree(
            wheel("transformer-engine", TRANSFORMER_ENGINE, request.config.cache) / package, tmp_path / package
        )
    original = content(tmp_path)
    apply_patches(project, tmp_path, f"--include={only}")
    patched = content(tmp_path)
    changed = {name for name in patched if patched[name] != original.get(name)}
    assert changed == {name for patch in PATCHES[project] for name in changed_by(patch) if name.startswith(only[:-1])}
    for name in changed:
        ast.parse(patched[name])
    apply_patches(project, tmp_path, f"--include={only}", "--reverse")
    assert content(tmp_path) == original


@pytest.mark.parametrize("patch", ALL)
def test_patch_is_small_and_describes_itself(patch: Path) -> None:
    message, _, diff = patch.read_text().partition("\n---\n")
    assert re.search(r"^Subject: \[PATCH( \d/\d)?\] \S", message, flags=re.MULTILINE), "git am takes it"
    assert "mcore_prefix_tree" not in diff, "the package enters their registries, if it is installed"
    for of_file in re.split(r"^diff --git ", diff, flags=re.MULTILINE)[1:]:
        hunks = re.split(r"^@@ .*\n", of_file, flags=re.MULTILINE)[1:]
        assert hunks
        if "\nnew file mode" in of_file:
            lines = hunks[0].splitlines()
            assert "Copyright (c) 20" in lines[0], "upstream's licence header"
            assert max(len(line) - 1 for line in lines) <= 100
            continue
        for hunk in hunks:
            runs = [
                len(list(run)) for context, run in groupby(hunk.splitlines(), lambda line: line[:1] == " ") if context
            ]
            assert max(runs) <= 6, "three lines of context on each side of a change"
    assert len(re.findall(r"^-(?!-- )", diff, flags=re.MULTILINE)) <= 8
