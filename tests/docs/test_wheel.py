"""A wheel works without the repository: its commands, its recipes and their data."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from harness.commands import run_process

ROOT = Path(__file__).parents[2]


def run(*command: object, cwd: Path) -> str:
    """Run a command that sees nothing of this repository; return its output."""
    hidden = ("PYTHONPATH", "RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    environment = {name: value for name, value in os.environ.items() if name not in hidden}
    done = subprocess.run(
        [str(word) for word in command], cwd=cwd, env=environment, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy, because setuptools leaves its folders next to the source."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    source.mkdir()
    for name in ("mcore_prefix_tree", "recipes"):
        shutil.copytree(ROOT / name, source / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    build = ("wheel", "--quiet", "--no-deps", "--no-build-isolation", "--no-index", "--wheel-dir", folder, source)
    run(sys.executable, "-m", "pip", *build, cwd=folder)
    (found,) = folder.glob("*.whl")
    return found


@pytest.fixture(scope="module")
def environment(wheel: Path) -> Path:
    """The wheel in a separate environment, which borrows the packages that it depends on."""
    folder = wheel.parent / "environment"
    run(sys.executable, "-m", "venv", "--without-pip", folder, cwd=wheel.parent)
    (packages,) = folder.glob("lib/python*/site-packages")
    # Only paths: an editable installation of this repository is a file next to the packages, which is not read.
    borrowed = [path for path in sys.path if path.endswith(("site-packages", "dist-packages"))]
    (packages / "borrowed.pth").write_text("\n".join(borrowed))
    install = ("--python", folder / "bin" / "python", "install", "--quiet", "--no-deps", "--no-index", wheel)
    run(sys.executable, "-m", "pip", *install, cwd=wheel.parent)
    return folder


def test_wheel_ships_every_recipe(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    recipes = [path.relative_to(ROOT / "recipes") for path in (ROOT / "recipes").rglob("*") if path.is_file()]
    assert len(recipes) > 10
    assert [path for path in recipes if f"mcore_prefix_tree/shipped_recipes/{path}" not in names] == []
    assert "mcore_prefix_tree/attention/costs.json" in names
    assert [name for name in names if name.startswith(("tests", "scripts"))] == []


def test_installed_command_copies_recipes_once(environment: Path, tmp_path: Path) -> None:
    python, command = environment / "bin" / "python", environment / "bin" / "mcore-prefix-tree"
    home = run(python, "-c", "import mcore_prefix_tree; print(mcore_prefix_tree.__file__)", cwd=tmp_path)
    assert Path(home.strip()).is_relative_to(environment)
    assert "mcore-prefix-tree train recipes/quickstart.yaml" in run(command, "recipes", cwd=tmp_path)
    shipped = ROOT / "recipes" / "data" / "quickstart_rollouts.jsonl"
    assert (tmp_path / "recipes" / "data" / shipped.name).read_bytes() == shipped.read_bytes()
    assert os.access(tmp_path / "recipes" / "launch" / "torchrun.sh", os.X_OK)
    again = run_process([command, "recipes"], cwd=tmp_path)
    assert (again.returncode, again.stderr) == (2, "error: recipes exists already; name another folder\n")


@pytest.mark.slow
def test_installed_command_trains_the_quickstart(environment: Path, tmp_path: Path) -> None:
    command = environment / "bin" / "mcore-prefix-tree"
    run(command, "recipes", cwd=tmp_path)
    quick = ("train_iters=1", "optimizer.lr_warmup_steps=0", "model.num_layers=1", "compare=false")
    printed = run(command, "train", "recipes/quickstart.yaml", "device=cpu", *quick, cwd=tmp_path)
    assert "\nstep 1 | loss " in printed
    assert (tmp_path / "runs" / "quickstart" / "iter_0000001").is_dir()
