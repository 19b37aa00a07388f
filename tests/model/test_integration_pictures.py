"""Rows with pictures that fold inside a Transformers model, against each row by itself in double precision."""

from __future__ import annotations

import copy

import pytest
import torch
from harness.oracles import worst
from hypothesis import given, settings
from hypothesis import strategies as st

transformers = pytest.importorskip("transformers")
from backbone_calls import (  # noqa: E402
    PAD,
    PICTURE,
    PIXELS,
    assert_exact,
    assert_recomputation_changes_nothing,
    left_padded,
    loss_of,
    names_of,
    padded,
    pictures_of,
    rows_of_padded,
    tokens_of,
    unique_tokens,
)
from harness.transformers_models import SMALL, InDouble, Noisy, gradients  # noqa: E402

from mcore_prefix_tree.integrations.trl import fold_backbone  # noqa: E402

# Newer releases renamed arguments of caches, which nothing here passes.
pytestmark = pytest.mark.filterwarnings("error:.*past_key_values:FutureWarning")
ROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}
TEXT = SMALL | {"num_hidden_layers": 3, "rope_parameters": ROPE, "pad_token_id": PAD, "eos_token_id": 1}
TEXT |= {"bos_token_id": 2, "attn_implementation": "sdpa"}
TOWER = {"depth": 2, "num_heads": 2, "in_channels": 1, "patch_size": 2, "spatial_merge_size": 2}
TOWER |= {"temporal_patch_size": 1, "hidden_size": 16, "intermediate_size": 24, "out_hidden_size": 32}
DEEP = TOWER | {"num_position_embeddings": 16, "deepstack_visual_indexes": [0, 1]}
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
GLM_MOE = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "first_k_dense_replace": 1}
GLM_MOE |= {"n_group": 1, "topk_group": 1}
GLM_MOE["rope_parameters"] = ROPE | {"mrope_section": [1, 1, 0], "partial_rotary_factor": 0.5}
FAMILIES = {
    "Qwen2VL": ({}, TOWER | {"embed_dim": 16, "hidden_size": 32, "mlp_ratio": 2}),
    "Qwen2_5_VL": ({}, TOWER | {"window_size": 8, "fullatt_block_indexes": [1]}),
    "Qwen3VL": ({}, DEEP),
    "Qwen3VLMoe": (MOE, DEEP),
    "Glm4v": ({}, TOWER | {"image_size": 8}),
    "Glm46V": ({}, TOWER | {"image_size": 8}),
    "Glm4vMoe": (GLM_MOE, TOWER | {"image_size": 8}),
}
# Duplicates, branches before, after and at a picture, prefixes that end in one, two pictures, and rows of text.
ROWS = [[5, "a", 6, 7], [5, "a", 6, 8], [5, "b", 6, 7], [5, "a", 6, 7], [5, "c", 6, 7], [5, "d", 6, 7], [5, "a"]]
ROWS += [[5, "a", 6, "e", 7, 3], [5, "a", 6, "b", 3], ["a", 9], ["e", 5, "a", 4], [5, 6, 7], [5, 6, 4], [5]]


def make(family, **settings):
    torch.manual_seed(1)
    text, tower = FAMILIES[family]
    config = getattr(transformers, f"{family}Config")(
        text_config=TEXT | text | settings, vision_config=tower, image_token_id=PICTURE, video_token_id=91,
        vision_start_token_id=92, vision_end_token_id=93,
    )  # fmt: skip
    kind = getattr(transformers, f"{family}ForConditionalGeneration")
    return kind._from_config(config, attn_implementation="sdpa", experts_implementation="eager").double().train()


def rows_of_packed(model, rows):
    """Rows behind each other with four positions: of text, by which rows begin, and in three dimensions."""
    positions = []
    for row in rows:
        call, _ = padded([row])
        ids = call["input_ids"]
        spatial, _ = model.base_model.get_rope_index(
            ids, (ids == PICTURE).int(), image_grid_thw=call.get("image_grid_thw")
        )
        positions.append(torch.cat([torch.arange(ids.shape[1])[None, None], spatial]))
    ids = torch.tensor([token for row in rows for token in tokens_of(row)])[None]
    call = {"input_ids": ids, "position_ids": torch.cat(positions, -1), "use_cache": False} | pictures_of(rows, ids)
    return list(model(**call).logits[0].split([len(tokens_of(row)) for row in rows]))


CALLS = {
    "right padding": rows_of_padded,
    "left padding": left_padded,
    "padding-free": rows_of_packed,
}


# Each family in one call, and each way of positions in all calls.
@pytest.mark.parametrize(
    ("family", "call"),
    [(family, "right padding") for family in FAMILIES]
    + [(family, call) for family in ("Qwen2_5_VL", "Qwen3VL", "Glm4v") for call in ("left padding", "padding-free")],
)
def test_logits_and_gradients_equal_those_of_each_row_by_itself(family, call):
    stock = make(family)
    assert_exact(stock, fold_backbone(copy.deepcopy(stock)), ROWS, CALLS[call])


PARTS = st.lists(st.sampled_from([5, 6, "a", "b", "d"]), min_size=1, max_size=6)
MODELS = {}


@settings(max_examples=20)
@given(st.lists(PARTS, min_size=1, max_size=5), st.sampled_from(sorted(CALLS)))
def test_random_rows_equal_each_row_by_itself(rows, call):
    # The model needs a token between two pictures.
    rows = [[part for pair in zip(row, [7] * len(row), strict=True) for part in pair] for row in rows]
    if not MODELS:
        MODELS["stock"] = make("Qwen3VL")
        MODELS["folds"] = fold_backbone(make("Qwen3VL"), least_fold_ratio=1.0)
    names = names_of(rows)
    shares = len({row[0] for row in rows}) < len(rows) or len(set(names)) < len(names)
    assert_exact(MODELS["stock"], MODELS["folds"], rows, CALLS[call], folded=shares)


@pytest.mark.parametrize("family", ["Qwen2_5_VL", "Qwen3VL"])
def test_rows_of_text_fold_as_in_a_model_of_text(family):
    stock = make(family)
    assert_exact(stock, fold_backbone(copy.deepcopy(stock)), [[5, 6, 7], [5, 6, 8], [9]], CALLS["left padding"])


def test_equal_pictures_run_once_where_rows_share_no_token():
    stock = make("Qwen3VL")
    assert_exact(stock, fold_backbone(copy.deepcopy(stock)), [[5, "a", 7], [6, "a", 7], [8, 9]])


def test_calls_that_share_nothing_reach_the_stock_model_as_they_are():
    stock = make("Qwen3VL")
    folds = fold_backbone(copy.deepcopy(stock))
    call, _ = padded([[5, "a", 7], [6, "b", 7]])
    assert torch.equal(folds(**call).logits, stock(**call).logits)
    assert folds.folding.report(with_grad=True).left_alone == 1


def test_pictures_without_token_types_are_positioned_as_text():
    stock = make("Qwen2_5_VL")
    folds = fold_backbone(copy.deepcopy(stock))
    call, columns = padded(ROWS)
    del call["mm_token_type_ids"]
    with InDouble():
        expected, actual = stock(**call).logits, folds(**call).logits
    for at, places in enumerate(columns):
        assert worst(actual[at, places], expected[at, places]) < 1e-12
    assert folds.folding.report(with_grad=True).unique_tokens == unique_tokens(ROWS)


@pytest.mark.parametrize(("change", "unique"), [("shift", 7), ("move", 12)])
def test_positions_of_the_caller_decide_what_is_shared(change, unique):
    stock = make("Qwen3VL")
    folds = fold_backbone(copy.deepcopy(stock))
    call, _ = padded([[5, "a", 6, 7]] * 2)
    positions, _ = stock.model.get_rope_index(call["input_ids"], call["mm_token_type_ids"], call["image_grid_thw"])
    positions[:, 1] += 3
    if change == "move":  # one side of the picture, from its second token
        positions[2, 1, 2:] += 2
    call |= {"position_ids": positions}
    with InDouble():
        expected, actual = stock(**call).logits, folds(**call).logits
        assert worst(actual, expected) < 1e-12
        wanted, found = gradients(stock, loss_of(expected)), gradients(folds, loss_of(actual))
    assert max(worst(found[name], wanted[name]) for name in wanted) < 1e-12
    assert folds.folding.report(with_grad=True).unique_tokens == unique


def test_losses_and_adapters_are_those_of_the_stock_model():
    peft = pytest.importorskip("peft")
    adapter = peft.LoraConfig(r=2, target_modules=["q_proj", "qkv", "linear_fc2"], init_lora_weights=False)
    stock = peft.get_peft_model(make("Qwen3VL"), adapter).double()
    folds = fold_backbone(copy.deepcopy(stock))
    call, _ = padded(ROWS)
    call["labels"] = call["input_ids"].masked_fill(call["attention_mask"] == 0, -100)
    with InDouble():
        losses = [model(**call).loss for model in (stock, folds)]
        assert worst(losses[1], losses[0]) < 1e-12
        wanted, found = (gradients(model, loss) for model, loss in zip((stock, folds), losses, strict=True))
    assert any("visual" in name for name in wanted)
    assert max(worst(found[name], wanted[name]) for name in wanted) < 1e-12


@pytest.mark.parametrize("reentrant", [True, False])
def test_recomputed_layers_follow_the_tree_of_their_call(reentrant):
    folds = fold_backbone(make("Qwen3VL"))
    assert_recomputation_changes_nothing(folds, ROWS, ROWS[:3], reentrant=reentrant)


def test_generation_and_the_towers_attention_are_untouched():
    stock = make("Qwen3VL").eval()
    folds = fold_backbone(copy.deepcopy(stock))
    assert folds.model.visual.config._attn_implementation == "sdpa"
    call, _ = padded([[5, "a", 6], [5, "a"]], side="left")
    call |= {"use_cache": True, "max_new_tokens": 4, "do_sample": False}
    assert torch.equal(*(model.generate(**call) for model in (stock, folds)))
    assert not folds.folding.report(with_grad=False).calls


def drop_in_the_tower(model):
    model.model.visual.merger = Noisy(model.model.visual.merger)


def set_a_rate(model):
    model.model.visual.blocks[1].attn.attention_dropout = 0.1


VIDEO = {"pixel_values_videos": PIXELS[0, :16], "video_grid_thw": torch.tensor([[1, 4, 4]])}
CALL, _ = padded([[5, "a", 6], [5, "a", 7]])
WIDTH = CALL["input_ids"].shape[1]
REFUSED_CALLS = {
    "does not support pixel_values_videos: videos": (None, VIDEO),
    "does not support mm_encoder_outputs": (None, {"mm_encoder_outputs": {}}),
    "pixel_values have no image_grid_thw": (None, {"image_grid_thw": None}),
    "does not support gradients of pixel_values": (None, {"pixel_values": torch.ones(32, 4, requires_grad=True)}),
    "describes 32 patches, but pixel_values have 31": (None, {"pixel_values": CALL["pixel_values"][1:]}),
    r"have 7 tokens of pictures \(id 90\).* describes 8: .* cut no picture": (
        None,
        {"input_ids": CALL["input_ids"].masked_fill(torch.arange(2 * WIDTH).view(2, -1) == 1, 3)},
    ),
    r"position_ids of shape \[3, 2, 5\]": (None, {"position_ids": torch.ones(3, 2, WIDTH - 1)}),
    r"position_ids of shape \[2, 2, 6\]": (None, {"position_ids": torch.ones(2, 2, WIDTH)}),
    r"visual\.blocks\.1\.attn has attention_dropout=0\.1": (set_a_rate, {}),
    "the model drew numbers in its forward pass": (drop_in_the_tower, {}),
    r"follows no tree.*\('prefix_tree_or_sdpa'\)": (lambda model: model.set_attn_implementation("sdpa"), {}),
}


@pytest.mark.parametrize("message", REFUSED_CALLS)
def test_calls_that_cannot_be_folded_are_refused_by_name(message):
    change, arguments = REFUSED_CALLS[message]
    model = fold_backbone(make("Qwen3VL"))
    if change:
        change(model)
    with pytest.raises(ValueError, match=message):
        model(**CALL | arguments)


def test_other_models_with_towers_are_refused_by_name(monkeypatch):
    model = make("Qwen2VL")
    monkeypatch.setattr(type(model.model), "forward", lambda self, position_ids, **kwargs: None)
    with pytest.raises(ValueError, match=r"Qwen2VLModel does not take mm_encoder_outputs.*Transformers 5\.23"):
        fold_backbone(model)
    model.config.model_type = "llava"
    with pytest.raises(
        ValueError, match=r"type 'llava': folding supports pictures of qwen2_vl, .*not videos or sounds"
    ):
        fold_backbone(model)
