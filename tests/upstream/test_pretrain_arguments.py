"""The group of arguments and its refusals, without Megatron-LM: a parser with the few of its arguments that matter."""

from __future__ import annotations

import argparse
from pathlib import Path
from types import SimpleNamespace

import pytest

from mcore_prefix_tree.arguments.flags import add_argument_group
from mcore_prefix_tree.arguments.refusals import (
    ArgumentError,
    check_arguments,
    check_unused,
)
from mcore_prefix_tree.pretrain_gpt import use_megatron_lm

FOLDED = ("--prefix-tree", "--prefix-tree-data-path", "a.jsonl", "b.jsonl", "--prefix-tree-max-tokens", "100")


def parse(*arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--calculate-per-token-loss", action="store_true")
    parser.add_argument("--dataloader-type", choices=["single", "cyclic", "external"])
    parser.add_argument("--num-experts", type=int)
    parser.add_argument("--context-parallel-size", type=int, default=1)
    parser.add_argument("--attention-dropout", type=float, default=0.0)
    parser.add_argument("--hidden-dropout", type=float, default=0.0)
    parser.add_argument("--yaml-cfg")
    parser.add_argument("--moe-token-dispatcher-type", default="allgather")
    parser.add_argument("--transformer-impl", default="transformer_engine")
    parser.add_argument("--position-embedding-type", default="rope")
    for flag in (
        *("--mock-data", "--sft", "--full-validation", "--use-torch-fsdp2", "--fp16", "--use-checkpoint-args"),
        *("--reset-position-ids", "--reset-attention-mask", "--eod-mask-loss", "--ddp-average-in-collective"),
        "--defer-embedding-wgrad-compute",
    ):
        parser.add_argument(flag, action="store_true")
    parser.add_argument("--deterministic-mode", action="store_true")
    parser.add_argument("--data-path", nargs="*")
    parser.add_argument("--logits-load-dir")
    parser.add_argument("--gtp-weight-remat-size", type=int)
    parser.add_argument("--non-persistent-ckpt-type")
    parser.add_argument("--iterations-to-skip", nargs="+", type=int, default=[])
    assert add_argument_group(parser) is parser
    return parser.parse_args(arguments)


def test_without_the_flag_nothing_else_changes() -> None:
    args = parse()
    assert args.prefix_tree is False
    assert args.calculate_per_token_loss is False
    assert args.dataloader_type is None


def test_the_flag_implies_one_denominator_for_the_step() -> None:
    args = parse(*FOLDED)
    assert args.prefix_tree is True
    assert args.calculate_per_token_loss is True
    assert args.dataloader_type == "external"
    assert args.prefix_tree_data_path == ["a.jsonl", "b.jsonl"]
    assert args.prefix_tree_order == "shuffled"
    assert args.prefix_tree_attention_backend == "auto"
    assert (args.prefix_tree_share, args.prefix_tree_min_shared_tokens) == ("all", 0)
    assert args.prefix_tree_length_buckets is None
    assert args.prefix_tree_deterministic_attention is False
    assert parse(*FOLDED, "--prefix-tree-deterministic-attention").prefix_tree_deterministic_attention is True
    assert args.prefix_tree_fused_head is True
    assert parse(*FOLDED, "--prefix-tree-no-fused-head").prefix_tree_fused_head is False
    check_arguments(args)


@pytest.mark.parametrize(
    "arguments",
    [
        ("--dataloader-type", "external"),
        ("--num-experts", "4", "--moe-token-dispatcher-type", "alltoall"),
        ("--transformer-impl", "local"),
        ("--deterministic-mode",),
        ("--prefix-tree-deterministic-attention",),
        ("--defer-embedding-wgrad-compute", "--prefix-tree-no-fused-head"),
        ("--attention-dropout", "0.1", "--hidden-dropout", "0.1", "--use-checkpoint-args"),
    ],
)
def test_accepted(arguments: tuple[str, ...]) -> None:
    check_arguments(parse(*FOLDED, *arguments))


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("--mock-data",), "--mock-data"),
        (("--data-path", "x"), "--data-path"),
        (("--sft",), "--sft"),
        (("--full-validation",), "--eval-iters"),
        (("--iterations-to-skip", "3"), "--iterations-to-skip"),
        (("--use-torch-fsdp2",), "--use-distributed-optimizer"),
        (("--fp16",), "--bf16"),
        (("--reset-position-ids",), "--reset-position-ids"),
        (("--reset-attention-mask",), "--reset-attention-mask"),
        (("--eod-mask-loss",), "--eod-mask-loss: losses are masked by the data"),
        (("--ddp-average-in-collective",), "--ddp-average-in-collective"),
        (("--defer-embedding-wgrad-compute",), "give --prefix-tree-no-fused-head"),
        (("--dataloader-type", "cyclic"), "--dataloader-type cyclic"),
        (("--num-experts", "4"), "--moe-token-dispatcher-type alltoall"),
        (("--position-embedding-type", "mrope"), "mrope"),
        (("--transformer-impl", "inference_optimized"), "inference_optimized"),
        (("--non-persistent-ckpt-type", "local"), "--non-persistent-ckpt-type local"),
        (("--logits-load-dir", "x"), "--logits-load-dir"),
        (("--gtp-weight-remat-size", "2"), "--tensor-parallel-num-weight-shards"),
        (("--context-parallel-size", "2"), "--context-parallel-size 2: a tree is not split"),
        (("--attention-dropout", "0.1"), "--attention-dropout 0.1: samples that share a token"),
        (("--hidden-dropout", "0.1"), "give --hidden-dropout 0"),
        (("--prefix-tree-data-path", "-"), "--prefix-tree-data-path -"),
        (("--prefix-tree-attention-backend", "nope"), "'nope'"),
    ],
)
def test_refused(arguments: tuple[str, ...], named: str) -> None:
    with pytest.raises(ValueError, match="nope") if named == "'nope'" else pytest.raises(ArgumentError) as caught:
        check_arguments(parse(*FOLDED, *arguments))
    assert named in str(caught.value)


def test_every_fault_is_named_at_once() -> None:
    with pytest.raises(ArgumentError) as caught:
        check_arguments(parse(*FOLDED, "--mock-data", "--sft"))
    assert "--mock-data" in str(caught.value)
    assert "--sft" in str(caught.value)


@pytest.mark.parametrize("missing", ["--prefix-tree-data-path", "--prefix-tree-max-tokens"])
def test_flag_requires_its_arguments(missing: str) -> None:
    given = {"--prefix-tree-data-path": "a.jsonl", "--prefix-tree-max-tokens": "100"}
    del given[missing]
    with pytest.raises(ArgumentError, match=f"--prefix-tree needs {missing}"):
        check_arguments(parse("--prefix-tree", *(word for pair in given.items() for word in pair)))


def test_the_group_without_the_flag_is_refused() -> None:
    check_unused(["--lr", "1"])
    with pytest.raises(ArgumentError, match="--prefix-tree-max-tokens needs --prefix-tree"):
        check_unused(["--lr", "1", "--prefix-tree-max-tokens=5"])


def test_help_has_a_separate_group() -> None:
    text = add_argument_group(argparse.ArgumentParser()).format_help()
    group = text.split("\nprefix-tree:\n")[1]
    assert "--prefix-tree-dry-run" in group
    assert "--global-batch-size" in group


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--prefix-tree-min-shared-tokens", "-1"), "input should be greater than or equal to 0 (given '-1')"),
        (("--prefix-tree-max-tokens", "0"), "input should be greater than 0 (given '0')"),
    ],
)
def test_a_number_out_of_range_is_refused(
    words: tuple[str, str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        parse(*FOLDED, *words)
    assert f"argument {words[0]}: {says}" in capsys.readouterr().err


def checkout(folder: Path, requires_python: str) -> Path:
    (folder / "megatron" / "training").mkdir(parents=True)
    (folder / "megatron" / "training" / "training.py").write_text("")
    (folder / "pyproject.toml").write_text(f"[project]\nrequires-python = '{requires_python}'\n")
    return folder


def test_a_checkout_for_a_newer_python_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"needs Python 3\.99 or newer, this is 3\.\d+$"):
        use_megatron_lm(str(checkout(tmp_path, ">=3.99")))


def test_a_folder_that_is_no_checkout_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"--megatron-lm-path: .* is not a checkout of Megatron-LM"):
        use_megatron_lm(str(tmp_path))
    monkeypatch.setenv("MEGATRON_LM_PATH", str(tmp_path))
    with pytest.raises(ValueError, match=r"MEGATRON_LM_PATH: .* is not a checkout of Megatron-LM"):
        use_megatron_lm(None)


def test_the_training_loop_of_a_wheel_is_no_checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Newer wheels of megatron-core carry it, without its compiled part."""
    monkeypatch.delenv("MEGATRON_LM_PATH", raising=False)
    origin = checkout(tmp_path, ">=3.10") / "megatron" / "training" / "__init__.py"
    monkeypatch.setattr("mcore_prefix_tree.pretrain_gpt.find_spec", lambda name: SimpleNamespace(origin=str(origin)))
    clones = r"core_v0\.16\.1, core_v0\.19\.0 or main and name it with --megatron-lm-path DIR"
    with pytest.raises(ValueError, match=clones):
        use_megatron_lm(None)
