"""scripts/extras imports everything that pyproject.toml installs and that package, examples and pages import."""

from __future__ import annotations

import ast
import re
import runpy
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from packaging.requirements import Requirement
from pages import PAGES, ROOT
from requirement_pins import pins

EXTRAS: dict[str, Any] = runpy.run_path(str(ROOT / "scripts" / "lib" / "extras.py"))
IMPORTS: dict[str, tuple[str, ...]] = EXTRAS["IMPORTS"]
# Installed with the package.
DEPENDENCIES = {
    *(
        "jinja2",
        "megatron",
        "mistral_common",
        "numpy",
        "omegaconf",
        "packaging",
        "psutil",
        "pydantic",
        "pydantic_core",
        "rich",
    ),
    *("pydantic_core", "rich", "safetensors", "torch", "triton", "typer", "yaml"),
}
# No extra adds trainers, kernels of others and contestants of benchmarks.
OTHERS = {*("liger_kernel", "nemo_rl", "ray", "slime", "tensordict", "tomli", "transfer_queue"), "verl"}
# Scripts' imports of and for the tests are installed for test runs.
TESTS = {"harness", "pytest", "tokenizers", *(path.stem for path in (ROOT / "tests").rglob("*.py"))}
OWN = {
    "mcore_prefix_tree",
    *(path.stem for path in (ROOT / "scripts").rglob("*") if path.suffix in ("", ".py")),
    *TESTS,
}


def declared() -> dict[str, list[str]]:
    section = (ROOT / "pyproject.toml").read_text().partition("[project.optional-dependencies]\n")[2]
    lines = re.findall(r"^(\w+) = \[(.+)\]$", section.partition("\n[")[0], flags=re.MULTILINE)
    return {extra: re.findall(r'"([^"]+)"', packages) for extra, packages in lines}


def packages_of(source: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (name.name.partition(".")[0] for name in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module.partition(".")[0]


def imported() -> set[str]:
    """The packages that the package, the examples, the scripts and the pages' blocks import."""
    files = [path for folder in ("mcore_prefix_tree", "examples", "scripts") for path in (ROOT / folder).rglob("*.py")]
    found = {name for path in files for name in packages_of(path.read_text())}
    for page in PAGES:
        for block in re.findall(r"^```python\n(.*?)^```", page.read_text(), flags=re.MULTILINE | re.DOTALL):
            statements = re.findall(r"^(?:from \S+ import [^(\n]+|import \S+)$", block, flags=re.MULTILINE)
            found |= {name for statement in statements for name in packages_of(statement)}
    return found - sys.stdlib_module_names - OWN


def test_every_extra_is_imported() -> None:
    assert set(IMPORTS) == set(declared())
    assert set(EXTRAS["ELSEWHERE"]) | set(EXTRAS["NEEDS_PYTHON"]) | set(EXTRAS["AFTERWARDS"]) <= set(IMPORTS)


def test_every_optional_package_is_in_an_extra() -> None:
    found = imported()
    assert {"transformers", "datasets", "pyarrow"} < found
    tried = {name.partition(".")[0] for names in IMPORTS.values() for name in names}
    assert found - DEPENDENCIES - OTHERS - tried == set()


def test_every_pin_that_is_elsewhere_is_there() -> None:
    for extra, file in EXTRAS["ELSEWHERE"].items():
        wanted = {Requirement(text).name for text in declared()[extra]}
        assert wanted & {pin.name for pin in pins(ROOT / file)}


def test_page_installs_the_pinned_bridge() -> None:
    """The commands of the page, of the message and of scripts/extras."""
    pin = EXTRAS["pin_of"]("megatron-bridge")
    assert f"pip install --no-deps {pin}\n" in (ROOT / "docs" / "huggingface.md").read_text()
    assert f"'{pin}'" in (ROOT / "mcore_prefix_tree" / "mcore" / "models" / "bridge.py").read_text()


def test_transformers_has_one_bound() -> None:
    """Megatron-Bridge 0.6.2 imports a module that transformers 5.24 lacks; pages name the last release before it."""
    bounds = {
        extra: requirement.specifier
        for extra, packages in declared().items()
        for requirement in map(Requirement, packages)
        if requirement.name == "transformers"
    }
    assert set(bounds) == {"bridge", "hf"}
    for specifier in bounds.values():
        assert specifier.contains("5.23.0")
        assert not specifier.contains("5.24.0")
    assert "between 5.8 and 5.23" in (ROOT / "docs" / "huggingface.md").read_text()


def test_failed_import_is_named(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """An extra whose package lost a module fails, with the error's own words."""
    monkeypatch.setitem(IMPORTS, "plot", ("matplotlib.lost",))
    import_all = EXTRAS["import_all"]
    problem = import_all(sys.executable, "plot", str(ROOT), {"PATH": "/usr/bin"})
    assert problem == "ModuleNotFoundError: No module named 'matplotlib.lost'"
    assert EXTRAS["tell"]("plot", problem, "") == 1
    assert capsys.readouterr().out == f"plot: FAILED: {problem}\n"
    assert EXTRAS["main"](["--newest", "plots"]) == 2
    assert "use --newest, then none or some of arrow, " in capsys.readouterr().err
