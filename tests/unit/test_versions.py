"""Messages name the packages of an extra, for example ``hf``, from the metadata of the installed package."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest

from mcore_prefix_tree.utils import versions
from mcore_prefix_tree.utils.versions import install_command, list_requirements

METADATA = [
    "torch>=2.6",
    'transformers<5.24,>=4.56; extra == "hf"',
    "pyarrow>=16; extra == 'hub'",
    'datasets>=3.0; extra == "hub"',
]


def test_command_lists_the_extras_requirements(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versions, "requires", lambda _: METADATA)
    assert install_command("hf") == "pip install 'transformers<5.24,>=4.56'"
    assert install_command("hub") == "pip install 'pyarrow>=16' 'datasets>=3.0'"
    with pytest.raises(KeyError, match="none"):
        list_requirements("none")


def test_clone_on_the_path_names_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> list[str]:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(versions, "requires", missing)
    assert install_command("hf") == f"pip install '{Path(__file__).parents[2]}[hf]'"
