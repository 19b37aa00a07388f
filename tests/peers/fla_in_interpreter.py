"""Run the rule of a tree with FLA's own kernels in Triton's interpreter; print errors and launches as JSON.

TRITON_INTERPRET=1 and a folder with ``fla`` on PYTHONPATH are the caller's.
"""

from __future__ import annotations

import builtins
import contextlib
import json
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
import triton.language as tl
from triton.runtime import autotuner, interpreter

launches: Counter[str] = Counter()


def take_first_config() -> None:
    """Let the tuner take the first of its configurations: it has no device to measure them on."""
    original = autotuner.Autotuner.__init__

    def initialise(self: Any, fn: Any, arg_names: Any, configs: list[Any], *args: Any, **kwargs: Any) -> None:
        original(self, fn, arg_names, configs[:1], *args, **kwargs)

    autotuner.Autotuner.__init__ = initialise


def count_launches() -> None:
    original = interpreter.GridExecutor.__call__

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        launches[self.fn.__name__] += 1
        return original(self, *args, **kwargs)

    interpreter.GridExecutor.__call__ = call


def range_of_tensors(*bounds: Any) -> Iterator[Any]:
    """``range``, whose numbers have the methods of compiled ones, which the interpreter's lack."""
    for at in builtins.range(*map(int, bounds)):
        yield tl.full((), at, tl.int32)


def launched(function: Callable[..., Any], *args: Any) -> tuple[Any, int]:
    launches.clear()
    return function(*args), launches.total()


take_first_config()
count_launches()
if not hasattr(torch.cpu, "device"):  # FLA before 0.5.1 enters the device of its inputs
    torch.cpu.device = lambda _: contextlib.nullcontext()  # type: ignore[attr-defined]

from fla.ops.common import chunk_delta_h  # noqa: E402
from fla.ops.gated_delta_rule import chunk_gated_delta_rule  # noqa: E402
from harness import delta_rule as rule  # noqa: E402
from harness.in_double import kept_double  # noqa: E402

from mcore_prefix_tree.mcore.seam.delta_levels import check_kernels  # noqa: E402
from mcore_prefix_tree.mcore.seam.levels import Levels  # noqa: E402


def whole_rule(levels: Levels, given: torch.Tensor, *inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """FLA's rule, once a level."""
    out, states = [], []
    for level in levels.levels:
        mixed, last = chunk_gated_delta_rule(
            *(one[:, level.start : level.end] for one in inputs),
            initial_state=states[-1][level.parent] if states else None,
            output_final_state=level.kept > 0,
            cu_seqlens=level.cu_lens,
            chunk_indices=level.chunks,
        )
        out.append(mixed)
        if level.kept:
            states.append(last[: level.kept])
    return torch.cat(out, 1), torch.cat(states)


def main() -> None:
    check_kernels()
    found: dict[str, Any] = {"errors": {}}
    parts = [Levels.of(metadata) for metadata in rule.parts_of_a_tree(63, 90)]
    cases = {
        "forest": Levels.of(rule.deep_forest()),
        "part": max(parts, key=lambda part: part.given * len(part.levels)),
    }
    with mock.patch.object(chunk_delta_h, "range", range_of_tensors, create=True):
        for name, levels in cases.items():
            inputs = rule.make_inputs(levels, torch.float32, heads=1)
            by_level, number = launched(rule.run, rule.level_by_level, levels, inputs)
            doubled = [one.detach().double().requires_grad_() for one in inputs]
            with kept_double():
                found["errors"][name] = rule.worst_error(by_level, rule.run(rule.on_each_path, levels, doubled))
            if not levels.given:
                whole, of_whole_rule = launched(rule.run, whole_rule, levels, inputs)
                found["from the whole rule"] = rule.worst_error(by_level, whole)
                found["launches"] = [len(levels.levels), number, of_whole_rule]
    print(json.dumps(found))


if __name__ == "__main__":
    main()
