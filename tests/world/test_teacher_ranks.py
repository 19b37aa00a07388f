"""``train`` with a teacher of the same vocabulary on other ranks than its student, and trees in chunks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from harness.torchrun_jobs import LAYOUTS, run
from harness.train_jobs import FLOAT64, write_job

pytestmark = pytest.mark.ci


@pytest.fixture(scope="module")
def given(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The student's recipe, and its settings of a teacher that was trained for two steps."""
    folder = tmp_path_factory.mktemp("teacher_ranks")
    job, teacher = write_job(folder), folder / "teacher.yaml"
    teacher.write_text(f"{job.read_text()}checkpoint: {{save: {folder / 'teacher'}}}\n")
    assert run(1, "train", str(teacher), *FLOAT64, "train_iters=2", "seed=5").code == 0
    options = f"objective.options={json.dumps({'divergence': 'reverse_kl', 'teacher': 'full'})}"
    objective = ("objective.name=distill", options, f"objective.teacher_recipe={teacher}")
    return [str(job), *FLOAT64, "train_iters=3", *objective]


def losses(folder: Path, ranks: int, *arguments: str) -> list[float]:
    """Return the losses of a job's steps."""
    log = folder / f"{ranks}.jsonl"
    assert run(ranks, "train", *arguments, f"log.metrics={log}").code == 0
    return [json.loads(line)["loss"] for line in log.read_text().splitlines()]


@pytest.mark.parametrize(
    ("parts", "layout"), [(2, "data"), (1, "tensor and sequence")], ids=["shared by replicas", "complete on each rank"]
)
def test_teachers_on_other_ranks_read_trees_in_chunks(
    given: list[str], tmp_path: Path, parts: int, layout: str
) -> None:
    """To what is left of gradients that Megatron adds up in fp32."""
    whole = losses(tmp_path, 1, *given)
    ranks = f"objective.teacher_tensor_model_parallel_size={parts}"
    assert losses(tmp_path, 2, *given, "batch.max_tokens=8", ranks, *LAYOUTS[layout]) == pytest.approx(whole, rel=1e-7)
