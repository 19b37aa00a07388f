#!/usr/bin/env python3
"""Write the tables of the README and of docs/ from the files under benchmarks/results."""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

from attention_bench.costs import costs_of
from attention_bench.plot import draw_roofline
from attention_bench.report import cells, columns, headline, lines_of
from gpu_check_parts.sections import sections_of

from mcore_prefix_tree.plan import CostModel, Measured, Parts
from mcore_prefix_tree.plan.flops import Work

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"


WAYS = ("folded", "packed", "small", "stock")
STEP_COLUMNS = ("model", "times faster", "by CPU time", "bound", "of its bound", *WAYS)


def bench_step_tables(results: list[dict[str, Any]]) -> str:
    """Markdown for results of ``mcore-prefix-tree bench step``."""
    lines = [f"| {' | '.join(STEP_COLUMNS)} |", "|---|" + "---:|" * (len(STEP_COLUMNS) - 1)]
    batches = []
    for model, result in _by_model(results):
        comparison, gain, cpu_gain = result["comparison"], result["gain"], result["cpu_gain"]
        cells = [
            f"**{_spread(gain['speedup'], '.2f', 'x')}**",
            "-" if cpu_gain is None else _spread(cpu_gain["speedup"], ".2f", "x"),
            f"{gain['bound']['ratio']:.2f}x",
            _spread(gain["share_of_bound"], ".0%"),
            *(_seconds_and_memory(way, comparison[way]) for way in WAYS),
        ]
        lines.append(f"| {model} | {' | '.join(cells)} |")
        machine = result["machine"]
        batches.append(
            f"{result['recipe']['batch']['global_batch_size']} samples, {comparison['logical_tokens']:,} tokens "
            f"unfolded and {comparison['folded']['tokens']:,} folded; {device_of(machine)}, torch {machine['torch']}, "
            f"megatron-core {machine['megatron-core']}."
        )
    return "\n".join([*lines, "", *dict.fromkeys(batches)])


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
    lines = ["| model | body | attention | head | rest | bound |", "|---|---:|---:|---:|---:|---:|"]
    for model, result in _by_model(results):
        bound = result["gain"]["bound"]
        parts = [
            f"{bound[name]['least_unfolded_seconds']:.3g} s / {bound[name]['ratio']:.2f}" for name in Parts._fields
        ]
        lines.append(f"| {model} | {' | '.join(parts)} | {bound['ratio']:.2f}x |")
    return "\n".join(lines)


def expected_table(results: list[dict[str, Any]]) -> str:
    """Markdown for the expected speed-ups in the same results, by parts."""
    lines = ["| model | body | attention | head | expected speed-up |", "|---|---:|---:|---:|---:|"]
    for model, result in _by_model(results):
        expected = result["comparison"]["expected_speedup"]
        parts = [f"{expected[name]['ratio']:.2f}x of {expected[name]['share']:.0%}" for name in Work._fields]
        lines.append(f"| {model} | {' | '.join(parts)} | {expected['ratio']:.2f}x |")
    return "\n".join(lines)


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
    """Markdown for a result of scripts/bench_trie.py."""
    times = result["median_ms"]
    lines = ["| from samples to | milliseconds |", "|---|---|"]
    lines += [f"| {name} | {times[key]:.0f} |" for name, key in (("a trie", "trie"), ("planned metadata", "all four"))]
    peer = ""
    if result.get("areal_ms"):
        peer = f" AReaL's trie builder took {result['areal_ms']:,.0f} ms for the same samples in the same run."
    lines += [
        "",
        f"{result['samples']:,} samples, {result['logical_tokens']:,} logical and {result['physical_tokens']:,} unique "
        f"tokens, one core ({result['machine']['cpu']}).{peer}",
    ]
    return "\n".join(lines)


def bench_plan_table(result: dict[str, Any]) -> str:
    """Markdown for a result of scripts/bench_plan.py."""
    ways = list(result["results"][0]["over_lower_bound"])
    lines = [
        f"| input | ranks | {' | '.join(ways)} | plan, ms |",
        f"|---|---|{'---|' * len(ways)}---|",
    ]
    for row in result["results"]:
        ratios = [row["over_lower_bound"].get(way) for way in ways]
        cells = ["-" if ratio is None else f"{ratio:.3f}" for ratio in ratios]
        milliseconds = f"{row['plan_seconds'] * 1e3:,.0f}"
        name = f"{row['case']} ({row['samples']:,} samples)"
        lines.append(f"| {name} | {row['dp_size']} | {' | '.join(cells)} | {milliseconds} |")
    lines += ["", f"Planning by cost is timed on one core ({result['machine']['cpu']})."]
    return "\n".join(lines)


def bench_order_table(result: dict[str, Any]) -> str:
    """Markdown for a result of scripts/bench_order.py."""
    lines = ["| data | samples per step | shuffled | folded |", "|---|---:|---:|---:|"]
    rows = {(row["lines"], row["step"], row["order"]): row for row in result["results"]}
    for name, step in dict.fromkeys((lines, step) for lines, step, _ in rows):
        ratios = [rows[name, step, order]["fold_ratio"] for order in ("shuffled", "folded")]
        cells = [f"{one['mean']:.2f} ({one['lowest']:.2f} to {one['highest']:.2f})" for one in ratios]
        lines.append(f"| {name} | {step} | {' | '.join(cells)} |")
    first, later = (max(row["seconds"][epoch] for row in result["results"]) * 1e3 for epoch in (0, 1))
    lines += [
        "",
        f"{result['samples']:,} samples, {result['logical_tokens']:,} logical tokens; all of them in one step fold "
        f"{result['fold_ratio']:.2f}x. The mean counts the tokens of all steps of an epoch; lowest and highest step in "
        f"brackets. Drawing the first epoch takes at most {first:,.0f} ms, a later one {later:,.0f} ms "
        f"({result['machine']['cpu']}, one core).",
    ]
    return "\n".join(lines)


def verl_dealing_table(result: dict[str, Any]) -> str:
    """Markdown for a result of benchmarks/verl_dealing.py."""
    ranks = sorted({row["ranks"] for row in result["results"]})
    cells = {
        (row["prompt"], row["answer"], dealt, row["updates"], row["ranks"]): row[dealt]
        for row in result["results"]
        for dealt in ("rows", "groups")
    }
    lines = [
        f"| prompt, answer | unit | {' | '.join(f'{count} ranks' if count > 1 else '1 rank' for count in ranks)} |",
        "|---|---|" + "---:|" * len(ranks),
    ]
    for prompt, answer, dealt in dict.fromkeys(key[:3] for key in cells):
        of_ranks = [cells[prompt, answer, dealt, 1, count]["fold_ratio"] for count in ranks]
        name = "complete groups" if dealt == "groups" else "rows"
        lines.append(f"| {prompt:,}, {answer:,} | {name} | {' | '.join(f'{ratio:.2f}' for ratio in of_ranks)} |")
    fullest = {
        (dealt, of): max(cell[of] for key, cell in cells.items() if key[2] == dealt)
        for dealt in ("rows", "groups")
        for of in ("fullest_rank", "fullest_of_updates")
    }
    lines += [
        "",
        f"Fold ratio of a step of {result['prompts']} prompts with {result['answers']} answers each, of log-normal "
        "lengths with these means. In steps of one and of four updates, the fullest rank has at most "
        f"{fullest['rows', 'fullest_rank'] - 1:.1%} more unique tokens than the mean if rows are distributed, and "
        f"{fullest['groups', 'fullest_rank'] - 1:.1%} if groups are; summed over the updates, the fullest rank of each "
        f"has at most {fullest['rows', 'fullest_of_updates'] - 1:.0%} and "
        f"{fullest['groups', 'fullest_of_updates'] - 1:.0%} more.",
    ]
    return "\n".join(lines)


def slime_dealing_table(result: dict[str, Any]) -> str:
    """Markdown for a result of benchmarks/slime_dealing.py."""
    ranks = sorted({row["ranks"] for row in result["workloads"][0]["results"]})
    lines = [
        f"| rows | micro-batches | {' | '.join(f'{count} ranks' if count > 1 else '1 rank' for count in ranks)} |",
        "|---|---|" + "---:|" * len(ranks),
    ]
    for workload in result["workloads"]:
        cells = {(row["way"], row["ranks"]): row for row in workload["results"]}
        for way in dict.fromkeys(way for way, _ in cells):
            of_ranks = [f"{cells[way, n]['fold_ratio']:.2f} ({cells[way, n]['micro_batches']})" for n in ranks]
            lines.append(f"| {workload['name']} | `{way}` | {' | '.join(of_ranks)} |")
    notes = [
        f"{one['name']}: {one['step']} rows in a step, at most {one['budget']:,} tokens in a micro-batch, and a fold "
        f"ratio of {one['bound']:.2f} if each step is one micro-batch."
        for one in result["workloads"]
    ]
    return "\n".join([*lines, "", " ".join(["Fold ratio, and in brackets the micro-batches of all ranks.", *notes])])


def cost_table(result: dict[str, Any]) -> str:
    """Markdown for a result of ``mcore-prefix-tree calibrate``."""
    cost, measured = result["cost"], result["measured"]
    lines = ["| tokens | scored | visible pairs | seconds | as fitted |", "|---|---|---|---|---|"]
    for one in measured:
        fitted = CostModel(**cost).of_measured(Measured(**one))
        counts = [f"{one.get(name, 0):,.0f}" for name in ("tokens", "scored", "pairs")]
        lines.append(f"| {' | '.join(counts)} | {one['seconds']:.3f} | {fitted:.3f} |")
    lines += [
        "",
        f"`recipes/quickstart.yaml` on one thread ({result['machine']['cpu']}): a token costs "
        f"{cost['token'] * 1e6:.3g} µs, scoring it {cost.get('scored', 0) * 1e6:.3g} µs, a visible pair "
        f"{cost['pair'] * 1e6:.3g} µs, a micro-batch "
        f"{cost['micro_batch'] * 1e3:.3g} ms; the largest error of the fit is {result['worst_relative_error']:.0%}.",
    ]
    return "\n".join(lines)


def bench_head_tables(result: dict[str, Any]) -> str:
    """Markdown for a result of scripts/bench_head.py: one table per case."""
    dtype = result["dtype"].removeprefix("torch.")
    paragraphs = [f"{device_of(result['machine'])}, torch {result['machine']['torch']}, {dtype}."]
    for case in result["cases"]:
        heading = f"{case['rows']:,} rows, hidden {case['hidden']}, vocabulary {case['vocab']:,}"
        lines = ["| way | ms | of unfused | peak memory | gradient error |", "|---|---:|---:|---:|---:|"]
        unfused = case["ways"]["unfused"].get("seconds", [])
        for name, way in case["ways"].items():
            if "failed" in way or not unfused:
                lines.append(f"| {name} | failed: {way.get('failed', 'unfused')} | | | |")
                continue
            ratio = statistics.median(own / other for own, other in zip(way["seconds"], unfused, strict=True))
            lines.append(
                f"| {name} | {way['median_seconds'] * 1e3:,.1f} | {ratio:.2f} | {way['peak_bytes'] / 2**20:,.0f} MiB "
                f"| {way['gradient_error']:.0e} |"
            )
        paragraphs += [f"**{heading}, {case['supervised']:.0%} of them scored**", "\n".join(lines)]
    return "\n\n".join(paragraphs)


def bench_kept_tables(result: dict[str, Any]) -> str:
    """Markdown for a result of scripts/bench_head.py: kept sets next to the whole vocabulary."""
    shown = ("unfused", "fused, any loss")
    cases = [
        case | {"ways": {name: way for name, way in case["ways"].items() if name in shown or name.endswith(" kept")}}
        for case in result["cases"]
    ]
    return bench_head_tables(result | {"cases": cases})


def attention_tables(result: dict[str, Any]) -> str:
    """Markdown for a result of scripts/bench_attention.py: one table per workload."""
    machine, settings, ceilings = result["machine"], result["settings"], result["ceilings"]
    name = machine["cpu"] if settings["device"] == "cpu" else machine["device"]
    paragraphs = [
        f"{name}, torch {machine['torch']}: {settings['dtype']}, {settings['heads']} heads on {settings['kv_heads']}, "
        f"head_dim {settings['head_dim']}, {settings['repeats']} rounds; matrix product "
        f"{ceilings['matrix_tflops']:.3g} TFLOP/s, copy {ceilings['copy_gbytes']:,.0f} GB/s."
    ]
    headings = columns(result)
    for workload in result["workloads"]:
        lines = [f"| {' | '.join(headings)} |", f"|---|---|{'---:|' * (len(headings) - 2)}"]
        lines += [f"| {' | '.join(cells(line, result))} |" for line in lines_of(workload, result)]
        paragraphs += [f"**{headline(workload)}**", "\n".join(lines)]
    return "\n\n".join(paragraphs)


def fault_table(result: dict[str, Any]) -> str:
    """Markdown for the result that tests/faults writes: outcomes of faulty inputs, by reader."""
    right = ("refused in a sentence", "accepted, being valid")
    wrong = ("traceback", "crash", "hang", "silent acceptance", "wrong refusal")
    lines = [f"| input | {' | '.join((*right, *wrong))} | other | executions |", "|---|" + "---:|" * 9]
    for suite, part in result.items():
        kind = "malicious " if suite.startswith("malicious") else ""
        for row in part["rows"]:
            outcomes = row["outcomes"]
            counts = [outcomes.get(name, 0) for name in (*right, *wrong)]
            cells = [*counts, sum(outcomes.values()) - sum(counts), part["executed"] if kind else "-"]
            lines.append(f"| {kind}{row['reader']} | {' | '.join(map(str, cells))} |")
    total = sum(sum(row["outcomes"].values()) for part in result.values() for row in part["rows"])
    slowest = max(part["slowest_seconds"] for part in result.values())
    malformed = f"seed {result['malformed']['seed']}" if "malformed" in result else "malformed inputs not yet measured"
    lines += ["", f"{total:,} cases, {malformed}; the slowest took {slowest:.1f} s."]
    return "\n".join(lines)


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
        tests = result.get("tests", {})
        if "tests" in tests:
            passed = tests["tests"] - tests["failures"] - tests["errors"] - tests["skipped"]
            paragraphs.append(f"{passed} of {tests['tests']} GPU tests passed.")
        else:
            paragraphs.append(f"GPU tests: {tests.get('failed', 'not run')}.")
        if "workloads" in result.get("attention", {}):
            paragraphs.append(attention_tables(result["attention"]))
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
    lines = [
        "| signal to | signals | stages | cases | resumed to the same bits | slowest end |",
        "|---|---|---:|---:|---:|---:|",
    ]
    by_target: dict[str, list[dict[str, Any]]] = {}
    for case in result["cases"]:
        layout = "the process" if case["target"] == "process" else f"the {case['target']}"
        where = f"{layout}, one rank" if case["ranks"] == 1 else f"{layout}, {case['ranks']} ranks under torchrun"
        by_target.setdefault(where, []).append(case)
    for where, cases in sorted(by_target.items()):
        signals = ", ".join(sorted({case["signal"] for case in cases}))
        resumed = sum(case["outcome"] == "same bits" for case in cases)
        slowest = max(case["seconds"] for case in cases)
        stages = len({case["stage"] for case in cases})
        lines.append(f"| {where} | {signals} | {stages} | {len(cases)} | {resumed} | {slowest:.1f} s |")
    cases = result["cases"]
    lines += [
        "",
        f"{len(cases)} cases; {device_of(result['machine'])}, megatron-core {result['machine']['megatron-core']}.",
    ]
    return "\n".join(lines)


def inside_table(result: dict[str, Any]) -> str:
    """Markdown for the result of benchmarks/inside.py."""
    lines = [
        "| rows | tokens | body | attention | head | expected | reading losses | reading logits | memory, GiB |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for row in result["workloads"]:
        expected, faster, peak = row["expected_speedup"], row["speedup"], row["peak_bytes"]
        cells = [
            f"{row['logical_tokens']:,}",
            *(f"{expected[name]['ratio']:.2f}x" for name in Work._fields),
            f"{expected['ratio']:.2f}x",
            *(f"**{faster[way]:.2f}x**" for way in ("losses", "logits")),
            " / ".join(f"{peak[way] / 2**30:.1f}" for way in ("losses", "logits", "stock")),
        ]
        lines.append(f"| {row['name']} | {' | '.join(cells)} |")
    model, machine, rounds = result["model"], result["machine"], result["rounds"]
    lines += [
        "",
        f"A GPT of {model['num_layers']} layers, hidden size {model['hidden_size']} and a vocabulary of "
        f"{model['vocab_size']:,}, on {device_of(machine)}; medians of {rounds['shared']} rounds. Memory is the peak "
        "of a step: folded reading losses, folded reading logits, stock.",
        "",
        "| rows that share nothing | tokens | step, stock | step, folding inside | of that, the hook |",
        "|---:|---:|---:|---:|---:|",
    ]
    lines += [_unshared_row(row) for row in result["unshared"]]
    lines += ["", f"The same model and machine; medians (and quartiles) of {rounds['unshared']} pairs of steps."]
    return "\n".join(lines)


def _unshared_row(row: dict[str, Any]) -> str:
    """Markdown for rows that share nothing: the step and its hook."""
    stock, folds = row["seconds"]["stock"], row["seconds"]["folds"]
    low, ratio, high = statistics.quantiles((b / a for a, b in zip(stock, folds, strict=True)), n=4)
    return (
        f"| {row['rows']} | {row['tokens']:,} | {statistics.median(stock) * 1e3:,.0f} ms "
        f"| {ratio:.3f}x ({low:.2f}-{high:.2f}) | {row['hook_seconds'] * 1e3:.2f} ms ({row['hook_share']:.2%}) |"
    )


def recurrent_steps_table(result: dict[str, Any]) -> str:
    """Markdown for the steps of benchmarks/recurrent.py."""
    lines = [
        "| three of four mixers | fold ratio | times faster | bound | of its bound |",
        "|---|---:|---:|---:|---:|",
    ]
    for row in result["steps"]:
        gain = row["gain"]
        cells = (
            f"{row['fold_ratio']:.2f}x",
            f"**{_spread(gain['speedup'], '.2f', 'x')}**",
            f"{gain['bound']['ratio']:.2f}x",
            _spread(gain["share_of_bound"], ".0%"),
        )
        lines.append(f"| {row['model']} | {' | '.join(cells)} |")
    machine, rounds = result["machine"], len(result["steps"][0]["cpu_seconds"]["folded"])
    lines += [
        "",
        f"CPU seconds of forward and backward, medians (and ranges) of {rounds} rounds; {device_of(machine)}, torch "
        f"{machine['torch']}, megatron-core {machine['megatron-core']}.",
    ]
    return "\n".join(lines)


def recurrent_trees_table(result: dict[str, Any]) -> str:
    """Markdown for the deep trees of benchmarks/recurrent.py: the share of the bound by model, levels and length."""
    rows = {(row["model"], row["levels"], row["segment"]): row for row in result["trees"]}
    lengths = sorted({length for *_, length in rows})
    lines = [
        f"| mixers | levels | {' | '.join(f'segments of {length}' for length in lengths)} |",
        "|---|---:|" + "---:|" * len(lengths),
    ]
    for model, levels in dict.fromkeys((model, levels) for model, levels, _ in rows):
        found = [rows[model, levels, length] for length in lengths]
        cells = [
            f"{row['gain']['speedup']['median']:.2f}x at {row['fold_ratio']:.2f}x, "
            f"{row['gain']['share_of_bound']['median']:.0%}"
            for row in found
        ]
        lines.append(f"| {model} | {levels} | {' | '.join(cells)} |")
    return "\n".join(lines)


def trl_table(result: dict[str, Any]) -> str:
    """Markdown for the result of benchmarks/trl_backbone.py."""
    lines = [
        "| rows | tokens | fold ratio | step, expected | step | scoring, expected | scoring |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    packing = [
        "| rows | tokens computed, TRL's packing | here | keys copied per layer | on the host, TRL's packing | here |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for row in result["workloads"]:
        cells = [f"{row['logical_tokens']:,}", f"{row['fold_ratio']:.2f}"]
        for what in ("step", "score"):
            cells += [f"{row['expected_speedup'][what]:.2f}x", f"**{row['speedup'][what]:.2f}x**"]
        lines.append(f"| {row['name']} | {' | '.join(cells)} |")
        pack = row["packing"]
        numbers = [pack["tokens"]["trl"], pack["tokens"]["folds"], pack["copied_keys"]["trl"]]
        times = [f"{pack['host_seconds'][way] * 1e3:.1f} ms" for way in ("trl", "folds")]
        packing.append(f"| {row['name']} | {' | '.join([*(f'{number:,}' for number in numbers), *times])} |")
    model, machine, rounds = result["model"], result["machine"], result["rounds"]
    lines += [
        "",
        f"A Qwen3 of {model['num_hidden_layers']} layers, hidden size {model['hidden_size']} and a vocabulary of "
        f"{model['vocab_size']:,} in fp32, on {device_of(machine)}; medians of {rounds['shared']} rounds. Expected by "
        "FLOPs, with a head that scores every row.",
        "",
        *packing,
        "",
        "| rows that share nothing | tokens | step, stock | step, folding | of that, the hook |",
        "|---:|---:|---:|---:|---:|",
    ]
    lines += [_unshared_row(row) for row in result["unshared"]]
    lines += ["", f"Medians (and quartiles) of {rounds['unshared']} pairs of steps."]
    return "\n".join(lines)


def verl_steps_table(result: dict[str, Any]) -> str:
    """Markdown for the result of benchmarks/verl_steps.py."""
    lines = [
        "| rows | step | verl's engine | folding inside | faster | expected |",
        "|---|---|---:|---:|---:|---:|",
    ]
    for row in result["workloads"]:
        for what, step in row["steps"].items():
            cells = [f"{statistics.median(step['seconds'][way]):.2f} s" for way in ("stock", "folds")]
            pairs = [a / b for a, b in zip(*step["seconds"].values(), strict=True)]
            cells.append(f"**{step['speedup']:.2f}x** ({min(pairs):.1f}-{max(pairs):.1f})")
            lines.append(f"| {row['name']} | {what} | {' | '.join(cells)} | {step['expected_speedup']:.2f}x |")
    model = result["model"]
    lines += [
        "",
        f"A Qwen3 of {model['num_hidden_layers']} layers, hidden size {model['hidden_size']} and a vocabulary of "
        f"{model['vocab_size']:,} in fp32, on {device_of(result['machine'])}; micro-batches of at most "
        f"{result['budget']:,} tokens. CPU seconds: medians of {result['rounds']} rounds, and the range of their "
        "ratios. Expected by FLOPs of layers, attention and head.",
    ]
    return "\n".join(lines)


FAMILY_COLUMNS = (
    "family",
    "log-probabilities",
    "gradients",
    "exported bits equal",
    "on a CPU, without TransformerEngine",
)


def families_table(result: dict[str, Any]) -> str:
    """Markdown for the result of ``benchmarks/families.py``: one row per family, with its layers for GPU training."""
    lines = [f"| {' | '.join(FAMILY_COLUMNS)} |", "|---|---|---|---|---|"]
    by_layers = {
        layers: {one["family"]: one for one in result["results"] if one["layers"] == layers}
        for layers in ("transformer_engine", "local")
    }
    for family, one in by_layers["transformer_engine"].items():
        local = by_layers["local"][family]
        kept = [name for name in ("TP=2", "PP=2", "EP=2") if isinstance(one.get(name), float | bool)]
        cells = [
            f"{one['logprob']:.1e}",
            f"{one['gradient']:.1e}",
            ", ".join(kept),
            _with_layouts(local) if "logprob" in local else f"no: {_reason(local)}",
        ]
        lines.append(f"| {' | '.join([family, *cells])} |")
    versions = ", ".join(f"{name} {version}" for name, version in result["versions"].items())
    return "\n".join([*lines, "", f"{versions}."])


BATCHES = {
    "shipped": "the shipped rollouts",
    "forks": "16 rollouts that fork four times in their second half",
    "prompted": "16 rollouts that share a quarter",
}


def over_budget_table(result: dict[str, Any]) -> str:
    """Markdown for the times in the result of ``benchmarks/over_budget.py``: one row per batch and budget."""
    lines = [
        "| batch | budget | `repeat`: tokens, seconds | `carry`: tokens + forward once more, seconds | `auto` |",
        "|---|---:|---|---|---|",
    ]
    for name, batch in BATCHES.items():
        for repeat, carry, auto in zip(*(result.get(name, [])[way::3] for way in range(3)), strict=True):
            again = f"{carry['tokens']:,.0f} + {carry['carried']:,.0f}, {carry['seconds']:.2f}"
            once = (
                "a sample is too long" if "refused" in repeat else f"{repeat['tokens']:,.0f}, {repeat['seconds']:.2f}"
            )
            way = "carry" if auto["carried"] else "repeat"
            lines.append(f"| {batch} | {carry['budget']:,} | {once} | {again} | {way}, {auto['seconds']:.2f} |")
    return "\n".join(lines)


def long_sample_table(result: dict[str, Any]) -> str:
    """Markdown for the memory in the same result: one row per length of a sample."""
    lines = [
        "| tokens of the sample | keys, values, gradients | estimate of them | other memory, beyond the first row |",
        "|---:|---:|---:|---:|",
    ]
    first = result["memory"][0]
    for one in result["memory"]:
        held, estimate, other = (
            f"{size / 2**20:,.1f} MiB"
            for size in (one["held"], one["estimate"], one["peak"] - first["peak"] - one["held"] + first["held"])
        )
        lines.append(f"| {one['length']:,} | {held} | {estimate} | {other} |")
    return "\n".join(lines)


def _with_layouts(result: dict[str, Any]) -> str:
    return "yes" if all(isinstance(result[name], float) for name in ("TP=2", "PP=2")) else "yes, without TP"


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
    "cost": ("cost_quickstart_cpu.json", cost_table),
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
ROOFLINE = ROOT / "docs" / "attention_roofline.png"


def rendered(page: str) -> str:
    """Return a page with its tables written again."""
    for name, (file, table) in TABLES.items():
        begin, end = f"<!-- {name}:begin -->\n", f"<!-- {name}:end -->"
        if begin not in page:
            continue
        before, rest = page.split(begin)
        _, after = rest.split(end)
        page = f"{before}{begin}{table(loaded(file))}\n{end}{after}"
    return page


def loaded(file: str) -> Any:
    """Return the result in a file, or the list of all results if its name contains ``*``."""
    if "*" in file:
        read = sections_of if file.startswith("gpu_") else lambda one: json.loads(one.read_text())
        return [read(one) for one in sorted(RESULTS.glob(file))]
    return json.loads((RESULTS / file).read_text())


def draw() -> None:
    """Draw the roofline of the first GPU with a result, else of the CPU."""
    draw_roofline((attention_on_gpus() or [loaded("attention_cpu.json")])[0], ROOFLINE)


def main() -> None:
    argparse.ArgumentParser(description=__doc__).parse_args()
    for name in PAGES:
        page = ROOT / name
        page.write_text(rendered(page.read_text()))
    COSTS.write_text(attention_costs())
    draw()


if __name__ == "__main__":
    main()
