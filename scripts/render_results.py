#!/usr/bin/env python3
"""Write the tables of the README and of docs/ from the files under benchmarks/results."""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from attention_bench.report import columns, costs_of, headline, lines_of
from gpu_check_parts.sections import sections_of

from mcore_prefix_tree.plan import Parts
from mcore_prefix_tree.plan.flops import Work

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"


WAYS = ("folded", "packed", "small", "stock")


def table(alignment: str, headings: str, rows: Iterable[Sequence[object]], note: str = "") -> str:
    """Markdown for rows under headings, which ``|`` separates, and a note below; ``l`` and ``r`` align the columns."""
    rule = "".join("---:|" if side == "r" else "---|" for side in alignment)
    lines = [f"| {headings} |", f"|{rule}", *(f"| {' | '.join(map(str, row))} |" for row in rows)]
    return "\n".join([*lines, "", note] if note else lines)


def bench_step_tables(results: list[dict[str, Any]]) -> str:
    """Markdown for results of ``mcore-prefix-tree bench step``."""
    rows, batches = [], []
    for model, result in _by_model(results):
        comparison, gain, cpu_gain = result["comparison"], result["gain"], result["cpu_gain"]
        by_cpu = "-" if cpu_gain is None else _spread(cpu_gain["speedup"], ".2f", "x")
        speedup, bound, share = _gains(gain)
        rows.append(
            (model, speedup, by_cpu, bound, share, *(_seconds_and_memory(way, comparison[way]) for way in WAYS))
        )
        machine = result["machine"]
        batches.append(
            f"{result['recipe']['batch']['global_batch_size']} samples, {comparison['logical_tokens']:,} tokens "
            f"unfolded and {comparison['folded']['tokens']:,} folded; {device_of(machine)}, torch {machine['torch']}, "
            f"megatron-core {machine['megatron-core']}."
        )
    headings = f"model | times faster | by CPU time | bound | of its bound | {' | '.join(WAYS)}"
    return table("lrrrrrrrr", headings, rows, "\n".join(dict.fromkeys(batches)))


def _gains(gain: dict[str, Any]) -> tuple[str, str, str]:
    """Return the cells of a speed-up, its bound, and its share of the bound."""
    speedup = f"**{_spread(gain['speedup'], '.2f', 'x')}**"
    return speedup, f"{gain['bound']['ratio']:.2f}x", _spread(gain["share_of_bound"], ".0%")


def _spread(figures: dict[str, float], form: str, unit: str = "") -> str:
    """Return the median of rounds, and their range."""
    low, median, high = (f"{figures[name]:{form}}" for name in ("min", "median", "max"))
    return f"{median}{unit} ({low}-{high})"


def saving(results: list[dict[str, Any]]) -> str:
    """Markdown for the widest model of the same results: one sentence."""
    model, result = _by_model(results)[0]
    comparison, machine, gain, cpu_gain = (result[name] for name in ("comparison", "machine", "gain", "cpu_gain"))
    unfolded = next(way for way in WAYS if _is_fastest(way, comparison))
    (folded, folded_memory), (slower, slower_memory) = (
        _seconds_and_memory(name, comparison[name]).split(", ", 1) for name in ("folded", unfolded)
    )
    speedup = gain["speedup"]
    by_cpu = "" if cpu_gain is None else f", {cpu_gain['speedup']['median']:.1f} by CPU time"
    return (
        f"One batch of {result['recipe']['batch']['global_batch_size']} agent turns has "
        f"{comparison['logical_tokens']:,} tokens, of which {comparison['folded']['tokens']:,} are unique. Forward and "
        f"backward of {model} take {folded} folded and {slower} in the fastest unfolded baseline: "
        f"**{speedup['median']:.1f} times faster** (median of {len(comparison['folded']['seconds'])} rounds in pairs, "
        f"{speedup['min']:.1f} to {speedup['max']:.1f}{by_cpu}), in {folded_memory} instead of {slower_memory}, on "
        f"{device_of(machine)}. On this machine, sharing could give at most {gain['bound']['ratio']:.1f} times."
    )


def _is_fastest(way: str, comparison: dict[str, Any]) -> bool:
    return comparison[way] is not None and comparison[way]["name"] == comparison["fastest"]


def bound_table(results: list[dict[str, Any]]) -> str:
    """Markdown for the bounds in the same results, by parts."""
    rows = []
    for model, result in _by_model(results):
        bound = result["gain"]["bound"]
        parts = (
            f"{bound[name]['least_unfolded_seconds']:.3g} s / {bound[name]['ratio']:.2f}" for name in Parts._fields
        )
        rows.append((model, *parts, f"{bound['ratio']:.2f}x"))
    return table("lrrrrr", "model | body | attention | head | rest | bound", rows)


def expected_table(results: list[dict[str, Any]]) -> str:
    """Markdown for the expected speed-ups in the same results, by parts."""
    rows = []
    for model, result in _by_model(results):
        expected = result["comparison"]["expected_speedup"]
        parts = (f"{expected[name]['ratio']:.2f}x of {expected[name]['share']:.0%}" for name in Work._fields)
        rows.append((model, *parts, f"{expected['ratio']:.2f}x"))
    return table("lrrrr", "model | body | attention | head | expected speed-up", rows)


def _by_model(results: list[dict[str, Any]]) -> list[tuple[str, dict[str, Any]]]:
    """Return results of ``mcore-prefix-tree bench step`` with the names of their models, the widest first."""
    widest_first = sorted(results, key=lambda result: -result["recipe"]["model"]["hidden_size"])
    return [("{num_layers} layers of {hidden_size}".format(**one["recipe"]["model"]), one) for one in widest_first]


def _seconds_and_memory(name: str, way: dict[str, Any] | None) -> str:
    if way is None:
        return "as packed" if name == "small" else "does not fit"
    memory = "" if way["peak_bytes"] is None else f", {way['peak_bytes'] / 2**20:,.0f} MiB"
    seconds = statistics.median(way["seconds"])
    return f"{seconds:.2f} s{memory}" if seconds >= 1 else f"{seconds * 1e3:.3g} ms{memory}"


def bench_trie_table(result: dict[str, Any]) -> str:
    """Markdown for the part trie of scripts/bench_plan.py."""
    peer, times = "", result["median_ms"]
    if result.get("areal_ms"):
        peer = f" AReaL's trie builder took {result['areal_ms']:,.0f} ms for the same samples in the same run."
    return table(
        "ll",
        "from samples to | milliseconds",
        [("a trie", f"{times['trie']:.0f}"), ("planned metadata", f"{times['all four']:.0f}")],
        f"{result['samples']:,} samples, {result['logical_tokens']:,} logical and {result['physical_tokens']:,} unique "
        f"tokens, one core ({result['machine']['cpu']}).{peer}",
    )


def bench_plan_table(result: dict[str, Any]) -> str:
    """Markdown for the part plan of scripts/bench_plan.py."""
    ways, rows = list(result["results"][0]["over_lower_bound"]), []
    for row in result["results"]:
        ratios = (row["over_lower_bound"].get(way) for way in ways)
        cells = ("-" if ratio is None else f"{ratio:.3f}" for ratio in ratios)
        name = f"{row['case']} ({row['samples']:,} samples)"
        rows.append((name, row["dp_size"], *cells, f"{row['plan_seconds'] * 1e3:,.0f}"))
    note = f"Planning by cost is timed on one core ({result['machine']['cpu']})."
    return table("lll" + "l" * len(ways), f"input | ranks | {' | '.join(ways)} | plan, ms", rows, note)


def bench_order_table(result: dict[str, Any]) -> str:
    """Markdown for the part order of scripts/bench_plan.py."""
    found = {(row["lines"], row["step"], row["order"]): row for row in result["results"]}
    rows = []
    for name, step in dict.fromkeys((lines, step) for lines, step, _ in found):
        ratios = [found[name, step, order]["fold_ratio"] for order in ("shuffled", "folded")]
        cells = (f"{one['mean']:.2f} ({one['lowest']:.2f} to {one['highest']:.2f})" for one in ratios)
        rows.append((name, step, *cells))
    first, later = (max(row["seconds"][epoch] for row in result["results"]) * 1e3 for epoch in (0, 1))
    return table(
        "lrrr",
        "data | samples per step | shuffled | folded",
        rows,
        f"{result['samples']:,} samples, {result['logical_tokens']:,} logical tokens; all of them in one step fold "
        f"{result['fold_ratio']:.2f}x. The mean counts the tokens of all steps of an epoch; lowest and highest step in "
        f"brackets. Drawing the first epoch takes at most {first:,.0f} ms, a later one {later:,.0f} ms "
        f"({result['machine']['cpu']}, one core).",
    )


def _of_ranks(ranks: Iterable[int]) -> str:
    return " | ".join(f"{count} ranks" if count > 1 else "1 rank" for count in ranks)


def verl_dealing_table(result: dict[str, Any]) -> str:
    """Markdown for a result of benchmarks/dealing.py verl."""
    ranks = sorted({row["ranks"] for row in result["results"]})
    cells = {
        (row["prompt"], row["answer"], dealt, row["updates"], row["ranks"]): row[dealt]
        for row in result["results"]
        for dealt in ("rows", "groups")
    }
    rows = [
        (
            f"{prompt:,}, {answer:,}",
            "complete groups" if dealt == "groups" else "rows",
            *(f"{cells[prompt, answer, dealt, 1, count]['fold_ratio']:.2f}" for count in ranks),
        )
        for prompt, answer, dealt in dict.fromkeys(key[:3] for key in cells)
    ]
    fullest = {
        (dealt, of): max(cell[of] for key, cell in cells.items() if key[2] == dealt)
        for dealt in ("rows", "groups")
        for of in ("fullest_rank", "fullest_of_updates")
    }
    return table(
        "ll" + "r" * len(ranks),
        f"prompt, answer | unit | {_of_ranks(ranks)}",
        rows,
        f"Fold ratio of a step of {result['prompts']} prompts with {result['answers']} answers each, of log-normal "
        "lengths with these means. In steps of one and of four updates, the fullest rank has at most "
        f"{fullest['rows', 'fullest_rank'] - 1:.1%} more unique tokens than the mean if rows are distributed, and "
        f"{fullest['groups', 'fullest_rank'] - 1:.1%} if groups are; summed over the updates, the fullest rank of each "
        f"has at most {fullest['rows', 'fullest_of_updates'] - 1:.0%} and "
        f"{fullest['groups', 'fullest_of_updates'] - 1:.0%} more.",
    )


def slime_dealing_table(result: dict[str, Any]) -> str:
    """Markdown for a result of benchmarks/dealing.py slime."""
    ranks = sorted({row["ranks"] for row in result["workloads"][0]["results"]})
    rows = []
    for workload in result["workloads"]:
        cells = {(row["way"], row["ranks"]): row for row in workload["results"]}
        for way in dict.fromkeys(way for way, _ in cells):
            of_ranks = (f"{cells[way, n]['fold_ratio']:.2f} ({cells[way, n]['micro_batches']})" for n in ranks)
            rows.append((workload["name"], f"`{way}`", *of_ranks))
    notes = [
        f"{one['name']}: {one['step']} rows in a step, at most {one['budget']:,} tokens in a micro-batch, and a fold "
        f"ratio of {one['bound']:.2f} if each step is one micro-batch."
        for one in result["workloads"]
    ]
    note = " ".join(["Fold ratio, and in brackets the micro-batches of all ranks.", *notes])
    return table("ll" + "r" * len(ranks), f"rows | micro-batches | {_of_ranks(ranks)}", rows, note)


def bench_head_tables(result: dict[str, Any]) -> str:
    """Markdown for a result of the part head: one table per case."""
    dtype = result["dtype"].removeprefix("torch.")
    paragraphs = [f"{device_of(result['machine'])}, torch {result['machine']['torch']}, {dtype}."]
    for case in result["cases"]:
        heading = f"{case['rows']:,} rows, hidden {case['hidden']}, vocabulary {case['vocab']:,}"
        rows = [_head_row(name, way, case["ways"]["unfused"].get("seconds", [])) for name, way in case["ways"].items()]
        paragraphs += [
            f"**{heading}, {case['supervised']:.0%} of them scored**",
            table("lrrrr", "way | ms | of unfused | peak memory | gradient error", rows),
        ]
    return "\n\n".join(paragraphs)


def _head_row(name: str, way: dict[str, Any], unfused: Sequence[float]) -> tuple[str, ...]:
    if "failed" in way or not unfused:
        return name, f"failed: {way.get('failed', 'unfused')} | | |"
    ratio = statistics.median(own / other for own, other in zip(way["seconds"], unfused, strict=True))
    memory = f"{way['peak_bytes'] / 2**20:,.0f} MiB"
    return name, f"{way['median_seconds'] * 1e3:,.1f}", f"{ratio:.2f}", memory, f"{way['gradient_error']:.0e}"


def bench_kept_tables(result: dict[str, Any]) -> str:
    """Markdown for a result of the part head: kept sets next to the whole vocabulary."""
    shown = ("unfused", "fused, any loss")
    cases = [
        case | {"ways": {name: way for name, way in case["ways"].items() if name in shown or name.endswith(" kept")}}
        for case in result["cases"]
    ]
    return bench_head_tables(result | {"cases": cases})


def attention_tables(result: dict[str, Any]) -> str:
    """Markdown for a result of the part attention: one table per workload."""
    machine, settings, ceilings = result["machine"], result["settings"], result["ceilings"]
    name = machine["cpu"] if settings["device"] == "cpu" else machine["device"]
    paragraphs = [
        f"{name}, torch {machine['torch']}: {settings['dtype']}, {settings['heads']} heads on {settings['kv_heads']}, "
        f"head_dim {settings['head_dim']}, {settings['repeats']} rounds; matrix product "
        f"{ceilings['matrix_tflops']:.3g} TFLOP/s, copy {ceilings['copy_gbytes']:,.0f} GB/s."
    ]
    headings = columns(result)
    for workload in result["workloads"]:
        alignment = "ll" + "r" * (len(headings) - 2)
        paragraphs += [f"**{headline(workload)}**", table(alignment, " | ".join(headings), lines_of(workload, result))]
    return "\n\n".join(paragraphs)


def fault_table(result: dict[str, Any]) -> str:
    """Markdown for the result that tests/faults writes: outcomes of faulty inputs, by reader."""
    right = ("refused in a sentence", "accepted, being valid")
    wrong = ("traceback", "crash", "hang", "silent acceptance", "wrong refusal")
    rows = []
    for suite, part in result.items():
        kind = "malicious " if suite.startswith("malicious") else ""
        for row in part["rows"]:
            outcomes = row["outcomes"]
            counts = [outcomes.get(name, 0) for name in (*right, *wrong)]
            others = sum(outcomes.values()) - sum(counts)
            rows.append((f"{kind}{row['reader']}", *counts, others, part["executed"] if kind else "-"))
    total = sum(sum(row["outcomes"].values()) for part in result.values() for row in part["rows"])
    slowest = max(part["slowest_seconds"] for part in result.values())
    malformed = f"seed {result['malformed']['seed']}" if "malformed" in result else "malformed inputs not yet measured"
    headings = f"input | {' | '.join((*right, *wrong))} | other | executions"
    return table("l" + "r" * 9, headings, rows, f"{total:,} cases, {malformed}; the slowest took {slowest:.1f} s.")


def device_of(machine: dict[str, Any]) -> str:
    """Return the hardware of a benchmark: the GPU if there was one, else the processor and its threads."""
    if machine["device"] != "cpu":
        return str(machine["device"])
    return f"{machine['cpu']}, {machine['threads']} thread{'s' * (machine['threads'] > 1)}"


def head_on_gpus(results: list[dict[str, Any]]) -> str:
    """Markdown for the heads of all results of scripts/gpu_check."""
    found = [bench_head_tables(result["head"]) for result in results if "cases" in result.get("head", {})]
    return "\n\n".join(found) or "On a GPU, and with Liger-Kernel: not yet measured."


def steps_on_gpus(results: list[dict[str, Any]]) -> str:
    """Markdown for the steps of all results of scripts/gpu_check."""
    found = [
        f"`recipes/{name}.yaml`, {device_of(step['machine'])}:\n\n{bench_step_tables([step])}"
        for result in results
        for name, step in result.get("steps", {}).items()
        if "comparison" in step
    ]
    return "\n\n".join(found) or "On a GPU: not yet measured."


def gpu_tables(results: list[dict[str, Any]]) -> str:
    """Markdown for all results of scripts/gpu_check."""
    if not results:
        return "Not yet measured."
    paragraphs = []
    for result in results:
        tests, said = result.get("tests", {}), "not run"
        if "workloads" in result.get("attention", {}):
            paragraphs.append(attention_tables(result["attention"]))
        if "tests" in tests:
            passed = tests["tests"] - tests["failures"] - tests["errors"] - tests["skipped"]
            said = f"{passed} of {tests['tests']} passed"
        paragraphs.append(f"GPU tests on this machine: {tests.get('failed', said)}.")
    return "\n\n".join(paragraphs)


def attention_on_gpus() -> list[dict[str, Any]]:
    """Return the attention benchmarks of scripts/gpu_check with at least one workload."""
    found = [result.get("attention", {}) for result in loaded("gpu_*.json")]
    return [result for result in found if "workloads" in result]


def attention_costs() -> str:
    """Return the cost table of ``attention_backend=auto``: every measured forest of every result."""
    measured = [loaded("attention_cpu.json"), *attention_on_gpus()]
    return json.dumps({"rows": [row for result in measured for row in costs_of(result)]}, indent=1) + "\n"


def endings_table(result: dict[str, Any]) -> str:
    """Markdown for the result of tests/faults/test_endings.py."""
    by_target: dict[str, list[dict[str, Any]]] = {}
    for case in result["cases"]:
        layout = "the process" if case["target"] == "process" else f"the {case['target']}"
        where = f"{layout}, one rank" if case["ranks"] == 1 else f"{layout}, {case['ranks']} ranks under torchrun"
        by_target.setdefault(where, []).append(case)
    rows = [
        (
            where,
            ", ".join(sorted({case["signal"] for case in cases})),
            len({case["stage"] for case in cases}),
            len(cases),
            sum(case["outcome"] == "same bits" for case in cases),
            f"{max(case['seconds'] for case in cases):.1f} s",
        )
        for where, cases in sorted(by_target.items())
    ]
    return table(
        "llrrrr",
        "signal to | signals | stages | cases | resumed to the same bits | slowest end",
        rows,
        f"{len(result['cases'])} cases; {device_of(result['machine'])}, megatron-core "
        f"{result['machine']['megatron-core']}.",
    )


def inside_table(result: dict[str, Any]) -> str:
    """Markdown for the result of benchmarks/inside.py."""
    rows = []
    for row in result["workloads"]:
        expected, faster, peak = row["expected_speedup"], row["speedup"], row["peak_bytes"]
        rows.append(
            (
                row["name"],
                f"{row['logical_tokens']:,}",
                *(f"{expected[name]['ratio']:.2f}x" for name in Work._fields),
                f"{expected['ratio']:.2f}x",
                *(f"**{faster[way]:.2f}x**" for way in ("losses", "logits")),
                " / ".join(f"{peak[way] / 2**30:.1f}" for way in ("losses", "logits", "stock")),
            )
        )
    model, rounds = result["model"], result["rounds"]
    shared = table(
        "lrrrrrrrr",
        "rows | tokens | body | attention | head | expected | reading losses | reading logits | memory, GiB",
        rows,
        f"A GPT of {model['num_layers']} layers, hidden size {model['hidden_size']} and a vocabulary of "
        f"{model['vocab_size']:,}, on {device_of(result['machine'])}; medians of {rounds['shared']} rounds. Memory is "
        "the peak of a step: folded reading losses, folded reading logits, stock.",
    )
    note = f"The same model and machine; medians (and quartiles) of {rounds['unshared']} pairs of steps."
    return f"{shared}\n\n{_unshared_table('folding inside', result['unshared'], note)}"


def inside_parts_table(result: dict[str, Any]) -> str:
    """Markdown for a micro-batch in parts of several sizes, the first of which is all of it."""
    rows, model = result["parts"], result["model"]
    first = rows[0]
    return table(
        "rrrr",
        "`max_tokens` | tokens that ran forward twice | step | memory of a step, MiB",
        [
            (
                "at once" if row["max_tokens"] is None else f"{row['max_tokens']:,}",
                f"{row['recomputed']:,}",
                f"{row['median_seconds'] / first['median_seconds']:.2f}x",
                f"{row['peak_bytes'] / 2**20:,.0f}",
            )
            for row in rows
        ],
        f"A micro-batch of {first['tokens']:,} unique tokens; a GPT of {model['num_layers']} layers, hidden size "
        f"{model['hidden_size']} and a vocabulary of {model['vocab_size']:,}, on {device_of(result['machine'])}. Steps "
        "are relative to the first row.",
    )


def _unshared_table(way: str, rows: Iterable[dict[str, Any]], note: str) -> str:
    """Markdown for rows that share nothing: the step and its hook."""
    return table(
        "rrrrr",
        f"rows that share nothing | tokens | step, stock | step, {way} | of that, the hook",
        map(_unshared_row, rows),
        note,
    )


def _unshared_row(row: dict[str, Any]) -> tuple[str, ...]:
    stock, folds = row["seconds"]["stock"], row["seconds"]["folds"]
    low, ratio, high = statistics.quantiles((b / a for a, b in zip(stock, folds, strict=True)), n=4)
    hook = f"{row['hook_seconds'] * 1e3:.2f} ms ({row['hook_share']:.2%})"
    tokens, median = f"{row['tokens']:,}", f"{statistics.median(stock) * 1e3:,.0f} ms"
    return str(row["rows"]), tokens, median, f"{ratio:.3f}x ({low:.2f}-{high:.2f})", hook


def recurrent_steps_table(result: dict[str, Any]) -> str:
    """Markdown for the steps of benchmarks/recurrent.py."""
    machine, rounds = result["machine"], len(result["steps"][0]["cpu_seconds"]["folded"])
    return table(
        "lrrrr",
        "three of four mixers | fold ratio | times faster | bound | of its bound",
        ((row["model"], f"{row['fold_ratio']:.2f}x", *_gains(row["gain"])) for row in result["steps"]),
        f"CPU seconds of forward and backward, medians (and ranges) of {rounds} rounds; {device_of(machine)}, torch "
        f"{machine['torch']}, megatron-core {machine['megatron-core']}.",
    )


def recurrent_trees_table(result: dict[str, Any]) -> str:
    """Markdown for the deep trees of benchmarks/recurrent.py: the share of the bound by model, levels and length."""
    found = {(row["model"], row["levels"], row["segment"]): row for row in result["trees"]}
    lengths, rows = sorted({length for *_, length in found}), []
    for model, levels in dict.fromkeys((model, levels) for model, levels, _ in found):
        of_lengths = (found[model, levels, length] for length in lengths)
        cells = (
            f"{row['gain']['speedup']['median']:.2f}x at {row['fold_ratio']:.2f}x, "
            f"{row['gain']['share_of_bound']['median']:.0%}"
            for row in of_lengths
        )
        rows.append((model, levels, *cells))
    headings = " | ".join(["mixers", "levels", *(f"segments of {length}" for length in lengths)])
    return table("lr" + "r" * len(lengths), headings, rows)


def trl_table(result: dict[str, Any]) -> str:
    """Markdown for the result of benchmarks/trl_backbone.py."""
    rows, packing = [], []
    for row in result["workloads"]:
        cells = [f"{row['logical_tokens']:,}", f"{row['fold_ratio']:.2f}"]
        for what in ("step", "score"):
            cells += [f"{row['expected_speedup'][what]:.2f}x", f"**{row['speedup'][what]:.2f}x**"]
        rows.append((row["name"], *cells))
        pack = row["packing"]
        numbers = (f"{one:,}" for one in (pack["tokens"]["trl"], pack["tokens"]["folds"], pack["copied_keys"]["trl"]))
        times = (f"{pack['host_seconds'][way] * 1e3:.1f} ms" for way in ("trl", "folds"))
        packing.append((row["name"], *numbers, *times))
    rounds = result["rounds"]
    tables = [
        table(
            "lrrrrrr",
            "rows | tokens | fold ratio | step, expected | step | scoring, expected | scoring",
            rows,
            f"{_describe_qwen(result)}; medians of {rounds['shared']} rounds. Expected by FLOPs, with a head that "
            "scores every row.",
        ),
        table(
            "lrrrrr",
            "rows | tokens computed, TRL's packing | here | keys copied per layer | on the host, TRL's packing | here",
            packing,
        ),
        _unshared_table(
            "folding", result["unshared"], f"Medians (and quartiles) of {rounds['unshared']} pairs of steps."
        ),
    ]
    return "\n\n".join(tables)


def _describe_qwen(result: dict[str, Any]) -> str:
    model = result["model"]
    return (
        f"A Qwen3 of {model['num_hidden_layers']} layers, hidden size {model['hidden_size']} and a vocabulary of "
        f"{model['vocab_size']:,} in fp32, on {device_of(result['machine'])}"
    )


def verl_steps_table(result: dict[str, Any]) -> str:
    """Markdown for the result of benchmarks/verl_steps.py."""
    rows = []
    for row in result["workloads"]:
        for what, step in row["steps"].items():
            cells = (f"{statistics.median(step['seconds'][way]):.2f} s" for way in ("stock", "folds"))
            pairs = [a / b for a, b in zip(*step["seconds"].values(), strict=True)]
            faster = f"**{step['speedup']:.2f}x** ({min(pairs):.1f}-{max(pairs):.1f})"
            rows.append((row["name"], what, *cells, faster, f"{step['expected_speedup']:.2f}x"))
    return table(
        "llrrrr",
        "rows | step | verl's engine | folding inside | faster | expected",
        rows,
        f"{_describe_qwen(result)}; micro-batches of at most {result['budget']:,} tokens. CPU seconds: medians of "
        f"{result['rounds']} rounds, and the range of their ratios. Expected by FLOPs of layers, attention and head.",
    )


def families_table(result: dict[str, Any]) -> str:
    """Markdown for the result of ``benchmarks/families.py``: one row per family, with its layers for GPU training."""
    by_layers = {
        layers: {one["family"]: one for one in result["results"] if one["layers"] == layers}
        for layers in ("transformer_engine", "local")
    }
    rows = []
    for family, local in by_layers["local"].items():
        one = max(by_layers["transformer_engine"][family], local, key=lambda result: "logprob" in result)
        kept = ", ".join(name for name in ("TP=2", "PP=2", "EP=2") if isinstance(one.get(name), float | bool))
        on_cpu = _with_layouts(local) if "logprob" in local else f"no: {_reason(local)}"
        rows.append((family, f"{one['logprob']:.1e}", f"{one['gradient']:.1e}", kept, on_cpu))
    versions = ", ".join(f"{name} {version}" for name, version in result["versions"].items())
    headings = "family | log-probabilities | gradients | exported bits equal | on a CPU, without TransformerEngine"
    return table("lllll", headings, rows, f"{versions}.")


BATCHES = {
    "shipped": "the shipped rollouts",
    "forks": "16 rollouts that fork four times in their second half",
    "prompted": "16 rollouts that share a quarter",
    "long": "16 rollouts of 65,536 tokens that fork four times",
}


def over_budget_table(result: dict[str, Any]) -> str:
    """Markdown for the times in the result of ``benchmarks/over_budget.py``: one row per batch and budget."""
    rows = []
    for name, batch in BATCHES.items():
        for repeat, carry, auto in zip(*(result.get(name, [])[way::3] for way in range(3)), strict=True):
            again = f"{carry['tokens']:,.0f} + {carry['carried']:,.0f}, {carry['seconds']:.2f}"
            once = (
                "a sample is too long" if "refused" in repeat else f"{repeat['tokens']:,.0f}, {repeat['seconds']:.2f}"
            )
            way = "carry" if auto["carried"] else "repeat"
            rows.append((batch, f"{carry['budget']:,}", once, again, f"{way}, {auto['seconds']:.2f}"))
    headings = "batch | budget | `repeat`: tokens, seconds | `carry`: tokens + forward once more, seconds | `auto`"
    return table("lrlll", headings, rows)


def long_sample_table(result: dict[str, Any]) -> str:
    """Markdown for the memory in the same result: one row per length of a sample."""
    first, rows = result["memory"][0], []
    for one in result["memory"]:
        other = one["peak"] - first["peak"] - one["held"] + first["held"]
        sizes = (f"{size / 2**20:,.1f} MiB" for size in (one["held"], one["estimate"], other))
        rows.append((f"{one['length']:,}", *sizes))
    headings = "tokens of the sample | keys, values, gradients | estimate of them | other memory, beyond the first row"
    return table("rrrr", headings, rows)


def _with_layouts(result: dict[str, Any]) -> str:
    without = [name[:2] for name in ("TP=2", "PP=2") if not isinstance(result[name], float)]
    return "yes" + (f", without {' and '.join(without)}" if without else "")


REASONS = {
    "cannot be trained with biases": "experts with biases",
    "does not read": "experts have other names",
    "its own layers": "layers of Megatron-Bridge's own",
}


def _reason(result: dict[str, Any]) -> str:
    return next(short for words, short in REASONS.items() if words in result["refused"])


TABLES: dict[str, tuple[str, Callable[[Any], str]]] = {
    "families": ("families.json", families_table),
    "inside": ("inside.json", inside_table),
    "inside_parts": ("inside_parts.json", inside_parts_table),
    "recurrent_steps": ("recurrent.json", recurrent_steps_table),
    "recurrent_trees": ("recurrent.json", recurrent_trees_table),
    "over_budget": ("over_budget.json", over_budget_table),
    "long_samples": ("over_budget.json", long_sample_table),
    "trl": ("trl.json", trl_table),
    "endings": ("endings.json", endings_table),
    "saving": ("step_*_cpu.json", saving),
    "bench_step": ("step_*_cpu.json", bench_step_tables),
    "bound": ("step_*_cpu.json", bound_table),
    "expected": ("step_*_cpu.json", expected_table),
    "bench_trie": ("trie.json", bench_trie_table),
    "bench_plan": ("plan.json", bench_plan_table),
    "bench_order": ("order.json", bench_order_table),
    "verl_dealing": ("verl_dealing.json", verl_dealing_table),
    "verl_steps": ("verl_steps.json", verl_steps_table),
    "slime_dealing": ("slime_dealing.json", slime_dealing_table),
    "bench_step_gpu": ("gpu_*.json", steps_on_gpus),
    "bench_head": ("head_cpu.json", bench_head_tables),
    "bench_kept": ("head_kept_cpu.json", bench_kept_tables),
    "bench_head_gpu": ("gpu_*.json", head_on_gpus),
    "attention_cpu": ("attention_cpu.json", attention_tables),
    "attention_gpu": ("gpu_*.json", gpu_tables),
    "faults": ("faults.json", fault_table),
}
PAGES = (
    "README.md",
    "docs/performance.md",
    "docs/planning.md",
    "docs/attention.md",
    "docs/head.md",
    "docs/correctness.md",
    "docs/inside.md",
    "docs/recurrent.md",
    "docs/trainers.md",
    "docs/huggingface.md",
    "docs/verl.md",
    "docs/sampling-replay.md",
    "docs/howto/long-samples.md",
)
COSTS = ROOT / "mcore_prefix_tree" / "attention" / "costs.json"


def rendered(page: str) -> str:
    """Return a page with its tables written again."""
    for name, (file, render) in TABLES.items():
        begin, end = f"<!-- {name}:begin -->\n", f"<!-- {name}:end -->"
        if begin not in page:
            continue
        before, rest = page.split(begin)
        _, after = rest.split(end)
        page = f"{before}{begin}{render(loaded(file))}\n{end}{after}"
    return page


def loaded(file: str) -> Any:
    """Return the result in a file, or the list of all results if its name contains ``*``."""
    if "*" in file:
        read = sections_of if file.startswith("gpu_") else lambda one: json.loads(one.read_text())
        return [read(one) for one in sorted(RESULTS.glob(file))]
    return json.loads((RESULTS / file).read_text())


def main() -> None:
    argparse.ArgumentParser(description=__doc__).parse_args()
    for name in PAGES:
        page = ROOT / name
        page.write_text(rendered(page.read_text()))
    COSTS.write_text(attention_costs())


if __name__ == "__main__":
    main()
