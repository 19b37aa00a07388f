"""P-KL, gold and H-KL against NeMo-RL's own loss function, if its definitions are ours.

Needs a checkout of NeMo-RL that NEMO_RL_PATH names; nothing of it has to be installed. It computes in float32 and adds
1e-10 to probabilities where ours are clamped to it.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from unittest.mock import MagicMock

import pytest
import torch
from harness.xtoken_problems import problem, product_terms, projection_of
from harness.xtoken_reference import Chunk

from mcore_prefix_tree.xtoken.losses import LossSettings
from mcore_prefix_tree.xtoken.projection_file import write_projection

CHECKOUT = os.environ.get("NEMO_RL_PATH")
pytestmark = pytest.mark.skipif(CHECKOUT is None, reason="NEMO_RL_PATH names no checkout of NeMo-RL")
# Imports of their loss function that one rank without Ray and DTensor does not need.
REPLACED = (
    "nemo_rl.algorithms.loss.interfaces",
    "nemo_rl.algorithms.utils",
    "nemo_rl.distributed.batched_data_dict",
    "nemo_rl.distributed.model_utils",
    "nemo_rl.models.dtensor",
    "nemo_rl.models.dtensor.parallelize",
)


def log_softmax_of_one_rank(logits, temperature, *, tp_group=None):
    assert tp_group is None
    return torch.log_softmax(logits.float() / temperature, dim=-1)


@pytest.fixture(scope="module")
def theirs():
    """Their loss function; its imports are removed again."""
    assert CHECKOUT is not None
    before = dict(sys.modules)
    sys.path.insert(0, CHECKOUT)
    for name in REPLACED:
        sys.modules[name] = MagicMock(spec=ModuleType(name))
    for name, attributes in {
        "nemo_rl.algorithms.loss.interfaces": {"LossFunction": object},
        "nemo_rl.distributed.batched_data_dict": {"BatchedDataDict": dict},
        "nemo_rl.distributed.model_utils": {
            "group_all_reduce_sum": lambda values, group: values,
            "vocab_parallel_log_softmax": log_softmax_of_one_rank,
            "vocab_parallel_full_log_softmax": log_softmax_of_one_rank,
        },
    }.items():
        for attribute, value in attributes.items():
            setattr(sys.modules[name], attribute, value)
    unused = {
        "nemo_rl.algorithms.loss.interfaces": ("LossInputType", "LossType", "MetricNormalizer"),
        "nemo_rl.algorithms.utils": ("calculate_kl", "masked_mean"),
        "nemo_rl.distributed.model_utils": (
            "DistributedCrossEntropy", "cp_shift_next", "vocab_parallel_gather_columns", "vocab_parallel_argmax",
            "cp_load_balanced_to_contiguous", "get_logprobs_from_vocab_parallel_logits",
            "group_all_reduce_sum_with_grad",
        ),
        "nemo_rl.models.dtensor.parallelize": ("to_local_if_dtensor",),
    }  # fmt: skip
    for name, attributes in unused.items():
        for attribute in attributes:
            setattr(sys.modules[name], attribute, MagicMock())
    file = Path(CHECKOUT) / "nemo_rl" / "algorithms" / "loss" / "loss_functions.py"
    spec = importlib.util.spec_from_file_location("theirs_of_nemo_rl", file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module.CrossTokenizerDistillationLossFn
    sys.path.remove(CHECKOUT)
    for name in [name for name in sys.modules if name.split(".")[0] == "nemo_rl"]:
        del sys.modules[name]
    sys.modules |= {name: module for name, module in before.items() if name not in sys.modules}


def apart():
    """A problem whose chunks have separate rows, one after another: theirs gives each position one chunk."""
    task = problem()
    chunks, at = [], [0, 0]
    for lens in ((1, 1), (1, 2), (2, 1), (3, 2), (1, 3)):
        rows = [tuple(range(start, start + count)) for start, count in zip(at, lens, strict=True)]
        chunks.append(
            Chunk(student=rows[0], teacher=rows[1], student_tokens=(0,) * lens[0], teacher_tokens=(0,) * lens[1])
        )
        at = [start + count for start, count in zip(at, lens, strict=True)]
    weight = torch.full((len(chunks),), 1 / len(chunks), dtype=torch.float64)
    return type(task)(**{**vars(task), "chunks": chunks, "weight": weight})


@pytest.mark.parametrize(
    "settings",
    [
        LossSettings(mode="p_kl"),
        LossSettings(mode="p_kl", reverse=True, temperature=2.0),
        LossSettings(mode="p_kl", top_k=9),
        LossSettings(mode="gold"),
        LossSettings(mode="gold", reverse=True, temperature=1.5),
        LossSettings(mode="gold", tail=4),
        LossSettings(mode="h_kl"),
    ],
    ids=lambda settings: f"{settings.mode}-{settings.temperature}-{settings.reverse}-{settings.top_k}-{settings.tail}",
)
def test_loss_and_gradient_are_theirs(theirs, tmp_path, settings):
    task = apart()
    file = tmp_path / "w.pt"
    write_projection(file, projection_of(task.w))
    hidden, weight = (part.clone().requires_grad_() for part in task.student)
    student, teacher = (hidden @ weight.t())[None], (task.teacher[0] @ task.teacher[1].t())[None]
    ids = [torch.full((1, side.shape[1]), -1) for side in (student, teacher)]
    for number, chunk in enumerate(task.chunks):
        for of_side, rows in zip(ids, (chunk.student, chunk.teacher), strict=True):
            of_side[0, list(rows)] = number
    # Theirs picks the columns of P-KL from all rows that it is given, ours from those of chunks.
    used = [slice(0, int((of_side >= 0).sum())) for of_side in ids]
    align = SimpleNamespace(
        student_chunk_id=ids[0][:, used[0]],
        teacher_chunk_id=ids[1][:, used[1]],
        pair_valid=torch.ones(1, len(task.chunks), dtype=torch.bool),
        sample_mask=torch.ones(1),
    )
    itself = SimpleNamespace(
        temperature=settings.temperature,
        vocab_topk=settings.top_k or teacher.shape[-1],
        uncommon_topk=settings.tail,
        reverse_kl=settings.reverse,
        exact_token_match_only=False,
        student_vocab_size=student.shape[-1],
    )
    more = {"xtoken_loss": settings.mode == "h_kl"} if settings.mode != "p_kl" else {}
    compute = theirs._compute_p_kl if settings.mode == "p_kl" else theirs._compute_gold
    found = compute(
        itself,
        student[:, used[0]],
        teacher[:, used[1]].float(),
        align,
        projection_matrix_path=str(file),
        teacher_vocab_size=teacher.shape[-1],
        **more,
    )[0]
    grads = torch.autograd.grad(found, (hidden, weight))
    ours = product_terms(task, settings)
    assert found.item() == pytest.approx(float(torch.dot(ours.terms, task.weight)), rel=3e-6)
    for grad, own in zip(grads, (ours.grad_hidden, ours.grad_weight), strict=True):
        assert float((grad - own).norm() / own.norm()) < 1e-5
