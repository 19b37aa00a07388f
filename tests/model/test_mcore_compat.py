"""The tables of required upstream names: complete, correct for the installed megatron-core, readable if not."""

from __future__ import annotations

import ast
import dataclasses
import importlib
import inspect
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mcore_prefix_tree.cli.verify import show_installed
from mcore_prefix_tree.mcore import compat, layer_names, multi_token_names
from mcore_prefix_tree.mcore.probe import MegatronCoreError, Uses, find_missing

pytestmark = pytest.mark.filterwarnings("ignore:::megatron")
FOLDER = Path(compat.__file__).parent
INSTALLED = [uses for table in compat.TABLES.values() for uses in table]
INSTALLED += compat.HYBRID if compat.has_hybrid_model() else ()
WITH_PARAMETERS = [uses for uses in INSTALLED if uses.positional or uses.keywords]
WITH_ATTRIBUTES = [uses for uses in INSTALLED if uses.attributes]


def names_of(table: Any) -> list[str]:
    return [uses.name.partition(":")[2] for uses in table]


def owner_of(uses: Uses) -> tuple[Any, str]:
    """The module or class that holds an entry's name, and its name there."""
    module, _, qualified = uses.name.partition(":")
    *owners, name = qualified.split(".")
    owner: Any = importlib.import_module(module)
    for one in owners:
        owner = getattr(owner, one)
    return owner, name


def without(target: Any, missing: str) -> Any:
    """A stand-in with the signature of ``target`` but for one parameter, and no ``**kwargs`` to take it."""

    def stand_in(*args: object, **kwargs: object) -> None: ...

    signature = inspect.signature(target)
    kept = [p for p in signature.parameters.values() if p.name != missing and p.kind is not p.VAR_KEYWORD]
    assert len(kept) < len(signature.parameters)
    stand_in.__signature__ = signature.replace(parameters=kept)  # type: ignore[attr-defined]
    return stand_in


@pytest.mark.parametrize("uses", INSTALLED, ids=names_of(INSTALLED))
def test_installed_megatron_core_has_all_required_names(uses: Uses) -> None:
    assert list(find_missing(uses)) == []


@pytest.mark.parametrize("uses", WITH_PARAMETERS, ids=names_of(WITH_PARAMETERS))
def test_a_missing_parameter_is_named(uses: Uses, monkeypatch: pytest.MonkeyPatch) -> None:
    owner, name = owner_of(uses)
    target = getattr(owner, name)
    for parameter in f"{uses.positional} {uses.keywords}".split():
        if parameter not in inspect.signature(target).parameters:
            continue  # goes into a **kwargs today
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, without(target, parameter))
            with pytest.raises(MegatronCoreError) as caught:
                compat.check([uses])
        message = str(caught.value)
        assert re.search(rf"{re.escape(name)}\({parameter}( at position \d|=)\)", message)
        assert compat.installed_version() in message
        assert message.endswith(f"; {compat.SUPPORTED}")
        assert "\n" not in message


@pytest.mark.parametrize("uses", INSTALLED, ids=names_of(INSTALLED))
def test_a_missing_name_is_named(uses: Uses, monkeypatch: pytest.MonkeyPatch) -> None:
    module, _, qualified = uses.name.partition(":")
    first = qualified.partition(".")[0]
    assert hasattr(importlib.import_module(module), first)
    monkeypatch.setitem(sys.modules, module, SimpleNamespace())
    assert list(find_missing(uses)) == [f"{module}.{qualified}"]


def test_all_moved_names_are_reported_at_once() -> None:
    table = [Uses("megatron.core:nonsense"), Uses("megatron.core.gone:Thing"), *compat.SEAM]
    with pytest.raises(MegatronCoreError, match=r"megatron\.core\.nonsense; megatron\.core\.gone\.Thing \(No module"):
        compat.check(table)


def upstream(query: Any, key: Any, *, scale: Any = 1, **others: Any) -> None: ...


@pytest.mark.parametrize(
    ("positional", "keywords", "problems"),
    [
        ("query key", "scale", []),
        ("query", "key anything", []),
        ("key", "", ["(key at position 1)"]),
        ("query value", "", ["(value at position 2)"]),
        ("query key scale", "", []),
        ("query key scale more", "", ["(more at position 4)"]),
    ],
)
def test_positions_and_names(positional: str, keywords: str, problems: list[str]) -> None:
    uses = Uses(f"{__name__}:upstream", positional, keywords)
    assert [problem.removeprefix(f"{__name__}.upstream") for problem in find_missing(uses)] == problems


@pytest.mark.parametrize("uses", WITH_ATTRIBUTES, ids=names_of(WITH_ATTRIBUTES))
def test_a_missing_attribute_is_named(uses: Uses) -> None:
    renamed = dataclasses.replace(uses, attributes=f"{uses.attributes} renamed_upstream")
    shown = uses.name.replace(":", ".")
    with pytest.raises(MegatronCoreError, match=rf"package uses: {re.escape(shown)}\.renamed_upstream; megatron-core"):
        compat.check([renamed])


def test_attributes_are_found_in_every_place_that_sets_them() -> None:
    there = "of_class annotated method set_in_init registered inherited"
    assert list(find_missing(Uses(f"{__name__}:Layer", attributes=there))) == []
    elsewhere = Uses(f"{__name__}:Layer", attributes="of_another local")
    assert list(find_missing(elsewhere)) == [f"{__name__}.Layer.of_another", f"{__name__}.Layer.local"]


class Base:
    def build(self) -> None:
        self.inherited = 1


class Layer(Base):
    of_class = 1
    annotated: int

    def __init__(self, other: Any) -> None:
        local = other
        self.set_in_init: int = local
        other.of_another = 2
        self.register_parameter("registered", None)

    def register_parameter(self, name: str, value: None) -> None: ...

    def method(self) -> None: ...


def test_an_installation_is_checked_in_one_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert show_installed(None, as_json=False)
    first, _, *rows = capsys.readouterr().out.splitlines()
    assert first.startswith(f"megatron-core {compat.installed_version()} in ")
    assert [row.split() for row in rows[: len(compat.TABLES)]] == [[room, "0"] for room in compat.TABLES]


def test_missing_upstream_names_are_listed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    gone = Uses("megatron.core.models.gpt:GPTModel", keywords="a_new_one", attributes="gone")
    monkeypatch.setattr(compat, "TABLES", {"seam": compat.SEAM, "engine": (gone,)})
    assert not show_installed(None, as_json=False)
    shown = "missing or different: megatron.core.models.gpt.GPTModel"
    assert capsys.readouterr().out.splitlines()[-2:] == [f"{shown}(a_new_one=)", f"{shown}.gone"]


def test_self_is_not_counted_as_a_parameter() -> None:
    assert list(find_missing(Uses(f"{__name__}:Upstream.forward", "query", "mask"))) == []
    assert list(find_missing(Uses(f"{__name__}:Upstream", "config"))) == []


class Upstream:
    def __init__(self, config: Any) -> None: ...

    def forward(self, query: Any, mask: Any = None) -> None: ...


def test_a_package_that_megatron_needs_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "needs_triton.py").write_text("import a_package_that_is_not_installed\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(MegatronCoreError, match="needs_triton needs the package a_package_that_is_not_installed"):
        compat.check([Uses("needs_triton:anything")])


@pytest.mark.parametrize("version", ["0.16.1", "0.16.1+bf3be79", "0.17.0", "0.18.2", "0.19.0rc1", "0.20.0+d98e8a64"])
def test_tested_versions_pass_without_a_word(
    version: str, monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder
) -> None:
    monkeypatch.setattr(compat, "installed_version", lambda: version)
    compat.check_version()
    assert not recwarn.list


@pytest.mark.parametrize("version", ["0.15.3", "0.16.0"])
def test_old_versions_are_refused(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compat, "installed_version", lambda: version)
    with pytest.raises(MegatronCoreError, match=f"megatron-core {version} is too old; megatron-core 0.16.1, "):
        compat.check_version()


def test_versions_that_no_test_has_seen_are_warned_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compat, "installed_version", lambda: "0.25.0")
    with pytest.warns(UserWarning, match=r"megatron-core 0\.25\.0 .* its tests have not seen it.*verify"):
        compat.check_version()


# Imported as modules; their names are looked up by attribute.
MODULES = {"parallel_state", "dist_checkpointing", "num_microbatches_calculator", "datasets"}
# Added by patches/megatron-lm: a stock megatron-core has neither, and nothing is required of it there.
PATCHED = {"megatron.core.tree_metadata", "megatron.core.transformer.tree_attention"}


def imported_from_core(file: Path) -> set[str]:
    """Names that a file takes from megatron-core, and those that it asks of ``parallel_state``."""
    tree = ast.parse(file.read_text())
    found = set()
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.ImportFrom)
            and (node.module or "").startswith("megatron.core")
            and node.module not in PATCHED
        ):
            found |= {alias.name for alias in node.names}
        is_attribute = isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)
        if is_attribute and node.value.id in MODULES:
            found.add(node.attr)
    return found - MODULES - {"__file__"}


@pytest.mark.parametrize(
    ("rooms", "tables"),
    [
        (
            ["seam", "outputs"],
            [
                *(compat.SEAM, compat.HYBRID, layer_names.DELTA_NET, layer_names.SPARSE_ATTENTION),
                *(multi_token_names.TABLE, compat.TRANSFORMER_ENGINE),
            ],
        ),
        (["engine"], [compat.SEAM, compat.ENGINE]),
        (["packed"], [compat.SEAM, compat.HYBRID, compat.PACKED]),
        (
            ["models", "checkpoints", "teachers"],
            [
                *(compat.SEAM, compat.HYBRID, layer_names.SPARSE_ATTENTION),
                *(compat.TRANSFORMER_ENGINE, compat.ENGINE, compat.MODELS),
            ],
        ),
        (["loop"], [compat.SEAM, compat.ENGINE, compat.MODELS, compat.LOOP]),
        (
            ["megatron_lm"],
            [compat.SEAM, compat.HYBRID, compat.TRANSFORMER_ENGINE, compat.ENGINE, compat.MEGATRON_LM],
        ),
    ],
    ids=["seam", "engine", "packed", "models", "loop", "megatron_lm"],
)
def test_tables_cover_every_import(rooms: list[str], tables: list[Any]) -> None:
    files = [file for room in rooms for file in sorted((FOLDER / room).glob("*.py"))]
    listed = {name.partition(".")[0] for table in tables for name in names_of(table)}
    imported = {name for file in files for name in imported_from_core(file)}
    assert len(imported) > 4
    assert imported <= listed


@pytest.mark.ci
def test_failed_import_reports_the_moved_name_first() -> None:
    """In a fresh interpreter, where upstream lost a name that the package imports."""
    script = (
        "import warnings; warnings.simplefilter('ignore')\n"
        "import megatron.core.transformer.attention as upstream\n"
        "import megatron.core.models.gpt\n"
        "del upstream.SelfAttention\n"
        "import mcore_prefix_tree.mcore\n"
    )
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    (last,) = result.stderr.strip().splitlines()[-1:]
    assert "MegatronCoreError: megatron-core" in last
    assert "megatron.core.transformer.attention.SelfAttention;" in last
