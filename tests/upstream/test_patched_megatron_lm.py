"""The patched ``pretrain_gpt.py`` of a checkout: ``--prefix-tree`` equals unfolded samples, all else is unchanged."""

from __future__ import annotations

import importlib.metadata
import os
import re
import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest
from megatron_lm import (
    CPU,
    FOLDED,
    MODEL,
    STOCK,
    TRAIN,
    UNFOLDED,
    VARIABLE,
    megatron,
    require_checkout,
    trained,
    write_samples,
)
from sources import ROOT, apply_patches, content, require_patchable, version_of

require_checkout()

CHECKOUT = Path(os.environ[VARIABLE])
PROJECT = ROOT / "pyproject.toml"
STEPS = 3
LOSS = 2e-6  # logged with seven digits
TOKENIZER = "--tokenizer-type NullTokenizer"
OWN_DATA = f"--mock-data {TOKENIZER} --vocab-size 127 --micro-batch-size 8"


def script(folder: Path, root: Path) -> tuple[str, ...]:
    """A checkout's pretrain_gpt.py, on a machine without a GPU, with this package installed by its instructions."""
    info = folder / "mcore_prefix_tree_of_this_test-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: mcore-prefix-tree-of-this-test\nVersion: 1\n")
    group = "megatron_lm.pretrain_gpt"
    if not importlib.metadata.entry_points(group=group):
        (found,) = re.findall(
            rf'^\[project\.entry-points\."{group}"\]\n(\w+) = "(.*)"$', PROJECT.read_text(), re.MULTILINE
        )
        (info / "entry_points.txt").write_text(f"[{group}]\n{found[0]} = {found[1]}\n")
    path = folder / "run.py"
    path.write_text(
        "import runpy, sys\n"
        f"sys.path[:0] = [{str(root)!r}, {str(folder)!r}]\n"
        "from mcore_prefix_tree.cpu.emulation import enable_training\n"
        "enable_training()\n"
        f"sys.argv[0] = {str(root / 'pretrain_gpt.py')!r}\n"
        "runpy.run_path(sys.argv[0], run_name='__main__')\n"
    )
    return (str(path),)


@pytest.fixture(scope="module")
def patched(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    require_patchable(version_of(CHECKOUT))
    root = tmp_path_factory.mktemp("checkout")
    shutil.copytree(CHECKOUT / "megatron", root / "megatron", ignore=shutil.ignore_patterns("__pycache__"))
    for path in CHECKOUT.glob("*.py"):
        shutil.copy(path, root)
    original = content(root)
    apply_patches("megatron-lm", root)
    assert {name for name, data in content(root).items() if data != original.get(name)} >= {"pretrain_gpt.py"}
    return script(tmp_path_factory.mktemp("patched"), root)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("data") / "samples.jsonl"
    write_samples(path)
    return f"--prefix-tree-data-path {path} --prefix-tree-order file"


@dataclass(frozen=True)
class Alone:
    """Unfolded samples through the stock model: its first checkpoint, and the losses after it."""

    start: Path
    losses: dict[int, float]


@pytest.fixture(scope="module")
def unfolded(data: str, tmp_path_factory: pytest.TempPathFactory) -> Alone:
    start = tmp_path_factory.mktemp("start")
    common = (CPU, MODEL, TRAIN, UNFOLDED, data)
    trained(STOCK, *common, f"--save {start} --exit-interval 1")
    rest = trained(STOCK, *common, f"--load {start} --exit-interval {STEPS}")
    return Alone(start, rest.losses)


@pytest.mark.parametrize(
    ("ranks", "arguments"),
    [
        pytest.param(1, "", id="layers of this package"),
        pytest.param(1, "--attention-backend tree", id="stock layers"),
        pytest.param(2, "--attention-backend tree --tensor-model-parallel-size 2", id="stock layers, tp2"),
        pytest.param(2, "--attention-backend tree --pipeline-model-parallel-size 2", id="stock layers, pp2"),
    ],
)
def test_folded_is_unfolded(patched: tuple[str, ...], unfolded: Alone, data: str, ranks: int, arguments: str) -> None:
    common = (CPU, MODEL, TRAIN, FOLDED, data, f"--load {unfolded.start} --exit-interval {STEPS}", TOKENIZER, arguments)
    run = trained(patched, *common, ranks=ranks)
    assert ("building GPT model, tree-capable" in run.output) == ("tree" not in arguments)
    assert sorted(run.losses) == sorted(unfolded.losses) == list(range(2, STEPS + 1))
    for iteration, loss in run.losses.items():
        assert loss == pytest.approx(unfolded.losses[iteration], rel=LOSS), iteration
    assert all(figures["fold ratio"] > 1.3 for figures in run.iterations.values())


def test_patched_script_without_the_flag_is_unchanged(patched: tuple[str, ...], tmp_path: Path) -> None:
    arguments = (CPU, MODEL, TRAIN, OWN_DATA, "--exit-interval 2")
    after, before = (trained(program, *arguments) for program in (patched, script(tmp_path, CHECKOUT)))
    assert len(before.losses) == 2
    assert after.losses == before.losses
    assert "fold ratio" not in after.output


def test_refusals_name_the_argument(patched: tuple[str, ...], data: str) -> None:
    run = megatron(
        patched, CPU, MODEL, TRAIN, FOLDED, data, TOKENIZER, "--attention-backend tree", "--hidden-dropout 0.1"
    )
    assert run.status != 0
    assert "does not support --hidden-dropout 0.1" in run.output
    assert not run.losses
