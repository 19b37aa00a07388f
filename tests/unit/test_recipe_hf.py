"""``model.hf``: settings that a recipe takes from a Hugging Face folder, and early rejection of folders."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import struct
import sys
from pathlib import Path
from typing import Any

import pytest
from harness.commands import run_command
from harness.hf_sources import CONFIG, hf_recipe, write_config, write_tensors

from mcore_prefix_tree.cli.options import with_hf
from mcore_prefix_tree.settings import RecipeError, load_recipe
from mcore_prefix_tree.settings.command_checks import CHECKS
from mcore_prefix_tree.settings.hf_folder import HuggingFaceFolder

HAS_BRIDGE = sys.version_info >= (3, 12) and importlib.util.find_spec("megatron.bridge") is not None


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "source"
    made.mkdir()
    (made / "config.json").write_text(json.dumps(CONFIG))
    write_tensors(made / "model.safetensors", ["a", "b"])
    return made


def write_index(folder: Path, **placed: str) -> None:
    (folder / "model.safetensors").unlink(missing_ok=True)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": placed}))


FP8 = "model.transformer.fp8=hybrid"  # another computation of the same function


def test_sizes_come_from_the_folder(folder: Path) -> None:
    recipe = hf_recipe(folder, "model.dtype=bfloat16", "model.transformer.recompute_granularity=full", FP8)
    model = recipe.model
    assert (model.hf, model.dtype) == (str(folder), "bfloat16")
    assert (model.num_layers, model.hidden_size, model.num_attention_heads) == (2, 8, 2)
    assert (model.vocab_size, model.max_position_embeddings) == (16, 64)
    assert recipe.data.tokenizer is None


@pytest.mark.parametrize("template", ["in the settings", "in a file"])
def test_tokenizer_is_the_folders_if_it_has_a_chat_template(folder: Path, template: str) -> None:
    (folder / "tokenizer_config.json").write_text("{}")
    assert hf_recipe(folder).data.tokenizer is None
    if template == "in a file":
        (folder / "chat_template.jinja").write_text("{{ messages }}")
    else:
        (folder / "tokenizer_config.json").write_text('{"chat_template": "{{ messages }}"}')
    assert hf_recipe(folder).data.tokenizer == str(folder)
    assert hf_recipe(folder, "data.tokenizer=mistral-v7").data.tokenizer == "mistral-v7"
    assert hf_recipe(folder, "data.tokenizer=null").data.tokenizer is None


@pytest.mark.parametrize(
    "setting",
    [
        "num_layers=2",
        "hidden_size=8",
        "vocab_size=16",
        "max_position_embeddings=64",
        "rotary_base=10000",
        "swiglu=true",
        "transformer.num_moe_experts=4",
        "transformer.layernorm_epsilon=1e-6",
    ],
)
def test_sizes_together_with_a_folder_are_rejected(folder: Path, setting: str) -> None:
    key = setting.partition("=")[0]
    with pytest.raises(RecipeError, match=rf"model\.{key} is set, but model\.hf=.* decides it; set only one of them"):
        hf_recipe(folder, f"model.{setting}")


@pytest.mark.parametrize(
    ("setting", "says"),
    [
        ("model.hf=Qwen/Qwen3-8B", "is not a folder with a config.json; download the model first"),
        ("model.hf=3", "model.hf: input should be a valid string"),
        ("model.nope=3", "model.nope is set, but model.hf="),
        ("model={3: 4}", "model.3 is set, but model.hf="),
    ],
)
def test_recipes_that_a_folder_does_not_fit(folder: Path, setting: str, says: str) -> None:
    with pytest.raises(RecipeError) as caught:
        hf_recipe(folder, setting)
    assert says in str(caught.value)


def test_unreadable_folder_is_the_only_mistake(tmp_path: Path) -> None:
    (tmp_path / "samples.jsonl").write_text('{"tokens": [1, 2]}\n')
    (tmp_path / "recipe.yaml").write_text(
        f"{{model: {{hf: {tmp_path}/gone}}, data: {{path: {tmp_path}/samples.jsonl}}, "
        "batch: {global_batch_size: 1, max_tokens: 8}, train_iters: 1}"
    )
    with pytest.raises(RecipeError) as caught:
        load_recipe(tmp_path / "recipe.yaml", checks=CHECKS["train"])
    assert str(caught.value).partition(": ")[2].startswith(f"model.hf: {tmp_path}/gone is not a folder")


def test_folder_with_a_scalar_head(folder: Path) -> None:
    write_config(folder, architectures=["LlamaForSequenceClassification"])
    with pytest.raises(RecipeError, match=r"has 'score\.weight' of shape None; a scalar head has one row"):
        hf_recipe(folder, "objective.name=reward_model")
    write_tensors(folder / "model.safetensors", ["a", "score.weight"], shape=[1, 8])
    assert hf_recipe(folder, "objective.name=reward_model").objective.has_scalar_head
    with pytest.raises(RecipeError, match=r"ends in a scalar head, and objective\.name=sft needs a vocabulary"):
        hf_recipe(folder)


@pytest.mark.parametrize("tied", [False, True])
def test_scalar_head_takes_the_place_of_the_vocabularys(folder: Path, tied: bool) -> None:
    write_index(
        folder, a="one.safetensors", b="two.safetensors", **({} if tied else {"lm_head.weight": "one.safetensors"})
    )
    write_tensors(folder / "one.safetensors", ["a"] if tied else ["a", "lm_head.weight"])
    write_tensors(folder / "two.safetensors", ["b"])
    made = HuggingFaceFolder.read(folder).with_scalar_head()
    where = "two" if tied else "one"
    assert made.files == {"a": "one.safetensors", "b": "two.safetensors", "score.weight": f"{where}.safetensors"}
    assert (made.shapes["score.weight"], made.dtypes["score.weight"]) == ([1, 8], "F32")
    assert (made.config["architectures"], made.has_scalar_head) == (["LlamaForSequenceClassification"], True)


def test_recipe_of_a_checkpoint_is_a_recipe(folder: Path, tmp_path: Path) -> None:
    """It has all keys, also those that the folder decided."""
    recipe = hf_recipe(folder, "model.dtype=bfloat16", "model.transformer.recompute_granularity=full")
    settings = dataclasses.asdict(recipe)
    settings["model"] |= {"rotary_base": 500, "num_query_groups": 1}
    settings["model"]["transformer"] |= {"num_moe_experts": 4}
    file = tmp_path / "written.yaml"
    file.write_text(json.dumps(settings))
    assert load_recipe(file).model == recipe.model
    file.write_text(json.dumps(settings | {"model": settings["model"] | {"num_layers": 3}}))
    with pytest.raises(RecipeError, match=r"model\.num_layers=3, but .*config\.json has 2"):
        load_recipe(file)


def test_tokenizer_of_another_vocabulary_is_rejected(folder: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    for place, vocabulary in ((folder, {"a": 0, "b": 1}), (other, {"b": 0, "a": 1})):
        (place / "tokenizer.json").write_text(json.dumps({"model": {"vocab": vocabulary}}))
    assert hf_recipe(folder, f"data.tokenizer={folder}").data.tokenizer == str(folder)
    with pytest.raises(RecipeError, match=r"data\.tokenizer=.*other has another vocabulary than the model's own"):
        hf_recipe(folder, f"data.tokenizer={other}")
    (other / "tokenizer.json").write_text((folder / "tokenizer.json").read_text())
    assert hf_recipe(folder, f"data.tokenizer={other}").data.tokenizer == str(other)


def test_export_without_a_folder_is_rejected(tmp_path: Path) -> None:
    file = tmp_path / "recipe.yaml"
    file.write_text(
        "data: {path: rows.jsonl}\nbatch: {global_batch_size: 2, max_tokens: 64}\ntrain_iters: 2\n"
        "model: {num_layers: 1, hidden_size: 8, num_attention_heads: 2}\n"
    )
    with pytest.raises(RecipeError, match=r"checkpoint\.export_hf writes the format of model\.hf, which is not set"):
        load_recipe(file, ["checkpoint.export_hf=out"])
    refused = run_command("export", file, tmp_path / "out", code=2)
    assert "export needs model.hf, whose format it writes" in refused.output


def test_text_model_of_a_model_of_pictures_and_text(folder: Path) -> None:
    text = {name: value for name, value in CONFIG.items() if name != "architectures"} | {"model_type": "qwen3_vl_text"}
    pictures = {"architectures": ["Qwen3VLForConditionalGeneration"], "model_type": "qwen3_vl"}
    (folder / "config.json").write_text(json.dumps(pictures | {"text_config": text}))
    inner = ["model.language_model.embed_tokens.weight", "model.language_model.norm.weight"]
    write_tensors(folder / "model.safetensors", [*inner, "lm_head.weight", "model.visual.merger.norm.weight"])
    read = HuggingFaceFolder.read(folder)
    assert (read.architecture, read.sizes["hidden_size"]) == ("Qwen3ForCausalLM", CONFIG["hidden_size"])
    own = ("model.embed_tokens.weight", "model.norm.weight", "lm_head.weight")
    assert read.names == dict(zip(own, [*inner, "lm_head.weight"], strict=True))
    (folder / "config.json").write_text(json.dumps(pictures | {"text_config": text | {"model_type": "llama"}}))
    with pytest.raises(ValueError, match="has another 'text_config' than one of model_type=qwen3_vl_text"):
        HuggingFaceFolder.read(folder)
    (folder / "config.json").write_text(json.dumps(pictures | {"text_config": text, "model_type": "glm4v"}))
    with pytest.raises(ValueError, match="has model_type=glm4v, an architecture whose results were never compared"):
        HuggingFaceFolder.read(folder)


def test_code_of_a_compared_family_is_ignored(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_config(folder, auto_map={"AutoModelForCausalLM": "own.Model"})
    (folder / "tokenizer_config.json").write_text('{"auto_map": {"AutoTokenizer": ["own.Tokenizer", null]}}')
    assert hf_recipe(folder).model.num_layers == CONFIG["num_hidden_layers"]
    says = "has 'auto_map': the folder's code is ignored, and the model is transformers' own llama"
    assert caplog.messages == [f"{folder / 'config.json'} {says}"]


@pytest.mark.parametrize(
    "layers", [{"layers_block_type": ["linear_attention", "moe", "full_attention"]}, {"hybrid_override_pattern": "ME*"}]
)
def test_layers_are_counted_by_their_kinds(folder: Path, layers: dict[str, Any]) -> None:
    config = {name: value for name, value in CONFIG.items() if name != "num_hidden_layers"}
    config |= layers | {"architectures": ["NemotronHForCausalLM"], "model_type": "nemotron_h"}
    (folder / "config.json").write_text(json.dumps(config))
    assert hf_recipe(folder).model.num_layers == 3


WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
KINDS = ("ernie4_5_moe", "falcon_h1", "deepseek_v4", None)
NOT_COMPARED = r"config\.json has model_type={}, an architecture whose results were never compared with transformers'"
HEADERS = [b"{}", b"[]", b'{"a": 1}', b'{"a": {"dtype": "F32"}}', b"[" * 5000]
HEADERS += [b'{"a": {"dtype": "F32", "shape": [%s], "data_offsets": [0, 0]}}' % size for size in (b"true", b"-1", b"9")]
# Changed files: an object is JSON, a list the tensors and their type, a number the bytes that are left, None no file.
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"adapter_config.json": {}}, r"has adapter_config\.json: transformers adds an adapter to these weights"),
    ({"config.json": CONFIG | {"quantization_config": {"quant_method": "fp8"}}}, "has 'quantization_config'"),
    (
        {"config.json": CONFIG | {"architectures": None}},
        "has architectures=None; model.hf takes one, a causal language model",
    ),
    ({"config.json": CONFIG | {"architectures": ["BertModel"]}}, r"has architectures=\['BertModel'\]"),
    ({"config.json": CONFIG | {"architectures": ["A", "BForCausalLM"]}}, r"has architectures=\['A', 'BForCausalLM'\]"),
    # Also those whose configurations have other names for the sizes, or tables of integers among the weights.
    *(
        (
            {
                "config.json": CONFIG
                | {"model_type": kind, "auto_map": {"AutoConfig": "own"}, "quantization_config": {}},
                WEIGHTS: (["a"], "I64"),
            },
            f"{NOT_COMPARED.format(kind)}; model.hf takes deepseek_v3, .*, qwen3_moe, ",
        )
        for kind in KINDS
    ),
    *(
        ({"config.json": text}, r"config\.json is not (JSON|a JSON object)")
        for text in ("{", "[]", "3", '{"a": ' * 10**5)
    ),
    (
        {"config.json": {name: CONFIG[name] for name in ("architectures", "model_type", "num_hidden_layers")}},
        r"config\.json lacks 'hidden_size'",
    ),
    ({WEIGHTS: None}, r"it has neither model\.safetensors nor"),
    (
        {WEIGHTS: None, "pytorch_model.bin": b"\x80"},
        r"its weights are pickles \(pytorch_model\.bin\), which can run code",
    ),
    *(({WEIGHTS: kept}, "was cut off or is damaged; download it again") for kept in (-1, 20, 7, 0)),
    *(({WEIGHTS: struct.pack("<Q", len(one)) + one}, "is not a safetensors file") for one in HEADERS),
    (
        {WEIGHTS: (["a"], "F8_E4M3")},
        "has 'a' of type F8_E4M3; give the folder of weights that are not quantized",
    ),
    (
        {INDEX: {"weight_map": {"a": "one.safetensors"}}, "one.safetensors": (["a"], "F32")},
        r"has weights twice: transformers reads model\.safetensors",
    ),
    *(
        ({WEIGHTS: None, INDEX: {"weight_map": {"a": file}}}, "which is no safetensors file next to it")
        for file in ("../one.safetensors", "/etc/passwd", "one.bin", "")
    ),
]


@pytest.mark.parametrize(("changes", "says"), REFUSED)
def test_folders_that_are_rejected(folder: Path, changes: dict[str, Any], says: str) -> None:
    for name, change in changes.items():
        file = folder / name
        if change is None:
            file.unlink()
        elif isinstance(change, int):
            file.write_bytes(file.read_bytes()[:change])
        elif isinstance(change, tuple):
            write_tensors(file, change[0], dtype=change[1])
        elif isinstance(change, dict):
            file.write_text(json.dumps(change))
        else:
            file.write_bytes(change if isinstance(change, bytes) else change.encode())
    with pytest.raises(RecipeError, match=says):
        hf_recipe(folder)


def test_weights_of_several_files(folder: Path) -> None:
    write_index(folder, a="one.safetensors", b="two.safetensors")
    write_tensors(folder / "one.safetensors", ["a"])
    with pytest.raises(RecipeError, match=r"two\.safetensors is missing; download the folder again"):
        hf_recipe(folder)
    write_tensors(folder / "two.safetensors", ["c"])
    with pytest.raises(RecipeError, match=r"two\.safetensors lacks 'b', which .* places there"):
        hf_recipe(folder)
    write_tensors(folder / "two.safetensors", ["b", "c"], dtype="BF16")
    read = HuggingFaceFolder.read(folder)
    assert read.files == {"a": "one.safetensors", "b": "two.safetensors"}
    assert read.dtypes == {"a": "F32", "b": "BF16"}


def test_paths_of_any_character(folder: Path) -> None:
    hf_recipe(folder)
    renamed = folder.rename(folder.parent / 'a=b \U0001f600 \u00e9 "q" \\')
    assert load_recipe(folder.parent / "recipe.yaml", with_hf(None, str(renamed))).model.hf == str(renamed)


@pytest.mark.skipif(HAS_BRIDGE, reason="Megatron-Bridge is installed")
@pytest.mark.parametrize("name", ["train", "verify"])
def test_missing_bridge_is_named(folder: Path, name: str) -> None:
    hf_recipe(folder)
    (folder.parent / "rows.jsonl").write_text('{"tokens": [1, 2, 3]}\n')
    arguments = [name, str(folder.parent / "recipe.yaml"), f"data.path={folder.parent / 'rows.jsonl'}"]
    plan = ["plan", str(folder.parent / "rows.jsonl"), "--model", arguments[1]]
    for given in (arguments, [*arguments, "--hf", str(folder)], plan):
        refused = run_command(*given, code=2)
        assert "model.hf needs Megatron-Bridge 0.6 with Python 3.12" in " ".join(refused.output.split())


@pytest.mark.skipif(sys.version_info < (3, 12), reason="Megatron-Bridge needs Python 3.12")
@pytest.mark.parametrize(
    ("transformers", "expected"),
    [
        ("5.24.0", "it needs transformers<5.24,>=5.8, and 5.24.0 is installed; pip install 'transformers<5.24,>=5.8'"),
        ("5.7.1", "it needs transformers<5.24,>=5.8, and 5.7.1 is installed; pip install 'transformers<5.24,>=5.8'"),
        ("5.23.0", "install it with pip install 'accelerate>=1.0' 'transformers<5.24,>=5.8' and pip install --no-deps"),
        (None, "install it with pip install 'accelerate>=1.0' 'transformers<5.24,>=5.8' and pip install --no-deps"),
    ],
)
def test_transformers_that_the_bridge_does_not_fit(
    folder: Path, transformers: str | None, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error names the installed release, the bound and the command; a bridge that is missing has its own."""
    from mcore_prefix_tree.mcore.models import bridge
    from mcore_prefix_tree.utils import versions

    declared = ['accelerate>=1.0; extra == "bridge"', 'transformers<5.24,>=5.8; extra == "bridge"']
    monkeypatch.setitem(sys.modules, "megatron.bridge", None)
    monkeypatch.setattr(versions, "requires", lambda _: declared)
    monkeypatch.setattr(bridge, "installed_version_of", {"transformers": transformers}.get)
    hf_recipe(folder)
    (folder.parent / "rows.jsonl").write_text('{"tokens": [1, 2, 3]}\n')
    recipe = folder.parent / "recipe.yaml"
    refused = run_command("train", recipe, f"data.path={folder.parent / 'rows.jsonl'}", code=2)
    assert expected in refused.output
