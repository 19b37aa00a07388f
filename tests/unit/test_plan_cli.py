from __future__ import annotations

import json
import os
import re
import sys

import pytest
from harness.commands import run_command, run_process, write_rows

from mcore_prefix_tree.data import read_samples
from mcore_prefix_tree.data.batches import SampleOrder
from mcore_prefix_tree.plan import CostModel, ModelWork, plan_step
from mcore_prefix_tree.settings import load_recipe

RECIPE = """
data: {path: unused.jsonl}
model: {num_layers: 2, hidden_size: 16, num_attention_heads: 8, ffn_hidden_size: 16, vocab_size: 64}
batch: {global_batch_size: 4, max_tokens: 64}
train_iters: 1
parallel: {tensor_model_parallel_size: 8, sequence_parallel: true}
"""


@pytest.fixture
def rows(tmp_path):
    tokens = [[*range(10), 20 + leaf] for leaf in range(6)] + [[40] * 12]
    return str(write_rows(tmp_path / "rows.jsonl", ({"tokens": row} for row in tokens)))


def plan(*arguments):
    return run_command("plan", *arguments)


def report_of(*arguments):
    result = plan(*arguments, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def written(folder, text):
    (folder / "recipe.yaml").write_text(text)
    return str(folder / "recipe.yaml")


def test_json_is_the_report(rows):
    report = report_of(rows, "--max-tokens", "14", "--dp", "2")
    assert report["samples"] == 7
    assert report["logical_tokens"] == 6 * 11 + 12
    assert report["unique_tokens"] == 10 + 6 + 12
    assert len(report["ranks"]) == 2
    tokens = [batch["tokens"] for rank in report["ranks"] for batch in rank]
    assert max(tokens) <= 14
    assert report["repeated_tokens"] == sum(tokens) - 28
    assert report["cost_unit"] == "tokens"
    assert report["slowest"] == max(sum(batch["cost"] for batch in rank) for rank in report["ranks"])


@pytest.mark.parametrize(
    ("objective", "work"),
    # A critic has no vocabulary to pay for.
    [("", {"fused_head": True}), ("objective: {name: critic}\n", {"scalar_head": True})],
)
def test_a_recipe_gives_flops_and_padding(rows, tmp_path, objective, work):
    recipe = written(tmp_path, RECIPE + objective)
    report = report_of(rows, "--max-tokens", "64", "--dp", "1", "--model", recipe)
    model = CostModel.from_work(ModelWork.from_model(load_recipe(recipe).model, **work))
    (batch,) = report["ranks"][0]
    assert batch["padding"] == 4
    assert 0 < batch["scored"] < batch["tokens"]
    assert batch["cost"] == model.of_micro_batch(batch["tokens"], batch["pairs"], batch["scored"])
    assert (model.scored == 0) == ("scalar_head" in work)
    assert report["cost_unit"] == "FLOPs"


def test_states_of_recurrent_layers_are_counted(rows, tmp_path):
    """The branches of ten tokens, and a sample alone: 7 segments in 2 levels, with a state of 8 x 2 x 2 entries."""
    recipe = tmp_path / "recipe.yaml"
    sizes = "{linear_key_head_dim: 2, linear_value_head_dim: 2, linear_num_key_heads: 8, linear_num_value_heads: 8}"
    recipe.write_text(
        RECIPE.replace("num_layers: 2,", f"num_layers: 3, hybrid_layer_pattern: GG*, transformer: {sizes},")
    )
    (batch,) = report_of(rows, "--max-tokens", "64", "--model", recipe)["ranks"][0]
    assert (batch["segments"], batch["segment_levels"], batch["segment_states"]) == (8, 2, 6)
    model = CostModel.from_work(ModelWork.from_model(load_recipe(recipe).model, fused_head=True))
    assert batch["cost"] == model.of_micro_batch(batch["tokens"], batch["pairs"], batch["scored"], 8, 2)
    shown = " ".join(plan(rows, "--max-tokens", "64", "--model", recipe).stdout.split())
    assert "levels of segments 2 at most in a micro-batch" in shown
    assert f"states below branches 6 {6 * 2 * 32 * 4 / 2**30:.3g} GiB in 2 layers" in shown
    assert f"in the budget {model.state_tokens} tokens for each path that joins a tree" in shown


def test_table_names_the_key_figures(rows):
    result = plan(rows, "--max-tokens", "14", "--dp", "20", "--micro-batches", "1")
    assert result.exit_code == 0, result.output
    for words in (
        "repeated context",
        "over the lower bound",
        "1 on each of 4 ranks",
        "… 16 idle ranks",
        "4 of 20",
        "use 4 ranks",
    ):
        assert words in " ".join(result.stdout.split())
    assert max(map(len, result.stdout.splitlines())) <= 80


def test_ranks_of_many_micro_batches_fit_80_columns(tmp_path):
    path = write_rows(tmp_path / "long.jsonl", ({"tokens": [first] * 9} for first in range(200)))
    result = plan(str(path), "--max-tokens", "9", "--dp", "2")
    lines = [line.rstrip() for line in result.stdout.splitlines()]
    assert lines[1].split() == ["0", "100", "900", "900", "100.0%", *["9"] * 6, "…", "94", "more"]
    assert max(map(len, lines)) <= 80


def steps_of(command, *arguments):
    result = run_command(command, *arguments, "--json", code=0)
    return json.loads(result.stdout)["steps"]


@pytest.fixture
def turns(tmp_path):
    """Six prompts of four completions each, one per line, none next to another of the same prompt."""
    path = tmp_path / "turns.jsonl"
    rows = [{"tokens": [prompt] * 20 + [30 + leaf] * 4, "group": leaf} for leaf in range(4) for prompt in range(6)]
    write_rows(path, rows)
    return path


def test_steps_are_the_ones_that_training_takes(turns):
    """By hand, from the documented order: the samples and folded tokens of each step of an epoch."""
    samples = read_samples(turns)
    order = SampleOrder([[sample] for sample in samples], seed=7, order="shuffled", step=4)
    logical = [96] * 6
    physical = []
    for start in range(0, 24, 4):
        step = order.take(start, 4)
        physical.append(20 * len({int(sample.tokens[0]) for sample in step}) + 4 * 4)
    report = steps_of("inspect", turns, "--global-batch-size", 4, "--seed", 7)
    assert report == {
        "steps": 6,
        "samples": 4,
        "fold_ratio": {
            "mean": sum(logical) / sum(physical),
            "lowest": 96 / max(physical),
            "highest": 96 / min(physical),
        },
        "planned_fold_ratio": None,
        "idle_ranks": None,
        "order": "shuffled",
        "global_batch_size": 4,
    }
    planned = steps_of("plan", turns, "--global-batch-size", 4, "--seed", 7, "--max-tokens", 24, "--dp", 5)
    assert planned["fold_ratio"] == report["fold_ratio"]
    assert planned["planned_fold_ratio"] == {"mean": 1, "lowest": 1, "highest": 1}  # a sample a micro-batch
    assert planned["idle_ranks"] == 1


def test_steps_follow_a_recipe_and_options_win(turns, tmp_path):
    recipe = written(tmp_path, RECIPE.replace("unused.jsonl}", "unused.jsonl, order: file}"))
    for command in ("inspect", "plan"):
        steps = steps_of(command, turns, "--model", recipe)
        assert (steps["order"], steps["global_batch_size"], steps["fold_ratio"]["mean"]) == ("file", 4, 1)
        steps = steps_of(command, turns, "--model", recipe, "--order", "folded", "--global-batch-size", 24)
        assert (steps["order"], steps["steps"], steps["fold_ratio"]["mean"]) == ("folded", 1, 24 * 24 / (6 * 36))
    # Groups that training takes complete, and rejects.
    recipe = written(tmp_path, RECIPE + "objective: {name: grpo}\n")
    result = run_command("inspect", turns, "--model", recipe, code=2)
    assert "group 0 goes on" in result.stderr or "global_batch_size=4 would cut some" in result.stderr


def test_output_says_that_one_step_takes_all_samples(turns):
    whole_file, steps = "These figures take all samples as one step", "  in training steps"
    for command in (["inspect"], ["plan", "--max-tokens", "100"]):
        asked = [*command, str(turns)]
        known = run_command(*asked, "--global-batch-size", "4").stdout
        unknown = run_command(*asked).stdout
        assert whole_file in " ".join(unknown.split())
        assert steps not in unknown
        assert "These figures" not in known
        assert "6 steps of 4 samples, shuffled" in " ".join(known.split())
        twice = run_command(*asked, "--global-batch-size", "30").stdout
        assert (
            "A step of 30 is larger than the 24 samples there are, so these figures are for one step that takes each "
            "of them once."
        ) in " ".join(twice.split())
        assert "1 step of 24 samples, shuffled" in " ".join(twice.split())
        result = run_command(*asked, "--order", "folded")
        assert (result.exit_code, "give --global-batch-size too" in result.stderr) == (2, True)


def test_expanded_turns_are_pointed_to(tmp_path):
    path = tmp_path / "chat.jsonl"
    messages = [{"role": role, "content": "go on"} for _ in range(3) for role in ("user", "assistant")]
    path.write_text(json.dumps({"messages": messages}) + "\n" + json.dumps({"messages": messages[:2]}) + "\n")
    expanded = json.loads(run_command("inspect", path, "--expand-turns", "--json").stdout)
    logical, physical = expanded["logical_tokens"], expanded["physical_tokens"]
    advice = f"give --expand-turns: 4 samples of {logical:,} logical tokens in the same {physical:,} physical ones"
    for command in (["inspect"], ["plan", "--max-tokens", "100"]):
        plain = " ".join(run_command(*command, path).stdout.split())
        assert advice in plain
        assert f"a fold ratio of {logical / physical:.2f}x instead of" in plain
        assert "give --expand-turns" not in run_command(*command, path, "--expand-turns").stdout


def test_idle_ranks_are_named(rows):
    report = report_of(rows, "--max-tokens", "14", "--dp", "20")
    idle = sum(not any(batch["samples"] for batch in rank) for rank in report["ranks"])
    assert report["idle_ranks"] == idle == 16
    assert "idle" not in plan(rows, "--max-tokens", "14", "--dp", "2").stdout


def test_empty_micro_batches_are_named(rows):
    """Only those of ranks with work: an idle rank is reported as idle."""
    words = ("--max-tokens", "100", "--dp", "2", "--micro-batches", "7")
    report = report_of(rows, *words)
    empty = sum(not batch["samples"] for rank in report["ranks"] for batch in rank)
    assert report["empty_micro_batches"] == empty > 0 == report["idle_ranks"]
    assert f"{empty} of 14 use fewer --micro-batches" in " ".join(plan(rows, *words).stdout.split())
    alone = ("--max-tokens", "14", "--dp", "20")
    assert report_of(rows, *alone)["empty_micro_batches"] == 16
    assert "without samples" not in plan(rows, *alone).stdout


def test_too_small_budget_is_reported_in_one_sentence(rows):
    result = plan(rows, "--max-tokens", "11")
    assert result.exit_code == 2
    assert "rows.jsonl:7: the sample has 12 tokens, but --max-tokens is 11; raise --max-tokens" in result.output
    result = plan(rows, "--max-tokens", "12", "--micro-batches", "1")
    assert result.exit_code == 2
    said = "1 micro-batches on each of 1 ranks cannot hold these samples with --max-tokens=12"
    assert said in result.output


def test_the_command_plans_like_the_library(rows):
    from mcore_prefix_tree.data import read_samples

    samples = read_samples(rows)
    expected = plan_step(samples, max_tokens=14, dp_size=2, cost_model=CostModel())
    report = report_of(rows, "--max-tokens", "14", "--dp", "2")
    assert tuple(tuple(batch["tokens"] for batch in rank) for rank in report["ranks"]) == expected.physical_tokens


def test_less_sharing(rows, tmp_path):
    masked = [{"tokens": [*range(10), 20 + leaf], "loss_mask": [0] * 5 + [1] * 6} for leaf in range(6)]
    prompts = write_rows(tmp_path / "prompts.jsonl", masked)

    def unique(*arguments):
        return json.loads(plan(str(prompts), "--max-tokens", "100", "--json", *arguments).stdout)["unique_tokens"]

    assert unique() == 10 + 6
    assert unique("--share", "prompt") == 5 + 6 * 6
    assert unique("--min-shared-tokens", "11") == 6 * 11
    assert plan(str(prompts), "--max-tokens", "100", "--share", "none").exit_code == 2


def test_sharing_options_override_the_recipe(rows, tmp_path):
    recipe = written(tmp_path, RECIPE.replace("max_tokens: 64}", "max_tokens: 64, min_shared_tokens: 11}"))
    model = ("--max-tokens", "64", "--model", recipe, "--json")
    assert json.loads(plan(rows, *model).stdout)["unique_tokens"] == 6 * 11 + 12
    assert json.loads(plan(rows, *model, "--min-shared-tokens", "10").stdout)["unique_tokens"] == 10 + 6 + 12


def test_length_buckets(rows):
    result = plan(rows, "--max-tokens", "14", "--length-buckets", "13,20", "--json")
    batches = [batch for rank in json.loads(result.stdout)["ranks"] for batch in rank]
    assert {batch["tokens"] + batch["padding"] for batch in batches} <= {13, 20}
    result = plan(rows, "--max-tokens", "14", "--length-buckets", "8,13")
    assert result.exit_code == 2
    assert "--length-buckets: the largest, 13, cannot hold a micro-batch of 14 tokens" in result.output
    result = plan(rows, "--max-tokens", "14", "--length-buckets", "8;20")
    assert result.exit_code == 2
    assert "give sizes with commas between" in result.output


def test_bad_samples_are_skipped_and_counted(rows):
    with open(rows, "a") as stream:
        stream.write("{\n")
    assert plan(rows, "--max-tokens", "11").exit_code == 2
    result = plan(rows, "--max-tokens", "11", "--on-error", "skip", "--json")
    assert result.exit_code == 0
    report = json.loads(result.stdout)
    assert (report["samples"], report["skipped"]) == (6, 2)
    assert "skipped 2 bad samples (" in result.stderr
    assert "rows.jsonl:7: the sample has 12 tokens" in result.stderr
    assert "rows.jsonl:8: not valid JSON" in result.stderr


def test_a_recipe_keeps_pairs_together(tmp_path):
    recipe, data = tmp_path / "recipe.yaml", tmp_path / "pairs.jsonl"
    pairs = [
        {"tokens": [pair, 9, side, *[side] * 5], "pair": pair, "chosen": side == 1}
        for pair in range(3)
        for side in (1, 2)
    ]

    def plan_pairs(rows, *options, objective="simpo", max_tokens=14, way="auto"):
        budget = RECIPE.replace("max_tokens: 64", f"max_tokens: 64, over_budget: {way}")
        recipe.write_text(budget + f"objective: {{name: {objective}}}\n")
        write_rows(data, rows)
        result = plan(str(data), "--max-tokens", str(max_tokens), "--model", recipe, "--json", *options)
        return result.exit_code, json.loads(result.stdout) if result.exit_code == 0 else result.stderr

    for objective in ("simpo", "reward_model"):
        code, report = plan_pairs(pairs, "--micro-batches", "3", objective=objective)
        assert code == 0, report
        assert [(batch["samples"], batch["tokens"]) for batch in report["ranks"][0]] == [(2, 14)] * 3
    # Without a loss of pairs the same samples fit less.
    assert plan_pairs(pairs, objective="sft", max_tokens=13)[0] == 0
    assert plan_pairs(pairs, max_tokens=13)[1]["scored_first_tokens"] == 3 * 14, "each pair is cut"
    code, error = plan_pairs(pairs, max_tokens=13, way="repeat")
    assert code == 2
    assert f"{data}:1 and {data}:2 stay together, and their 14 unique tokens do not fit a micro-batch" in error
    # Pairs that training rejects are rejected.
    assert "field 'pair' is missing, and objective.name=simpo needs it" in plan_pairs([{"tokens": [1]}])[1]
    assert "pair 0 has 1 sample; a pair is two" in plan_pairs(pairs[1:])[1]
    assert "objective.name: " in plan_pairs(pairs, objective="nonsense")[1]


def test_on_error_option_overrides_the_recipe(rows, tmp_path):
    recipe = tmp_path / "recipe.yaml"
    skipping = RECIPE.replace("unused.jsonl}", "unused.jsonl, on_error: skip}")
    recipe.write_text(skipping.replace("max_tokens: 64}", "max_tokens: 64, over_budget: repeat}"))
    model = ("--max-tokens", "11", "--model", recipe, "--json")
    result = plan(rows, *model)
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["skipped"] == 1
    assert plan(rows, *model, "--on-error", "raise").exit_code == 2


def test_plan_uses_the_recipes_data_settings(tmp_path):
    turns = [{"role": role, "content": "go on"} for _ in range(3) for role in ("user", "assistant")]
    data = tmp_path / "chat.jsonl"
    data.write_text(json.dumps({"messages": turns}) + "\n")
    recipe = tmp_path / "recipe.yaml"
    reading = "data: {path: x.jsonl, tokenizer: mistral-v3-tekken, expand_turns: true}"
    recipe.write_text(re.sub(r"data: .*", reading, RECIPE))
    given = plan(str(data), "--max-tokens", "100", "--tokenizer", "mistral-v3-tekken", "--expand-turns", "--json")
    by_recipe = plan(str(data), "--max-tokens", "100", "--model", recipe, "--json")
    assert given.exit_code == by_recipe.exit_code == 0, by_recipe.output
    given, by_recipe = json.loads(given.stdout), json.loads(by_recipe.stdout)
    assert by_recipe["samples"] == given["samples"] == 3
    assert by_recipe["unique_tokens"] == given["unique_tokens"]


WITHOUT_MEGATRON = """
import sys
from importlib.abc import MetaPathFinder

class Missing(MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name.partition(".")[0] in ("megatron", "transformer_engine", "apex", "flash_attn", "triton"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Missing())
"""


@pytest.fixture
def without_megatron(tmp_path):
    """Run a command in a process that finds neither Megatron nor packages for GPUs."""
    (tmp_path / "sitecustomize.py").write_text(WITHOUT_MEGATRON)
    path = os.pathsep.join([str(tmp_path), *filter(None, sys.path)])

    def run(*arguments):
        return run_process([sys.executable, "-m", "mcore_prefix_tree", *map(str, arguments)], env={"PYTHONPATH": path})

    return run


@pytest.mark.ci
def test_plan_needs_no_megatron(rows, tmp_path, without_megatron):
    recipe = written(tmp_path, RECIPE + "objective: {name: grpo}\n")
    done = without_megatron("plan", rows, "--max-tokens", 64, "--dp", 2, "--json")
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout)["unique_tokens"] == 10 + 6 + 12
    data = write_rows(tmp_path / "groups.jsonl", ({"tokens": [1, 2, 3 + n], "group": n // 2} for n in range(8)))
    done = without_megatron("plan", data, "--model", recipe, "--json")
    assert done.returncode == 0, done.stderr
    assert done.stderr == "megatron-core is not installed, so the model's settings are checked only by train\n"
    assert done.stdout == plan(str(data), "--model", recipe, "--json").stdout


def test_plan_rejects_unsupported_settings(rows, tmp_path, without_megatron):
    recipe = written(tmp_path, RECIPE.replace("vocab_size: 64", "vocab_size: 64, transformer: {num_moe_experts: four}"))
    done = without_megatron("plan", rows, "--model", recipe)
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].startswith("error: model.transformer: cannot count FLOPs with these settings")


def test_a_recipe_carries_samples_above_the_budget(rows, tmp_path):
    recipe = written(tmp_path, RECIPE)
    report = report_of(rows, "--max-tokens", "8", "--model", recipe)
    batches = report["ranks"][0]
    assert report["repeated_tokens"] == 0
    assert sum(batch["tokens"] for batch in batches) == report["unique_tokens"] + report["carried_tokens"]
    assert max(batch["tokens"] for batch in batches) <= 8
    assert sum(batch["samples"] for batch in batches) == report["samples"]
    assert report["carried_tokens"] > 0
    assert report["slowest"] >= report["lower_bound"]
    assert "carried tokens" in plan(rows, "--max-tokens", "8", "--model", recipe).stdout


def test_plan_counts_the_scoring_pass(rows, tmp_path):
    recipe, reports = tmp_path / "recipe.yaml", {}
    for name in ("sft", "kto"):
        recipe.write_text(f"{RECIPE}objective: {{name: {name}}}\n")
        arguments = ("--max-tokens", "8", "--model", recipe)
        reports[name] = report_of(rows, *arguments)
    ordinary, whole = reports["sft"], reports["kto"]
    assert (ordinary["scored_first_tokens"], whole["scored_first_tokens"]) == (0, whole["unique_tokens"])
    costs = [sum(batch["cost"] for batch in one["ranks"][0] if batch["scored"]) for one in (ordinary, whole)]
    assert costs[1] == pytest.approx(costs[0] * 4 / 3)
    assert "scored first" in plan(rows, *arguments).stdout


def test_models_with_further_depths_are_carried(rows, tmp_path):
    recipe = written(tmp_path, RECIPE.replace("vocab_size: 64", "vocab_size: 64, transformer: {mtp_num_layers: 1}"))
    assert "carried tokens" in plan(rows, "--max-tokens", "8", "--model", recipe).stdout
