"""``mcore-prefix-tree score`` on two ranks writes the file that one process writes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from harness.folded_jobs import VOCAB as IDS
from harness.folded_jobs import branching_samples, tree_spec
from harness.models import build_chunks, tiny_gpt_config
from harness.torchrun_jobs import RECIPE, rows, run, write_job
from harness.worlds import Layout, world

from mcore_prefix_tree.mcore.engine.folding import Folding
from mcore_prefix_tree.mcore.engine.scoring import ScoreError, ScoringStep
from mcore_prefix_tree.mcore.outputs import Logprobs
from mcore_prefix_tree.mcore.seam.output_layer import with_edge_head


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture(scope="module")
def scored(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    """A recipe with a checkpoint, and the output of one process."""
    folder = tmp_path_factory.mktemp("job")
    job = write_job(folder, RECIPE + f"checkpoint: {{save: {folder / 'runs'}, save_interval: 1}}\n")
    run(1, "train", job, "train_iters=3", code=0)
    run(1, "score", job, "--reference", folder / "runs", "--output", folder / "one.jsonl", code=0)
    return job, lines(folder / "one.jsonl")


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param(
            ("parallel.tensor_model_parallel_size=2", "parallel.sequence_parallel=true"), id="tensor and sequence"
        ),
        pytest.param(
            ("batch.max_tokens=7", "parallel.pipeline_model_parallel_size=2"),
            id="chunks on a pipeline",
            marks=pytest.mark.ci,
        ),
    ],
)
def test_every_layout_writes_the_same(
    scored: tuple[Path, list[dict[str, Any]]], tmp_path: Path, layout: tuple[str, ...]
) -> None:
    job, expected = scored
    output = tmp_path / "two.jsonl"
    done = run(2, "score", job, *layout, "--reference", job.parent / "runs", "--output", output, code=0)
    assert done.out.count("scored tokens") == 1, "one rank speaks"
    assert len(expected) == len(rows())
    for line, wanted in zip(lines(output), expected, strict=True):
        assert line["tokens"] == wanted["tokens"]
        for column in ("old_logprobs", "ref_logprobs", "entropy"):
            actual, other = (np.array(each[column], dtype=np.float64) for each in (line, wanted))
            np.testing.assert_allclose(actual, other, rtol=2e-5, atol=1e-6)
    assert [path.name for path in tmp_path.iterdir()] == ["two.jsonl"]


def test_a_missing_checkpoint_is_one_sentence(scored: tuple[Path, list[dict[str, Any]]], tmp_path: Path) -> None:
    done = run(2, "score", scored[0], f"checkpoint.save={tmp_path}", "--output", tmp_path / "out.jsonl")
    assert done.code != 0
    assert done.errors == [f"error: {tmp_path} holds no checkpoint; train first, or name the folder of a run that did"]
    assert not list(tmp_path.iterdir())


def score_twice(layout: Layout) -> tuple[list[Any], list[Any], str]:
    """Scores that a rank gets for all ranks and for the main one, and its error for another rank's NaN."""
    config = tiny_gpt_config(layout=layout, dtype=torch.float64)
    (chunk,) = (with_edge_head(one) for one in build_chunks(config, tree_spec, vocab_size=IDS))
    folding = Folding(max_tokens=60, dp_size=layout.dp(2), cost_model=None, device=torch.device("cpu"))
    of_all, of_main = (
        ScoringStep.plan(branching_samples(), folding, for_main_rank=for_main_rank) for for_main_rank in (False, True)
    )
    found = [
        [(one.logprobs, one.entropy) for one in step.score([chunk], Logprobs(entropy=True))]
        for step in (of_all, of_main)
    ]
    if dist.get_rank() == 1:
        with torch.no_grad():
            next(chunk.parameters()).fill_(torch.nan)
    with pytest.raises(ScoreError) as error:
        of_main.score([chunk], Logprobs(entropy=True))
    return found[0], found[1], str(error.value)


def test_scores_reach_the_writing_rank_and_bad_weights_stop_all() -> None:
    (everyone, written, told), (same, nothing, told_too) = world(2).run(score_twice, Layout(), layout=Layout())
    assert nothing == []
    for ours in (same, written):
        np.testing.assert_equal(ours, everyone)
    assert len(everyone) == len(branching_samples())
    assert told == told_too
    assert "is nan; the model's weights are bad" in told
