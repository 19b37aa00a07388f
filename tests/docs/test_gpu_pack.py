"""``scripts/gpu_check --pack`` and ``--wheels``: files for a machine without a network, and their use there."""

from __future__ import annotations

import subprocess
import sys
import tarfile
import tempfile
import zipfile
from importlib.metadata import requires
from pathlib import Path

import pytest
from gpu_check_parts import pack, wheels
from packaging.requirements import Requirement
from requirement_pins import packed_pins

ROOT = Path(__file__).parents[2]


def test_packed_pins_agree_with_the_others():
    """And each one with the requirements of the others in its folder, as far as they are installed here."""
    files = [ROOT / "requirements" / f"{name}.txt" for name in ("base", "gpu")]
    elsewhere = [line for file in files for line in file.read_text().splitlines()]
    for name in pack.FOLDERS:
        packed = packed_pins(name)
        for line in elsewhere:
            pin = Requirement(line) if "==" in line and not line.startswith("#") else None
            if (
                pin is not None
                and pin.name in packed
                and (pin.marker is None or pin.marker.evaluate({"python_version": "3.12"}))
            ):
                assert f"=={packed[pin.name]}" == str(pin.specifier)
    if sys.version_info[:2] == (3, 12):
        packed = packed_pins("steps")
        for name in packed:
            for needed in map(Requirement, requires(name) or ()):
                if needed.name in packed and (needed.marker is None or needed.marker.evaluate({"extra": ""})):
                    assert needed.specifier.contains(packed[needed.name]), (name, needed)


def test_archive_has_all_files_but_stubs(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with zipfile.ZipFile(tmp_path / "a.whl", "w") as wheel:
        for name in ("a/__init__.py", "a.pth", "a/cu13/lib/stubs/large.so"):
            wheel.writestr(name, "")
    pack.archive([tmp_path / "a.whl"], tmp_path / "site", tmp_path / "a.tar.xz")
    with tarfile.open(tmp_path / "a.tar.xz") as packed:
        names = {name.removeprefix("./") for name in packed.getnames()}
    assert {"a/__init__.py", "a.pth"} <= names
    assert not any("large" in name for name in names)
    # And a Python over it follows its .pth.
    (tmp_path / "site" / "a.pth").write_text("inner\n")
    (tmp_path / "site" / "inner").mkdir()
    (tmp_path / "site" / "inner" / "found_by_pth.py").write_text("")
    folder = tmp_path / "packed"
    folder.mkdir()
    pack.archive([], tmp_path / "site", folder / "a.tar.xz")
    python = wheels.python_with(folder)
    subprocess.run([python, "-c", "import a, found_by_pth, numpy, pytest"], check=True)
    assert wheels.python_with(folder) == python


@pytest.mark.parametrize(
    ("sizes", "code", "says"),
    [
        ((20, 55), 0, "together they are 81.0 MiB: make one trip for each folder, without the others:"),
        ((20, 30), 0, "all folders fit in one trip, 56.0 MiB; call the script once with each:"),
        ((20, 58.5), 0, "  TOO LARGE by 0.5 MiB: remove docs, examples, patches from the checkout first"),
        ((20, 60), 1, "  TOO LARGE by 2.0 MiB: pin smaller packages in requirements/pack-*.txt"),
    ],
)
def test_trips_stay_below_the_limit(sizes, code, says):
    folders = {name: int(size * 2**20) for name, size in zip(("packed/steps", "packed/fa4"), sizes, strict=True)}
    lines, found = pack.trips(folders, tree=6 << 20, unread=1 << 20)
    assert (found, says in lines) == (code, True), lines
    assert lines[-3:-1] == [f"  scripts/gpu_check --minutes 9 --wheels {folder}" for folder in folders]
    assert pack.tracked_bytes(*pack.UNREAD) < pack.tracked_bytes() < 16 << 20


def test_folder_without_wheels_is_named(tmp_path):
    with pytest.raises(SystemExit, match=r"has no \*\.whl and no \*\.tar\.xz; scripts/gpu_check --pack makes them"):
        wheels.python_with(tmp_path)
