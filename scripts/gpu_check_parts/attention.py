"""Parts ``attention`` and ``workloads``: the methods of ``scripts/bench_attention.py`` on the same forests.

A row has the seconds of every round. It is sent after its first round and again after each further one, in which all
methods of a forest run in turn.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict
from functools import partial
from typing import Any

import torch
from attention_bench.clock import measure_ceilings
from attention_bench.contest import FAILED as METHOD_FAILED
from attention_bench.contest import Contest, NoRoomError, Runner
from attention_bench.contestants import Contestant, contestants, peers
from attention_bench.settings import Settings
from attention_bench.workloads import Workload, standard_workloads

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


def workloads_of(context: Context) -> list[Workload]:
    """Return the requested forests."""
    found = standard_workloads(SMOKE_SCALE if context.options.smoke else 1.0)
    if context.options.data is not None:
        from bench_attention import workloads_of_file

        found += workloads_of_file(context.options.data, None, 32768)
    return [one for one in found if context.options.wants(one.name)]


def run_first(context: Context) -> None:
    """Measure the most important methods on two forests."""
    settings = settings_of(context)
    measure_the_ceilings(context, settings)
    for workload in workloads_of(context):
        if workload.name.startswith(FIRST):
            _run_workload(context, settings, workload, first=True)


def run_rest(context: Context) -> None:
    """Measure all methods on all forests, except those that are already measured. Peers come last."""
    settings = settings_of(context)
    measure_the_ceilings(context, settings)
    for workload in workloads_of(context):
        _run_workload(context, settings, workload, first=False)
    for workload in workloads_of(context):
        entered = [
            (context.key(workload.name, *_name_of(one)), one) for one in peers(workload.folded(_HOST), settings.case)
        ]
        _measure(context, settings, workload, entered)


def measure_the_ceilings(context: Context, settings: Settings) -> None:
    """Measure a matrix product and a copy, the ceilings of all rates."""
    key, used = context.key("machine", "ceilings"), context.used("torch")

    def ceilings() -> dict[str, Any]:
        found = measure_ceilings(settings.case.device, settings.case.dtype, small=context.options.smoke)
        shown = f"{found.matrix_tflops:.0f} TFLOP/s, {found.copy_gbytes:,.0f} GB/s"
        return {**asdict(found), "shown": shown}

    if not context.is_done(key, used):
        context.measure(key, used, ceilings)


def in_order(entered: Iterable[Contestant], *, first: bool) -> list[Contestant]:
    """Return the contestants to measure, the most valuable first; with ``first`` only those of :data:`PRIORITY`."""
    places = {pair: place for place, pair in enumerate(PRIORITY)}
    kept = [one for one in entered if one.method not in NEVER]
    if first:
        kept = [one for one in kept if (one.method, one.layout) in places]
    return sorted(kept, key=lambda one: places.get((one.method, one.layout), len(places)))


def _run_workload(context: Context, settings: Settings, workload: Workload, *, first: bool) -> None:
    forest = workload.folded(_HOST)
    key, used = context.key(workload.name, "shape"), context.used(nodes=forest.num_nodes, tokens=forest.num_tokens)
    if not context.is_done(key, used):
        context.measure(key, used, partial(_shape_of, workload))
    chosen = in_order(contestants(forest, settings.case), first=first)
    _measure(context, settings, workload, [(context.key(workload.name, *_name_of(one)), one) for one in chosen])


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


def _name_of(contestant: Contestant) -> tuple[str, str]:
    mode = "deterministic" if contestant.options.deterministic else "any order"
    return f"{contestant.method}, {contestant.layout}", mode


def _measure(context: Context, settings: Settings, workload: Workload, entered: list[tuple[Key, Contestant]]) -> None:
    """Measure contestants on one forest: each runs a first round, then all run in turn."""
    contest = Contest(workload, settings)
    running: list[tuple[Key, dict[str, str], Runner]] = []
    compared: set[str] = set()
    for key, one in entered:
        used = _used(context, settings, one)
        also = {"layout": one.layout, "deterministic": one.options.deterministic, "name": one.method}
        if context.is_done(key, used):
            continue
        if one.refusal is not None:
            context.leave_out(key, used, one.refusal, **also)
            continue
        if one.layout not in compared:
            compared.add(one.layout)
            _set_yardstick(context, settings, contest, entered, one)

        def enter(one: Contestant = one, key: Key = key, used: dict[str, str] = used) -> dict[str, Any] | str:
            try:
                found = contest.warm_up(one)
            except NoRoomError as error:
                return str(error)
            if isinstance(found, str):
                return {FAILED: found} if found.startswith(METHOD_FAILED) else found
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

            if not context.measure(key, used, again):
                running.remove((key, used, runner))


def _used(context: Context, settings: Settings, one: Contestant) -> dict[str, str]:
    shape = f"{settings.heads}/{settings.kv_heads} {settings.head_dim}/{settings.value_dim} {settings.dtype}"
    return context.used(*packages_of(one.method), sources=sources_of(one.method), heads=shape, rounds=settings.repeats)


def _set_yardstick(
    context: Context, settings: Settings, contest: Contest, entered: list[tuple[Key, Contestant]], one: Contestant
) -> None:
    """Compare with the first method on this layout, if it was measured before this process or is not an entrant."""
    done = (
        other
        for key, other in entered
        if other.layout == one.layout
        and other.refusal is None
        and key not in context.skip
        and context.is_done(key, _used(context, settings, other))
    )
    yardstick = next(done, None)
    if yardstick is None and one.layout == "tree":
        candidates = contestants(contest.workload.folded(_HOST), settings.case)
        yardstick = next((other for other in in_order(candidates, first=True) if other.refusal is None), None)
    if yardstick is not None and (yardstick.method, yardstick.layout) != (one.method, one.layout):
        key = context.key("machine", "yardstick", f"{yardstick.method}, {yardstick.layout}")
        if key not in context.skip:
            context.measure(key, {}, lambda: _warmed(contest, yardstick))


def _warmed(contest: Contest, yardstick: Contestant) -> dict[str, Any]:
    contest.set_yardstick(yardstick)
    return {"shown": "warmed up, as the baseline of the comparison"}


def _row(runner: Runner, settings: Settings) -> dict[str, Any]:
    row = asdict(runner.row())
    row["name"] = row.pop("method")  # the key's method names the layout too
    seconds = sorted(map(sum, zip(row["forward_seconds"], row["backward_seconds"], strict=True)))
    row["settings"] = asdict(settings)
    row["shown"] = f"{seconds[len(seconds) // 2] * 1e3:.2f} ms, {len(seconds)} of {settings.repeats} rounds"
    if len(seconds) < settings.repeats:
        row["unfinished"] = True
    return row
