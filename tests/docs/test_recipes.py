"""Every recipe and launcher: well formed, the same job from every launcher, and on Slurm the job after an end."""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from pathlib import Path

import pytest
from harness.commands import run_process
from recipe_launches import LAUNCH, RECIPES, ROOT, SIZES, Call, launch, slurm
from torch.distributed.run import parse_args as parse_torchrun

from mcore_prefix_tree.arguments.flags import add_argument_group
from mcore_prefix_tree.settings import load_recipe

SHELL_FILES = sorted([*RECIPES, *LAUNCH.iterdir()])
YAML_FILES = sorted((ROOT / "recipes").glob("*.yaml"))
ENTRY = "mcore_prefix_tree.pretrain_gpt"
each_recipe = pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)


def torchrun_of(call: Call) -> tuple[argparse.Namespace, list[str]]:
    """A call in torchrun's own parser, and the words that it hands on."""
    words = call.words
    if call.program == "srun":
        words = words[words.index("torchrun") + 1 :]
    options = parse_torchrun(words)
    assert (options.module, options.training_script) == (True, ENTRY)
    return options, options.training_script_args


def options_of(words: list[str]) -> dict[str, list[str]]:
    """Options and their values; each option is given once."""
    found: dict[str, list[str]] = {}
    for word in words:
        if word.startswith("--"):
            assert re.fullmatch(r"--[a-z0-9]+(-[a-z0-9]+)*", word), word
            assert word not in found, f"{word} twice"
            found[word] = []
        else:
            assert word.strip() == word != ""
            found[[*found][-1]].append(word)
    return found


def number(options: dict[str, list[str]], name: str, default: int = 1) -> int:
    (value,) = options.get(name, [str(default)])
    return int(value)


@pytest.mark.parametrize("file", SHELL_FILES, ids=lambda path: path.name)
def test_the_shell_finds_nothing(file: Path) -> None:
    subprocess.run(["bash", "-n", str(file)], check=True)
    shellcheck = Path(sys.executable).with_name("shellcheck")
    run_process([str(shellcheck), "-x", "-P", "SCRIPTDIR", "-P", str(ROOT), str(file)], code=0)


@each_recipe
def test_every_launcher_starts_the_same_job(tmp_path: Path, recipe: Path) -> None:
    more = ("--tensorboard-queue-size", "5")
    one = launch(tmp_path, "torchrun.sh", recipe, *more, NNODES=1).call
    two = launch(tmp_path, "torchrun.sh", recipe, *more, NNODES=2, HEAD="a").call
    dry = launch(tmp_path, "dry_run.sh", recipe, *more).call
    decided, _, batch = slurm(tmp_path, recipe, *more, nodes=2).calls
    words = torchrun_of(one)[1]
    assert words[-6:] == [*more, *SIZES]
    assert torchrun_of(two)[1] == words
    assert torchrun_of(batch)[1] == words
    assert (dry.program, dry.words) == ("python", ["-m", ENTRY, *words[:-4], "--prefix-tree-dry-run"])
    assert (decided.words, decided.environment["WORLD_SIZE"]) == (dry.words, "16")
    for variable in (
        "CUDA_DEVICE_MAX_CONNECTIONS",
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE",
        "FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED",
    ):
        assert {call.environment[variable] for call in (one, two, dry, batch)} == {"1"}
    assert {call.environment["MEGATRON_LM_PATH"] for call in (one, two, dry, batch)} == {"../Megatron-LM"}


@each_recipe
def test_the_arguments_fit_each_other_and_the_machines(tmp_path: Path, recipe: Path) -> None:
    call = launch(tmp_path, "dry_run.sh", recipe).call
    options = options_of(call.words[2:])
    ours, _ = add_argument_group(argparse.ArgumentParser()).parse_known_args(
        [word for name, values in options.items() if name.startswith("--prefix-tree") for word in (name, *values)],
        argparse.Namespace(dataloader_type=None),
    )
    assert ours.prefix_tree is True
    assert ours.prefix_tree_expand_turns is True
    assert ours.prefix_tree_tokenizer == "mistral-v7"
    assert all(Path(path).is_file() for path in ours.prefix_tree_data_path)
    assert {"--seq-length", "--micro-batch-size"} & {*options} == set(), "the data decides them"
    assert options["--save"] == options["--load"] == [f"runs/{recipe.stem}"]
    assert "--exit-signal-handler" in options
    assert options["--attention-dropout"] == options["--hidden-dropout"] == ["0"]

    pipeline = number(options, "--pipeline-model-parallel-size")
    replica = number(options, "--tensor-model-parallel-size") * pipeline
    experts = number(options, "--expert-tensor-parallel-size") * number(options, "--expert-model-parallel-size")
    world_size = int(call.environment["WORLD_SIZE"])
    for nodes in (1, 2, 4):  # times the recipe's initial number
        ranks = world_size * nodes
        assert ranks % replica == 0
        assert ranks % (experts * pipeline) == 0
        samples, left = divmod(number(options, "--global-batch-size"), ranks // replica)
        assert left == 0
        assert samples % pipeline == 0, "as many micro-batches as stages leave none idle all the time"


def test_one_machine_and_several(tmp_path: Path) -> None:
    recipe = RECIPES[0]
    one, _ = torchrun_of(launch(tmp_path, "torchrun.sh", recipe).call)
    assert (one.nnodes, one.nproc_per_node, one.rdzv_backend) == ("1", "8", "c10d")
    assert one.rdzv_endpoint == "localhost:0"
    several, _ = torchrun_of(
        launch(tmp_path, "torchrun.sh", recipe, NNODES=4, HEAD="gpu01", PORT=1, GPUS_PER_NODE=4, MAX_RESTARTS=7).call
    )
    assert (several.nnodes, several.nproc_per_node, several.max_restarts) == ("4", "4", 7)
    assert (several.rdzv_endpoint, several.rdzv_id) == ("gpu01:1", "llama3_8b")


def test_exported_variables_are_used(tmp_path: Path) -> None:
    call = launch(
        tmp_path,
        "dry_run.sh",
        RECIPES[0],
        DATA="my data/*.jsonl",
        SAVE="/shared/run",
        WEIGHTS="/shared/base",
        MAX_TOKENS=1024,
        MEGATRON_LM_PATH="/opt/megatron",
    ).call
    options = options_of(call.words[2:])
    assert options["--prefix-tree-data-path"] == ["my data/*.jsonl"]
    assert "--prefix-tree-tokenizer" not in options, "the shipped rollouts' is not for other data"
    assert options["--save"] == options["--load"] == ["/shared/run"]
    assert options["--pretrained-checkpoint"] == ["/shared/base"]
    assert options["--prefix-tree-max-tokens"] == ["1024"]
    assert call.environment["MEGATRON_LM_PATH"] == "/opt/megatron"

    more = {"NNODES": 4, "GPUS_PER_NODE": 2, "FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED": 0}
    call = launch(
        tmp_path, "dry_run.sh", RECIPES[0], DATA="chats.jsonl", TOKENIZER="tok", EXPAND_TURNS="no", **more
    ).call
    assert (call.environment["WORLD_SIZE"], call.environment["FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED"]) == ("8", "0")
    options = options_of(call.words[2:])
    assert options["--prefix-tree-tokenizer"] == ["tok"]
    assert "--prefix-tree-expand-turns" not in options


def test_given_micro_batch_size_skips_the_dry_run(tmp_path: Path) -> None:
    (call,) = launch(tmp_path, "torchrun.sh", RECIPES[0], MICRO_BATCH_SIZE=4, MAX_TOKENS=1024).calls
    options = options_of(torchrun_of(call)[1])
    assert (options["--micro-batch-size"], options["--seq-length"]) == (["4"], ["1024"])


def test_sizes_at_the_end_of_the_command_win(tmp_path: Path) -> None:
    """The dry run finds the sizes that are unset, which may be none."""
    given = ("--micro-batch-size", "4", "--seq-length", "900")
    done = launch(tmp_path, "torchrun.sh", RECIPES[0], *given, ANSWER_python="283 samples an epoch")
    assert done.status == 0, done.error
    assert done.call.words[-4:] == [*given]


@pytest.mark.parametrize("argument", ["--prefix-tree-score=scored.jsonl", "--use-checkpoint-args"])
def test_jobs_without_dry_run_support_start_directly(tmp_path: Path, argument: str) -> None:
    (call,) = launch(tmp_path, "torchrun.sh", RECIPES[0], argument).calls
    words = torchrun_of(call)[1]
    assert words[words.index("--micro-batch-size") + 1] == "1"


def test_a_dry_run_that_fails_ends_the_launch(tmp_path: Path) -> None:
    for done in (
        launch(tmp_path, "torchrun.sh", RECIPES[0], EFFECT_python="sys.exit(2)"),
        slurm(tmp_path, RECIPES[0], nodes=1, EFFECT_python="sys.exit(2)"),
    ):
        assert (done.status, [call.program for call in done.calls]) == (2, ["python"])


@each_recipe
def test_without_apex_its_kernel_is_switched_off(tmp_path: Path, recipe: Path) -> None:
    """Megatron-LM's default needs it, and the launcher prints its addition."""
    flag, note = "--no-gradient-accumulation-fusion", "NVIDIA Apex is not installed"
    for launcher in ("torchrun.sh", "dry_run.sh"):
        without = launch(tmp_path, launcher, recipe, NO_APEX=1, NNODES=1)
        assert (flag in without.call.words, note in without.error) == (True, True)
        there = launch(tmp_path, launcher, recipe, NNODES=1)
        assert (flag in there.call.words, note in there.error) == (False, False)


def test_copied_recipe_runs_from_another_folder(tmp_path: Path) -> None:
    copy = tmp_path / "my_model.sh"
    copy.write_text(RECIPES[0].read_text().replace("--num-layers 32", "--num-layers 4"))
    options = options_of(launch(tmp_path, "dry_run.sh", copy).call.words[2:])
    assert options["--num-layers"] == ["4"]
    assert options["--save"] == ["runs/my_model"]


@pytest.mark.parametrize(
    ("arguments", "variables", "says"),
    [
        ((), {}, "error: name a recipe: "),
        (("recipes/nope.sh",), {}, "error: recipes/nope.sh does not exist; name a recipe: "),
        ((RECIPES[0],), {"NNODES": 2}, "HEAD: with NNODES=2 name one of the machines, the same on all: HEAD=HOST"),
    ],
)
def test_mistakes_are_reported_in_one_sentence(
    tmp_path: Path, arguments: tuple[object, ...], variables: dict[str, object], says: str
) -> None:
    done = launch(tmp_path, "torchrun.sh", *arguments, **variables)
    assert done.status != 0
    assert done.calls == []
    assert says in done.error
    assert done.error.count("\n") == 1


def test_slurm_meets_on_the_first_node(tmp_path: Path) -> None:
    done = slurm(tmp_path, RECIPES[0], nodes=3)
    assert done.status == 0, done.error
    _, hosts, job = done.calls
    assert (hosts.program, hosts.words) == ("scontrol", ["show", "hostnames", "gpu[01-03]"])
    assert job.program == "srun"
    options, _ = torchrun_of(job)
    assert (options.nnodes, options.nproc_per_node, options.rdzv_backend) == ("3", "8", "c10d")
    assert (options.rdzv_endpoint, options.rdzv_id) == ("gpu01:24567", "1234567")


@pytest.mark.parametrize(
    ("before", "after", "status", "requeued"),
    [
        (None, None, 1, False),  # failed before its first checkpoint
        (None, "50", 1, True),
        ("50", "50", 1, False),
        ("50", "73", 143, True),
        ("50", "100", 0, False),  # done
    ],
)
def test_slurm_requeues_while_there_is_progress(
    tmp_path: Path, before: str | None, after: str | None, status: int, requeued: bool
) -> None:
    tracker = tmp_path / "saved" / "latest_checkpointed_iteration.txt"
    tracker.parent.mkdir()
    if before is not None:
        tracker.write_text(before)
    write = "" if after is None else f"open({str(tracker)!r}, 'w').write({after!r})"
    done = slurm(tmp_path, RECIPES[0], nodes=1, SAVE=tracker.parent, EFFECT_srun=f"{write}\nsys.exit({status})")
    assert done.status == status
    requeue = [call.words for call in done.calls if call.words[:1] == ["requeue"]]
    assert requeue == ([["requeue", "1234567"]] if requeued else [])


def test_slurm_gives_the_workers_the_time_that_torchrun_does(tmp_path: Path) -> None:
    script = (LAUNCH / "slurm.sbatch").read_text()
    (seconds,) = re.findall(r"^#SBATCH --signal=TERM@(\d+)$", script, flags=re.MULTILINE)
    assert slurm(tmp_path, RECIPES[0], nodes=1).calls[-1].environment["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"] == seconds
    # sbatch reads options up to the first command.
    head, _, rest = script.partition("set -euo pipefail")
    assert head.count("\n#SBATCH") >= 8
    assert "#SBATCH" not in rest


# Those of a Hugging Face folder have no separate model: tests/peers/test_grpo_own_model.py.
@pytest.mark.parametrize("on_gpu", [True, False])
@pytest.mark.parametrize(
    "recipe", [path for path in YAML_FILES if "--hf" not in path.read_text()], ids=lambda path: path.stem
)
def test_yaml_recipes_are_models_that_can_be_folded(recipe: Path, on_gpu: bool) -> None:
    from mcore_prefix_tree.mcore.models.build_gpt import transformer_config
    from mcore_prefix_tree.mcore.seam.validation import check_config

    job = load_recipe(recipe)
    check_config(transformer_config(job.model, job.parallel, on_gpu=on_gpu))


def test_the_readme_has_a_row_for_each() -> None:
    readme = (ROOT / "recipes" / "README.md").read_text()
    table = [line for line in readme.splitlines() if line.startswith("| [")]
    assert sorted(re.findall(r"^\| \[(.+?)\]\(\1\)", "\n".join(table), flags=re.MULTILINE)) == sorted(
        str(path.relative_to(ROOT / "recipes")) for path in [*RECIPES, *YAML_FILES]
    )
    for file in LAUNCH.iterdir():
        assert f"launch/{file.name}" in readme
