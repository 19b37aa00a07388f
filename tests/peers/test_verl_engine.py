"""verl's own Megatron engine and the one that folds inside answer the same for the same batch.

Needs verl: ``pip install --no-deps -r requirements/peers.txt``.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("verl", reason="verl is not installed")
from harness.layouts import in_layouts
from harness.worlds import Layout, world
from qwen_vl_jobs import BEGIN, END, PICTURE, pictures_of
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from verl_engines import compare, compare_pictures, emulated, engine, track

from mcore_prefix_tree.cpu.emulation import cpu_emulation
from mcore_prefix_tree.mcore.release import HAS_DEPTHS, NEEDS_DEPTHS

ROOT = Path(__file__).parents[2]
NEEDS_DEPTHS = pytest.mark.skipif(not HAS_DEPTHS, reason=f"needs {NEEDS_DEPTHS}")


@in_layouts("single", "tp2-sp", "pp2", "dp2", "pp2-vpp2", "ep2")
@pytest.mark.parametrize("kind", ["language_model", "value_model"])
def test_answers_losses_and_gradients(size: int, layout: Layout, kind: str) -> None:
    results = world(size).run(compare, layout, kind, layout=layout)
    last = results[-1]
    answers = ("values",) if kind == "value_model" else ("entropy", "log_probs")
    assert {"loss", *(f"{name} {run}" for name in answers for run in (0, 1))} <= {*last["names"]}
    assert last["fold"]["fold/fold_ratio"][0] > 1.3
    assert (last["fold"]["fold/expanded_bytes"] == [0]) == (kind == "language_model")


@pytest.mark.skipif(find_spec("megatron.bridge") is None, reason="Megatron-Bridge is not installed")
@in_layouts("single", "tp2-sp", "pp2")
def test_rows_with_pictures(size: int, layout: Layout) -> None:
    results = world(size).run(compare_pictures, layout, layout=layout)
    assert results[-1]["fold"]["fold/fold_ratio"][0] > 1.3


def test_micro_batches_count_the_tokens_of_each_picture() -> None:
    from verl.utils import tensordict_utils as tu

    from mcore_prefix_tree.integrations.verl.engine import FoldingEngine

    row = torch.tensor([12, BEGIN, *[PICTURE] * 6, END, 13])
    rows = torch.nested.as_nested_tensor([row, row, row, row[-1:]], layout=torch.jagged)
    inputs = [pictures_of([[name]]) for name in "aba"] + [{}]
    data = tu.get_tensordict({"input_ids": rows, "multi_modal_inputs": inputs}, {})
    config = SimpleNamespace(vision_config=SimpleNamespace(spatial_merge_size=2), image_token_id=PICTURE)
    engine = SimpleNamespace(model_config=SimpleNamespace(hf_config=config))
    first, other, again, text = FoldingEngine._compared_rows(engine, data).unbind()
    assert torch.equal(first, again)
    assert (first != other).tolist() == (row == PICTURE).tolist()
    assert (first == row).tolist() == (row != PICTURE).tolist()
    assert text.tolist() == [13]


def test_critics_with_pictures_are_refused() -> None:
    with (
        cpu_emulation(force=True),
        emulated("mcore_prefix_tree"),
        pytest.raises(NotImplementedError, match="a vision model as a critic"),
    ):
        engine("value_model", pictures=True)


@NEEDS_DEPTHS
@in_layouts("single", "tp2-sp", "pp2", slow=["dp2", "pp2-vpp2"])
@pytest.mark.parametrize("mtp", [{"detach_encoder": False}, {"detach_encoder": True}, {"enable_train": False}], ids=str)
def test_depths_learn_what_those_of_verl_learn(size: int, layout: Layout, mtp: dict[str, Any]) -> None:
    settings = {"enable": True, "enable_train": True, "mtp_loss_scaling_factor": 0.7} | mtp
    # Both have the micro-batches of verl: a depth's loss is a mean over the tokens of each.
    results = world(size).run(partial(compare, dynamic=False, mtp=settings), layout, "language_model", layout=layout)
    assert results[-1]["fold"]["fold/fold_ratio"][0] > 1.3
    assert ("mtp" in results[-1]["learns"]) == settings["enable_train"]
    logged = {name for result in results for name in result["names"] if name.startswith("mtp_losses/")}
    assert logged == ({"mtp_losses/mtp_1_loss 1", "mtp_losses/mtp_2_loss 1"} if settings["enable_train"] else set())


@pytest.mark.parametrize("form", ["answers", "rows", "padded"])
def test_depths_read_the_loss_mask_that_verl_packs(form: str) -> None:
    from verl.models.mcore.model_forward import _build_mtp_loss_mask_nested
    from verl.utils import tensordict_utils as tu

    from mcore_prefix_tree.integrations.verl.engine import _loss_mask

    jagged = partial(torch.nested.as_nested_tensor, layout=torch.jagged)
    rows = jagged([torch.arange(5), torch.arange(7)])
    answers = [torch.tensor([1, 0]), torch.tensor([1, 0, 1, 1])]
    whole = [F.pad(answer, (3, 0)) for answer in answers]
    present = torch.tensor([[0, 1, 1, 1, 1, 1, 0, 0], [0, 1, 1, 1, 1, 1, 1, 1]])  # padded on both sides
    mask = {"answers": jagged(answers), "rows": jagged(whole), "padded": torch.tensor([[1, 0, 1, 1], [1, 0, 1, 1]])}
    given = {"input_ids": rows, "loss_mask": mask[form], "attention_mask": present}
    expected = _build_mtp_loss_mask_nested(mask[form], [5, 7], present[:, -4:])
    found = _loss_mask(tu.get_tensordict(given, {}))
    assert [row.tolist() for row in found.unbind()] == [row.tolist() for row in expected.unbind()]
    assert found.values().sum() == 4


def test_a_loss_mask_with_a_first_token_is_refused() -> None:
    """verl's engine rolls such a mask, and its label, to the end of the row before."""
    from verl.utils import tensordict_utils as tu

    from mcore_prefix_tree.integrations.verl.engine import _loss_mask

    rows = torch.nested.as_nested_tensor([torch.arange(3), torch.arange(2)], layout=torch.jagged)
    mask = torch.nested.as_nested_tensor([torch.tensor([0, 1, 1]), torch.tensor([1, 1])], layout=torch.jagged)
    with pytest.raises(NotImplementedError, match="the first token of a row in loss_mask"):
        _loss_mask(tu.get_tensordict({"input_ids": rows, "loss_mask": mask}, {}))


@in_layouts("single", "tp2-sp", "pp2", "ep2")
def test_routes_of_the_rollout_engine(size: int, layout: Layout) -> None:
    results = world(size).run(partial(compare, replays=True), layout, "language_model", layout=layout)
    assert results[-1]["fold"]["fold/fold_ratio"][0] > 1.2


@NEEDS_DEPTHS
def test_depths_behind_layers_with_routes() -> None:
    call = partial(compare, dynamic=False, replays=True, mtp={"enable": True, "enable_train": True})
    (result,) = world(1).run(call, Layout(), "language_model", layout=Layout())
    assert "mtp" in result["learns"]


@NEEDS_DEPTHS
def test_critics_have_depths_that_do_not_learn() -> None:
    call = partial(compare, mtp={"enable": True, "enable_train": True})
    (result,) = world(1).run(call, Layout(), "value_model", layout=Layout())
    assert "mtp" not in result["learns"]


def test_routes_that_are_missing_are_an_error() -> None:
    from verl.utils import tensordict_utils as tu

    from mcore_prefix_tree.integrations.verl.engine import _routes

    rows = torch.nested.as_nested_tensor([torch.arange(4), torch.arange(3)], layout=torch.jagged)
    data = tu.get_tensordict({"input_ids": rows}, {"enable_routing_replay": True})
    with pytest.raises(ValueError, match=r"set actor_rollout_ref\.rollout\.enable_rollout_routing_replay=True"):
        _routes(data)
    given = [torch.tensor([[[1, 0]], [[0, 0]], [[2, 1]]]), torch.tensor([[[3, 1]], [[0, 2]], [[0, 0]]])]
    data["routed_experts"] = torch.nested.as_nested_tensor(given, layout=torch.jagged)
    routes = [row.tolist() for row in _routes(data).unbind()]
    assert routes == [[[[1, 0]], [[-1, -1]], [[2, 1]], [[-1, -1]]], [[[3, 1]], [[0, 2]], [[-1, -1]]]]


def test_micro_batches_of_verl_and_a_check_of_the_first() -> None:
    settings = {"override_mcore_model_config": {"prefix_tree": {"check_first": True}}}
    call = partial(compare, dynamic=False, **settings)
    (result,) = world(1).run(call, Layout(), "language_model", layout=Layout())
    assert result["fold"]["fold/micro_batches"] == [2]
    assert result["fold"]["fold/rows"] == [12]


@in_layouts("single", "dp2")
def test_sft_report_reaches_every_tracker(size: int, layout: Layout, tmp_path: Path) -> None:
    pytest.importorskip("uvicorn", reason="verl's workers import it")
    backends = ["console", "file", "tensorboard"] + ["wandb"] * (find_spec("wandb") is not None)
    metrics = world(size).run(track, layout, str(tmp_path), backends, layout=layout)[0]
    report = {name: value for name, value in metrics.items() if "fold/" in name}
    assert report["mtp_losses/fold/rows"] == 12 * size
    assert report["mtp_losses/fold/fold_ratio"] > 1.3
    # MLflow, ClearML and the others take numbers only.
    assert {type(value) for value in report.values()} == {float}
    (line,) = (tmp_path / "project" / "run.jsonl").read_text().splitlines()
    assert json.loads(line)["data"] == metrics
    (events,) = tmp_path.glob("events.out.tfevents.*")
    scalars = EventAccumulator(str(events)).Reload()
    for name, value in report.items():
        assert scalars.Scalars(name)[0].value == pytest.approx(value, rel=1e-6)


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"vanilla_mbridge": True}, "vanilla_mbridge=True"),
        ({"use_fused_kernels": True}, "use_fused_kernels=True"),
        ({"pad_to_length": True}, "pad_to_length=True"),
        ({"use_remove_padding": False}, "use_remove_padding=False"),
    ],
)
def test_refusals_by_name(settings: dict[str, Any], named: str) -> None:
    with cpu_emulation(force=True), emulated("mcore_prefix_tree"), pytest.raises(NotImplementedError, match=named):
        engine("language_model", **settings)


def test_verl_finds_the_engines_by_their_entry_point(tmp_path: Path) -> None:
    group = '[project.entry-points."verl.plugins"]\n'
    found = (ROOT / "pyproject.toml").read_text().partition(group)[2].partition("\n\n")[0]
    installed = tmp_path / "plugin-1.dist-info"
    installed.mkdir()
    (installed / "METADATA").write_text("Name: plugin\nVersion: 1\n")
    (installed / "entry_points.txt").write_text("[verl.plugins]\n" + found.replace('"', ""))
    code = """
import verl
from verl.workers.engine import EngineRegistry
print(*(EngineRegistry.get_engine_cls(kind, "megatron").__name__ for kind in ("language_model", "value_model")))
"""
    paths = [tmp_path, ROOT, *sys.path]
    settings = {"PYTHONPATH": os.pathsep.join(map(str, paths)), "VERL_ENGINE_VENDOR": "mcore_prefix_tree"}
    environment = os.environ | settings | {"VERL_ENGINE_DEVICE": "cuda"}
    ran = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert ran.stdout.split()[-2:] == ["FoldingEngine", "FoldingValueEngine"]
