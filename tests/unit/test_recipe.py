from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from mcore_prefix_tree.objectives import OBJECTIVES
from mcore_prefix_tree.objectives.scalar_head import Critic, RewardModel
from mcore_prefix_tree.settings import (
    BatchConfig,
    CheckpointConfig,
    ObjectiveConfig,
    OptimizerConfig,
    ParallelConfig,
    Recipe,
    RecipeError,
    VerifyConfig,
    load_recipe,
)

SMALLEST = """
data: {path: rollouts.jsonl}
model: {num_layers: 2, hidden_size: 32, num_attention_heads: 4}
batch: {global_batch_size: 6, max_tokens: 64}
train_iters: 4
"""
SHIPPED = sorted((Path(__file__).parents[2] / "recipes").glob("**/*.yaml"))


@pytest.fixture
def recipe(tmp_path):
    path = tmp_path / "small.yaml"
    path.write_text(SMALLEST)
    return path


def test_unset_settings_have_their_defaults(recipe):
    loaded = load_recipe(recipe)
    assert (loaded.data.path, loaded.model.hidden_size, loaded.train_iters) == ("rollouts.jsonl", 32, 4)
    assert loaded.batch == BatchConfig(global_batch_size=6, max_tokens=64)
    assert (loaded.parallel, loaded.optimizer) == (ParallelConfig(), OptimizerConfig())
    assert (loaded.checkpoint, loaded.verify) == (CheckpointConfig(), VerifyConfig())


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_shipped_recipes_load(path):
    # In place of a folder that --hf would name.
    sizes = ["model.num_layers=1", "model.hidden_size=8", "model.num_attention_heads=1", "checkpoint.export_hf=null"]
    loaded = load_recipe(path, sizes if "--hf" in path.read_text() else [])
    assert isinstance(loaded, Recipe)
    # A recipe that ships with its data names it relative to the repository.
    paths = [loaded.data.path] if isinstance(loaded.data.path, str) else loaded.data.path
    assert all((SHIPPED[0].parents[1] / name).exists() for name in paths if name.startswith("recipes/"))


@pytest.mark.parametrize(("name", "steps"), [("quickstart", 4), ("one_gpu", 10)])
def test_shipped_recipes_warm_up_in_any_number_of_steps(name, steps):
    recipe = load_recipe(SHIPPED[0].parent / f"{name}.yaml")
    fraction, batch = recipe.optimizer.lr_warmup_fraction, recipe.batch.per_step
    assert recipe.optimizer.lr_warmup_steps == 0
    # Megatron counts in samples; at the recipe's own length the warm-up is one of steps, to the bit.
    assert fraction * (recipe.train_iters * batch) == steps * batch


@pytest.mark.parametrize(
    ("override", "section", "key", "value"),
    [
        ("train_iters=7", None, "train_iters", 7),
        ("optimizer.lr=1e-4", "optimizer", "lr", 1e-4),  # YAML 1.1 reads this as a string
        ("optimizer.lr=.5", "optimizer", "lr", 0.5),
        ("data.path=a=b.jsonl", "data", "path", "a=b.jsonl"),
        ("data.path=[one.jsonl,two/*.jsonl]", "data", "path", ["one.jsonl", "two/*.jsonl"]),
        ("data.path=-", "data", "path", "-"),
        ("data.path=*.jsonl", "data", "path", "*.jsonl"),
        ("data.path=**/*.jsonl", "data", "path", "**/*.jsonl"),
        ("data.path={a,b}.jsonl", "data", "path", "{a,b}.jsonl"),
        ("data.order=file", "data", "order", "file"),
        ("model.vocab_size=null", "model", "vocab_size", None),
        ("model.dtype=bfloat16", "model", "dtype", "bfloat16"),
        ("model.transformer.window_size=[16,0]", "model", "transformer", {"window_size": [16, 0]}),
        ("model.transformer={a: [[1, 2], [3]]}", "model", "transformer", {"a": [[1, 2], [3]]}),
        ("checkpoint.save=${data.path}.ckpt", "checkpoint", "save", "rollouts.jsonl.ckpt"),
        ("attention_backend=reference", None, "attention_backend", "reference"),
        ("deterministic_attention=false", None, "deterministic_attention", False),
    ],
)
def test_overrides(recipe, override, section, key, value):
    loaded = load_recipe(recipe, [override])
    given = getattr(getattr(loaded, section) if section else loaded, key)
    assert given == value
    assert type(given) is type(value)


def test_the_last_override_wins_and_none_touches_the_rest(recipe):
    loaded = load_recipe(recipe, ["seed=1", "model.num_layers=3", "seed=2"])
    assert loaded == dataclasses.replace(
        load_recipe(recipe), seed=2, model=dataclasses.replace(load_recipe(recipe).model, num_layers=3)
    )


@pytest.mark.parametrize(
    ("in_file", "overrides", "steps", "fraction"),
    [
        ("lr_warmup_fraction: 0.2", ["optimizer.lr_warmup_steps=0"], 0, None),
        ("lr_warmup_fraction: 0.2", ["optimizer={lr_warmup_steps: 3}"], 3, None),
        ("lr_warmup_fraction: 0.2", ["optimizer.lr_warmup_fraction=0.1"], 0, 0.1),
        ("lr_warmup_fraction: 0.2", ["optimizer.lr_warmup_fraction=null"], 0, None),
        ("lr_warmup_fraction: 0.2", ["optimizer.lr=1e-3"], 0, 0.2),
        ("lr_warmup_steps: 3", ["optimizer.lr_warmup_fraction=0.1", "seed=2"], 0, 0.1),
        ("lr_warmup_steps: 3", ["optimizer.lr_warmup_fraction=0"], 0, 0.0),
        ("lr_warmup_steps: 3", ["optimizer.lr_warmup_fraction=null"], 3, None),
        ("lr_warmup_steps: 3", ["optimizer.lr_warmup_fraction=0.1", "optimizer.lr_warmup_fraction=null"], 3, None),
        ("lr_warmup_steps: 3, lr_warmup_fraction: null", [], 3, None),
        # Both, for example in a checkpoint's recipe.yaml.
        ("lr_warmup_steps: 0, lr_warmup_fraction: 0.2", [], 0, 0.2),
        ("lr_warmup_steps: 0, lr_warmup_fraction: 0.2", ["optimizer.lr_warmup_steps=3"], 3, None),
    ],
)
def test_an_override_replaces_the_warm_up_of_the_file(recipe, in_file, overrides, steps, fraction):
    recipe.write_text(f"{SMALLEST}optimizer: {{{in_file}}}\n")
    optimizer = load_recipe(recipe, overrides).optimizer
    assert (optimizer.lr_warmup_steps, optimizer.lr_warmup_fraction) == (steps, fraction)


@pytest.mark.parametrize("in_file", ["", "lr_warmup_steps: 3", "lr_warmup_fraction: 0.2"])
def test_two_warm_ups_are_refused(recipe, in_file):
    recipe.write_text(f"{SMALLEST}optimizer: {{{in_file}}}\n")
    both = ["optimizer.lr_warmup_steps=2", "optimizer.lr_warmup_fraction=0.1"]
    for overrides in (both, both[::-1]):
        with pytest.raises(RecipeError, match=r"optimizer: lr_warmup_steps=2 and lr_warmup_fraction=0.1 both set"):
            load_recipe(recipe, overrides)


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("nope=1", "nope: there is no such key (given 1)"),
        ("model.nope=1", "model.nope: there is no such key (given 1)"),
        ("data.pth=x", "data.pth: there is no such key (given 'x')"),
        ("model.num_layers=two", "model.num_layers: input should be a valid integer"),
        ("model.num_layers=2.5", "model.num_layers: input should be a valid integer"),
        ("model.num_layers.deeper=1", "model.num_layers: input should be a valid integer"),
        ("train_iters=", "train_iters: input should be a valid integer (given None)"),
        ("optimizer.lr=1e-4x", "optimizer.lr: input should be a valid number"),
        ("parallel.sequence_parallel=2", "parallel.sequence_parallel: input should be a valid boolean"),
        ("train_iters=true", "train_iters: input should be a number, not a boolean (given True)"),
        ("optimizer.lr=true", "optimizer.lr: input should be a number, not a boolean (given True)"),
        ("batch.length_buckets=[8,false]", "batch.length_buckets.1: input should be a number, not a boolean"),
        ("batch.share=some", "batch.share: input should be 'all' or 'prompt' (given 'some')"),
        ("data.on_error=ignore", "data.on_error: input should be 'raise' or 'skip' (given 'ignore')"),
        ("data.path=3", "data.path: input should be a valid string (given 3)"),
        ("data.path=[a,[b]]", "data.path.1: input should be a valid string (given ['b'])"),
        ("data=x", "data: input should be a dictionary"),
        ("model=null", "model: input should be a dictionary"),
        ("model.transformer=[1]", "model.transformer: input should be a valid dictionary (given [1])"),
        ("train_iters=0", "train_iters: input should be greater than 0 (given 0)"),
        ("batch.max_tokens=-1", "batch.max_tokens: input should be greater than 0 (given -1)"),
        ("seed=-1", "seed: input should be greater than or equal to 0 (given -1)"),
        ("optimizer.adam_beta1=1", "optimizer.adam_beta1: input should be less than 1 (given 1)"),
        ("optimizer.lr_warmup_fraction=1", "optimizer.lr_warmup_fraction: input should be less than 1 (given 1)"),
        ("optimizer.lr_warmup_fraction=-0.1", "optimizer.lr_warmup_fraction: input should be greater than or equal to"),
        ("optimizer.lr_warmup_fraction=true", "optimizer.lr_warmup_fraction: input should be a number, not a boolean"),
        ("optimizer.lr_warmup_fraction=.nan", "optimizer.lr_warmup_fraction: input should be a finite number"),
        (
            "optimizer={lr_warmup_steps: 2, lr_warmup_fraction: 0.5}",
            "optimizer: lr_warmup_steps=2 and lr_warmup_fraction=0.5 both set the warm-up; give one of them",
        ),
        ("optimizer.lr=0", "optimizer.lr: input should be greater than 0 (given 0)"),
        ("optimizer.lr=.inf", "optimizer.lr: input should be a finite number"),
        ("optimizer.clip_grad=.nan", "optimizer.clip_grad: input should be a finite number"),
        ("verify.tolerance=0", "verify.tolerance: input should be greater than 0 (given 0)"),
        ("checkpoint.save_interval=0", "checkpoint.save_interval: input should be greater than 0"),
        ("checkpoint.keep_last=0", "checkpoint.keep_last: input should be greater than 0 (given 0)"),
        ("log.metrics=runs/m.csv", "log.metrics: give a name that ends in .jsonl, the format of the file (given 'ru"),
        ("model.dtype=fp8", "model.dtype: input should be 'float64', 'float32' or 'bfloat16' (given 'fp8')"),
        (
            "seed=99999999999999999999",
            "seed: input should be less than 9223372036854775808 (given 99999999999999999999)",
        ),
        ("train_iters=9999999999", "train_iters: input should be less than or equal to 2147483647 (given 9999999999)"),
        ("data.num_workers=100000", "data.num_workers: input should be less than or equal to 256 (given 100000)"),
        ("model.num_layers=1000000", "model.num_layers: input should be less than or equal to 10000 (given 1000000)"),
        ("optimizer.lr=1e400", "optimizer.lr: input should be a finite number (given inf)"),
        ("data.path=yes", "data.path: input should be a valid string (given True)"),
        ("device=tpu", "device: input should be 'auto', 'cpu' or 'cuda' (given 'tpu')"),
        ("data.path=${nope}", "Interpolation key 'nope' not found full_key: data.path"),
        ("data.path=${oc.env:NO_SUCH_VARIABLE_HERE}", "'NO_SUCH_VARIABLE_HERE' not found\" full_key: data.path"),
    ],
)
def test_a_wrong_value_is_refused_by_file_and_key(recipe, override, says):
    with pytest.raises(RecipeError) as error:
        load_recipe(recipe, [override])
    assert str(error.value).startswith(f"recipe {recipe}")
    assert says in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("train_iters", "'train_iters' is not an override; write key=value"),
        ("--train-iters", "'--train-iters' is not an override; write key=value"),
        ("", "'' is not an override; write key=value"),
        ("train_iters=[1", "override 'train_iters=[1': while parsing a flow sequence"),
        ("data.path=${", "override 'data.path=${': no viable alternative"),
        ("data=[1]", "override 'data=[1]': Cannot merge"),
        ("data.path=???", "override 'data.path=???': line 1: ??? stands for a value that is missing; give the value"),
        ("model.yarn={beta_fast: 010}", "override 'model.yarn={beta_fast: 010}': line 1: YAML reads 010 as octal or "),
        ("seed=1:30", "override 'seed=1:30': line 1: YAML reads 1:30 as octal or to base 60; write a decimal number"),
        ("optimizer.lr=1:30.5", "override 'optimizer.lr=1:30.5': line 1: YAML reads 1:30.5 as octal or to base 60; "),
        ("seed=!!int '90'", "override \"seed=!!int '90'\": line 1 has a tag, 'int'; recipes hold plain values"),
        ("data={path: x, path: y}", "override 'data={path: x, path: y}': while constructing a mapping"),
        ("seed=" + "9" * 5000, "override 'seed=999"),
        ("seed=" + "[" * 3000, "override 'seed=[[["),
    ],
)
def test_an_override_that_cannot_be_read_is_quoted(recipe, override, says):
    with pytest.raises(RecipeError) as error:
        load_recipe(recipe, ["seed=1", override])
    assert str(error.value).startswith(says)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", ": data: field required; model: field required; batch: field required; train_iters: field required"),
        (SMALLEST.replace("train_iters: 4", ""), ": train_iters: field required"),
        (SMALLEST.replace("max_tokens: 64", ""), ": batch.max_tokens: field required"),
        (SMALLEST.replace("global_batch_size: 6, ", ""), ": batch: give either global_batch_size, the samples of a st"),
        (SMALLEST.replace("global_batch", "groups_per_step: 2, global_batch"), ": batch: give either global_batch"),
        (SMALLEST.replace("global_batch_size: 6", "groups_per_step: 0"), "batch.groups_per_step: input should be gre"),
        (
            SMALLEST.replace("rollouts.jsonl", "'???'"),
            " cannot be read: Missing mandatory value: path full_key: data.path",
        ),
        (SMALLEST.replace("num_layers: 2", "num_layers: 0, nope: 1"), "; model.nope: there is no such key (given 1)"),
        (SMALLEST + "train_iters: 5\n", " cannot be read: while constructing a mapping"),
        (SMALLEST + "seed: [1\n", " cannot be read: while parsing a flow sequence"),
        ("- data\n- model\n", " is a list; it must map keys to values"),
        (SMALLEST + "seed: 1:30\n", " cannot be read: line 6: YAML reads 1:30 as octal or to base 60; write a deci"),
        (SMALLEST + "seed: 0777\n", " cannot be read: line 6: YAML reads 0777 as octal or to base 60; write a deci"),
        (SMALLEST + "seed: ???\n", " cannot be read: line 6: ??? stands for a value that is missing; give the value"),
        (SMALLEST + "seed:\t1\n\t- 2\n", " cannot be read: while scanning a plain scalar"),
        (SMALLEST + "a: &a [*a]\n", " cannot be read: YAML recursive aliases"),
        (SMALLEST + "seed: " + "[" * 5000 + "]" * 5000, " cannot be read: "),
        ("3\n", " cannot be read: Invalid loaded object type: int"),
    ],
)
def test_a_wrong_file_is_refused_by_name(tmp_path, text, says):
    path = tmp_path / "wrong.yaml"
    path.write_text(text)
    with pytest.raises(RecipeError) as error:
        load_recipe(path)
    assert str(error.value).startswith(f"recipe {path}")
    assert says in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("override", "ends"),
    [
        ("optimizr.lr=1", "optimizr: there is no such key (given {'lr': 1}), did you mean optimizer?"),
        ("train_iter=3", "train_iter: there is no such key (given 3), did you mean train_iters?"),
        ("model.hiden_size=64", "model.hiden_size: there is no such key (given 64), did you mean model.hidden_size?"),
        (
            "model.yarn.beta_fas=1",
            "model.yarn.beta_fas: there is no such key (given 1), did you mean model.yarn.beta_fast?",
        ),
        ("lr=1", "lr: there is no such key (given 1), did you mean optimizer.lr?"),
        ("checkpoint.beta_slow=1", "(given 1), did you mean model.yarn.beta_slow?"),
        ("checkpoint.zzz=1", "(given 1), checkpoint has save, pretrained_checkpoint, save_interval, keep_last"),
        ("model.yarn.zzz=1", "mscale_all_dim, correction_range_round_to_int"),
        ("zzz=1", "(given 1), a recipe has data, model, batch, train_iters, seed, attention_backend, "),
    ],
)
def test_unknown_key_error_suggests_a_valid_key(recipe, override, ends):
    with pytest.raises(RecipeError) as error:
        load_recipe(recipe, [override])
    assert ends in str(error.value)
    assert str(error.value).count("there is no such key") == 1


def test_files_that_cannot_be_opened(tmp_path, recipe):
    with pytest.raises(RecipeError, match=r"missing\.yaml does not exist; check the path, or copy the shipped"):
        load_recipe(tmp_path / "missing.yaml")
    with pytest.raises(RecipeError, match=rf"^recipe {tmp_path} is a folder; name a YAML file in it$"):
        load_recipe(tmp_path)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    with pytest.raises(RecipeError, match=r"model is a folder; name a recipe, and this folder with --hf$"):
        load_recipe(tmp_path / "model")
    for name, content in (("rows.jsonl", b'{"tokens": [1]}\n{"tokens": [2]}\n'), ("rows.Parquet", b"PAR1\xff")):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(RecipeError, match=rf"{name} is a file of samples, by its name; name a recipe, and this f"):
            load_recipe(tmp_path / name)
    with pytest.raises(RecipeError, match=r"cannot be read: .*Not a directory"):
        load_recipe(recipe / "below_a_file.yaml")
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(RecipeError, match=r"binary\.yaml cannot be read: .*utf-8"):
        load_recipe(tmp_path / "binary.yaml")


def test_the_objectives_that_end_in_a_scalar_head():
    named = {name for name in OBJECTIVES if ObjectiveConfig(name=name).has_scalar_head}
    assert named == {name for name, (made, _) in OBJECTIVES.items() if made in (Critic, RewardModel)}


def test_a_recipe_is_frozen(recipe):
    loaded = load_recipe(recipe)
    for part, key in ((loaded, "seed"), (loaded.data, "path"), (loaded.optimizer, "lr"), (loaded.checkpoint, "save")):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(part, key, 1)
