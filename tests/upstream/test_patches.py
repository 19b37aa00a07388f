"""scripts/patches on copies of upstream releases: all or nothing, once, and back to the byte."""

from __future__ import annotations

import ast
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path

import pytest
from harness.marks import quick
from harness.wheels import wheel
from sources import (
    MEGATRON,
    ROOT,
    TRANSFORMER_ENGINE,
    content,
    installed_core,
    megatron_core,
    patches,
    source_patches,
)

PATCHES = ROOT / "patches"
SERIES = source_patches.read_manifest()
TARGETS = [("--megatron-lm", version) for version in MEGATRON] + [
    ("--transformer-engine", version) for version in TRANSFORMER_ENGINE
]
MOVED = "megatron/core/transformer/enums.py"
CREATED = {"megatron/core/tree_metadata.py", "megatron/core/transformer/tree_attention.py"}


@pytest.fixture(
    params=quick(("--megatron-lm", "installed"), ("--transformer-engine", "2.20.2"), of=TARGETS),
    ids=" ".join,
)
def target(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[str, Path]:
    option, version = request.param
    if option == "--megatron-lm":
        if version == "installed" and not (installed_core() or "").startswith("0.19."):
            version = "0.19.2"
        return option, megatron_core(MEGATRON[version], tmp_path, request.config.cache)
    source = wheel("transformer-engine", version, request.config.cache)
    for path in [source / "transformer_engine" / "pytorch", *source.glob("*.dist-info")]:
        shutil.copytree(path, tmp_path / path.relative_to(source))
    return option, tmp_path


@pytest.fixture
def core(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A copy of megatron-core 0.19.2: the installed one, if it is that version."""
    return megatron_core(None if installed_core() == "0.19.2" else "0.19.2", tmp_path, request.config.cache)


def test_apply_again_and_revert(target: tuple[str, Path]) -> None:
    option, folder = target
    original = content(folder)

    assert patches("check", option, folder).stdout.count(": not applied\n") == len(changed_by(option))
    assert content(folder) == original

    result = patches("apply", option, folder)
    assert result.returncode == 0, result.stderr
    patched = content(folder)
    assert {name for name in patched if patched[name] != original.get(name)} == changed_by(option)
    assert patched.keys() - original.keys() == (CREATED if option == "--megatron-lm" else set())
    for name in changed_by(option):
        ast.parse(patched[name])

    assert patches("check", option, folder).stdout.count(": applied\n") == len(changed_by(option))
    times = {name: (folder / name).stat().st_mtime_ns for name in patched}
    again = patches("apply", option, folder)
    assert again.returncode == 0
    assert "nothing to do" in again.stdout
    assert {name: (folder / name).stat().st_mtime_ns for name in content(folder)} == times

    assert patches("revert", option, folder).returncode == 0
    assert content(folder) == original
    again = patches("revert", option, folder)
    assert again.returncode == 0
    assert "nothing to do" in again.stdout
    assert content(folder) == original


def series_of(core: Path) -> source_patches.Series:
    return source_patches.series_for(source_patches.Target.megatron_lm(core), SERIES)


def series_of_version(version: str) -> source_patches.Series:
    (found,) = [one for one in SERIES if one.project == "megatron-lm" and version in one.versions]
    return found


def header_of(core: Path, patch: str, name: str) -> str:
    """Return the header of a file's first hunk in the patch whose name begins with ``patch``."""
    (found,) = [one for one in series_of(core).patches if one.path.name.startswith(patch)]
    return found.hunks(name)[0].header


def changed_by(option: str) -> set[str]:
    project = option.removeprefix("--")
    series = [one for one in SERIES if one.project == project]
    packages = ("megatron/core/", "transformer_engine/")
    found = [{name for patch in one.patches for name in patch.files if name.startswith(packages)} for one in series]
    assert all(names == found[0] for names in found)
    return found[0]


def test_lines_that_moved_are_found(core: Path) -> None:
    path = core / MOVED
    path.write_text("# a fork's own line\n\n" + path.read_text())
    original = content(core)
    result = patches("apply", "--megatron-lm", core)
    assert result.returncode == 0, result.stderr
    line = int(re.findall(r"\+(\d+)", header_of(core, "0003", MOVED))[0]) + 2
    moved = f"{MOVED}: hunk 1 of 0003-core-attention-of-prefix-trees.patch is at line {line}, not {line - 2} (offset 2"
    assert moved in result.stdout
    assert patches("revert", "--megatron-lm", core).returncode == 0
    assert content(core) == original


def test_a_line_that_differs_is_named_and_nothing_changes(core: Path) -> None:
    path = core / MOVED
    path.write_text(path.read_text().replace("    auto = 5\n", "    auto = 5\n    own = 7\n"))
    other = core / "megatron/core/models/gpt/gpt_model.py"
    other.write_text(
        other.read_text().replace("is_active()\n\n        # Decoder embedding.", "is_active()\n\n        # Edited")
    )
    original = content(core)
    header = header_of(core, "0002", "megatron/core/models/gpt/gpt_model.py")
    for command in ("check", "apply"):
        result = patches(command, "--megatron-lm", core)
        assert result.returncode == 2
        (sentence,) = result.stderr.splitlines()
        assert sentence.startswith(f"error: cannot apply the patches of {series_of(core).title} in {core}")
        report = result.stdout if command == "check" else sentence
        assert f"{MOVED}, hunk 1 of 1 ({header_of(core, '0003', MOVED)}) of 0003-" in report
        assert f"gpt_model.py, hunk 1 of 3 ({header}) of 0002-rotary-position-ids.patch" in report
        # Position of the lines, and the first one that differs.
        assert re.search(
            r"expected at line \d+, found at line \d+, where line \d+ should be '' but stands 'own = 7'", report
        )
        assert content(core) == original


def test_missing_file_is_listed_with_all_others(core: Path) -> None:
    name = "megatron/core/models/hybrid/hybrid_model.py"
    (core / name).unlink()
    original = content(core)
    result = patches("check", "--megatron-lm", core)
    assert result.returncode == 2
    assert f"  {name}: does not fit\n" in result.stdout
    assert "  megatron/core/models/gpt/gpt_model.py: not applied\n" in result.stdout
    hunks = [line for line in result.stdout.splitlines() if line.endswith(": the file is missing")]
    assert len(hunks) == 4
    assert hunks[0].startswith(f"  {name}, hunk 1 of 4 (@@ ")
    assert patches("apply", "--megatron-lm", core).returncode == 2
    assert content(core) == original


def test_versions_without_patches_are_compared_with_the_nearest(core: Path) -> None:
    info = core / "megatron/core/package_info.py"
    info.write_text(re.sub(r"^MINOR = .*", "MINOR = 99", info.read_text(), flags=re.MULTILINE))
    result = patches("check", "--megatron-lm", core)
    assert result.returncode == 0, result.stderr
    assert f"patches of {series_of_version('0.19.0').base}:" in result.stdout
    assert "every hunk fits: apply them with --as-version 0.19.0" in result.stdout


def test_files_that_a_patch_adds_are_not_written_over(core: Path) -> None:
    for name in CREATED:
        (core / name).write_text("own = 1\n")
    original = content(core)
    result = patches("apply", "--megatron-lm", core)
    assert result.returncode == 2
    assert (
        "megatron/core/tree_metadata.py: another file than 0001-packed-seq-params-tree-metadata.patch adds"
        in result.stderr
    )
    assert content(core) == original


def test_local_changes_elsewhere_survive_both_ways(core: Path) -> None:
    path = core / MOVED
    path.write_text(path.read_text().replace('"""Attention Backend"""', '"""Attention back-end of a fork"""'))
    original = content(core)
    assert patches("apply", "--megatron-lm", core).returncode == 0
    path.write_text(path.read_text() + "\n# later\n")
    assert patches("revert", "--megatron-lm", core).returncode == 0
    assert content(core) == original | {MOVED: original[MOVED] + b"\n# later\n"}


def test_revert_does_not_overwrite_later_changes(core: Path) -> None:
    assert patches("apply", "--megatron-lm", core).returncode == 0
    path = core / MOVED
    path.write_text(path.read_text().replace("    tree = 6", "    tree = 8"))
    edited = content(core)
    result = patches("revert", "--megatron-lm", core)
    assert result.returncode == 2
    (sentence,) = result.stderr.splitlines()
    assert f"other lines than the series left are at {MOVED}, hunk 1 of 1" in sentence
    assert content(core) == edited
    assert patches("apply", "--megatron-lm", core).returncode == 2
    assert content(core) == edited


def test_half_a_series_is_completed_or_taken_back(core: Path) -> None:
    """The state that a power failure between two renames leaves."""
    original = content(core)
    assert patches("apply", "--megatron-lm", core).returncode == 0
    patched = content(core)
    for command, finished in (("apply", patched), ("revert", original)):
        (core / MOVED).write_bytes(patched[MOVED])
        for name in changed_by("--megatron-lm") - {MOVED}:
            if name in CREATED:
                (core / name).unlink(missing_ok=True)
            else:
                (core / name).write_bytes(original[name])
        assert patches(command, "--megatron-lm", core).returncode == 0
        assert content(core) == finished


@pytest.mark.parametrize("error", [OSError("disk full"), KeyboardInterrupt()], ids=repr)
def test_a_failure_half_way_takes_everything_back(
    core: Path, error: BaseException, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = content(core)
    files = source_patches.examine(source_patches.Target.megatron_lm(core), series_of(core))
    renames = 0

    def replace(source: object, destination: object) -> None:
        nonlocal renames
        renames += 1
        if renames == 4:
            raise error
        rename(source, destination)

    rename = os.replace
    monkeypatch.setattr(source_patches.os, "replace", replace)
    with pytest.raises(type(error)):
        source_patches.replace_files(files)
    assert renames == 4 + 3
    assert content(core) == original


def test_ctrl_c_waits_for_the_last_rename(core: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = source_patches.examine(source_patches.Target.megatron_lm(core), series_of(core))
    rename = os.replace

    def replace(source: object, destination: object) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        rename(source, destination)

    monkeypatch.setattr(source_patches.os, "replace", replace)
    with pytest.raises(KeyboardInterrupt):
        source_patches.replace_files(files)
    assert all(file.path.read_bytes() == file.after for file in files)
    assert not [name for name in content(core) if Path(name).name.startswith(".")]


def test_modes_and_links_of_other_copies_stay(core: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Some installers link one copy of a file into every environment."""
    path = core / MOVED
    path.chmod(0o640)
    elsewhere = tmp_path_factory.mktemp("cache") / "enums.py"
    os.link(path, elsewhere)
    before = elsewhere.read_bytes()
    assert patches("apply", "--megatron-lm", core).returncode == 0
    assert path.stat().st_mode & 0o777 == 0o640
    assert path.read_bytes() != before
    assert elsewhere.read_bytes() == before


def test_repository_around_the_target_is_ignored(core: Path) -> None:
    """git apply skips files above its working directory if that is inside of a repository."""
    environment = core / "venv"
    environment.mkdir()
    (core / "megatron").rename(environment / "megatron")
    subprocess.run(["git", "init", "--quiet", core], check=True)
    (core / ".git" / "config").write_text("[apply]\n\twhitespace = error-all\n[core]\n\tautocrlf = true\n")
    original = content(environment)
    assert patches("apply", "--megatron-lm", environment).returncode == 0
    assert {name for name, data in content(environment).items() if data != original.get(name)} == changed_by(
        "--megatron-lm"
    )
    assert patches("revert", "--megatron-lm", environment).returncode == 0
    assert content(environment) == original


def test_installed(core: Path) -> None:
    """The package that the active Python imports, here the copy; with a warning, because it is pip's."""
    environment = {**os.environ, "PYTHONPATH": str(core), "PYTHON": sys.executable}
    command = [str(ROOT / "scripts" / "patches"), "apply", "--installed"]
    result = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert result.returncode == 0, result.stderr
    assert f"warning: {core} was installed by pip" in result.stderr
    assert "applied to 12 of 12 files" in result.stdout
    assert "skipped, because a wheel does not contain them: pretrain_gpt.py, tests/unit_tests/" in result.stdout
    command[1] = "revert"
    result = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert (result.returncode, result.stderr) == (0, "")


def test_versions_without_patches_are_refused_by_name(core: Path) -> None:
    fits = series_of(core).versions[0]
    other = "0.20.0"
    info = core / "megatron/core/package_info.py"
    info.write_text(re.sub(r"^MINOR = .*", "MINOR = 99", info.read_text(), flags=re.MULTILINE))
    original = content(core)
    result = patches("apply", "--megatron-lm", core)
    assert result.returncode == 2
    assert re.search(rf"{core} is Megatron-LM 0\.99\.\d, and there are patches for 0\.19\.0, 0\.19\.1", result.stderr)
    assert "--as-version" in result.stderr
    # The way out for a fork that counts by itself, and for one that reports the wrong version.
    assert patches("apply", "--megatron-lm", core, "--as-version", other).returncode == 2
    assert content(core) == original
    assert patches("apply", "--megatron-lm", core, "--as-version", fits).returncode == 0


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["apply"], "nothing to patch; set"),
        (["apply", "--megatron-lm", "/"], "/ has no megatron/core"),
        (["apply", "--transformer-engine", "/"], "/ has no transformer_engine/pytorch"),
        (["revert", "--installed", "--megatron-lm", "/"], "omit --megatron-lm"),
    ],
)
def test_mistakes_get_one_sentence(arguments: list[str], sentence: str) -> None:
    result = patches(*arguments)
    assert result.returncode == 2
    (line,) = result.stderr.splitlines()
    assert line.startswith("error: ")
    assert sentence in line


def test_list_matches_the_manifest() -> None:
    result = patches("list")
    assert result.returncode == 0
    for series in SERIES:
        assert series.commit[:12] in result.stdout
    assert result.stdout.count("not sent") == sum(len(series.patches) for series in SERIES)


def every_patch() -> Iterator[tuple[source_patches.Series, source_patches.Patch]]:
    for series in SERIES:
        for patch in series.patches:
            yield series, patch


def test_the_manifest_and_the_folder_agree() -> None:
    assert sorted(patch.path for _, patch in every_patch()) == sorted(PATCHES.rglob("*.patch"))
    for series in SERIES:
        assert re.fullmatch(r"[0-9a-f]{64}" if "PyPI" in series.base else r"[0-9a-f]{40}", series.commit)
        assert series.versions
        numbers = [int(patch.path.name[:4]) for patch in series.patches]
        assert numbers == list(range(1, len(numbers) + 1))


@pytest.mark.parametrize("patch", [patch for _, patch in every_patch()], ids=lambda p: str(p.path.relative_to(PATCHES)))
def test_patch_is_small_and_describes_itself(patch: source_patches.Patch) -> None:
    text = patch.path.read_text()
    message, _, diff = text.partition("\n---\n")
    assert re.search(r"^Subject: \[PATCH( \d/\d)?\] \S", message, flags=re.MULTILINE), "git am takes it"
    assert sorted(re.findall(r"^diff --git a/(\S+) b/\1$", diff, flags=re.MULTILINE)) == sorted(patch.files)
    assert patch.why
    assert patch.until
    assert patch.upstream == "not sent"
    for name in patch.files:
        hunks = patch.hunks(name)
        assert hunks
        if patch.creates(name):
            assert "Copyright (c) 20" in hunks[0].lines[0], "upstream's licence header"
            assert max(len(line) - 1 for line in hunks[0].lines) <= 100
            continue
        for hunk in hunks:
            runs = [len(list(run)) for context, run in groupby(hunk.lines, lambda line: line[:1] == " ") if context]
            assert max(runs) <= 6, "three lines of context on each side of a change"
    removed = re.findall(r"^-(?!-- )", diff, flags=re.MULTILINE)
    assert len(removed) <= 8


def test_no_patch_knows_this_package() -> None:
    """It enters their registries, if it is installed."""
    for _, patch in every_patch():
        assert "mcore_prefix_tree" not in patch.path.read_text()


def test_every_series_of_a_project_has_a_cover_letter() -> None:
    for project in {series.project for series in SERIES}:
        assert (PATCHES / project / "README.md").is_file()
