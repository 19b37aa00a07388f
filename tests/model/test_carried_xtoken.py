"""Distillation across tokenizers on a tree in chunks: the step of both stock models on separate samples."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from harness.carried_trees import carried_parts
from harness.marks import mostly_in_ci
from harness.oracles import worst
from harness.seam_models import tiny_config, twins
from harness.seam_runs import assert_same_gradients, take_gradients
from xtoken_jobs import STUDENT_SIZE, TEACHER_SIZE, unfolded_loss
from xtoken_texts import samples as make_samples
from xtoken_texts import texts

from mcore_prefix_tree import Sample, fold
from mcore_prefix_tree.mcore.engine.forward_step import forward_step, with_rows
from mcore_prefix_tree.mcore.outputs import make_readout
from mcore_prefix_tree.mcore.seam.output_layer import with_edge_head
from mcore_prefix_tree.mcore.teachers.paired_teachers import PairedTeachers
from mcore_prefix_tree.mcore.teachers.teacher_model import TeacherModel
from mcore_prefix_tree.objectives import BoundCrossTokenizer, add_means, make_objective

pytestmark = [pytest.mark.usefixtures("megatron_on_the_cpu"), pytest.mark.filterwarnings("ignore:::megatron")]
FP64 = 1e-12
BOTH = texts()
SETTINGS = {
    "p_kl": {"mode": "p_kl", "top_k": 9, "ce_weight": 0.3},
    "alm": {"mode": "alm", "ce_weight": 0.4},
    "gold": {"mode": "gold", "temperature": 2.0},
}


class Step:
    """A step of one tree in one process, with a teacher of other sizes."""

    def __init__(self, name: str, samples: Sequence[Sample]) -> None:
        settings: Any = make_objective("xtoken", SETTINGS[name])
        self.samples = samples
        self.objective = BoundCrossTokenizer(settings=settings, sides=(BOTH.side(settings.losses),), block_rows=7)
        self.stock, self.tree = twins(tiny_config(), vocab_size=STUDENT_SIZE)
        larger = tiny_config(hidden_size=48, ffn_hidden_size=64, num_layers=2)
        self.stock_teacher, teacher = twins(larger, vocab_size=TEACHER_SIZE)
        with_edge_head(self.tree)
        model = TeacherModel(chunks=[with_edge_head(teacher)], attention_backend="path", attention_cases=())
        self.hook = PairedTeachers(
            objective=self.objective, models=[model], student_columns=STUDENT_SIZE, device=torch.device("cpu")
        )

    def apart(self) -> dict[str, Any]:
        def logits(model: torch.nn.Module, sample: Sample) -> torch.Tensor:
            tokens = torch.from_numpy(sample.tokens.copy()).long()[None]
            return model(tokens, torch.arange(len(sample))[None], None)[0]

        pairs = [BOTH.pairing.reencode(sample) for sample in self.samples]
        loss = self.objective.targets(self.samples).divisor * unfolded_loss(
            self.objective.settings,
            pairs,
            [logits(self.stock, sample) for sample in self.samples],
            [[logits(self.stock_teacher, pair.teacher).detach() for pair in pairs]],
            w=BOTH.w,
            token_bytes=BOTH.token_bytes,
        )
        loss.backward()
        return {"loss": loss.detach(), "grads": take_gradients(self.stock)}

    def in_chunks(self, cuts: Sequence[int], **options: Any) -> dict[str, Any]:
        batches, _, carrying = carried_parts(self.samples, cuts, **options)
        targets, order = self.objective.targets(self.samples), range(len(self.samples))
        rows = [with_rows(batch, self.objective, targets, () if batch.forward_only else order) for batch in batches]
        readout, reports = make_readout(self.objective, fused_head=True), []

        def run(batch: Any) -> Any:
            output, loss = forward_step(iter([batch]), self.tree, readout=readout)
            return loss(output)

        store = batches[0].packed_seq_params.carry.store
        asked = self.hook.prepare(rows, carrying)
        taught = self.hook.before_step(asked, lambda scored: [run(batch)[2] for batch in scored])
        assert store.num_bytes == 0, "a pass before the step leaves nothing behind"
        for batch in taught:
            loss, _, report = run(batch)
            loss.backward()
            reports.append(report)
        assert store.num_bytes == 0, "states and gradients of every chunk are released after its backward"
        for batch in (batch for one in asked for batch in one.hook_data if batch.packed_seq_params.carry is not None):
            assert batch.packed_seq_params.carry.store.num_bytes == 0, "the teacher's are, too"
        assert sum(int(report["num_tokens"]) for report in reports) == targets.divisor
        return {
            "loss": sum(report["loss_sum"] for report in reports),
            "metrics": add_means(report["metrics"] for report in reports),
            "grads": take_gradients(self.tree),
            "above": [len(batch.rows.above) for batch in rows],
        }


def assert_equal(actual: dict[str, Any], expected: dict[str, Any]) -> None:
    assert worst(actual["loss"], expected["loss"]) < FP64
    assert_same_gradients(actual["grads"], expected["grads"], FP64)
    for name, pair in expected.get("metrics", {}).items():
        torch.testing.assert_close(actual["metrics"][name], pair, rtol=1e-12, atol=1e-13)


@pytest.mark.ci
def test_every_place_of_a_cut() -> None:
    """One cut divides some chunks of text, by a branch point or not, and not others."""
    step = Step("p_kl", make_samples())
    expected, size, above = step.apart(), fold(step.samples).physical_tokens, []
    for cut in range(1, size):
        actual = step.in_chunks([cut])
        assert_equal(actual, expected)
        expected.setdefault("metrics", actual["metrics"])
        above.append(sum(actual["above"]))
    assert min(above) == 0
    assert max(above) > 2


@pytest.mark.parametrize("name", mostly_in_ci("p_kl", "gold", of=SETTINGS))
@pytest.mark.parametrize("seed", [1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(2, 6))])
def test_random_cuts_of_random_trees(name: str, seed: int) -> None:
    step, rng = Step(name, make_samples(seed)), random.Random(seed)
    expected, places = step.apart(), range(1, fold(step.samples).physical_tokens)
    for _ in range(3):
        of_pass = {"multiple": rng.randint(1, 4), "pass_tokens": rng.randint(1, 9)}
        actual = step.in_chunks(rng.sample(places, rng.randint(2, 9)), **of_pass)
        assert_equal(actual, expected)
        expected.setdefault("metrics", actual["metrics"])
    assert_equal(step.in_chunks(places), expected)  # chunks of one token
