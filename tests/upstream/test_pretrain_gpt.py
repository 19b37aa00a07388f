"""Megatron-LM's own training loop, folded: equal to its stock run of the same samples, one by one."""

from __future__ import annotations

import os
import re
import shutil
import sys
import sysconfig
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
from bf16 import assert_no_further, bf16_errors
from harness.commands import run_process, write_rows
from megatron_lm import (
    BATCH,
    CPU,
    ENTRY,
    FIRST,
    FOLDED,
    HERE,
    ITERATIONS,
    LOSS,
    MODEL,
    STOCK,
    TRAIN,
    UNFOLDED,
    VARIABLE,
    VOCAB,
    WEIGHTS_ONLY,
    Run,
    Stock,
    assert_same_tensors,
    megatron,
    require_checkout,
    runs_ahead,
    trained,
    under_open_mpi,
)

from mcore_prefix_tree import fold
from mcore_prefix_tree.data import read_samples
from mcore_prefix_tree.data.batches import SampleOrder
from mcore_prefix_tree.plan import CostModel, ModelWork, plan_step

require_checkout()
COUNTS = (str(HERE / "counts_exchanges.py"),)


def check(run: Run, stock: Stock, folder: Path, *, first: int = FIRST + 1) -> None:
    """Every loss, the counts, and the weights and optimizer state at the end."""
    assert sorted(run.losses) == list(range(first, ITERATIONS + 1))
    for iteration, loss in run.losses.items():
        assert loss == pytest.approx(stock.losses[iteration], rel=LOSS), iteration
    for iteration, figures in run.iterations.items():
        expected = stock.iterations[iteration]
        for counted in ("consumed samples", "learning rate", "global batch size"):
            assert figures[counted] == expected[counted], (iteration, counted)
        assert figures["fold ratio"] > 1.3
        assert figures["plan time (ms)"] > 0
    for name in ("logical tokens/s", "physical tokens/s"):
        # Nothing was measured before the first step.
        assert [name in run.iterations[i] for i in (first, first + 1, ITERATIONS)] == [False, True, True]
    assert_same_tensors(folder, stock.folder, ITERATIONS)


def test_from_scratch_in_one_process(stock: Stock, tmp_path: Path) -> None:
    check(trained(ENTRY, *stock.args(tmp_path)), stock, tmp_path, first=1)


@pytest.mark.parametrize(
    ("ranks", "layout"),
    [
        pytest.param(2, "--tensor-model-parallel-size 2 --recompute-granularity selective", id="tp2-selective"),
        pytest.param(2, "--pipeline-model-parallel-size 2", id="pp2"),
        pytest.param(2, "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1", id="dp2"),
    ],
)
def test_resumed_from_the_stock_run_in_another_layout(
    stock: Stock, tmp_path: Path, ranks: int, layout: str, base: Path
) -> None:
    run = trained(COUNTS, *stock.args(tmp_path), f"--load {base}", layout, ranks=ranks)
    check(run, stock, tmp_path)
    assert_no_exchanges(run)


def assert_no_exchanges(run: Run) -> None:
    """Stages ask for no shapes; before core_v0.19, the loop takes no communicator that knows them."""
    counts = {int(count) for count in re.findall("exchanges: ([0-9]+);", run.output)}
    if runs_ahead():
        assert counts == {0}


def test_interleaved_stages_keep_outputs_that_gloo_may_still_be_sending(stock: Stock, tmp_path: Path) -> None:
    """Freed, they arrived with other contents once in a dozen runs of twenty iterations."""
    layout = "--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2 --exit-interval 1"
    run = trained((str(HERE / "keeps_outputs.py"),), *stock.args(tmp_path), layout, ranks=2)
    assert list(run.losses) == [1]


def test_ranks_that_mpirun_started_train_the_same(stock: Stock, base: Path, tmp_path: Path) -> None:
    layout = f"--tensor-model-parallel-size 2 --load {base} --exit-interval 4"
    runs = under_open_mpi(ENTRY, *stock.args(tmp_path), layout, ranks=2)
    assert [run.status for run in runs] == [0, 0], runs[1].output[-8000:]
    first, last = runs
    # Megatron's log lines are the last rank's.
    assert first.losses == {}
    assert sorted(last.losses) == [2, 3, 4]
    for iteration, loss in last.losses.items():
        assert loss == pytest.approx(stock.losses[iteration], rel=LOSS), iteration
    assert (tmp_path / "latest_checkpointed_iteration.txt").read_text() == "4"


def test_streamed_from_a_file_with_bad_lines(stock: Stock, base: Path, tmp_path: Path) -> None:
    """Two data-parallel ranks, each with a worker, from the second step on: the samples of the stock run."""
    good = Path(stock.data.split()[1]).read_text()
    bad = tmp_path / "bad.jsonl"
    bad.write_text("{\n" + good + '{"tokens": [' + "1, " * 70 + "1]}\n")
    arguments = [argument.replace(stock.data.split()[1], str(bad)) for argument in stock.args(tmp_path / "saved")]
    streaming = "--prefix-tree-streaming --prefix-tree-on-error skip --num-workers 1"
    padded = "--prefix-tree-length-buckets 100 200 400"
    run = trained(ENTRY, *arguments, f"--load {base}", streaming, padded, ranks=2)
    check(run, stock, tmp_path / "saved")
    assert f"> skipped 2 bad samples (1 unreadable, 1 too long): {bad}:1: not valid JSON" in run.output
    assert "the sample has 71 tokens, but --seq-length is 64" in run.output


@pytest.fixture(scope="module")
def evaluated(stock: Stock, base: Path) -> tuple[str, Run]:
    """Arguments of four iterations from the stock weights, with validation after two of them; and the stock run."""
    valid = stock.data.replace("--prefix-tree-data-path", "--prefix-tree-valid-data-path")
    evaluate = f"{valid} --eval-iters 2 --eval-interval 2 --exit-interval 4"
    # The optimizer's state of one kind cannot be read by the other.
    arguments = f"{stock.data} --load {base} {WEIGHTS_ONLY} {evaluate}"
    return arguments, trained(STOCK, CPU, MODEL, TRAIN, UNFOLDED, arguments)


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param("--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather", id="dp2"),
        pytest.param("--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2", id="pp2-vpp2"),
    ],
)
def test_layouts_train_and_validate_in_turn(evaluated: tuple[str, Run], layout: str) -> None:
    arguments, alone = evaluated
    folded = trained(COUNTS, CPU, MODEL, TRAIN, FOLDED, arguments, layout, ranks=2)
    assert sorted(folded.losses) == sorted(alone.losses) == [1, 2, 3, 4]
    for iteration, loss in alone.losses.items():
        assert folded.losses[iteration] == pytest.approx(loss, rel=LOSS)
    for iteration in (2, 4):
        validation = [run.validation_loss(iteration) for run in (folded, alone)]
        assert validation[0] == pytest.approx(validation[1], rel=LOSS)
    assert_no_exchanges(folded)


def test_bf16_stays_as_close_to_fp32_as_the_stock_run(stock: Stock, tmp_path: Path) -> None:
    assert_no_further(bf16_errors(stock.data, FOLDED, f"{CPU} {MODEL}", tmp_path))


def test_script_without_the_flag_equals_megatrons(tmp_path: Path) -> None:
    """Its losses, bit for bit as far as they are printed, and its arguments: it knows none of ours."""
    script = tmp_path / "own.py"
    script.write_text(
        "import os, runpy, sys\n"
        f"root = os.environ['{VARIABLE}']\n"
        "sys.path.insert(0, root)\n"
        "from mcore_prefix_tree.cpu.emulation import enable_training\n"
        "enable_training()\n"
        "runpy.run_path(os.path.join(root, 'pretrain_gpt.py'), run_name='__main__')\n"
    )
    arguments = (
        CPU,
        MODEL,
        TRAIN,
        "--mock-data --tokenizer-type NullTokenizer --vocab-size 127 --micro-batch-size 8 --exit-interval 3",
    )
    ours, own = (trained(program, *arguments) for program in (ENTRY, (str(script),)))
    assert len(own.losses) == 3
    assert ours.losses == own.losses
    printed = [[line for line in run.output.splitlines() if " ..... " in line] for run in (ours, own)]
    assert printed[0] == printed[1]
    assert "prefix_tree_" not in ours.output


SITE_SCRIPT = f"""
import inspect, os, sys
sys.path.insert(0, os.environ["{VARIABLE}"])
from mcore_prefix_tree.cpu.emulation import enable_training
enable_training()
from functools import partial
from gpt_builders import gpt_builder
from megatron.core.enums import ModelType
from megatron.training import pretrain
from model_provider import model_provider
from pretrain_gpt import forward_step, train_valid_test_datasets_provider
from mcore_prefix_tree.mcore.megatron_lm.providers import add_prefix_tree_args, prefix_tree_providers
train_valid_test_datasets_provider.is_distributed = True
kind = ModelType.encoder_or_decoder
if "cfg_container" in inspect.signature(pretrain).parameters:  # core_v0.19
    from megatron.training.argument_utils import gpt_config_from_args, pretrain_cfg_container_from_args
    from megatron.training.arguments import parse_and_validate_args
    args = parse_and_validate_args(extra_args_provider=add_prefix_tree_args)
    container = pretrain_cfg_container_from_args(args, None if args.prefix_tree else gpt_config_from_args(args))
    datasets, model, step = prefix_tree_providers(train_valid_test_datasets_provider, None, forward_step)
    pretrain(container, datasets, kind, step, model_provider=model)
else:
    own = train_valid_test_datasets_provider, partial(model_provider, gpt_builder), forward_step
    datasets, model, step = prefix_tree_providers(*own)
    pretrain(datasets, model, kind, step, extra_args_provider=add_prefix_tree_args)
"""


@pytest.fixture
def site_script(tmp_path: Path) -> tuple[str, ...]:
    script = tmp_path / "pretrain_site.py"
    script.write_text(SITE_SCRIPT)
    return (str(script),)


def test_a_sites_own_script_takes_three_lines(stock: Stock, site_script: tuple[str, ...]) -> None:
    common = (CPU, MODEL, TRAIN, "--tokenizer-type NullTokenizer --exit-interval 2")
    folded = trained(site_script, *common, FOLDED, stock.data)
    assert folded.losses[1] == pytest.approx(stock.losses[1], rel=LOSS)
    assert folded.losses[2] == pytest.approx(stock.losses[2], rel=LOSS)
    own = trained(site_script, *common, "--mock-data --vocab-size 127 --micro-batch-size 8")
    assert len(own.losses) == 2
    assert "fold ratio" not in own.output


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ("--hidden-dropout 0.1", "--hidden-dropout 0.1"),
        ("--use-distributed-optimizer --save saved", "--use-distributed-optimizer with --save"),
        ("--micro-batch-size 5", "Megatron-LM does not take these arguments: "),
        ("--prefix-tree-max-tokens 48", "--prefix-tree-max-tokens=48"),
    ],
)
def test_a_sites_own_script_refuses_with_one_sentence(
    stock: Stock, site_script: tuple[str, ...], arguments: str, sentence: str
) -> None:
    """And needs no tokenizer of Megatron's."""
    run = megatron(site_script, CPU, MODEL, TRAIN, FOLDED, stock.data, arguments, ranks=2)
    assert "exitcode  : 2 " in run.output
    (line,) = [line for line in run.output.splitlines() if line.startswith("error: ")]
    assert sentence in line
    # torchrun ends the other rank, perhaps while it imports Megatron, which has that print a stack without commas.
    assert re.search(r'pretrain_site\.py", line \d+, in', run.output) is None, "a sentence, no traceback"
    assert not run.losses


def test_a_sites_own_script_plans_a_dry_run(stock: Stock, site_script: tuple[str, ...]) -> None:
    run = trained(site_script, CPU, MODEL, TRAIN, FOLDED, stock.data, "--prefix-tree-dry-run", ranks=2)
    assert run.output.count(f"{BATCH} a step, in 2 micro-batches on each of 2 data-parallel ranks") == 1
    assert not run.losses


def test_a_provider_refuses_a_dry_run_that_passed_the_parser(stock: Stock, site_script: tuple[str, ...]) -> None:
    script = Path(site_script[0])
    lost = "extra_args_provider=lambda parser: add_prefix_tree_args(parser) and parser"
    script.write_text(SITE_SCRIPT.replace("extra_args_provider=add_prefix_tree_args", lost))
    tokenizer = "--tokenizer-type NullTokenizer"
    run = megatron(site_script, CPU, MODEL, TRAIN, FOLDED, stock.data, tokenizer, "--prefix-tree-dry-run")
    (line,) = [line for line in run.output.splitlines() if line.startswith("error: ")]
    assert "has to return the parser that add_prefix_tree_args returns" in line
    assert not run.losses


def test_helpers_are_built_for_the_running_python(
    stock: Stock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With another Python's python3-config, and a python3 without pybind11."""
    root, others = tmp_path / "checkout", tmp_path / "bin"
    checkout = Path(os.environ[VARIABLE])
    shutil.copytree(checkout / "megatron", root / "megatron", ignore=shutil.ignore_patterns("__pycache__", "*.so"))
    shutil.copy(checkout / "gpt_builders.py", root)
    others.mkdir()
    for name, script in {"python3-config": "echo .cpython-30-other.so", "python3": "exit 1"}.items():
        (others / name).write_text(f"#!/bin/sh\n{script}\n")
        (others / name).chmod(0o755)
    monkeypatch.setenv(VARIABLE, str(root))
    monkeypatch.setattr("megatron_lm.search_path", lambda: f"{others}{os.pathsep}{os.environ['PATH']}")
    trained(ENTRY, CPU, MODEL, TRAIN, FOLDED, stock.data, "--exit-interval 1")
    built = [path.name for path in (root / "megatron/core/datasets").glob("helpers_cpp*")]
    assert built == [f"helpers_cpp{sysconfig.get_config_var('EXT_SUFFIX')}"]


def test_the_dry_run_plans_the_first_step_of_a_ramp_up(stock: Stock) -> None:
    if "rampup_batch_size" not in (Path(os.environ[VARIABLE]) / "megatron/training/arguments.py").read_text():
        pytest.skip("this Megatron-LM has no --rampup-batch-size")
    samples = TRAIN.replace(f"--train-iters {ITERATIONS}", "--train-samples 200").replace("--lr-warmup-iters 2", "")
    ramp = "--rampup-batch-size 8 4 64 --prefix-tree-dry-run"
    run = trained(ENTRY, CPU, MODEL, samples, FOLDED, stock.data, ramp)
    assert "8 a step, in 2 micro-batches on each of 1 data-parallel ranks" in run.output
    # The second size, 12, is none of eights.
    run = megatron(ENTRY, CPU, MODEL, samples, FOLDED, stock.data, ramp, "--micro-batch-size 8")
    assert "batch size (12) is not divisible by micro-batch-size (8)" in run.output


def test_help_has_a_separate_group() -> None:
    run = megatron(ENTRY, "--help")
    assert run.status == 0
    ours = run.output.split("\nprefix-tree:\n")[1]
    assert "--prefix-tree-max-tokens N" in ours
    assert "--micro-batch-size" in run.output


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ("--hidden-dropout 0.1", "--hidden-dropout 0.1"),
        ("--context-parallel-size 2", "--context-parallel-size 2"),
        (
            "--num-experts 4 --moe-token-dispatcher-type alltoall --moe-expert-capacity-factor 1.5",
            "moe_expert_capacity_factor=1.5",
        ),
        ("--mock-data", "--mock-data"),
        ("--pipeline-model-parallel-size 2 --prefix-tree-max-token 3", "--prefix-tree-max-token: there is no such arg"),
    ],
)
def test_refusals_come_before_anything_is_started(stock: Stock, arguments: str, sentence: str) -> None:
    ranks = 2 if "parallel" in arguments else 1
    run = megatron(ENTRY, CPU, MODEL, TRAIN, FOLDED, stock.data, arguments, ranks=ranks)
    assert run.status == 2
    (line,) = [line for line in run.output.splitlines() if line.startswith("error: ")]
    assert sentence in line
    assert "pretrain_gpt.py" not in run.output, "a sentence, no traceback"
    for later in ("building GPT model", "initializing torch distributed"):
        assert later not in run.output


def test_a_step_that_does_not_fit_is_refused_before_training(stock: Stock) -> None:
    run = megatron(ENTRY, CPU, MODEL, TRAIN, FOLDED, stock.data, "--prefix-tree-max-tokens 48")
    assert run.status != 0
    (line,) = [line for line in run.output.splitlines() if line.startswith("error: ")]
    assert "--prefix-tree-max-tokens=48" in line
    assert "use --micro-batch-size" in line
    assert not run.losses


@pytest.mark.parametrize("dry", ["", "--prefix-tree-dry-run"])
def test_an_evaluation_that_does_not_fit_is_refused_before_training(stock: Stock, tmp_path: Path, dry: str) -> None:
    """Not when it comes, hours later, before its step's checkpoint; a dry run needs no --train-iters to know."""
    loners = write_rows(tmp_path / "loners.jsonl", ({"tokens": [index] * 60} for index in range(2 * BATCH)))
    train = TRAIN.replace(f"--train-iters {ITERATIONS} ", "") if dry else TRAIN
    evaluate = f"--prefix-tree-valid-data-path {loners} --eval-iters 1 --prefix-tree-max-tokens 200 {dry}"
    run = megatron(ENTRY, CPU, MODEL, train, FOLDED, stock.data, evaluate)
    assert run.status != 0
    (line,) = [line for line in run.output.splitlines() if line.startswith("error: ")]
    assert f"the first of these samples is {loners}:1)" in line
    assert not run.losses


@pytest.mark.parametrize("form", ["jsonl", "parquet"])
def test_a_dry_run_looks_at_all_of_a_streamed_epoch(tmp_path: Path, form: str) -> None:
    data = tmp_path / f"late.{form}"
    rows = [[1, 2]] * BATCH + [[row] * 60 for row in range(BATCH)]
    place = f"{data}:{BATCH + 1}"
    if form == "parquet":
        pyarrow.parquet.write_table(pyarrow.table({"tokens": rows}), data, row_group_size=3)
        place = f"{data} row {BATCH}"
    else:
        data.write_text("".join(f'{{"tokens": {row}}}\n' for row in rows))
    streamed = f"--prefix-tree-data-path {data} --prefix-tree-streaming --prefix-tree-order file"
    run = megatron(ENTRY, CPU, MODEL, TRAIN, FOLDED, streamed, "--prefix-tree-max-tokens 64 --prefix-tree-dry-run")
    assert run.status != 0
    (line,) = [line for line in run.output.splitlines() if line.startswith("error: ")]
    assert f"the first of these samples is {place})" in line


def test_mistake_inside_a_step_gets_one_sentence(tmp_path: Path) -> None:
    """Streamed samples are read while the job trains."""
    data = tmp_path / "late.jsonl"
    rows = [[1, 2]] * BATCH + [[row] * 60 for row in range(BATCH)]
    data.write_text("".join(f'{{"tokens": {row}}}\n' for row in rows))
    streamed = f"--prefix-tree-data-path {data} --prefix-tree-streaming --prefix-tree-order file"
    run = megatron(ENTRY, CPU, MODEL, TRAIN, FOLDED, streamed, "--prefix-tree-max-tokens 64")
    assert run.status == 2
    (line,) = [line for line in run.output.splitlines() if line.startswith("error: ")]
    assert f"the first of these samples is {data}:{BATCH + 1})" in line
    assert sorted(run.iterations) == [1]
    assert "Traceback" not in run.output


def test_dry_run_names_idle_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Equal samples are computed once, by one rank."""
    data = tmp_path / "equal.jsonl"
    data.write_text('{"tokens": [1, 2, 3]}\n' * BATCH)
    monkeypatch.setenv("WORLD_SIZE", "4")
    arguments = (*CPU.split(), *MODEL.split(), *TRAIN.split(), *FOLDED.split(), "--prefix-tree-data-path", str(data))
    done = run_process([sys.executable, *ENTRY, *arguments, "--prefix-tree-dry-run"], timeout=400, code=0)
    assert "3 of 4 data-parallel ranks have no work (1, 2, 3): use fewer ranks, or raise --global-" in done.stdout


def test_dry_run_folds_the_first_step_in_its_order(stock: Stock, tmp_path: Path) -> None:
    lines = [[sample] for sample in read_samples(stock.data.split()[1])]
    data = f"--prefix-tree-data-path {stock.data.split()[1]} --prefix-tree-order folded"
    run = trained(ENTRY, CPU, MODEL, TRAIN, FOLDED, data, "--prefix-tree-dry-run")
    step = SampleOrder(lines, seed=1234, order="folded", step=BATCH).take(0, BATCH)
    assert f"first step: {sum(map(len, step))} logical tokens" in run.output


def test_dry_run_pads_the_vocabulary_without_a_tokenizer(stock: Stock) -> None:
    unpadded = MODEL.replace(f"--padded-vocab-size {VOCAB} --vocab-size {VOCAB}", "--tokenizer-type NullTokenizer")
    run = trained(ENTRY, CPU, unpadded, f"--vocab-size {VOCAB}", TRAIN, FOLDED, stock.data, "--prefix-tree-dry-run")
    assert "first step: " in run.output
    run = megatron(ENTRY, CPU, unpadded, TRAIN, FOLDED, stock.data, "--prefix-tree-dry-run")
    assert run.status == 2
    assert "--prefix-tree-dry-run builds no tokenizer; give --vocab-size or --padded-vocab-size" in run.output


def test_dry_run_finds_unset_sizes(stock: Stock) -> None:
    """They fill the budget; a job with them has the losses of the job without folding."""
    left_out = FOLDED.replace("--micro-batch-size 4", "")
    model = MODEL.replace("--seq-length 64 ", "")
    run = trained(ENTRY, CPU, model, TRAIN, left_out, stock.data, "--prefix-tree-dry-run")
    (sizes,) = re.findall(r"^sizes that the data decides: (.*)$", run.output, flags=re.MULTILINE)
    longest = max(map(len, read_samples(stock.data.split()[1])))
    size = int(re.fullmatch(rf"--micro-batch-size (\d+) --seq-length {longest}", sizes)[1])
    job = trained(ENTRY, CPU, model, TRAIN, left_out, sizes, stock.data, "--exit-interval 3")
    assert {step: job.losses[step] for step in (1, 2, 3)} == pytest.approx(
        {step: stock.losses[step] for step in (1, 2, 3)}, rel=LOSS
    )
    given = trained(ENTRY, CPU, MODEL, TRAIN, left_out, "--micro-batch-size 1", stock.data, "--prefix-tree-dry-run")
    assert f"fit every step: use --micro-batch-size {size}\n" in given.output
    assert "micro-batches with samples use " in given.output
    assert "sizes that the data decides" not in given.output


def test_dry_run(stock: Stock) -> None:
    run = trained(ENTRY, CPU, MODEL, TRAIN, FOLDED, stock.data, "--prefix-tree-dry-run")
    assert f"{BATCH} a step, in 4 micro-batches on each of 1 data-parallel ranks" in run.output
    samples = read_samples(stock.data.split()[1])[:BATCH]
    work = ModelWork.from_dimensions(
        num_layers=4,
        hidden_size=32,
        ffn_hidden_size=64,  # Megatron's default with SwiGLU: two thirds of four times the hidden size, in 64s
        num_attention_heads=4,
        num_query_groups=2,
        vocab_size=VOCAB,
        fused_head=True,
    )
    cost_model = CostModel.from_work(work)
    plan = plan_step(samples, max_tokens=400, micro_batches=4, cost_model=cost_model)
    ratio = sum(map(len, samples)) / sum(map(sum, plan.physical_tokens))
    assert f"fold ratio {ratio:.2f}" in run.output
    layouts = [fold([samples[index] for index in batch]) for rank in plan.micro_batches for batch in rank]
    assert f"first step: expected speed-up {work.expected_speedup(layouts)}" in run.output
    assert "weights, gradients, optimizer" in run.output
    assert "no work" not in run.output
    assert not run.losses
