"""``attention_backend=auto`` in a job: chosen once, by the first step, and kept for all later steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from harness.train_jobs import BATCH, Notes, rows, train, write_job

from mcore_prefix_tree.attention import cascade, path
from mcore_prefix_tree.attention.auto import TreeShape
from mcore_prefix_tree.layout import fold
from mcore_prefix_tree.metadata import TreeMetadata
from mcore_prefix_tree.sample import Sample

UNSHARED = [{"tokens": [token, *range(20, 20 + token)]} for token in range(3, 3 + BATCH)]
SHARED = rows()[: 2 * BATCH]
IN_ORDER = ("data.order=file", "train_iters=3")


@pytest.fixture
def called(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """Name and number of tokens of every call of a back-end that a CPU may be given."""
    calls = []

    def watched(name: str, original: Any) -> Any:
        def attention(query: Any, *others: Any) -> torch.Tensor:
            calls.append((name, len(query)))
            return original(query, *others)

        return attention

    for name, module in {"path": path, "cascade": cascade}.items():
        monkeypatch.setattr(module, "attention", watched(name, module.attention))
    return calls


def said_of(notes: Notes) -> list[str]:
    return [message for message in notes.messages if message.startswith("attention backend ")]


def test_steps_match_their_names() -> None:
    depths = [
        TreeShape.of([TreeMetadata.from_layout(fold([Sample(tokens=row["tokens"]) for row in some]))]).depth
        for some in (UNSHARED, SHARED[:BATCH], SHARED[BATCH:])
    ]
    assert depths[0] == 0
    assert min(depths[1:]) > 0


def test_the_first_step_chooses_for_all_steps(tmp_path: Path, called: list[tuple[str, int]]) -> None:
    notes = train(write_job(tmp_path, UNSHARED + SHARED), "attention_backend=auto", *IN_ORDER)
    (said,) = said_of(notes)
    assert said.startswith("attention backend cascade: fastest on the measured shape nearest to this one (")
    assert {name for name, _ in called} == {"cascade"}
    assert len({size for _, size in called}) > 1, "the steps are of several sizes"
    # The steps that do share lose nothing but speed by it.
    (again,) = said_of(train(write_job(tmp_path, UNSHARED + SHARED), "attention_backend=auto", *IN_ORDER))
    assert again == said
    other = train(write_job(tmp_path, UNSHARED + SHARED), "attention_backend=path", *IN_ORDER)
    torch.testing.assert_close(notes.losses, other.losses, rtol=1e-5, atol=0)


def test_a_later_step_without_sharing_changes_nothing(tmp_path: Path, called: list[tuple[str, int]]) -> None:
    notes = train(write_job(tmp_path, SHARED + UNSHARED), "attention_backend=auto", *IN_ORDER)
    (said,) = said_of(notes)
    assert "no sample branches off" not in said
    (name,) = {name for name, _ in called}
    assert said.startswith(f"attention backend {name}: ")


@pytest.mark.parametrize("name", ["path", "cascade"])
def test_named_back_end_overrides_auto(tmp_path: Path, called: list[tuple[str, int]], name: str) -> None:
    notes = train(write_job(tmp_path, UNSHARED), f"attention_backend={name}", "data.order=file", "train_iters=2")
    assert not said_of(notes)
    assert {one for one, _ in called} == {name}


def test_resumed_run_chooses_by_the_same_step(tmp_path: Path, called: list[tuple[str, int]]) -> None:
    """The job begins again in the middle of its data, and makes the same choice."""
    saved = ("attention_backend=auto", *IN_ORDER, f"checkpoint.save={tmp_path / 'saved'}", "checkpoint.save_interval=1")
    job = write_job(tmp_path, UNSHARED + SHARED)
    first = train(job, *saved, stop_after=1)
    rest = train(job, *saved, resume=True)
    assert said_of(rest) == said_of(first)
    assert {name for name, _ in called} == {"cascade"}
    assert [report.iteration for report in rest.reports][-1] == 3
