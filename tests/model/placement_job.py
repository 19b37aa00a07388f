"""Fold, run forward, loss and backward where tensors are on a device without being there: torch's fake tensors.

They have shapes, dtypes and a device, and reject operations that a GPU would reject or wait for: an operation on two
devices, any number that the host reads back, and, since :class:`Fake` looks for them, copies between host and device
that wait. A CPU build of torch cannot give a fake tensor the device ``cuda``; PyTorch's device for Python back-ends
stands in for it. Kernels do not run: operators of our own answer with their fake implementation.

Takes names of objectives. Prints one JSON object: for each case "" or the failure. A separate process, because
such a device is set up once per process and ends it with an abort.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar
from unittest import mock

import numpy as np
import torch
from harness.seam_models import branching_samples, build, local_spec, tiny_config
from harness.seam_runs import SPARSE
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

import mcore_prefix_tree
from mcore_prefix_tree import Sample, Signals, fold
from mcore_prefix_tree.attention import parity
from mcore_prefix_tree.attention.backend_options import Case
from mcore_prefix_tree.cpu.emulation import cpu_emulation, single_process
from mcore_prefix_tree.logprob import head_chunks, softmax
from mcore_prefix_tree.mcore import with_edge_head, with_prefix_tree
from mcore_prefix_tree.mcore.engine.carried_trees import fold_carrying
from mcore_prefix_tree.mcore.engine.folding import Folding
from mcore_prefix_tree.mcore.engine.forward_step import forward_step, tree_forward, with_rows
from mcore_prefix_tree.mcore.engine.tree_losses import make_hook
from mcore_prefix_tree.mcore.outputs import Logprobs, WeightedSum, make_readout
from mcore_prefix_tree.mcore.seam.micro_batch import MicroBatch
from mcore_prefix_tree.mcore.seam.scalar_output_layer import with_scalar_head
from mcore_prefix_tree.objectives import make_objective, sft_loss
from mcore_prefix_tree.signals import Teacher

DEVICE = "gpu"
PACKAGE = str(Path(mcore_prefix_tree.__file__).parent)
BACKENDS = ("reference", "triton")  # in addition to path, which the readouts run with
READOUTS = {
    "logits": WeightedSum(fused=False),
    "logprobs": Logprobs(),
    "logprobs_and_entropy": Logprobs(entropy=True),
    "weighted_sum": WeightedSum(),
}
# What the head runs on a GPU: kernels, and products and sums in fp32 unless the logits are the model's.
KERNELS = {"mcore_prefix_tree.softmax_sums.default", "mcore_prefix_tree.softmax_gradient.default"}
PRODUCTS = {"aten.mm.dtype_out", "aten.addmm.dtype_out"}
CHOICE = {"mcore_prefix_tree.index_scores.default", "aten.topk.default"}  # of an indexer's keys
CUT = ("gspo", "reward_model")  # losses of whole samples, in chunks: with entropies, and of values
OPTIONS = {"kto": {"reference_point": "zero"}}


class Fake(FakeTensorMode):
    """Fake tensors without constants: torch would keep the value of a single number, on a missing device."""

    ran: ClassVar[set[str]] = set()  # names of operators

    def may_turn_const(self, t: torch.Tensor) -> bool:
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.ran.add(str(func))
        source, target, non_blocking = None, None, False
        if func is torch.ops.aten._to_copy.default:
            source, target = args[0], kwargs.get("device")
            non_blocking = kwargs.get("non_blocking", False)
        elif func is torch.ops.aten.copy_.default:
            target, source = args[0].device, args[1]
            non_blocking = args[2] if len(args) > 2 else (kwargs or {}).get("non_blocking", False)
        if source is not None and target is not None and source.device.type != torch.device(target).type:
            assert source.device.type == "cpu", "a copy to the host, which waits for the device"
            assert non_blocking, "a blocking copy to the device"
            assert getattr(source, "in_pinned_memory", False), "a copy from pageable memory, which waits for the device"
        return super().__torch_dispatch__(func, types, args, kwargs)


def pin_memory(tensor: torch.Tensor) -> torch.Tensor:
    """``Tensor.pin_memory``, which wants a GPU."""
    pinned = tensor.clone()
    pinned.in_pinned_memory = True
    return pinned


def tensor_on_device(data: Any, *, device: Any = None, _tensor: Any = torch.tensor, **options: Any) -> torch.Tensor:
    """``torch.tensor``, which may not copy Python's numbers to the device: it would wait for the copy."""
    assert device is None, f"{data!r} is copied from the host; torch.full writes it on the device"
    return _tensor(data, **options)


def as_tensor_on_device(data: Any, **options: Any) -> torch.Tensor:
    """``torch.as_tensor``, likewise."""
    return data.to(**options) if isinstance(data, torch.Tensor) else tensor_on_device(data, **options)


def pretend_hopper() -> None:
    """Let back-ends and the head take the device for an NVIDIA GPU, and trust their kernels, which cannot run here."""
    of = Case.of.__func__

    def on_hopper(cls: type[Case], *arguments: Any) -> Case:
        return replace(of(cls, *arguments), device=torch.device("cuda", 0), capability=(9, 0))

    Case.of = classmethod(on_hopper)
    parity._check = softmax._check_kernels = lambda *arguments: None
    torch.Tensor.is_cuda = property(lambda tensor: tensor.device.type == DEVICE)
    torch.cuda.get_device_capability = lambda device: (9, 0)
    torch.cuda.device_of = lambda tensor: nullcontext()
    torch.cuda.is_initialized = lambda: False  # no stream is captured
    torch.use_deterministic_algorithms(True)  # required by cascade with torch's own kernel


def move(model: torch.nn.Module, dtype: torch.dtype) -> None:
    """Give the device every parameter, with the attributes that Megatron put on it, and every tensor of a module."""
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            moved = torch.nn.Parameter(torch.empty(parameter.shape, dtype=dtype, device=DEVICE))
            vars(moved).update(vars(parameter))
            setattr(module, name, moved)
        for name, value in list(vars(module).items()):
            if isinstance(value, torch.Tensor):
                setattr(module, name, torch.empty(value.shape, dtype=value.dtype, device=DEVICE))


def forward_backward(
    samples: list[Sample],
    *,
    readout: Any,
    backend: str = "path",
    objective: Any = None,
    dtype: torch.dtype,
    max_tokens: int | None = None,
    **changes: Any,
) -> None:
    heads = {"num_attention_heads": 2, "num_query_groups": 1}
    config = tiny_config(dtype, **heads | {"hidden_size": 128, "bf16": dtype is torch.bfloat16} | changes)
    model = build(config, with_prefix_tree(local_spec(config)))
    model = with_scalar_head(model) if objective is not None and objective.has_scalar_head else with_edge_head(model)
    layout = fold(samples)
    with (
        mock.patch.object(torch, "tensor", tensor_on_device),
        mock.patch.object(torch, "as_tensor", as_tensor_on_device),
        mock.patch.object(torch.Tensor, "pin_memory", pin_memory),
        mock.patch.object(head_chunks, "_GPU", (1, 12)),  # several, and rows that wait for a later one
        Fake(allow_non_fake_inputs=True),
    ):
        move(model, dtype)
        batch = MicroBatch.from_layout(layout, device=DEVICE, attention_backend=backend)
        if objective is not None and not objective.is_weighted_sum:
            batch = with_rows(batch, objective, objective.targets(samples), range(len(samples)))
        if isinstance(readout, Logprobs):
            logprob, entropy = readout.read(tree_forward(model, batch, readout), batch)
            loss = sft_loss(logprob, batch.loss_weight) + (0 if entropy is None else entropy.sum())
            loss.backward()
        else:

            def run(batch: MicroBatch) -> Any:
                given, loss_of = forward_step(iter([batch]), model, readout=readout)
                return loss_of(given)

            for one in [batch] if max_tokens is None else in_chunks(samples, objective, max_tokens, run):
                run(one)[0].backward()
        # Nothing trains an indexer without a loss.
        trained = {name: one for name, one in model.named_parameters() if ".indexer." not in name}
        missing = [name for name, parameter in trained.items() if parameter.grad is None]
        assert not missing, missing
        assert {parameter.grad.device.type for parameter in trained.values()} == {DEVICE}


def on_kernels(readout: Any, samples: list[Sample]) -> None:
    """Run a readout in bfloat16, which must use the kernels of the head."""
    Fake.ran.clear()
    forward_backward(samples, readout=readout, dtype=torch.bfloat16)
    wanted = KERNELS if readout is READOUTS["logits"] else KERNELS | PRODUCTS
    assert not wanted - Fake.ran, f"not run: {wanted - Fake.ran}"
    assert readout is READOUTS["logits"] or "aten.exp_.default" not in Fake.ran


def on_the_indexers_kernel(samples: list[Sample]) -> None:
    """Run a model of sparse attention in bfloat16, whose indexer must use its kernel."""
    Fake.ran.clear()
    changes = SPARSE | {"num_attention_heads": 4}
    forward_backward(samples, readout=READOUTS["weighted_sum"], dtype=torch.bfloat16, **changes)
    assert not CHOICE - Fake.ran, f"not run: {CHOICE - Fake.ran}"


def in_chunks(
    samples: list[Sample], objective: Any, max_tokens: int, run: Callable[[MicroBatch], Any]
) -> Sequence[MicroBatch]:
    """Return the micro-batches of trees above the budget, scored by ``run``."""
    folding = Folding(
        max_tokens=max_tokens,
        dp_size=1,
        cost_model=None,
        device=torch.device(DEVICE),
        attention_backend="reference",
        over_budget="carry",
        scores_first=True,
    )
    plan, targets = folding.plan(samples, together=objective.together(samples)), objective.targets(samples)
    assert plan.carrying is not None
    (cut,), (carrying,) = plan.micro_batches, plan.carrying
    batches = [
        with_rows(batch, objective, targets, () if batch.forward_only else own)
        for batch, own in zip(fold_carrying(samples, cut, carrying, folding), cut, strict=True)
    ]
    hook = make_hook(objective, folding)
    made = hook.before_step(hook.prepare(batches, carrying), lambda asked: [run(one.on(DEVICE))[2] for one in asked])
    return [batch.on(DEVICE) for batch in made]


def informed_samples() -> list[Sample]:
    """The forest with all that any objective reads: groups of two, which are pairs too."""
    samples = [sample for sample in branching_samples() if sample.merge_key is None and len(sample) > 1]
    informed = []
    for index, sample in enumerate(samples[: len(samples) // 2 * 2]):
        per_token = torch.linspace(-2.0, -1.0, len(sample)).tolist()
        teacher = Teacher(
            token_ids=np.tile(np.arange(3, dtype=np.int32), (len(sample), 1)),
            logprobs=np.full((len(sample), 3), -1.5, dtype=np.float32),
        )
        signals = Signals(
            group=index // 2,
            reward=float(index % 2),
            pair=index // 2,
            chosen=index % 2 == 0,
            label=index % 2 == 0,
            old_logprobs=per_token,
            ref_logprobs=per_token,
            rollout_logprobs=per_token,
            values=per_token,
            teacher=teacher,
        )
        informed.append(Sample(tokens=sample.tokens, loss_mask=[1.0] * len(sample), signals=signals, source=str(index)))
    return informed


def outcome(case: Callable[..., None], *arguments: Any, **options: Any) -> str:
    try:
        case(*arguments, **options)
    except Exception as error:
        frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename.startswith(PACKAGE)]
        where = f"{frames[-1].filename}:{frames[-1].lineno}: {frames[-1].line}: " if frames else ""
        return f"{where}{type(error).__name__}: {error}"
    return ""


def main() -> None:
    _setup_privateuseone_for_python_backend(DEVICE)
    outcomes: dict[str, str] = {}
    with cpu_emulation(force=True), single_process():
        samples, informed = branching_samples(), informed_samples()
        for name in sys.argv[1:]:
            objective = make_objective(name, OPTIONS.get(name))
            readout = make_readout(objective, fused_head=True)
            # The attention that is cheapest on fake tensors; the readouts below go with path.
            outcomes[f"objective {name}"] = outcome(
                forward_backward,
                informed,
                readout=readout,
                backend="reference",
                objective=objective,
                dtype=torch.float32,
            )
        for name in CUT:
            objective = make_objective(name)
            outcomes[f"cut {name}"] = outcome(
                forward_backward,
                informed,
                readout=make_readout(objective, fused_head=True),
                objective=objective,
                dtype=torch.float32,
                max_tokens=max(map(len, informed)) - 1,
            )
        for name, readout in READOUTS.items():
            outcomes[f"readout {name}"] = outcome(forward_backward, samples, readout=readout, dtype=torch.float32)
        pretend_hopper()
        for backend in BACKENDS:
            outcomes[f"attention {backend}"] = outcome(
                forward_backward,
                samples,
                readout=READOUTS["weighted_sum"],
                backend=backend,
                dtype=torch.float32 if backend == "reference" else torch.bfloat16,
            )
        for name, readout in READOUTS.items():
            outcomes[f"kernels {name}"] = outcome(on_kernels, readout, samples)
        outcomes["sparse attention"] = outcome(on_the_indexers_kernel, samples)
        # Checks that the fake device detects the faults that it exists for.
        with Fake():
            here, there = torch.ones(2), torch.ones(2, device=DEVICE)
            outcomes["two devices"] = outcome(lambda: here + there)
            outcomes["read back"] = outcome(there.sum().item)
            outcomes["copied back"] = outcome(there.cpu)
            outcomes["blocking copy"] = outcome(lambda: here.to(DEVICE))
            outcomes["pageable copy"] = outcome(lambda: torch.from_numpy(np.ones(2)).to(DEVICE, non_blocking=True))
    print(json.dumps(outcomes))
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
