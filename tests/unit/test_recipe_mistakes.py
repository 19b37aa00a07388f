"""All mistakes of a recipe are reported together, and a Hugging Face folder is read once."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest
from harness.commands import run_command
from harness.hf_sources import CONFIG, write_tensors
from pydantic import ValidationError

from mcore_prefix_tree.settings import ModelConfig, OptimizerConfig, ParallelConfig, RecipeError, hf_folder, load_recipe

RECIPE = """
data: {path: rows.jsonl}
model: {num_layers: 1, hidden_size: 16, num_attention_heads: 2, vocab_size: 16}
batch: {global_batch_size: 2, max_tokens: 64}
train_iters: 4
"""
# Each of another kind: the change, and how its sentence begins; in the order of the report.
MISTAKES = {
    "model.num_layers=two": "model.num_layers: input should be a valid integer",
    "batch.share=some": "batch.share: input should be 'all' or 'prompt' (given 'some')",
    "optimizer.weight_decai=1": "optimizer.weight_decai: there is no such key (given 1), did you mean optimizer.w",
    "log.metrics=steps.csv": "log.metrics: give a name that ends in .jsonl",
    "data={path: nowhere.jsonl, order: folded, streaming: true}": "data.order=folded sorts all samples in memory",
    "model.num_query_groups=3": "model.num_attention_heads=2 is not a multiple of model.num_query_groups=3",
    "model.hidden_size=15": "model.hidden_size=15 is not a multiple of model.num_attention_heads=2",
    "parallel.virtual_pipeline_model_parallel_size=2": "parallel.virtual_pipeline_model_parallel_size cuts the stages",
    "attention_backend=flash": "attention backend 'flash' does not exist",
    "objective={name: grpo, options: {kl_coeff: 1, clip_eps_high: -1}}": "objective.options.kl_coeff: grpo has no such",
    "checkpoint.export_hf=out": "checkpoint.export_hf writes the format of model.hf",
    "model.dtype=float64": "optimizer.clip_grad: Megatron clips fp32 gradients",
    "optimizer.lr_warmup_steps=9": "optimizer.lr_warmup_steps=9 must be below train_iters=4",
    "optimizer.min_lr=1": "optimizer.min_lr=1.0 is above optimizer.lr=0.001",
    "batch.length_buckets=[8]": "batch.length_buckets: the largest, 8, cannot hold a micro-batch of 64 tokens",
    "model.vocab_size=null": "model.vocab_size is missing",
    "seed=5": "nowhere.jsonl: no such file",
    "validation.path=held_out.jsonl": "held_out.jsonl: no such file",
    "log.tensorboard=board": "log.tensorboard=board needs tensorboard",
}
ONLY_TRAINED = ("optimizer.clip_grad", "optimizer.lr_warmup_steps", "optimizer.min_lr")
ONLY_LOGGED = ("held_out.jsonl", "log.tensorboard")


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("mcore_prefix_tree.settings.command_checks.find_spec", lambda name: None)
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "recipe.yaml"
    path.write_text(RECIPE)
    return path


def places(said: str, sentences: list[str]) -> list[int]:
    missing = [sentence for sentence in sentences if said.count(sentence) != 1]
    assert not missing, said
    return [said.index(sentence) for sentence in sentences]


def check_report(arguments: list[str], recipe: Path, sentences: list[str]) -> None:
    result = run_command(*arguments)
    assert (result.exit_code, result.stdout, result.stderr.count("\n")) == (2, "", 1), result.output
    found = places(result.stderr, [f"error: recipe {recipe}: ", *sentences])
    assert found == sorted(found), result.stderr


@pytest.mark.parametrize(
    ("command", "left_out"),
    [
        ("train", ()),
        ("bench step", ONLY_LOGGED),
        ("verify", ONLY_LOGGED + ONLY_TRAINED),
        ("score --output scored.jsonl", ONLY_LOGGED + ONLY_TRAINED),
    ],
)
def test_every_command_reports_all_mistakes(recipe: Path, command: str, left_out: tuple[str, ...]) -> None:
    sentences = [sentence for sentence in MISTAKES.values() if not sentence.startswith(left_out or ("none",))]
    check_report([*command.split(), str(recipe), *MISTAKES], recipe, sentences)


def test_mistakes_in_the_file_are_reported_as_those_of_overrides(recipe: Path) -> None:
    """As the overrides would have left it."""
    from omegaconf import OmegaConf

    OmegaConf.save(OmegaConf.merge(OmegaConf.load(recipe), OmegaConf.from_dotlist(list(MISTAKES))), recipe)
    check_report(["train", str(recipe)], recipe, list(MISTAKES.values()))


def test_commands_without_samples_report_mistakes_in_the_recipe(recipe: Path) -> None:
    own = list(MISTAKES.values())[:11]
    check_report(["export", str(recipe), "exported", *MISTAKES], recipe, [*own, "export needs checkpoint.save"])
    check_report(["xtoken", "export-teacher", str(recipe), "--output", "o.jsonl", *MISTAKES], recipe, own)


def test_overrides_that_cannot_be_read_hide_nothing(recipe: Path) -> None:
    with pytest.raises(RecipeError) as error:
        load_recipe(recipe, ["train_iters", "seed=${nope}", "data=[1]", "batch.max_tokens=0", "device=tpu"])
    sentences = [
        "'train_iters' is not an override",
        "override 'data=[1]': Cannot merge",
        f"recipe {recipe} cannot be read: Interpolation key 'nope' not found full_key: seed",
        f"recipe {recipe}: batch.max_tokens: input should be greater than 0",
        "device: input should be 'auto', 'cpu' or 'cuda'",
    ]
    found = places(str(error.value), sentences)
    assert found == sorted(found)


@pytest.mark.parametrize(
    ("changes", "absent"),
    [
        (["batch.global_batch_size=0"], "give either global_batch_size"),
        (["model.hidden_size=x"], "is not a multiple of"),
        (["model.hf=nowhere", "model.num_layers=null"], "model.num_layers"),
        (["optimizer.lr=-1", "optimizer.min_lr=1"], "is above"),
        (["objective.name=grop", "batch.global_batch_size=null", "batch.groups_per_step=2"], "takes each sample"),
        (["objective.options=3", "head_chunk_rows=2", "fused_head=true"], "head_chunk_rows"),
    ],
)
def test_an_invalid_key_is_reported_once(recipe: Path, changes: list[str], absent: str) -> None:
    """Errors that would follow from it are not reported."""
    result = run_command("train", recipe, *changes, code=2)
    assert absent not in result.stderr


def test_a_misspelled_key_is_reported_once(recipe: Path) -> None:
    recipe.write_text(RECIPE.replace("global_batch_size", "global_batch_sise"))
    with pytest.raises(
        RecipeError, match=r"global_batch_sise: there is no such key .* did you mean batch.global_[^;]*$"
    ):
        load_recipe(recipe)


def test_mistakes_of_teachers_name_their_recipes(recipe: Path, tmp_path: Path) -> None:
    teachers = [tmp_path / f"{name}.yaml" for name in ("one", "two")]
    for teacher in teachers:
        teacher.write_text(RECIPE + f"optimizer: {{nope: 1}}\ndevice: {teacher.stem}\n")
    given = ["objective={name: xtoken, options: {mode: alm}}", f"objective.teacher_recipe={[*map(str, teachers)]}"]
    sentences = ["train_iters: input should be greater than 0"]
    for teacher in teachers:
        sentences += [
            f"recipe {teacher}: device: input should be ",
            f"(given '{teacher.stem}')",
            "optimizer.nope: ther",
        ]
    result = run_command("train", recipe, "train_iters=0", *given, code=2)
    for sentence in sentences:
        assert sentence in result.stderr, result.stderr
    assert result.stderr.count("optimizer.nope: there is no such key") == 2


def test_sections_check_themselves_when_they_are_built() -> None:
    with pytest.raises(ValidationError) as error:
        ModelConfig(num_layers=1, hidden_size=15, num_attention_heads=2, num_query_groups=3)
    places(str(error.value), ["is not a multiple of model.num_query_groups=3", "model.hidden_size=15 is not a"])
    with pytest.raises(ValidationError, match="both set the warm-up"):
        OptimizerConfig(lr_warmup_steps=1, lr_warmup_fraction=0.5)
    with pytest.raises(ValidationError, match="cuts the stages of a pipeline"):
        ParallelConfig(virtual_pipeline_model_parallel_size=2)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "source"
    made.mkdir()
    (made / "config.json").write_text(json.dumps(CONFIG))
    (made / "tokenizer_config.json").write_text('{"chat_template": "{{ messages }}"}')
    write_tensors(made / "model.safetensors", [f"model.layers.{i}.self_attn.q_proj.weight" for i in range(2)])
    return made


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often each file of a folder was opened."""
    counts: Counter[str] = Counter()
    for name in ("tensors_in", "read_text"):
        honest = getattr(hf_folder, name)
        monkeypatch.setattr(
            hf_folder, name, lambda path, honest=honest: (counts.update([Path(path).name]), honest(path))[1]
        )
    return counts


def test_a_folder_is_read_once(recipe: Path, folder: Path, opened: Counter[str]) -> None:
    recipe.write_text(RECIPE.replace("num_layers: 1, hidden_size: 16, num_attention_heads: 2, vocab_size: 16", ""))
    arguments = ["train", str(recipe), "--hf", str(folder), "model.lora.target_modules=[q_proj]"]
    for _ in range(2):
        result = run_command(*arguments)
        assert (result.exit_code, "rows.jsonl: no such file" in result.stderr) == (2, True), result.stderr
        assert opened == {"config.json": 1, "tokenizer_config.json": 1, "model.safetensors": 1}
    for file in ("config.json", "model.safetensors"):
        before = (folder / file).read_bytes()
        (folder / file).write_bytes(before.replace(b"Llama", b"Gemma").replace(b"q_proj", b"z_proj"))  # of equal length
        says = "rows.jsonl: no such file" if file == "config.json" else "has no layer 'q_proj'"
        assert says in run_command(*arguments).stderr
    assert opened["config.json"] == 3
    assert hf_folder.HuggingFaceFolder.read(folder).architecture == "GemmaForCausalLM"
