"""Stable names: each can be imported, is on the page of the Python reference, and documented code needs no others."""

from __future__ import annotations

import ast
import re
from importlib import import_module

import pytest
from pages import PAGES, ROOT, name_of

PAGE = ROOT / "docs" / "reference" / "python.md"
EXAMPLE = ROOT / "examples" / "own_trainer.py"
INTEGRATIONS = "mcore_prefix_tree.integrations"
# To take a name away, or to give it another meaning, breaks users: say so in the changelog.
STABLE = {
    "mcore_prefix_tree": {
        "FlatLayout", "Sample", "SampleError", "SamplingMask", "Signals", "Teacher", "Tempered", "TreeMetadata",
        "fold", "plan_step", "restore",
    },
    "mcore_prefix_tree.mcore": {
        "Logprobs", "MicroBatch", "PicturePackedSeqParams", "RoutedPackedSeqParams", "RowLogprobs",
        "TreePackedSeqParams", "Values", "fold_inside", "folding_model", "follow_trees", "local_layer_spec",
        "plan_step", "restore", "single_process", "te_layer_spec", "tree_forward", "with_edge_head",
        "with_multi_token", "with_prefix_tree", "with_scalar_head", "with_vocab_size",
    },
    f"{INTEGRATIONS}.transformers": {"check_model", "model_inputs", "sample_logprobs"},
    f"{INTEGRATIONS}.trl": {"LogFolding", "fold_backbone"},
}  # fmt: skip
_PYTHON = re.compile(r"^```python\n(.*?)^```", flags=re.MULTILINE | re.DOTALL)
_IMPORT = re.compile(
    r"^\s*(?:import (mcore_prefix_tree[\w.]*)|from (mcore_prefix_tree[\w.]*) import (?:\(([^)]*)\)|([^#\n]*)))",
    flags=re.MULTILINE,
)


def imports_of(code: str) -> list[tuple[str, str]]:
    """Return module and name of every import of this package; the blocks of pages need not be complete programs."""
    found = []
    for plain, module, several, line in _IMPORT.findall(code):
        if plain:
            found.append((plain, ""))
        found += [(module, name.split(" as ")[0].strip()) for name in (several or line).split(",") if name.strip()]
    return found


@pytest.mark.parametrize("module", STABLE)
def test_stable_names_can_be_imported(module: str) -> None:
    if module.startswith(INTEGRATIONS):
        pytest.importorskip("transformers")
    home = import_module(module)
    assert {name for name in STABLE[module] if not callable(getattr(home, name))} == set()
    if not module.startswith(INTEGRATIONS):
        assert set(home.__all__) == STABLE[module]
    with pytest.raises(AttributeError, match="nonsense"):
        home.nonsense  # noqa: B018


def test_page_lists_the_stable_names() -> None:
    page = PAGE.read_text()
    rows = re.findall(r"^\| `([\w.]+)` \| (.*) \|$", page, flags=re.MULTILINE)
    assert {module: set(re.findall(r"`(\w+)`", names)) for module, names in rows} == STABLE
    described = set(re.findall(r"^::: [\w.]+\.(\w+)$", page, flags=re.MULTILINE))
    assert set().union(*STABLE.values()) - described == set()


def test_the_example_imports_stable_names_from_two_modules() -> None:
    code = EXAMPLE.read_text()
    found = imports_of(code)
    parsed = [node for node in ast.walk(ast.parse(code)) if isinstance(node, ast.ImportFrom)]
    assert found == [
        (node.module, alias.name)
        for node in parsed
        if (node.module or "").startswith("mcore_prefix_tree")
        for alias in node.names
    ]
    assert {module for module, _ in found} == {"mcore_prefix_tree", "mcore_prefix_tree.mcore"}
    assert [pair for pair in found if pair[1] not in STABLE[pair[0]]] == []


def test_code_on_pages_imports_stable_names() -> None:
    found = [
        (name_of(page), *pair)
        for page in PAGES
        for block in _PYTHON.findall(page.read_text())
        for pair in imports_of(block)
    ]
    assert {module for _, module, _ in found} == set(STABLE)
    assert [each for each in found if each[2] not in STABLE.get(each[1], ())] == []
