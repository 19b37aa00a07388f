"""The rules of ``--prefix-tree``'s arguments, and what the door says before it imports Megatron-LM."""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from harness.commands import run_process
from harness.hf_sources import CONFIG, write_tensors

from mcore_prefix_tree.arguments import refusals
from mcore_prefix_tree.arguments.flags import add_argument_group, add_rl_argument_group, readable_arguments
from mcore_prefix_tree.pretrain_gpt import use_megatron_lm
from mcore_prefix_tree.utils.inputs import TRACKER

# Starts the door with one command line after the other, in one interpreter, and prints how each ended.
PROGRAM = """
import contextlib, io, json, os, sys
from mcore_prefix_tree.pretrain_gpt import main
for script, arguments in json.load(sys.stdin):
    sys.argv, said, err = [script, *arguments], io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(err):
        try:
            main(script, "a.room.that.no.refused.job.comes.to")
        except SystemExit as end:
            code = end.code
    loaded = sorted({"torch", "megatron.core", "megatron.training", "transformers"} & set(sys.modules))
    print(json.dumps({"code": code, "out": said.getvalue(), "err": err.getvalue(), "loaded": loaded}))
"""

GPT, HYBRID, RL = "pretrain_gpt.py", "pretrain_hybrid.py", "train_rl.py"
# Megatron-LM's arguments that the rules read, as its parser sets them.
MEGATRON = argparse.ArgumentParser()
for name, default in {
    "tensor_model_parallel_size": 1, "pipeline_model_parallel_size": 1, "context_parallel_size": 1,
    "attention_dropout": 0.1, "hidden_dropout": 0.1, "num_experts": 0, "global_batch_size": 0, "vocab_size": 0,
    "transformer_impl": "transformer_engine", "moe_token_dispatcher_type": "allgather", "ckpt_format": "torch_dist",
    "dataloader_type": "external", "experimental_attention_variant": None, "load": None, "tokenizer_model": None,
    "vocab_file": None, "merge_file": None, "mtp_num_layers": 0, "mtp_loss_scaling_factor": 0.1,
    "logits_load_dir": None, "gtp_weight_remat_size": 0, "non_persistent_ckpt_type": None,
    "position_embedding_type": None, "multi_latent_attention": False, "use_checkpoint_args": False, "mock_data": False,
    "rl_training_cuda_graphs": False, "perform_rl_step": False, "fp16": False, "sft": False, "eod_mask_loss": False,
    "full_validation": False, "use_torch_fsdp2": False, "reset_position_ids": False, "reset_attention_mask": False,
    "ddp_average_in_collective": False, "defer_embedding_wgrad_compute": False, "deterministic_mode": False,
}.items():  # fmt: skip
    option = f"--{name.replace('_', '-')}"
    if default is False:
        MEGATRON.add_argument(option, action="store_true")
    else:
        MEGATRON.add_argument(option, type=str if default is None else type(default), default=default or None)
MEGATRON.add_argument("--iterations-to-skip", nargs="+", type=int, default=[])
MEGATRON.add_argument("--data-path", nargs="*")
MEGATRON.set_defaults(
    calculate_per_token_loss=True, spec=None, yaml_cfg=None, tokenizer_type=None, padded_vocab_size=None
)
MODEL = "--attention-dropout 0 --hidden-dropout 0 --vocab-size 128"
JOB = f"--prefix-tree --prefix-tree-data-path PATH --prefix-tree-max-tokens 64 {MODEL}"
# Arguments added to the job, and the start of the sentence.
RULES = [
    ("--prefix-tree-order sorted", "argument --prefix-tree-order: invalid choice: 'sorted'"),
    ("--prefix-tree-max-tokens 0", "argument --prefix-tree-max-tokens: input should be greater than 0"),
    ("--prefix-tree-max-tokens lots", "argument --prefix-tree-max-tokens: 'lots' is not a number"),
    ("--prefix-tree-data-path nope.jsonl", "nope.jsonl: no such file in "),
    ("--prefix-tree-valid-data-path nope/*.jsonl", "nope/*.jsonl: this glob matches no file in "),
    ("--prefix-tree-order folded --prefix-tree-streaming", "--prefix-tree-order=folded sorts all samples in mem"),
    ("--prefix-tree-objective-options {", "argument --prefix-tree-objective-options: '{' is not JSON (Expecting "),
    ("--prefix-tree-objective-options 3", "argument --prefix-tree-objective-options: '3' is not a JSON object"),
    ('--prefix-tree-objective-options {"kl":1}', "--prefix-tree-objective-options.kl: "),
    ('--prefix-tree-objective distill --prefix-tree-objective-options {"teacher":"full"}', "--prefix-tree-"),
    ("--prefix-tree-attention-backend nope", "attention backend 'nope' does not exist; "),
    ("--prefix-tree-hf no/folder --use-checkpoint-args", "--use-checkpoint-args and --prefix-tree-hf both decide"),
    ("--use-checkpoint-args --prefix-tree-dry-run", "--prefix-tree-dry-run does not read --use-checkpoint-args; "),
    ("--prefix-tree-score s.jsonl", "--prefix-tree-score needs --global-batch-size, "),
    ("--prefix-tree-score s.jsonl --global-batch-size 4 --load no/folder", "--load no/folder holds no checkpoint"),
    ("--prefix-tree-score-all-tokens", "--prefix-tree-score-all-tokens needs --prefix-tree-score FILE"),
    ("--prefix-tree-min-shared-tokens -1", "argument --prefix-tree-min-shared-tokens: input should be greater than or"),
    ("--prefix-tree-data-path -", "--prefix-tree-data-path -: every rank reads the data itself; write it to a file"),
]
# The same, after "prefix-tree training does not support ".
UNSUPPORTED = [
    ("--context-parallel-size 2", "--context-parallel-size 2: a tree is not split"),
    ("--attention-dropout 0.1", "--attention-dropout 0.1: samples that share a token"),
    ("--hidden-dropout .5", "--hidden-dropout 0.5: "),
    ("--mock-data", "--mock-data: "),
    ("--data-path a b", "--data-path: "),
    ("--fp16", "--fp16: not proven equal yet; use --bf16"),
    ("--transformer-impl=inference_optimized", "--transformer-impl inference_optimized"),
    ("--num-experts 4", "--moe-token-dispatcher-type allgather: "),
    ("--dataloader-type cyclic", "--dataloader-type cyclic: "),
    ("--experimental-attention-variant gated_delta_net --transformer-impl local", "--experimental-attention-variant"),
    (
        "--multi-latent-attention --tensor-model-parallel-size 2 --transformer-impl local",
        "--transformer-impl local with --multi-latent-attention",
    ),
    ("--sft", "--sft: losses are masked by the data here"),
    ("--full-validation", "--full-validation: use --eval-iters"),
    ("--iterations-to-skip 3", "--iterations-to-skip: Megatron skips by reading its own"),
    ("--use-torch-fsdp2", "--use-torch-fsdp2: not proven equal yet; use --use-distributed-optimizer"),
    ("--reset-position-ids", "--reset-position-ids: it belongs to Megatron's own data"),
    ("--reset-attention-mask", "--reset-attention-mask: it belongs to Megatron's own data"),
    ("--eod-mask-loss", "--eod-mask-loss: losses are masked by the data"),
    ("--ddp-average-in-collective", "--ddp-average-in-collective: a step's divisor is known only after it"),
    ("--defer-embedding-wgrad-compute", "--defer-embedding-wgrad-compute with the fused head"),
    ("--position-embedding-type mrope", "--position-embedding-type mrope: its positions are three-dimensional"),
    ("--non-persistent-ckpt-type local", "--non-persistent-ckpt-type local: "),
    ("--logits-load-dir x", "--logits-load-dir: it brings its own loss"),
    ("--gtp-weight-remat-size 2", "--tensor-parallel-num-weight-shards above the tensor-parallel size"),
    ("--mock-data --sft", "--mock-data: the data is --prefix-tree-data-path; remove it; nor --sft: losses are masked"),
]
RULES += [(text, f"prefix-tree training does not support {says}") for text, says in UNSUPPORTED]
RL_RULES = [
    ("--prefix-tree", "--prefix-tree needs --perform-rl-step here"),
    (
        "--prefix-tree --perform-rl-step --attention-dropout 0 --hidden-dropout 0 --rl-training-cuda-graphs",
        "prefix-tree training does not support --rl-training-cuda-graphs: ",
    ),
    (
        "--prefix-tree --perform-rl-step --attention-dropout 0 --hidden-dropout 0 --mtp-num-layers 1",
        "prefix-tree training does not support --mtp-num-layers: ",
    ),
]
# Script, arguments, and the start of the sentence.
DOORS = [
    (GPT, "--prefix-tree-max-tokens 8", "--prefix-tree-max-tokens needs --prefix-tree, which is missing"),
    (GPT, "--prefix-trees", "--prefix-trees: there is no such argument, did you mean --prefix-tree?"),
    (GPT, "--prefix-tree=1", "--prefix-tree=1: there is no such argument, did you mean --prefix-tree?"),
    (GPT, "--prefix-tree --hybrid-layer-pattern *-", "--hybrid-layer-pattern is an argument of pretrain_hybrid.py; "),
    (HYBRID, "--prefix-tree --num-layers 2", "pretrain_hybrid.py needs --hybrid-layer-pattern"),
]
HELP = (["--help"], ["-h"], ["--prefix-tree", "--help"], [])


def parse(text: str, data: Path, *, rl: bool = False) -> argparse.Namespace:
    parser = argparse.ArgumentParser(parents=[MEGATRON], add_help=False, allow_abbrev=False)
    (add_rl_argument_group if rl else add_argument_group)(parser)
    return parser.parse_args([str(data) if word == "PATH" else word for word in text.split()])


def check(args: argparse.Namespace) -> None:
    """Apply the rules in the order of ``mcore/megatron_lm/``."""
    refusals.check_checkpoint_args(args)
    refusals.check_arguments(args)
    refusals.check_score(args)
    refusals.check_data(args)
    refusals.check_vocabulary_known(args)


def said(capsys: pytest.CaptureFixture[str]) -> str:
    return capsys.readouterr().err.rpartition("error: ")[2]


@pytest.fixture
def data(tmp_path: Path) -> Path:
    path = tmp_path / "data.jsonl"
    path.write_text('{"tokens": [1, 2, 3]}\n')
    return path


@pytest.mark.parametrize(("text", "says"), RULES)
def test_a_mistake_is_named(data: Path, capsys: pytest.CaptureFixture[str], text: str, says: str) -> None:
    with pytest.raises(SystemExit) as ended, readable_arguments():
        check(parse(f"{JOB} {text}", data))
    assert ended.value.code == 2
    assert said(capsys).startswith(says)


@pytest.mark.parametrize(("text", "says"), RL_RULES)
def test_a_mistake_of_the_rl_loop_is_named(
    data: Path, capsys: pytest.CaptureFixture[str], text: str, says: str
) -> None:
    with pytest.raises(SystemExit), readable_arguments():
        refusals.check_rl_arguments(parse(text, data, rl=True))
    assert said(capsys).startswith(says)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "--use-checkpoint-args --attention-dropout 0.1 --hidden-dropout 0.1",
        "--num-experts 4 --moe-token-dispatcher-type=alltoall",
        "--transformer-impl local",
        "--deterministic-mode",
        "--prefix-tree-deterministic-attention",
        "--defer-embedding-wgrad-compute --prefix-tree-no-fused-head",
    ],
)
def test_a_job_that_can_run_passes(data: Path, text: str) -> None:
    check(parse(f"{JOB} {text}", data))


@pytest.mark.parametrize("missing", ["--prefix-tree-data-path PATH", "--prefix-tree-max-tokens 64"])
def test_the_flag_requires_its_arguments(data: Path, missing: str) -> None:
    with pytest.raises(refusals.ArgumentError, match=f"--prefix-tree needs {missing.split()[0]}"):
        refusals.check_arguments(parse(JOB.replace(missing, ""), data))


def test_the_flag_implies_one_denominator_for_the_step(data: Path) -> None:
    defaults = vars(parse(f"{JOB} --prefix-tree-data-path a.jsonl b.jsonl", data))
    wanted = {"data_path": ["a.jsonl", "b.jsonl"], "order": "shuffled", "attention_backend": "auto", "share": "all"}
    wanted |= {"min_shared_tokens": 0, "length_buckets": None, "deterministic_attention": False, "fused_head": True}
    assert {name: defaults[f"prefix_tree_{name}"] for name in wanted} == wanted
    MEGATRON.set_defaults(calculate_per_token_loss=False, dataloader_type=None)
    try:
        for text, folds in ((JOB, True), ("", False)):
            args = parse(text, data)
            assert (args.prefix_tree, args.calculate_per_token_loss) == (folds, folds)
            assert args.dataloader_type == ("external" if folds else None)
    finally:
        MEGATRON.set_defaults(calculate_per_token_loss=True, dataloader_type="external")
    args = parse(f"{JOB} --prefix-tree-deterministic-attention --prefix-tree-no-fused-head", data)
    assert (args.prefix_tree_deterministic_attention, args.prefix_tree_fused_head) == (True, False)


def test_help_has_a_separate_group() -> None:
    group = add_argument_group(argparse.ArgumentParser()).format_help().split("\nprefix-tree:\n")[1]
    assert "--prefix-tree-dry-run" in group
    assert "--global-batch-size" in group


def test_the_group_without_the_flag_is_refused() -> None:
    refusals.check_unused(["--lr", "1"])
    with pytest.raises(refusals.ArgumentError, match="--prefix-tree-max-tokens needs --prefix-tree"):
        refusals.check_unused(["--lr", "1", "--prefix-tree-max-tokens=5"])


def test_missing_launcher_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    with pytest.raises(refusals.ArgumentError, match=r"^MASTER_ADDR is not set: start the job with torchrun"):
        refusals.check_launched()


def test_scores_replace_no_file_that_is_read(tmp_path: Path, data: Path) -> None:
    """Named by itself, through links and a detour; a file of another name passes."""
    options = {
        "--load": ("run", "iter_0000002/metadata.json", "iter_0000002/mp_rank_00/model_optim_rng.pt", TRACKER),
        "--prefix-tree-score-reference": ("reference", "release/.metadata", TRACKER),
        "--prefix-tree-hf": ("model", "config.json", "model.safetensors", "tokenizer.json"),
        "--prefix-tree-tokenizer": ("tokenizer", "tokenizer.json", "additional_chat_templates/tools.jinja"),
    }
    paths = [tmp_path / first / name for first, *names in options.values() for name in names]
    for path in paths:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("1")
    (tmp_path / "model" / "config.json").write_text(json.dumps(CONFIG))
    write_tensors(tmp_path / "model" / "model.safetensors", ["a"])
    files = {"--tokenizer-model": "own.model", "--vocab-file": "vocab.json", "--merge-file": "merges.txt"}
    paths += [tmp_path / name for name in (*files.values(), "data.jsonl")]
    for name in files.values():
        (tmp_path / name).touch()
    outputs = [path for path in paths if path.suffix in (".json", ".jsonl")]
    for number, path in enumerate(paths):
        (tmp_path / f"soft{number}.jsonl").symlink_to(path)
        os.link(path, tmp_path / f"hard{number}.jsonl")
        outputs += [tmp_path / f"soft{number}.jsonl", tmp_path / f"hard{number}.jsonl"]
    outputs.append(tmp_path / "run" / ".." / "run" / "iter_0000002" / "metadata.json")
    given = [f"{option} {tmp_path / first}" for option, (first, *_) in options.items()]
    given += [f"{option} {tmp_path / name}" for option, name in files.items()]
    job = f"{JOB} --global-batch-size 4 {' '.join(given)} --prefix-tree-score"
    for path in outputs:
        with pytest.raises(ValueError, match="is read by this command, which would replace it; name another file"):
            refusals.check_score(parse(f"{job} {path}", data))
    for name in ("run/scored.jsonl", "model_of_another_job.json"):
        refusals.check_score(parse(f"{job} {tmp_path / name}", data))


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A fake checkout, in which every import fails."""
    for name in (GPT, HYBRID, RL):
        (tmp_path / name).write_text("raise AssertionError")
    (tmp_path / "megatron" / "training").mkdir(parents=True)
    (tmp_path / "megatron" / "training" / "training.py").touch()
    return tmp_path


def ended(root: Path, cases: list[tuple[str, list[str]]]) -> list[dict[str, object]]:
    """Return the exit of each command line, and the modules imported by then."""
    result = run_process(
        [sys.executable, "-c", PROGRAM], env={"MEGATRON_LM_PATH": str(root)}, input=json.dumps(cases), cwd=root, code=0
    )
    return [json.loads(line) for line in result.stdout.splitlines()]


def test_the_door_names_mistakes_before_it_imports_anything(checkout: Path) -> None:
    found = ended(checkout, [(script, text.split()) for script, text, _ in DOORS])
    for (*_, says), end in zip(DOORS, found, strict=True):
        assert str(end["err"]).startswith(f"error: {says}")
        assert (str(end["err"]).count("\n"), end["code"], end["loaded"]) == (1, 2, [])


def test_help_imports_nothing_and_names_the_rest(checkout: Path) -> None:
    cases = [(script, arguments) for script in (GPT, HYBRID, RL) for arguments in HELP]
    for (script, arguments), end in zip(cases, ended(checkout, cases), strict=True):
        assert (end["code"], end["loaded"]) == (0 if arguments else 2, []), (script, arguments)
        assert "\nprefix-tree:\n" in str(end["out"])
        assert "--prefix-tree-share" in str(end["out"])
        assert f"python {script} --help in its checkout" in str(end["out"])


def requiring(root: Path, python: str) -> str:
    (root / "pyproject.toml").write_text(f"[project]\nrequires-python = '{python}'\n")
    return str(root)


def test_a_checkout_for_a_newer_python_is_refused(checkout: Path) -> None:
    with pytest.raises(ValueError, match=r"needs Python 3\.99 or newer, this is 3\.\d+$"):
        use_megatron_lm(requiring(checkout, ">=3.99"))


def test_a_folder_that_is_no_checkout_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"--megatron-lm-path: .* is not a checkout of Megatron-LM"):
        use_megatron_lm(str(tmp_path))
    monkeypatch.setenv("MEGATRON_LM_PATH", str(tmp_path))
    with pytest.raises(ValueError, match=r"MEGATRON_LM_PATH: .* is not a checkout of Megatron-LM"):
        use_megatron_lm(None)


def test_the_training_loop_of_a_wheel_is_no_checkout(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Newer wheels of megatron-core carry it, without its compiled part."""
    monkeypatch.delenv("MEGATRON_LM_PATH", raising=False)
    (checkout / GPT).unlink()
    origin = str(Path(requiring(checkout, ">=3.10")) / "megatron" / "training" / "__init__.py")
    monkeypatch.setattr("mcore_prefix_tree.pretrain_gpt.find_spec", lambda name: SimpleNamespace(origin=origin))
    clones = r"core_v0\.16\.1, core_v0\.19\.0 or main and name it with --megatron-lm-path DIR"
    with pytest.raises(ValueError, match=clones):
        use_megatron_lm(None)
