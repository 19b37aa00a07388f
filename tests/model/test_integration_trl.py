"""Calls of a Transformers model that folds in its backbone, against each row by itself in double precision."""

from __future__ import annotations

import copy
import json
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from harness.forks import fork_context
from harness.oracles import worst
from hypothesis import given
from hypothesis import strategies as st

transformers = pytest.importorskip("transformers")
from backbone_calls import (  # noqa: E402
    PAD,
    assert_exact,
    assert_recomputation_changes_nothing,
    left_padded,
    loss_of,
    padded,
    rows_of_padded,
)
from harness.transformers_models import SMALL, InDouble, Noisy, gradients  # noqa: E402

from mcore_prefix_tree.integrations.trl import LogFolding, fold_backbone, read_rows  # noqa: E402

SIZES = SMALL | {"pad_token_id": PAD, "attn_implementation": "sdpa"}
FAMILIES = {
    "Qwen3": {},
    "Llama": {},
    "GPTNeoX": {"hidden_dropout": 0.0, "attention_dropout": 0.0},
    "GPT2": {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
    "Qwen3Moe": {
        "moe_intermediate_size": 16,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "experts_implementation": "eager",
    },
}
# Branches at several depths, duplicates, a strict prefix, rows of one token, and padding only.
ROWS = [[5, 6, 7, 8, 9], [5, 6, 7, 3], [5, 6, 7, 8, 9], [5, 6], [5], [], [11, 12, 13], [5, 6, 7, 8, 4, 2], [11]]


def make(family="Qwen3", *, head="CausalLM", **settings):
    torch.manual_seed(1)
    config = getattr(transformers, f"{family}Config")(**SIZES | FAMILIES[family] | settings)
    auto = getattr(transformers, f"AutoModelFor{head}")
    return auto.from_config(config, attn_implementation="sdpa").double().train()


def packed(rows):
    """Rows behind each other, for example in padding-free batches."""
    rows = [row for row in rows if row]
    ids = torch.tensor([token for row in rows for token in row])[None]
    positions = torch.cat([torch.arange(len(row)) for row in rows])[None]
    return {"input_ids": ids, "position_ids": positions, "use_cache": False}


def rows_of_packed(model, rows, call=packed):
    return list(model(**call(rows)).logits[0].split([len(row) for row in rows if row]))


def collated(**settings):
    """Rows in a call as Transformers' collator of padding-free batches makes it; it does not say ``use_cache``."""
    collate = transformers.DataCollatorWithFlattening(**{"return_position_ids": False} | settings)

    def call(rows):
        return collate([{"input_ids": row} for row in rows]) | {"labels": None}

    return lambda model, rows: rows_of_packed(model, rows, call)


CALLS = {
    "right padding": rows_of_padded,
    "left padding": left_padded,
    "padding-free": rows_of_packed,
    "borders only": collated(return_flash_attn_kwargs=True),
    "numbers of rows only": collated(return_seq_idx=True),
    "all of them": collated(return_flash_attn_kwargs=True, return_seq_idx=True, return_position_ids=True),
}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_and_gradients_equal_those_of_each_row_by_itself(family, call):
    stock = make(family)
    folds = fold_backbone(copy.deepcopy(stock))
    if family == "GPT2" and call == "left padding":
        with pytest.raises(ValueError, match="row 0 begins at position 3, and the model's positions are not rotary"):
            CALLS[call](folds, ROWS)
        return
    assert_exact(stock, folds, ROWS, CALLS[call])


MODELS = {}


@given(
    st.lists(st.lists(st.integers(1, 4), max_size=6), min_size=1, max_size=6).filter(any),
    st.sampled_from(sorted(CALLS)),
)
def test_random_rows_equal_each_row_by_itself(rows, call):
    if not MODELS:
        MODELS["stock"] = make()
        MODELS["folds"] = fold_backbone(make(), least_fold_ratio=1.0)
    shares = len({row[0] for row in rows if row}) < sum(map(bool, rows))
    assert_exact(MODELS["stock"], MODELS["folds"], rows, CALLS[call], folded=shares)


@given(
    st.lists(st.integers(0, 4), min_size=1, max_size=4).filter(any),
    st.lists(st.integers(0, 4), min_size=1, max_size=4),
    st.sampled_from(["cu_seq_lens_q", "cu_seq_lens_k", "seq_idx"]),
    st.sampled_from(["position_ids", "cu_seq_lens_q", "seq_idx", "attention_mask"]),
    st.sampled_from([torch.int32, torch.int64]),
)
def test_arguments_give_the_same_rows_or_are_refused(lengths, others, name, beside, dtype):
    """In calls of one batch row, and of two if a mask gives the rows."""

    def give(name, lengths):
        if name == "position_ids":
            return torch.cat([torch.arange(length) for length in lengths])[None]
        if name == "seq_idx":
            return torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))[None].to(dtype)
        return torch.tensor([0, *lengths], dtype=dtype).cumsum(0)

    lengths = [length for length in lengths if length]
    call = {"input_ids": torch.ones(1, sum(lengths), dtype=torch.long), beside: give(beside, lengths)}
    if beside == "attention_mask":
        call = {name: padded([[1] * length for length in lengths])[0][name] for name in ("input_ids", beside)}
    if name == "seq_idx" and (beside == "attention_mask" or sum(others) != sum(lengths)):
        return
    borders = {key: value for key, value in call.items() if key not in ("input_ids", "attention_mask", "position_ids")}
    arguments = [call["input_ids"], call.get("attention_mask"), call.get("position_ids")]
    if name != beside and [length for length in others if length] != lengths:
        with pytest.raises(ValueError, match=f"{name} must rise|(cu_seq_lens_.|seq_idx) contradicts"):
            read_rows(*arguments, borders | {name: give(name, others)})
        others = lengths
    rows = read_rows(*arguments, borders | {name: give(name, others if name != beside else lengths)})
    assert rows.length.tolist() == lengths


def test_calls_that_share_nothing_reach_the_stock_model_as_they_are():
    stock = make()
    folds = fold_backbone(copy.deepcopy(stock))
    call, _ = padded([[1, 2, 3], [4, 2]])
    assert torch.equal(folds(**call).logits, stock(**call).logits)
    call, _ = padded([[], []])
    assert torch.isfinite(folds(**call).logits).all()
    report = folds.folding.report(with_grad=True)
    assert (report.calls, report.left_alone, report.fold_ratio) == (2, 2, 1.0)


def test_generation_and_caches_are_untouched():
    stock = make().eval()
    folds = fold_backbone(copy.deepcopy(stock))
    call, _ = padded([[5, 6, 7], [5, 6], [5, 6, 7]], side="left")
    asked = {name: call[name] for name in ("input_ids", "attention_mask")}
    generated = [model.generate(**asked, max_new_tokens=6, do_sample=False) for model in (stock, folds)]
    assert torch.equal(*generated)
    with torch.no_grad():
        assert folds(**asked).past_key_values.get_seq_length() == 3
    assert folds(**asked, use_cache=True).past_key_values.get_seq_length() == 3
    assert not folds.folding.report(with_grad=True).calls
    assert not folds.folding.report(with_grad=False).calls
    with torch.no_grad():
        folds(**call)
    folds(**asked)
    assert folds.folding.report(with_grad=True).unique_tokens == 3
    assert folds.folding.report(with_grad=False).unique_tokens == 3


@pytest.mark.parametrize("reentrant", [True, False])
def test_recomputed_layers_follow_the_tree_of_their_call(reentrant):
    batches = (ROWS, ROWS[:3], [[1], [2]])
    assert_recomputation_changes_nothing(fold_backbone(make()), *batches, reentrant=reentrant)


@pytest.mark.parametrize("side", ["left", "right"])
def test_classifiers_pool_the_last_token_of_each_row(side):
    stock = make(head="SequenceClassification", num_labels=1)
    folds = fold_backbone(copy.deepcopy(stock))
    rows = [row for row in ROWS if row]
    with InDouble():
        scores = folds(**padded(rows, side)[0]).logits[:, 0]
        alone = torch.cat([stock(torch.tensor([row]), use_cache=False).logits[0] for row in rows])
        assert worst(scores, alone) < 1e-12
        found, wanted = (
            gradients(model, -F.logsigmoid(values[::2] - values[1::2]).mean())
            for model, values in ((folds, scores), (stock, alone))
        )
    assert max(worst(found[name], wanted[name]) for name in wanted) < 1e-12
    assert folds.folding.report(with_grad=True).fold_ratio > 2


def test_balancing_losses_and_hidden_states_are_those_of_all_rows():
    stock = make("Qwen3Moe")
    folds = fold_backbone(copy.deepcopy(stock))
    call, columns = padded(ROWS)
    call |= {"output_router_logits": True, "output_hidden_states": True, "labels": call["input_ids"]}
    with InDouble():
        outputs = [model(**call) for model in (stock, folds)]
    assert worst(outputs[1].aux_loss, outputs[0].aux_loss) < 1e-12
    assert len(outputs[1].hidden_states) == len(outputs[0].hidden_states) == 3
    for expected, actual in zip(*(output.hidden_states for output in outputs), strict=True):
        for at, places in enumerate(columns):
            assert not ROWS[at] or worst(actual[at, places], expected[at, places]) < 1e-12


def test_adapters_train_as_with_each_row_by_itself():
    peft = pytest.importorskip("peft")
    adapter = peft.LoraConfig(
        r=2, target_modules=["q_proj", "down_proj"], init_lora_weights=False, task_type="CAUSAL_LM"
    )
    torch.manual_seed(2)
    stock = peft.get_peft_model(make(), adapter).double()
    folds = fold_backbone(copy.deepcopy(stock))
    assert_exact(stock, folds, ROWS)
    with stock.disable_adapter(), folds.disable_adapter(), InDouble():
        expected = [rows_of_padded(stock, [row])[0] for row in ROWS if row]
        actual = rows_of_padded(folds, ROWS)
    assert max(worst(one, other) for one, other in zip(actual, expected, strict=True)) < 1e-12
    folds.add_adapter("dropping", peft.LoraConfig(r=2, lora_dropout=0.1, target_modules=["q_proj"]))
    folds.set_adapter("dropping")
    with pytest.raises(ValueError, match=r"q_proj\.lora_dropout\.dropping has p=0\.1"):
        folds.double().train()(**padded(ROWS)[0])
    folds.eval()(**padded(ROWS)[0])


def test_the_saved_model_is_the_stock_one(tmp_path):
    stock = make()
    folds = fold_backbone(copy.deepcopy(stock))
    assert folds.state_dict().keys() == stock.state_dict().keys()
    for model, folder in ((stock, "stock"), (folds, "folds")):
        model.save_pretrained(tmp_path / folder)
    configs = [json.loads((tmp_path / folder / "config.json").read_text()) for folder in ("stock", "folds")]
    assert configs[0] == configs[1]
    # A trainer makes its reference model with the attention of the model.
    reference = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "folds", attn_implementation=folds.config._attn_implementation
    )
    call, _ = padded(ROWS)
    weights = stock.state_dict()
    assert all(torch.equal(value, weights[name]) for name, value in reference.state_dict().items())
    # Loaded weights lie elsewhere in memory, where products may be summed in another order.
    torch.testing.assert_close(reference(**call).logits, stock(**call).logits, rtol=0, atol=1e-12)


def rate(module, name):
    return lambda model: setattr(model.get_submodule(module), name, 0.1)


def drop_unseen(model):
    block = model.model.layers[1]
    block.mlp = Noisy(block.mlp)


def lose_the_tree(model):
    model.model.layers[1].register_forward_pre_hook(
        lambda layer, args, kwargs: (args, {name: value for name, value in kwargs.items() if name != "prefix_tree"}),
        with_kwargs=True,
    )


def borders(*at):
    return {"cu_seq_lens_q": torch.tensor(at, dtype=torch.int32)}


GAP = torch.tensor([[1, 0, 1]] * 2)
REFUSED_CALLS = {
    r"layers\.1\.self_attn has attention_dropout=0\.1": (rate("model.layers.1.self_attn", "attention_dropout"), {}),
    r"embed_tokens has neftune_noise_alpha=0\.1": (rate("model.embed_tokens", "neftune_noise_alpha"), {}),
    "the model drew numbers in its forward pass": (drop_unseen, {}),
    r"'sdpa' follows no tree.*\('prefix_tree_or_sdpa'\)": (lambda model: model.set_attn_implementation("sdpa"), {}),
    "Qwen3Attention did not receive prefix_tree": (lose_the_tree, {}),
    "does not support inputs_embeds": (None, {"input_ids": None, "inputs_embeds": torch.ones(2, 3, 32).double()}),
    "does not support output_attentions": (None, {"output_attentions": True}),
    "does not support token_type_ids": (None, {"token_type_ids": torch.ones(2, 3)}),
    r"attention_mask of shape \[2, 1, 3, 3\]": (None, {"attention_mask": torch.ones(2, 1, 3, 3)}),
    r"position_ids of shape \[3, 2, 3\]": (None, {"position_ids": torch.ones(3, 2, 3)}),
    "cu_seq_lens_q must rise from 0 to .*, 6, not": (None, borders(0, 3, 7)),
    r"cu_seq_lens_q must rise.*not \[0 5 3 6\]": (None, borders(0, 5, 3, 6)),
    "cu_seq_lens_k contradicts.* at token 3; give the same": (None, borders(0, 3, 6) | {"cu_seq_lens_k": [0, 6]}),
    "cu_seq_lens_q contradicts.* at token 3;": (None, borders(0, 4, 6)),
    "max_length_q=2 contradicts.* a row has 3 tokens": (None, borders(0, 3, 6) | {"max_length_q": 2}),
    "seq_idx contradicts.* at token 4": (None, borders(0, 3, 6) | {"seq_idx": torch.tensor([[0, 0, 0], [1, 2, 2]])}),
    r"seq_idx of shape \[6\]": (None, {"seq_idx": torch.arange(6)}),
    "row 0 has gaps in its attention_mask": (None, {"attention_mask": GAP}),
    "row 1 has gaps": (
        None,
        {"attention_mask": torch.ones(2, 3), "position_ids": torch.tensor([[0, 1, 2], [0, 1, 3]])},
    ),
}


@pytest.mark.parametrize("message", REFUSED_CALLS)
def test_calls_that_cannot_be_folded_are_refused_by_name(message):
    change, arguments = REFUSED_CALLS[message]
    model = fold_backbone(make())
    if change:
        change(model)
    with pytest.raises(ValueError, match=message):
        model(**{"input_ids": torch.tensor([[5, 6, 7], [5, 6, 8]]), "use_cache": False} | arguments)


def test_sliding_windows_are_refused_unless_the_backend_has_them():
    settings = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 5, "use_sliding_window": True}
    with pytest.raises(ValueError, match=r"window=5.*name 'reference'"):
        fold_backbone(make(**settings))(**padded(ROWS)[0])
    stock = make(**settings)
    assert_exact(stock, fold_backbone(copy.deepcopy(stock), backend="reference"), ROWS, rows_of_padded)


REFUSED_MODELS = {
    "folds already": fold_backbone,
    "attn_implementation='eager'.*set_attn_implementation": lambda model: model.set_attn_implementation("eager"),
    r"layers\.0\.self_attn has attention_dropout=0\.1": rate("model.layers.0.self_attn", "attention_dropout"),
    "alibi=True": lambda model: setattr(model.config, "alibi", True),
    "more than a text model": lambda model: setattr(model.config, "get_text_config", lambda: model.generation_config),
    "mixes tokens by Conv1d": lambda model: model.model.add_module("conv", torch.nn.Conv1d(1, 1, 1)),
}


@pytest.mark.parametrize("message", REFUSED_MODELS)
def test_models_that_cannot_be_folded_are_refused_by_name(message):
    model = make()
    REFUSED_MODELS[message](model)
    with pytest.raises(ValueError, match=message):
        fold_backbone(model)
    if message == "folds already":
        return
    with pytest.raises(ValueError, match="backend 'fastest' does not exist"):
        fold_backbone(make(), backend="fastest")


def test_models_without_position_ids_are_refused():
    sizes = {"d_model": 8, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 1, "encoder_ffn_dim": 8}
    config = transformers.BartConfig(vocab_size=9, decoder_attention_heads=1, decoder_ffn_dim=8, dropout=0.0, **sizes)
    with pytest.raises(ValueError, match="BartModel does not take position_ids"):
        fold_backbone(transformers.BartForConditionalGeneration(config))


@pytest.mark.parametrize("setting", ["cp_size", "sp_size"])
def test_rows_that_ranks_split_are_refused(monkeypatch, setting):
    state = pytest.importorskip("accelerate.state").AcceleratorState
    monkeypatch.setattr(state, "_shared_state", {"parallelism_config": SimpleNamespace(**{setting: 2})})
    with pytest.raises(ValueError, match=f"does not support {setting}=2"):
        fold_backbone(make())(**padded(ROWS)[0])


@pytest.mark.ci
def test_compiled_models_are_exact():
    # In another process: later tests fork DataLoader workers of this one, which torch.compile would break.
    process = fork_context().Process(target=compare_compiled)
    process.start()
    process.join()
    assert process.exitcode == 0


def compare_compiled():
    """Compare a compiled model that folds with itself and with the stock one; raises AssertionError."""
    stock = make(num_hidden_layers=1)
    folds = fold_backbone(copy.deepcopy(stock))
    assert_exact(stock, folds, ROWS[:4], rows_of_padded)
    compiled = torch.compile(folds, backend="aot_eager")
    expected, actual = rows_of_padded(folds, ROWS), rows_of_padded(compiled, ROWS)
    assert max(worst(one, other) for one, other in zip(actual, expected, strict=True)) < 1e-12
    wanted, found = gradients(folds, loss_of(expected)), gradients(folds, loss_of(actual))
    assert max(worst(found[name], wanted[name]) for name in wanted) < 1e-12
    assert folds.folding.report(with_grad=True).calls == 2


def test_log_needs_a_model_that_folds():
    control = transformers.TrainerControl(should_log=True)
    with pytest.raises(ValueError, match=r"call fold_backbone\(model\)"):
        LogFolding().on_step_end(None, None, control, model=make())
