"""CUDA graphs of MLPs and routers with TransformerEngine's own layers and its own capture, in recipes.

Run by test_transformer_engine_layers.py, as te_layers.py is.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

from te_recorded import RecordedGraph, recorded_graphs  # isort: skip  before Megatron-Core
import pytest
import te_compiled
import te_recorded
from harness import forks
from harness.commands import write_rows
from harness.forked_ranks import launch
from harness.train_jobs import Notes, rows, train, write_job

from mcore_prefix_tree.mcore.seam import validation
from mcore_prefix_tree.settings import load_recipe

pytestmark = pytest.mark.filterwarnings("ignore")
MODEL = (*te_compiled.RECIPE, "verify.enabled=false", "train_iters=3")
JOB = Path(te_recorded.__file__)
# Ranks are forked from a process that has it, too.
forks.PRELOADED.insert(0, "te_compiled")
EXPERTS = ("model.transformer.num_moe_experts=4", "model.transformer.moe_router_topk=2")


@pytest.fixture(autouse=True)
def graphs_on_a_gpu() -> Iterator[None]:
    with recorded_graphs():
        yield


def settings(modules: str | None) -> list[str]:
    """Return the overrides of a recipe, with CUDA graphs of some modules or without."""
    graphs = ("cuda_graph_impl=transformer_engine", f"cuda_graph_modules=[{modules}]") if modules else ()
    return [*MODEL, *(f"model.transformer.{one}" for one in graphs), "batch.length_buckets=[16,24,64]"]


def trained(folder: Path, modules: str | None, *changes: str) -> tuple[Notes, int]:
    """Return what a run reported, and the number of graphs that it replayed."""
    RecordedGraph.replays.clear()
    notes = train(load_recipe(write_job(folder), [*settings(modules), *changes]))
    return notes, len(RecordedGraph.replays)


CASES = {
    "mlp": ("mlp", ()),
    "router": ("moe_router", EXPERTS),
    "shared experts": ("moe_router", (*EXPERTS, "model.transformer.moe_shared_expert_intermediate_size=32")),
    "both": ("mlp,moe_router", (*EXPERTS, "model.transformer.moe_layer_freq=[0,1]")),
    "chunks": ("mlp", ("batch.max_tokens=20",)),
    "selective recompute": ("mlp", ("model.transformer.recompute_granularity=selective",)),
    "latent attention": (
        "mlp",
        ("model.transformer.multi_latent_attention=true", "model.num_query_groups=null", "model.kv_channels=null"),
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_graphed_steps_are_steps_without_graphs(tmp_path: Path, case: str) -> None:
    """To the bit: a replay runs the operations that were captured."""
    modules, changes = CASES[case]
    plain, none = trained(tmp_path, None, *changes)
    graphed, replayed = trained(tmp_path, modules, *changes)
    lengths = 2 if case == "chunks" else 3
    assert (none, replayed) == (0, 2 * 2 * lengths), "forward and backward of each layer"
    assert graphed.losses == plain.losses
    assert [one.grad_norm for one in graphed.reports] == [one.grad_norm for one in plain.reports]


def test_a_router_that_counts_samples_would_differ(tmp_path: Path) -> None:
    """A graph has the tree of its capture, which is none; so this is refused."""
    balanced = (
        *EXPERTS,
        "model.transformer.moe_router_load_balancing_type=aux_loss",
        "model.transformer.moe_aux_loss_coeff=0.1",
    )
    with pytest.raises(NotImplementedError, match=r"of moe_router with moe_aux_loss_coeff=0\.1: it counts the samples"):
        trained(tmp_path, "moe_router", *balanced)
    plain, _ = trained(tmp_path, None, *balanced)
    with mock.patch.object(validation, "_graph_refusals", return_value=[]):
        graphed, _ = trained(tmp_path, "moe_router", *balanced)
    assert graphed.reports[0].grad_norm != plain.reports[0].grad_norm


def test_evaluation_comparison_and_resume(tmp_path: Path) -> None:
    """The graphs of a run end with it: the next captures its own, of the weights that it reads."""
    held_out = write_rows(tmp_path / "held_out.jsonl", rows(1))
    found = []
    for modules in (None, "mlp"):
        saved = f"checkpoint.save={tmp_path / str(modules)}"
        changes = [saved, f"validation.path={held_out}", "validation.eval_interval=1", "compare=true"]
        job = write_job(tmp_path)
        runs = [
            train(load_recipe(job, [*settings(modules), *changes, f"train_iters={steps}"]), resume=steps > 2)
            for steps in (2, 4)
        ]
        assert [len(run.comparisons) for run in runs] == [1, 1]
        found.append([(run.losses, [one.loss for one in run.evaluations]) for run in runs])
    assert found[0] == found[1]
    assert RecordedGraph.replays
    assert RecordedGraph.captured == []


def test_tensor_and_sequence_parallel_ranks_replay(tmp_path: Path) -> None:
    """A graph has the ranks' communication."""
    layout = ("parallel.tensor_model_parallel_size=2", "parallel.sequence_parallel=true")
    found = []
    for name, modules in (("plain", None), ("graphed", "mlp")):
        log = tmp_path / f"{name}.jsonl"
        command = [str(JOB), "train", str(write_job(tmp_path)), *settings(modules), *layout, f"log.metrics={log}"]
        code, _, err = launch(2, command, environment=os.environ | {"OMP_NUM_THREADS": "1"}, timeout_s=300)
        assert code == 0, err
        found.append(
            [[json.loads(line)[key] for key in ("loss", "grad_norm")] for line in log.read_text().splitlines()]
        )
    assert found[0] == found[1]
