"""Parts ``attention`` and ``workloads``: every attention method on the same forests.

A row has the seconds of every round. It is sent after its first round and again after each further one, in which all
methods of a forest run in turn.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

import torch
from attention_bench.contest import Contest, NoRoomError, Runner, measure_ceilings
from attention_bench.contestants import Contestant, contestants
from attention_bench.settings import Settings
from attention_bench.workloads import Workload, standard_workloads, workloads_of_file

from gpu_check_parts.context import Context
from gpu_check_parts.results import FAILED, Key
from gpu_check_parts.using import packages_of, sources_of
from mcore_prefix_tree.attention.auto import TreeShape
from mcore_prefix_tree.attention.tile_blocks import visible_pairs

FIRST = ("P4096", "P16384")
# Methods and layouts of the part "attention", in the order in which they are measured.
PRIORITY = (
    ("triton", "tree"),
    ("fa4", "tree"),
    ("torch", "unfolded"),
    ("torch", "dense"),
    ("flex", "tree"),
    ("FlashAttention-4", "unfolded"),
    ("FlashAttention-4", "dense"),
)
# On a GPU they are for tests.
NEVER = ("path", "reference")
SMOKE_SCALE = 0.004
_HOST = torch.device("cpu")


def run_first(context: Context) -> None:
    """Measure the most important methods on two forests."""
    workloads = [one for one in workloads_of(context) if one.name.startswith(FIRST)]
    run_workloads(context, settings_of(context), workloads, first=True)


def run_rest(context: Context) -> None:
    """Measure all methods on all forests, except those that are already measured."""
    run_workloads(context, settings_of(context), workloads_of(context))


def settings_of(context: Context) -> Settings:
    """Return the shape of heads that is measured."""
    small = context.options.smoke
    return Settings(
        heads=4 if small else 64,
        kv_heads=1 if small else 8,
        head_dim=64 if small else 128,
        value_dim=64 if small else 128,
        dtype="bfloat16",
        device="cuda",
        repeats=context.options.repeats,
    )


def workloads_of(context: Context, scale: float = 1.0) -> list[Workload]:
    """Return the requested forests; ``scale`` is a factor on the lengths of the standard ones."""
    found = standard_workloads(SMOKE_SCALE if context.options.smoke else scale)
    if context.options.data is not None:
        found += workloads_of_file(context.options.data)
    return [one for one in found if context.options.wants(one.name)]


def run_workloads(context: Context, settings: Settings, workloads: Sequence[Workload], *, first: bool = False) -> None:
    """Measure methods on forests: all, or with ``first`` those of :data:`PRIORITY`."""
    measure_the_ceilings(context, settings)
    for workload in workloads:
        forest = workload.folded(_HOST)
        key, used = context.key(workload.name, "shape"), context.used(nodes=forest.num_nodes, tokens=forest.num_tokens)
        if not context.is_done(key, used):
            context.measure(key, used, partial(_shape_of, workload))
        _measure(context, settings, workload, in_order(contestants(forest, settings.case), settings, first=first))


def measure_the_ceilings(context: Context, settings: Settings) -> None:
    """Measure a matrix product and a copy, the ceilings of all rates."""
    key, used = context.key("machine", "ceilings"), context.used("torch")

    def ceilings() -> dict[str, Any]:
        found = measure_ceilings(settings.case.device, settings.case.dtype, small=context.options.smoke)
        return found | {"shown": "{matrix_tflops:.3g} TFLOP/s, {copy_gbytes:,.0f} GB/s".format(**found)}

    if not context.is_done(key, used):
        context.measure(key, used, ceilings)


def in_order(entered: Iterable[Contestant], settings: Settings, *, first: bool = False) -> list[Contestant]:
    """Return the contestants to measure, the most valuable first; with ``first`` only those of :data:`PRIORITY`."""
    places = {pair: place for place, pair in enumerate(PRIORITY)}
    kept = [one for one in entered if settings.device == "cpu" or one.method not in NEVER]
    if first:
        kept = [one for one in kept if (one.method, one.layout) in places]
    return sorted(kept, key=lambda one: places.get((one.method, one.layout), len(places)))


def _shape_of(workload: Workload) -> dict[str, Any]:
    forest, unfolded = workload.folded(_HOST), workload.unfolded(_HOST)
    return {
        "tokens": forest.num_tokens,
        "pairs": visible_pairs(forest),
        "unfolded_tokens": unfolded.num_tokens,
        "unfolded_pairs": visible_pairs(unfolded),
        "nodes": forest.num_nodes,
        "shape": asdict(TreeShape.of([forest])),
        "shown": f"{forest.num_tokens:,} tokens in {forest.num_nodes} nodes",
    }


def _key_of(context: Context, workload: Workload, one: Contestant) -> Key:
    mode = "deterministic" if one.options.deterministic else "any order"
    return context.key(workload.name, f"{one.method}, {one.layout}", mode)


def _measure(context: Context, settings: Settings, workload: Workload, entered: Iterable[Contestant]) -> None:
    """Measure contestants on one forest: each runs a first round, then all run in turn."""
    contest = Contest(workload, settings)
    running: list[tuple[Key, dict[str, str], Runner]] = []
    compared: set[str] = set()
    for one in entered:
        key, used = _key_of(context, workload, one), _used(context, settings, one)
        also = {"layout": one.layout, "deterministic": one.options.deterministic, "name": one.method}
        if context.is_done(key, used):
            continue
        if one.refusal is not None:
            context.leave_out(key, used, one.refusal, **also)
            continue
        if one.layout not in compared:
            compared.add(one.layout)
            _set_yardstick(context, settings, contest, one.layout)

        def enter(one: Contestant = one, key: Key = key, used: dict[str, str] = used) -> dict[str, Any] | str:
            try:
                found = contest.warm_up(one)
            except NoRoomError as error:
                return str(error)
            if isinstance(found, str):
                return {FAILED: found}
            found.run()
            running.append((key, used, found))
            return _row(found, settings)

        context.measure(key, used, enter, also=also)
        if settings.case.device.type == "cuda":
            torch.cuda.empty_cache()
    contest.forget_results()
    for _ in range(settings.repeats - 1):
        for key, used, runner in list(running):

            def again(runner: Runner = runner) -> dict[str, Any]:
                runner.run()
                return _row(runner, settings)

            also = {"layout": runner.contestant.layout, "name": runner.contestant.method}
            if not context.measure(key, used, again, also=also):
                running.remove((key, used, runner))


def _used(context: Context, settings: Settings, one: Contestant) -> dict[str, str]:
    shape = f"{settings.heads}/{settings.kv_heads} {settings.head_dim}/{settings.value_dim} {settings.dtype}"
    return context.used(*packages_of(one.method), sources=sources_of(one.method), heads=shape, rounds=settings.repeats)


def _set_yardstick(context: Context, settings: Settings, contest: Contest, layout: str) -> None:
    """Compare with the first method on this layout that was measured before, if there is one."""
    forest = contest.workload.folded(_HOST)
    for one in in_order(contestants(forest, settings.case), settings):
        key = _key_of(context, contest.workload, one)
        if one.layout != layout or key in context.skip or not context.is_done(key, _used(context, settings, one)):
            continue
        key = context.key("machine", "yardstick", f"{one.method}, {layout}")
        if key not in context.skip:
            context.measure(key, {}, partial(_warmed, contest, one))
        return


def _warmed(contest: Contest, yardstick: Contestant) -> dict[str, Any]:
    contest.set_yardstick(yardstick)
    return {"shown": "warmed up, as the baseline of the comparison"}


def _row(runner: Runner, settings: Settings) -> dict[str, Any]:
    row = runner.row()
    seconds = sorted(map(sum, zip(row["forward_seconds"], row["backward_seconds"], strict=True)))
    row["settings"] = asdict(settings)
    row["shown"] = f"{seconds[len(seconds) // 2] * 1e3:.2f} ms, {len(seconds)} of {settings.repeats} rounds"
    if len(seconds) < settings.repeats:
        row["unfinished"] = True
    return row
