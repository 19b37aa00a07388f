"""A Transformers model that draws random numbers in training is refused; one that draws none is not."""

from __future__ import annotations

import contextlib

import pytest
import torch

from mcore_prefix_tree import Sample, fold

transformers = pytest.importorskip("transformers")
from harness.transformers_models import Noisy  # noqa: E402

from mcore_prefix_tree.integrations.automodel import prefix_tree_collate_fn  # noqa: E402
from mcore_prefix_tree.integrations.prefix_grouper import PrefixGrouper, register_attention  # noqa: E402
from mcore_prefix_tree.integrations.transformers import check_model, model_inputs, sample_logprobs  # noqa: E402

LAYOUT = fold([Sample(tokens=row) for row in ([5, 6, 7, 8], [5, 6, 9], [1, 2, 3])])
BATCH = [{"prompt_ids": [5, 6], "completions": [[7, 8], [9]]}]
SIZES = {"vocab_size": 32, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
OFF = {
    "GPTNeoX": {"hidden_dropout": 0.0, "attention_dropout": 0.0, "classifier_dropout": 0.1},
    "GPT2": {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "summary_first_dropout": 0.1},
    "OPT": {"dropout": 0.0, "layerdrop": 0.0, "ffn_dim": 16, "word_embed_proj_dim": 16},
    "Mixtral": {
        "num_key_value_heads": 2,
        "intermediate_size": 16,
        "num_local_experts": 2,
        "experts_implementation": "eager",
    },
    "Qwen3": {"num_key_value_heads": 2, "head_dim": 8, "intermediate_size": 16},
}


def tiny(family, **settings):
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(
        **SIZES | OFF[family] | {"max_position_embeddings": 64, "bos_token_id": 0, "eos_token_id": 1} | settings
    )
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="prefix_tree")
    return model.double().train()


@pytest.mark.parametrize(
    ("family", "setting", "named"),
    [
        ("GPTNeoX", "hidden_dropout", "gpt_neox.emb_dropout has p=0.1"),
        ("GPT2", "resid_pdrop", "transformer.h.0.attn.resid_dropout has p=0.1"),
        ("GPT2", "embd_pdrop", "transformer.drop has p=0.1"),
        ("OPT", "dropout", "model.decoder has dropout=0.1"),
        ("OPT", "layerdrop", "model.decoder has layerdrop=0.1"),
        ("Mixtral", "router_jitter_noise", "jitter_noise=0.1"),
    ],
)
def test_rates_are_refused_in_training_by_path_and_value(family, setting, named):
    model = tiny(family, **{setting: 0.1})
    for call in (
        lambda: sample_logprobs(model, LAYOUT),
        lambda: model_inputs(model, LAYOUT),
        lambda: check_model(model),
    ):
        with pytest.raises(ValueError, match=named):
            call()
    sample_logprobs(model.eval(), LAYOUT)


@pytest.mark.parametrize("family", OFF)
def test_models_without_a_rate_train_as_they_evaluate(family):
    model = tiny(family)
    training = sample_logprobs(model, LAYOUT)
    assert all(map(torch.equal, training, sample_logprobs(model.eval(), LAYOUT)))


def with_adapter(dropout, **settings):
    peft = pytest.importorskip("peft")
    settings = {"target_modules": ["q_proj", "v_proj"], "init_lora_weights": False} | settings
    return peft, peft.get_peft_model(tiny("Qwen3"), peft.LoraConfig(r=2, lora_dropout=dropout, **settings)).double()


@pytest.mark.parametrize("targets", [["q_proj", "v_proj"], ["down_proj"]])
def test_dropout_of_adapters_is_refused_while_it_is_in_effect(targets):
    peft, model = with_adapter(0.1, target_modules=targets)
    with pytest.raises(ValueError, match=rf"{targets[0]}\.lora_dropout\.default has p=0\.1"):
        sample_logprobs(model.train(), LAYOUT)
    with model.disable_adapter():
        sample_logprobs(model, LAYOUT)
    model.add_adapter("other", peft.LoraConfig(r=2, target_modules=targets))
    model.set_adapter("other")
    sample_logprobs(model.double().train(), LAYOUT)
    model.set_adapter("default")
    with pytest.raises(ValueError, match=r"p=0\.1"):
        sample_logprobs(model.train(), LAYOUT)
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    sample_logprobs(model, LAYOUT)


@pytest.mark.parametrize("layer", [0, 1])
def test_dropout_that_no_attribute_shows_is_refused_after_the_forward(layer):
    model = tiny("Qwen3")
    block = model.model.layers[layer]
    block.mlp = Noisy(block.mlp)
    with pytest.raises(ValueError, match=r"the model drew numbers .*set dropout and noise to 0"):
        sample_logprobs(model.train(), LAYOUT)
    sample_logprobs(model.eval(), LAYOUT)


@pytest.mark.parametrize("seen", ["attribute", "draw"])
def test_callers_of_the_attention_are_refused_too(seen):
    register_attention()
    if seen == "attribute":
        model = with_adapter(0.1)[1].train()
        inner, message = model.base_model.model, r"in attention layer 0, q_proj\.lora_dropout\.default has p=0\.1"
    else:
        model = inner = tiny("Qwen3")
        block = model.model.layers[0]
        block.mlp = Noisy(block.mlp)
        message = "the model drew numbers before layer 1"
    batch = prefix_tree_collate_fn(BATCH)
    for mode in (True, False):
        model.train(mode)
        with pytest.raises(ValueError, match=message) if mode else contextlib.nullcontext():
            model(**{name: batch[name] for name in ("input_ids", "position_ids", "prefix_tree")}, use_cache=False)
    grouper = PrefixGrouper([[2, 2, 1]])
    inner.set_attn_implementation("prefix_grouper_attention")
    call = {"input_ids": torch.tensor([[5, 6, 7, 8, 9]]), "position_ids": grouper.position_ids, "use_cache": False}
    for mode in (True, False):
        model.train(mode)
        with pytest.raises(ValueError, match=message) if mode else contextlib.nullcontext():
            model(**call, prefix_grouper=grouper)


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing_and_callers_random_numbers_are_not_mistaken_for_dropout(reentrant):
    model = tiny("OPT")
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    inputs = model_inputs(model, LAYOUT)
    for _ in range(2):
        torch.rand(7)
        model(**inputs).logits.square().sum().backward()
        torch.rand(7)
