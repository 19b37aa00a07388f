"""Mistakes on the command line of Megatron-LM's door, reported before Megatron-LM or torch is imported."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from harness.hf_sources import CONFIG, write_tensors

from mcore_prefix_tree.utils.inputs import TRACKER

# Starts the door with one command line after the other, in one interpreter, and prints how each ended.
PROGRAM = """
import contextlib, io, json, os, sys
from unittest import mock
from mcore_prefix_tree.pretrain_gpt import HYBRID, RL, main
for script, arguments, environment in json.load(sys.stdin):
    sys.argv, said, err = [script, *arguments], io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(err), mock.patch.dict(os.environ, environment):
        try:
            main(script, "a.room.that.no.refused.job.comes.to")
            code = 0
        except SystemExit as end:
            code = end.code
        except ModuleNotFoundError as error:
            code = f"passed: {error.name}"
    loaded = sorted({"torch", "megatron.core", "megatron.training", "transformers"} & set(sys.modules))
    print(json.dumps({"code": code, "out": said.getvalue(), "err": err.getvalue(), "loaded": loaded}))
"""

GPT, HYBRID, RL = "pretrain_gpt.py", "pretrain_hybrid.py", "train_rl.py"
LAUNCHED = {"MASTER_ADDR": "localhost"}
DRY = "--prefix-tree-dry-run"
# A job without early errors; PATH stands for a file of samples.
JOB = (
    "--prefix-tree --prefix-tree-data-path PATH --prefix-tree-max-tokens 64 --attention-dropout 0 --hidden-dropout 0 "
    "--vocab-size 128 --no-gradient-accumulation-fusion"
)
LATENT = "--multi-latent-attention --tensor-model-parallel-size 2 --transformer-impl local"

# Script, arguments added to the job (or after "only", all of them), and the start of the sentence.
MISTAKES = [
    (
        GPT,
        "--prefix-tree-max-token 3",
        "--prefix-tree-max-token: there is no such argument, did you mean --prefix-tree-m",
    ),
    (
        GPT,
        "--prefix_tree_order file",
        "--prefix_tree_order: there is no such argument, did you mean --prefix-tree-order?",
    ),
    (GPT, "--prefix-tree-zzzzz", "--prefix-tree-zzzzz: there is no such argument"),
    (GPT, "--prefix-tree-order sorted", "argument --prefix-tree-order: invalid choice: 'sorted'"),
    (GPT, "--prefix-tree-max-tokens 0", "argument --prefix-tree-max-tokens: input should be greater than 0"),
    (GPT, "--prefix-tree-max-tokens lots", "argument --prefix-tree-max-tokens: 'lots' is not a number"),
    (GPT, "--prefix-tree-data-path", "argument --prefix-tree-data-path: expected at least one argument"),
    (GPT, "--prefix-tree-data-path nope.jsonl", "nope.jsonl: no such file in "),
    (GPT, "--prefix-tree-valid-data-path nope/*.jsonl", "nope/*.jsonl: this glob matches no file in "),
    (GPT, "--prefix-tree-order folded --prefix-tree-streaming", "--prefix-tree-order=folded sorts all samples in mem"),
    (GPT, "--prefix-tree-objective-options {", "argument --prefix-tree-objective-options: '{' is not JSON (Expecting "),
    (GPT, "--prefix-tree-objective-options 3", "argument --prefix-tree-objective-options: '3' is not a JSON object"),
    (GPT, '--prefix-tree-objective-options {"kl":1}', "--prefix-tree-objective-options.kl: "),
    (GPT, '--prefix-tree-objective distill --prefix-tree-objective-options {"teacher":"full"}', "--prefix-tree-"),
    (GPT, "--prefix-tree-attention-backend nope", "attention backend 'nope' does not exist; "),
    (GPT, "--prefix-tree-length-buckets 8 16", "--prefix-tree-length-buckets: "),
    (GPT, "--prefix-tree-tokenizer mistral-v9", "tokenizer 'mistral-v9' is neither a folder nor one of "),
    (GPT, "--prefix-tree-hf no/folder", "--prefix-tree-hf"),
    (GPT, "--prefix-tree-hf no/folder --use-checkpoint-args", "--use-checkpoint-args and --prefix-tree-hf both decide"),
    (GPT, f"--use-checkpoint-args {DRY}", "--prefix-tree-dry-run does not read --use-checkpoint-args; "),
    (GPT, "--prefix-tree-score s.jsonl", "--prefix-tree-score needs --global-batch-size, "),
    (GPT, "--prefix-tree-score s.jsonl --global-batch-size 4 --load no/folder", "--load no/folder holds no checkpoint"),
    (GPT, "--prefix-tree-score-all-tokens", "--prefix-tree-score-all-tokens needs --prefix-tree-score FILE"),
    (GPT, "--context-parallel-size 2", "prefix-tree training does not support --context-parallel-size 2: "),
    (GPT, "--context-parallel-size two", "argument --context-parallel-size: invalid int value: 'two'"),
    (GPT, "--attention-dropout 0.1", "prefix-tree training does not support --attention-dropout 0.1: "),
    (GPT, "--hidden-dropout .5", "prefix-tree training does not support --hidden-dropout 0.5: "),
    (GPT, "--spec os", "--spec os: give a module and the name of a spec in it; for example --spec mcore_prefix_tree."),
    (GPT, "--spec no_such_package layer", "--spec no_such_package layer: there is no module no_such_package; for exam"),
    (GPT, "--mock-data", "prefix-tree training does not support --mock-data: "),
    (GPT, "--data-path a b", "prefix-tree training does not support --data-path: "),
    (GPT, "--fp16", "prefix-tree training does not support --fp16: "),
    (GPT, "--transformer-impl=inference_optimized", "prefix-tree training does not support --transformer-impl infer"),
    (GPT, "--num-experts 4", "prefix-tree training does not support --moe-token-dispatcher-type allgather: "),
    (GPT, "--dataloader-type cyclic", "prefix-tree training does not support --dataloader-type cyclic: "),
    (
        GPT,
        "--experimental-attention-variant gated_delta_net --transformer-impl local",
        "prefix-tree training does not support --experimental-attention-variant gated_delta_net with --transf",
    ),
    (GPT, LATENT, "prefix-tree training does not support --transformer-impl local with --multi-latent-attention"),
    (GPT, "--yaml-cfg model.yaml", "prefix-tree training does not support --yaml-cfg: give the arguments on the c"),
    (GPT, "only --prefix-tree --yaml-cfg model.yaml", "prefix-tree training does not support --yaml-cfg: "),
    (GPT, "only --prefix-tree --attention-dropout 0 --hidden-dropout 0", "--prefix-tree needs --prefix-tree-data-path"),
    (GPT, "only --prefix-tree", "prefix-tree training does not support --attention-dropout 0.1: "),
    (
        GPT,
        f"only {JOB.replace(' --vocab-size 128', '')}",
        "the vocabulary is not known: give --prefix-tree-tokenizer",
    ),
    (GPT, "only --prefix-tree-max-tokens 8", "--prefix-tree-max-tokens needs --prefix-tree, which is missing"),
    (GPT, "only --prefix-trees", "--prefix-trees: there is no such argument, did you mean --prefix-tree?"),
    (GPT, "only --prefix-tree=1", "--prefix-tree=1: there is no such argument, did you mean --prefix-tree?"),
    (GPT, "--hybrid-layer-pattern *-", "--hybrid-layer-pattern is an argument of pretrain_hybrid.py; "),
    (HYBRID, "--num-layers 2", "pretrain_hybrid.py needs --hybrid-layer-pattern"),
    (
        HYBRID,
        "--hybrid-layer-pattern *-*- --context-parallel-size 2",
        "prefix-tree training does not support --context",
    ),
    (RL, "only --prefix-tree", "--prefix-tree needs --perform-rl-step here"),
    (RL, "only --prefix-tree --perform-rl-step --prefix-tree-sharing all", "--prefix-tree-sharing: there is no such a"),
    (
        RL,
        "only --prefix-tree --perform-rl-step --attention-dropout 0 --hidden-dropout 0 --rl-training-cuda-graphs",
        "prefix-tree training does not support --rl-training-cuda-graphs: ",
    ),
    (
        RL,
        "only --prefix-tree --perform-rl-step --attention-dropout 0 --hidden-dropout 0 --mtp-num-layers 1",
        "prefix-tree training does not support --mtp-num-layers: ",
    ),
]
# Jobs that only Megatron-LM's parser, a checkpoint or the model can judge.
PASSED = [
    (GPT, ""),
    (GPT, "--use-checkpoint-args --attention-dropout 0.1 --hidden-dropout 0.1"),
    (GPT, f"only {JOB.replace(' --attention-dropout 0 --hidden-dropout 0', '')} --use-checkpoint-args"),
    (GPT, "--hybrid-attention-ratio 0.0 --log-interval 1 --spec mcore_prefix_tree.cpu.hybrid hybrid_stack"),
    (GPT, "--spec os system"),
    (GPT, "--not-an-argument-of-this-version 3 --lr -1"),
    (GPT, "--num-experts 4 --moe-token-dispatcher-type=alltoall --rampup-batch-size 8 4 64"),
    (HYBRID, "--hybrid-layer-pattern *-*-"),
    (
        RL,
        "only --prefix-tree --perform-rl-step --attention-dropout 0 --hidden-dropout 0 --mock-data "
        "--no-gradient-accumulation-fusion",
    ),
]
HELP = (["--help"], ["-h"], ["--prefix-tree", "--help"], [])


def words(text: str, data: Path) -> list[str]:
    added = text.removeprefix("only ") if text.startswith("only ") else f"{JOB} {text}"
    return [str(data) if word == "PATH" else word for word in added.split()]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of samples, and a fake checkout, in which every import fails."""
    root = tmp_path_factory.mktemp("job")
    for name in (GPT, HYBRID, RL):
        (root / name).write_text("raise AssertionError")
    for package in ("training", "core"):
        (root / "megatron" / package).mkdir(parents=True)
        (root / "megatron" / package / "__init__.py").write_text("raise ModuleNotFoundError(name='megatron')")
    (root / "megatron" / "training" / "training.py").touch()
    (root / "data.jsonl").write_text('{"tokens": [1, 2, 3]}\n')
    return root


def ended(root: Path, cases: list[tuple[str, list[str], dict[str, str]]]) -> list[dict[str, object]]:
    """Exit of each command line, and the modules imported by then."""
    environment = {name: value for name, value in os.environ.items() if name != "MASTER_ADDR"}
    result = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        input=json.dumps(cases),
        capture_output=True,
        text=True,
        cwd=root,
        env=environment | {"MEGATRON_LM_PATH": str(root)},
    )
    assert result.returncode == 0, result.stderr
    return [json.loads(line) for line in result.stdout.splitlines()]


@pytest.fixture(scope="module")
def refused(folder: Path) -> list[dict[str, object]]:
    cases = [(script, words(text, folder / "data.jsonl"), LAUNCHED) for script, text, _ in MISTAKES]
    return ended(folder, cases)


@pytest.mark.parametrize("index", range(len(MISTAKES)), ids=[f"{script} {text}" for script, text, _ in MISTAKES])
def test_mistakes_are_reported_before_anything_is_imported(refused: list[dict[str, object]], index: int) -> None:
    found = refused[index]
    assert str(found["err"]).startswith(f"error: {MISTAKES[index][2]}")
    assert str(found["err"]).count("\n") == 1
    assert found["code"] == 2
    assert found["loaded"] == []


def test_a_job_without_a_launcher_is_refused_early(folder: Path) -> None:
    (found,) = ended(folder, [(GPT, words("", folder / "data.jsonl"), {})])
    assert str(found["err"]).startswith("error: MASTER_ADDR is not set: start the job with torchrun")
    assert (found["code"], found["loaded"]) == (2, [])


def test_scores_replace_no_file_that_is_read(folder: Path) -> None:
    """Named by itself, through links and a detour; a file of another name passes."""
    options = {
        "--load": ("run", "iter_0000002/metadata.json", "iter_0000002/mp_rank_00/model_optim_rng.pt", TRACKER),
        "--prefix-tree-score-reference": ("reference", "release/.metadata", TRACKER),
        "--prefix-tree-hf": ("model", "config.json", "model.safetensors", "tokenizer.json"),
        "--prefix-tree-tokenizer": ("tokenizer", "tokenizer.json", "additional_chat_templates/tools.jinja"),
    }
    paths = [folder / first / name for first, *names in options.values() for name in names]
    for path in paths:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("1")
    (folder / "model" / "config.json").write_text(json.dumps(CONFIG))
    write_tensors(folder / "model" / "model.safetensors", ["a"])
    files = {"--tokenizer-model": "own.model", "--vocab-file": "vocab.json", "--merge-file": "merges.txt"}
    paths += [folder / name for name in (*files.values(), "data.jsonl")]
    for name in files.values():
        (folder / name).touch()
    before = [path.read_bytes() for path in paths]
    outputs = [path for path in paths if path.suffix in (".json", ".jsonl")]
    for number, path in enumerate(paths):
        (folder / f"soft{number}.jsonl").symlink_to(path)
        os.link(path, folder / f"hard{number}.jsonl")
        outputs += [folder / f"soft{number}.jsonl", folder / f"hard{number}.jsonl"]
    outputs.append(folder / "run" / ".." / "run" / "iter_0000002" / "metadata.json")
    given = [f"{option} {first}" for option, (first, *_) in options.items()]
    given += [f"{option} {name}" for option, name in files.items()]
    job = words(f"--global-batch-size 4 {' '.join(given)}", folder / "data.jsonl")
    ends = ended(folder, [(GPT, [*job, "--prefix-tree-score", str(path)], LAUNCHED) for path in outputs])
    for path, end in zip(outputs, ends, strict=True):
        assert end["err"] == (
            f"error: --prefix-tree-score {path}: is read by this command, which would replace it; name another file\n"
        )
        assert (end["code"], end["loaded"]) == (2, [])
    assert [path.read_bytes() for path in paths] == before
    end, kept = ended(
        folder,
        [
            (GPT, [*job, "--prefix-tree-score", str(folder / name)], LAUNCHED)
            for name in ("run/scored.jsonl", "model_of_another_job.json")
        ],
    )
    assert str(end["code"]).startswith("passed: "), end
    assert str(kept["code"]).startswith("passed: "), kept


def test_arguments_for_megatron_lm_pass(folder: Path) -> None:
    # They end at the import of Megatron-LM, which fails in this checkout.
    ends = ended(folder, [(script, words(text, folder / "data.jsonl"), LAUNCHED) for script, text in PASSED])
    for case, end in zip(PASSED, ends, strict=True):
        assert str(end["code"]).startswith("passed: "), (case, end)


def test_help_imports_nothing_and_names_the_rest(folder: Path) -> None:
    cases = [(script, arguments, {}) for script in (GPT, HYBRID, RL) for arguments in HELP]
    for (script, arguments, _), end in zip(cases, ended(folder, cases), strict=True):
        assert (end["code"], end["loaded"]) == (0 if arguments else 2, []), (script, arguments)
        assert "\nprefix-tree:\n" in str(end["out"])
        assert "--prefix-tree-share" in str(end["out"])
        assert f"python {script} --help in its checkout" in str(end["out"])
