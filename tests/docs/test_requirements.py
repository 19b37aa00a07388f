"""The requirement files agree with each other, pyproject.toml and torch; environments keep borrowed torches."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import zipfile
from importlib.metadata import distribution, requires, version
from pathlib import Path

import pytest
import yaml
from harness.commands import run_process
from packaging.requirements import Requirement
from pages import PAGES
from requirement_pins import pins

from mcore_prefix_tree.mcore.release import MAIN, MAIN_COMMIT, RELEASES

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[2]
FILES = sorted([*ROOT.glob("requirements/*.txt"), *ROOT.glob("requirements/versions/*.txt")])


def pinned_version(name: str, file: str = "torch") -> str:
    (found,) = (pin for pin in pins(ROOT / "requirements" / f"{file}.txt") if pin.name == name)
    return str(found.specifier).removeprefix("==")


@pytest.mark.parametrize("name", ["torch", "triton"])
def test_torch_and_triton_are_pinned_in_one_place(name: str) -> None:
    assert [file.name for file in FILES for pin in pins(file) if pin.name == name] == ["torch.txt"]
    scripts = [path for path in (ROOT / "scripts").rglob("*") if path.is_file() and path.suffix != ".pyc"]
    assert [path.name for path in scripts if re.search(rf"\b{name}==\d", path.read_text())] == []


def test_pinned_triton_is_the_one_torch_depends_on() -> None:
    """Builds of torch for the CPU name no Triton: there only the one pin above can be checked."""
    if version("torch").partition("+")[0] == pinned_version("torch"):
        for requirement in map(Requirement, requires("torch") or ()):
            assert requirement.name != "triton" or requirement.specifier.contains(pinned_version("triton"))


# Compiled against a torch for CUDA: no test installs it, as docs/gpu.md explains.
NOT_RUN = ("transformer-engine",)


def test_gpu_extras_are_on_their_page() -> None:
    """Each by its name, including those that were never run, and no removed extra."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    page = (ROOT / "docs" / "gpu.md").read_text()
    for extra in ("gpu", "te"):
        assert extra in extras
        assert f"| `{extra}` |" in page
        assert f"'.[{extra}]'" in page
    assert "triton" in extras["gpu"], "torch pins it, nothing else does"
    assert [name for name in NOT_RUN if f"`{name}`" not in page] == []
    named = {
        extra
        for file in [*PAGES, *(ROOT / "mcore_prefix_tree").rglob("*.py")]
        for found in re.findall(r"pip install[^\n`]*?\.\[([\w,]+)\]", file.read_text())
        for extra in found.split(",")
    }
    assert named <= {*extras}


def test_pins_are_within_the_bounds_of_pyproject() -> None:
    text = (ROOT / "pyproject.toml").read_text().partition("\n[project.scripts]")[0]
    bounds = [Requirement(found) for found in re.findall(r'"([a-z][\w.-]*(?:\[[\w,]+\])?>=[\w.,<]+)"', text)]
    expected = {"torch", "megatron-core", "flash-attn-4", "transformers", "accelerate", *NOT_RUN}
    assert expected < {bound.name for bound in bounds}
    for bound in bounds:
        if bound.name in NOT_RUN:
            continue
        pinned = [(file, pin) for file in FILES for pin in pins(file) if pin.name == bound.name]
        # Packages that only tests/peers needs are pinned only there.
        found = [pin for file, pin in pinned if "peers" not in file.name] or [pin for _, pin in pinned]
        if bound.name != "setuptools":
            assert found, f"nothing is tested with {bound.name}"
        for pin in found:
            assert bound.specifier.contains(str(pin.specifier).removeprefix("=="), prereleases=True), pin


def test_files_for_one_environment_pin_one_version() -> None:
    """requirements/peers.txt and requirements/bridge.txt are installed on top of requirements/test.txt."""
    files = [file for file in FILES if file.name in ("bridge.txt", "peers.txt")]
    found: dict[str, set[str]] = {}
    for pin in (pin for file in files for pin in pins(file)):
        found.setdefault(pin.name, set()).add(str(pin.specifier))
    assert "accelerate" in found
    assert {name: versions for name, versions in found.items() if len(versions) > 1} == {}


def test_bridge_is_installed_without_unused_dependencies() -> None:
    """Which packages, and why without dependencies, is written in one file; the page gives the command."""
    text = (ROOT / "requirements/bridge.txt").read_text()
    assert "--no-deps" in text
    assert {str(pin.marker) for pin in pins(ROOT / "requirements/bridge.txt")} == {'python_version == "3.12"'}
    page = (ROOT / "docs" / "trainers.md").read_text()
    assert "pip install --no-deps -r requirements/bridge.txt" in page
    assert [name for name in ("einops", "megatron-bridge==") if name in page] == []


def machine_with(folder: Path, torch: str) -> Path:
    """A Python in a virtual environment with a torch of this source."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder / "machine"], check=True)
    (packages,) = folder.glob("machine/lib/python*/site-packages")
    for name, release in (("torch", "2.9.1+cu126"), ("triton", "3.5.1")):
        information = packages / f"{name}-{release}.dist-info"
        information.mkdir()
        (information / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {release}\n")
    (packages / "torch.py").write_text(torch)
    python = folder / "python3"
    python.write_text(
        '#!/bin/sh\n[ "$2" = venv ] && set -- "$@" --without-pip\n' + f'exec {folder}/machine/bin/python "$@"\n'
    )
    python.chmod(0o755)
    return python


INSTALL_PACKAGE = "install --no-deps --editable . -r requirements/bridge.txt"
# Prints pip's arguments instead of running it.
PREPARE = """
set -euo pipefail
. scripts/lib/environment.sh
pip_install() {
    shift
    if [ "$1" = --constraint ]; then echo "keep $(tr '\\n' ' ' <"$2")" && shift 2; fi
    echo "install $*"
}
prepare_environment requirements/test.txt "$1" "$2"
python -c 'import torch' 2>/dev/null && echo "torch is seen"
"""


def prepared(folder: Path, python: Path) -> list[str]:
    done = subprocess.run(
        ["bash", "-c", PREPARE, "prepare", str(folder), str(python)],
        cwd=ROOT,
        env={name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
        capture_output=True,
        text=True,
    )
    return [line for line in done.stdout.splitlines() if not line.startswith(("making ", "installing "))]


def test_environment_keeps_a_torch_that_sees_a_gpu(tmp_path: Path) -> None:
    """Also one that lies in another virtual environment, with its Triton."""
    python = machine_with(tmp_path, "class cuda:\n    is_available = staticmethod(lambda: True)\n")
    expected = ["keep torch==2.9.1+cu126 triton==3.5.1 ", "install -r requirements/test.txt"]
    assert prepared(tmp_path / "new", python) == [*expected, INSTALL_PACKAGE, "torch is seen"]
    assert prepared(tmp_path / "new", python) == ["torch is seen"]  # installed once


def test_environment_pins_torch_without_a_gpu(tmp_path: Path) -> None:
    python = machine_with(tmp_path, "class cuda:\n    is_available = staticmethod(lambda: False)\n")
    expected = "install -r requirements/torch.txt -r requirements/test.txt"
    assert prepared(tmp_path / "new", python) == [expected, INSTALL_PACKAGE]


def test_environment_that_cannot_be_made_leaves_nothing(tmp_path: Path) -> None:
    """As on Debian without python3-venv, whose venv fails halfway."""
    python = tmp_path / "python3"
    half = 'mkdir -p "$3/bin"\nln -s /bin/true "$3/bin/python"\nexit 1\n'
    python.write_text(f'#!/bin/sh\n[ "$2" = venv ] || exec {sys.executable} "$@"\n' + half)
    python.chmod(0o755)
    done = run_process(["bash", "-c", PREPARE, "prepare", str(tmp_path / "new"), str(python)], cwd=ROOT, code=2)
    assert "install the package python3-venv" in done.stderr
    assert not (tmp_path / "new").exists()


def test_unfinished_environment_is_made_again(tmp_path: Path) -> None:
    python = machine_with(tmp_path, "class cuda:\n    is_available = staticmethod(lambda: False)\n")
    whole = prepared(tmp_path / "new", python)
    (tmp_path / "new" / "unfinished").touch()  # as if its making was interrupted
    assert prepared(tmp_path / "new", python) == whole
    (tmp_path / "new" / "bin" / "python").unlink()
    (tmp_path / "new" / "bin" / "python").symlink_to(tmp_path / "a removed python")
    assert prepared(tmp_path / "new", python) == whole
    assert prepared(tmp_path / "new", python) == []  # installed once


def test_what_is_left_out_on_purpose_is_no_error(tmp_path: Path) -> None:
    """A second script installs beside Megatron-Bridge, whose own requirements are not met."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "new"], check=True)
    (packages,) = tmp_path.glob("new/lib/python*/site-packages")
    (packages / "pip").symlink_to(str(distribution("pip").locate_file("pip")))
    bridge = packages / "megatron_bridge-0.6.2.dist-info"
    bridge.mkdir()
    (bridge / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: megatron-bridge\nVersion: 0.6.2\nRequires-Dist: other<1\n"
    )
    wheel = tmp_path / "other-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as packed:
        packed.writestr("other-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: other\nVersion: 1.0\n")
        packed.writestr("other-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        packed.writestr("other-1.0.dist-info/RECORD", "")
    script = f". scripts/lib/environment.sh; pip_install {tmp_path}/new --no-index --no-cache-dir {wheel}"
    done = run_process(["bash", "-c", script, "call"], cwd=ROOT)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert (packages / "other-1.0.dist-info/METADATA").exists()


# A Python by its version, with or without a torch that sees a GPU.
PYTHON = """#!/bin/sh
case "$2" in *torch*) exit {no_gpu} ;; esac
echo {version}
"""


def call(script: str, home: Path, **pythons: str) -> subprocess.CompletedProcess[str]:
    """Call functions of environment.sh with only these Pythons, by their paths below ``home``."""
    (home / "bin").mkdir(exist_ok=True)
    for name, release in pythons.items():
        python = home / name
        python.parent.mkdir(parents=True, exist_ok=True)
        python.write_text(PYTHON.format(version=release.removesuffix(" gpu"), no_gpu=0 if "gpu" in release else 1))
        if release == "placeholder":
            python.write_text("#!/bin/sh\necho no such version >&2\nexit 127\n")
        python.chmod(0o755)
    for tool in ("basename", "dirname", "sed"):
        (home / "bin" / tool).symlink_to(shutil.which(tool) or "")
    variables = {"PATH": str(home / "bin"), "HOME": str(home)}
    script = f"set -euo pipefail\n. scripts/lib/environment.sh\n{script}"
    return subprocess.run(["/bin/bash", "-c", script, "call"], cwd=ROOT, env=variables, capture_output=True, text=True)


@pytest.mark.parametrize(
    ("pythons", "chosen"),
    [
        ({"bin/python3": "3.11", "bin/python3.12": "3.12"}, "python3.12, the newest that are tested"),
        ({"bin/python3": "3.12"}, "python3, the newest that are tested"),
        (
            {"bin/python3": "3.11", "bin/python3.12": "placeholder", ".pyenv/versions/3.12.1/bin/python": "3.12"},
            "{home}/.pyenv/versions/3.12.1/bin/python, the newest that are tested",
        ),
        ({"bin/python3": "3.11 gpu", "bin/python3.12": "3.12"}, "python3, because its torch sees a GPU"),
        ({"bin/python3": "3.11"}, "python3, because no Python 3.12 is found, which newer ones need"),
        (
            {"bin/python3": "3.9", "bin/python3.10": "3.10"},
            "python3.10, because no Python 3.12 is found, which newer ones need",
        ),
    ],
)
def test_python_that_is_chosen(pythons: dict[str, str], chosen: str, tmp_path: Path) -> None:
    done = call('choose_python; echo "$python, $why"', tmp_path, **pythons)
    assert (done.stdout, done.stderr) == (chosen.format(home=tmp_path) + "\n", "")


def test_environment_of_another_python(tmp_path: Path) -> None:
    """An older one is used with a remark; one that PYTHON contradicts is an error."""
    pythons = {"bin/python3": "3.12", "env/bin/python": "3.11"}
    done = call(f'borrowed_torch() {{ :; }}; newer_than "{tmp_path}/env"', tmp_path, **pythons)
    newest = core_pins()["3.12"]
    assert done.stdout == f"; remove {tmp_path}/env to get Python 3.12 and megatron-core {newest}\n"
    (tmp_path / "again").mkdir()
    pythons["env/bin/python"] = "3.10"
    done = call(f"check_same_version {tmp_path}/again/env python3", tmp_path / "again", **pythons)
    assert done.returncode == 2
    assert "python3 is Python 3.12, and" in done.stderr
    assert "was made with Python 3.10; remove" in done.stderr


def core_pins() -> dict[str, str]:
    """The megatron-core of requirements/base.txt by the version of Python."""
    lines = [pin for pin in pins(ROOT / "requirements/base.txt") if pin.name == "megatron-core"]
    return {
        python: str(pin.specifier).removeprefix("==")
        for python in ("3.10", "3.11", "3.12")
        for pin in lines
        if pin.marker is not None and pin.marker.evaluate({"python_version": python})
    }


def test_each_megatron_core_is_tested(tmp_path: Path) -> None:
    """requirements/base.txt installs the versions that scripts/versions tests and environment.sh announces."""
    found = core_pins()
    assert {*found.values()} <= {file.stem for file in (ROOT / "requirements" / "versions").glob("*.txt")}
    done = call("for version in 3.10 3.11 3.12; do core_for $version; done", tmp_path)
    assert done.stdout.split() == [found["3.10"], found["3.11"], found["3.12"]]
    assert f"scripts/versions {found['3.11']} " in (ROOT / ".ci" / "run").read_text()


def test_each_tested_version_is_named_in_the_docs() -> None:
    """The files of scripts/versions, the sentence about other versions, and the page of supported versions."""
    files = {file.stem: file for file in (ROOT / "requirements" / "versions").glob("*.txt")}
    main = files.pop("main")
    assert set(RELEASES) == set(files)
    for release, file in files.items():
        assert [str(pin.specifier) for pin in pins(file) if pin.name == "megatron-core"] == [f"=={release}"]
    (commit,) = re.findall(r"\b[0-9a-f]{40}\b", main.read_text())
    assert commit.startswith(MAIN_COMMIT)
    assert f"calls itself {MAIN}." in " ".join(main.read_text().replace("#", " ").split())
    page = (ROOT / "docs" / "support.md").read_text()
    assert [name for name in (*RELEASES, MAIN, MAIN_COMMIT) if name not in page] == []


def checkout(folder: Path, minor: int) -> Path:
    (folder / "megatron" / "core").mkdir(parents=True)
    (folder / "megatron" / "core" / "package_info.py").write_text(f"MAJOR = 0\nMINOR = {minor}\n")
    return folder


def call_versions(script: str, path: Path | None, tested: str | None = None) -> subprocess.CompletedProcess[str]:
    """Call functions of versions.sh with a checkout in MEGATRON_LM_PATH."""
    variables = {"PATH": os.environ["PATH"]} | ({} if path is None else {"MEGATRON_LM_PATH": str(path)})
    instead = "" if tested is None else f"tested_commit() {{ echo {tested}; }}\n"
    script = f"set -euo pipefail\n. scripts/lib/versions.sh\n{instead}{script}"
    return subprocess.run(["/bin/bash", "-c", script, "call"], cwd=ROOT, env=variables, capture_output=True, text=True)


@pytest.mark.parametrize(("release", "fits"), [("0.19.2", True), ("0.16.1", False), ("main", True)])
def test_checkout_of_a_version(release: str, fits: bool, tmp_path: Path) -> None:
    assert (call_versions(f"is_checkout_of {release}", checkout(tmp_path, 19)).returncode == 0) is fits
    assert call_versions(f"is_checkout_of {release}", None).returncode == 1


def test_another_commit_of_main_gets_one_sentence(tmp_path: Path) -> None:
    folder = checkout(tmp_path, 20)
    assert f"{folder} has no history that git can read" in call_versions("say_commit", folder).stdout
    git = ["git", "-C", str(folder), "-c", "user.name=x", "-c", "user.email=x"]
    subprocess.run([*git, "init", "--quiet"], check=True)
    subprocess.run([*git, "commit", "--quiet", "--allow-empty", "-m", "x"], check=True)
    there = subprocess.run([*git, "rev-parse", "HEAD"], check=True, capture_output=True, text=True).stdout.strip()
    said = call_versions("say_commit", folder)
    assert said.returncode == 0
    (line,) = said.stdout.splitlines()
    assert line.startswith(f"{folder} is at {there[:10]}, and main is tested at {MAIN_COMMIT}: ")
    assert call_versions("say_commit", folder, tested=there).stdout == ""


def test_main_needs_a_checkout(tmp_path: Path) -> None:
    variables = {name: value for name, value in os.environ.items() if name != "MEGATRON_LM_PATH"}
    command = [str(ROOT / "scripts" / "versions"), "main"]
    done = subprocess.run(command, cwd=tmp_path, env=variables, capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr.startswith("main needs a checkout of Megatron-LM: name one with MEGATRON_LM_PATH, best at ")


def test_the_hooks_before_a_commit_run_the_same_ruff() -> None:
    (hooks,) = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    assert hooks["rev"] == f"v{pinned_version('ruff', 'test')}"


def test_the_workflow_runs_what_ci_runs() -> None:
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text())
    commands = [step["run"] for step in workflow["jobs"]["ci"]["steps"] if "run" in step]
    assert commands == [".ci/run"]
    assert os.access(ROOT / ".ci" / "run", os.X_OK)
