"""FLOPs by hand, counts by brute force. For torch's own count of a step, see tests/model/test_train_bound.py."""

from __future__ import annotations

import argparse
import json
import math
from dataclasses import replace

import numpy as np
import pytest
from harness.oracles import sample_lists
from hypothesis import given
from hypothesis import strategies as st
from megatron.core.transformer.utils import is_layer_window_attention

from mcore_prefix_tree import Sample, fold
from mcore_prefix_tree.plan import Counts, ExpectedSpeedup, LatentAttention, ModelWork
from mcore_prefix_tree.plan.flops import Flops, pair_flops
from mcore_prefix_tree.plan.model_shape import SparseAttention, layers_with_window
from mcore_prefix_tree.settings import ModelConfig

SMALL = {"num_layers": 2, "hidden_size": 8, "num_attention_heads": 4, "vocab_size": 100}
DENSE = SMALL | {"ffn_hidden_size": 16}


def test_flops_by_hand():
    """Head size 2. A layer: q and out 8 x 8 each, k and v 8 x 4 each, three of 8 x 16. The head: 8 x 100."""
    work = ModelWork.from_dimensions(**DENSE, num_query_groups=2)
    assert work.token == 2 * 2 * (2 * 64 + 2 * 32 + 3 * 128)
    assert work.position == 2 * 800
    assert work.pair == Flops(forward=2 * 2 * 2 * 4, backward=2.5 * 2 * 2 * 2 * 4)
    counts = Counts(tokens=10, pairs=30, window_pairs=0, predictors=3)
    body, attention, head = work.of(counts)
    assert body == Flops(forward=10 * work.token, backward=20 * work.token)
    assert attention == Flops(forward=2 * 30 * work.pair.forward, backward=2 * 30 * work.pair.backward)
    assert head == Flops(forward=10 * work.position, backward=20 * work.position)
    fused = replace(work, fused_head=True).of(counts)
    assert fused == (body, attention, Flops(forward=3 * work.position, backward=6 * work.position))


def test_flops_of_multi_token_prediction_by_hand():
    """Two depths: a layer each like the last, which has experts, two rows of 8 into one, and a head."""
    experts = {"num_moe_experts": 4, "moe_router_topk": 2, "moe_ffn_hidden_size": 4, "moe_layer_freq": [0, 1]}
    window = {"window_size": [3, 0], "window_attn_skip_freq": [1, 0]}
    plain = ModelWork.from_dimensions(**DENSE, settings=experts | window)
    last = ModelWork.from_dimensions(**DENSE | {"num_layers": 1}, settings=experts | {"moe_layer_freq": [1]})
    work = ModelWork.from_dimensions(**DENSE, settings=experts | window | {"mtp_num_layers": 2})
    assert work.token == plain.token + 2 * last.token + 2 * 2 * (16 * 8)
    assert work.position == 3 * plain.position
    # The depths count their layers from 1, as Megatron does.
    assert (plain.layers, plain.window_layers) == (1, 1)
    assert (work.layers, work.window_layers) == (2, 2)

    # The depths of a pattern, too.
    pattern, windows = "**-*", {"window_size": [3, 0], "window_attn_skip_freq": [1, 0, 1, 0]}
    plain = ModelWork.from_dimensions(**DENSE, settings=windows, pattern=pattern)
    assert ModelWork.from_dimensions(**DENSE, settings=windows, pattern=f"{pattern}/**") == plain
    work = ModelWork.from_dimensions(**DENSE, settings=windows | {"mtp_num_layers": 2}, pattern=f"{pattern}/**/**")
    assert work.token == plain.token + 2 * 2 * (2 * (4 * 64) + 16 * 8)
    assert work.position == 3 * plain.position
    assert (plain.layers, plain.window_layers) == (2, 1)
    assert (work.layers, work.window_layers) == (4, 3)


def test_flops_of_latent_attention_by_hand():
    """Four heads, whose queries and keys have 3 channels without a position and 2 with one, and whose values have 5."""
    latent = LatentAttention(q_lora_rank=6, kv_lora_rank=7, qk_head_dim=3, qk_pos_emb_head_dim=2, v_head_dim=5)
    settings = {"multi_latent_attention": True, **vars(latent), "rope_type": "rope"}
    queries = 8 * 6 + 6 * (4 * (3 + 2))
    keys_values = 8 * (7 + 2) + 7 * (4 * (3 + 5))
    layer = queries + keys_values + (4 * 5) * 8 + 3 * 8 * 16
    work = ModelWork.from_dimensions(**DENSE, settings=settings)
    assert work.token == 2 * 2 * layer
    # Scores of 5 channels three times in the backward, and those of values twice.
    assert work.pair == Flops(forward=2 * 4 * (5 + 5), backward=2 * 4 * (3 * 5 + 2 * 5)) == pair_flops(4, 5, 5)
    assert pair_flops(1, 3, 5) == Flops(forward=2 * 8, backward=2 * 19)
    whole = replace(latent, q_lora_rank=None)
    assert whole.weights(8, 4) == latent.weights(8, 4) - queries + 8 * (4 * 5)
    assert LatentAttention.from_settings({"multi_latent_attention": True}) == LatentAttention()
    assert LatentAttention.from_settings(settings | {"multi_latent_attention": False}) is None


LATENT = {
    "multi_latent_attention": True,
    "q_lora_rank": 6,
    "kv_lora_rank": 7,
    "qk_head_dim": 3,
    "qk_pos_emb_head_dim": 2,
    "v_head_dim": 5,
}
INDEXER = {"dsa_indexer_n_heads": 2, "dsa_indexer_head_dim": 3, "dsa_indexer_topk": 4}
SPARSE = {"experimental_attention_variant": "dsa", **LATENT, **INDEXER}


def pairs_by_hand(samples, topk, is_folded):
    """Tokens, (query, visible key) pairs, and as many of a query as it attends to, each enumerated."""
    queries = {path if is_folded else (at, path) for at, path in enumerate(paths(samples))}
    keys = [(query, key) for query in queries for key in range(len((query if is_folded else query[1])[1]))]
    attended = [(query, key) for query, key in keys if key < topk]  # any choice has as many
    return len(queries), len(keys), len(attended)


@given(sample_lists(), st.integers(1, 6), st.sampled_from([0.0, 0.1]))
def test_flops_of_sparse_attention_by_hand(samples, topk, coefficient):
    """The second of three layers takes the keys of the first; the indexer's loss reads attention's scores."""
    settings = SPARSE | {"dsa_indexer_topk": topk, "dsa_indexer_topk_freq": 2, "dsa_indexer_loss_coeff": coefficient}
    three = DENSE | {"num_layers": 3}
    work, latent = (ModelWork.from_dimensions(**three, settings=one) for one in (settings, LATENT))
    learns = coefficient > 0
    expected = work.expected_speedup([fold(samples)])
    for is_folded, found in ((True, expected.folded), (False, expected.unfolded)):
        tokens, visible, attended = pairs_by_hand(samples, topk, is_folded)
        indexer = 2 * 2 * visible * (2 * 3)
        target = 2 * 2 * visible * 4 * (3 + 2) * learns
        assert found.attention == Flops(
            forward=3 * attended * 2 * 4 * (5 + 5) + indexer + target,
            backward=3 * attended * 2 * 4 * (3 * 5 + 2 * 5) + 2 * indexer * learns,
        )
        projected = 2 * 2 * tokens * (6 * (2 * 3) + 8 * 3 + 8 * 2)
        assert found.body == Flops(
            forward=latent.token * tokens + projected, backward=2 * latent.token * tokens + projected * learns
        )
        assert found.head == latent.of(Counts(tokens, 0, 0, 0)).head


def test_sparse_layers_of_patterns_and_depths():
    """The D of a pattern chooses among all keys, also where attention has a window; layers are counted from 1."""
    settings = LATENT | INDEXER | {"window_size": (2, 0), "dsa_indexer_topk_freq": 4}
    work = ModelWork.from_dimensions(**DENSE, settings=settings, pattern="D*-D|D")
    assert (work.layers, work.window_layers, work.sparse_layers, work.limits) == (0, 1, 3, (3, 4))
    one = ModelWork.from_dimensions(**DENSE, settings=settings, pattern="D")
    assert work.indexer_pair == one.indexer_pair * 2 == Flops(forward=2 * 2 * 6, backward=0)
    # A depth of multi-token prediction has a layer like the last, with an indexer.
    deep = ModelWork.from_dimensions(**DENSE, settings=SPARSE | {"mtp_num_layers": 1})
    assert (deep.sparse_layers, deep.indexer_pair) == (3, one.indexer_pair * 3)
    # Without latents of queries, the indexer projects the layer's input.
    wide = ModelWork.from_dimensions(**DENSE, settings=SPARSE | {"q_lora_rank": None})
    assert wide.indexer_token.forward == 2 * 2 * (8 * 6 + 8 * 3 + 8 * 2)
    for missing in INDEXER:
        with pytest.raises(ValueError, match=f"{missing} is not set"):
            ModelWork.from_dimensions(**DENSE, settings={**SPARSE, missing: None})


@pytest.mark.parametrize(("offset", "every"), [(0, 1), (0, 2), (1, 4), (2, 3), (3, 2)])
def test_layers_with_an_indexer_match_megatrons(offset, every):
    dsa = pytest.importorskip("megatron.core.transformer.experimental_attention_variant.dsa")
    if not hasattr(dsa, "is_dsa_skip_topk_layer"):
        pytest.skip("this megatron-core has no layers that take the keys of another")
    indexer = SparseAttention(**INDEXER, dsa_indexer_topk_freq=every, dsa_indexer_skip_topk_offset=offset)
    for layer in range(1, 12):
        assert indexer.chooses(layer) != dsa.is_dsa_skip_topk_layer(layer, offset, every)


def test_megatron_lm_counts_sparse_attention_as_latent():
    """It counts no indexer, norms, half the square of a length for its pairs, and no second scores in the backward."""
    training = pytest.importorskip("megatron.training.training")
    length, layers = 64, 2
    names = {"num_experts": None, "moe_layer_freq": 1, "mtp_num_layers": None, "hybrid_layer_pattern": None}
    names |= {"moe_router_topk": 0, "moe_latent_size": None, "moe_ffn_hidden_size": None}
    names |= {"moe_shared_expert_intermediate_size": None, "group_query_attention": False, "num_query_groups": 4}
    settings = SPARSE | {"dsa_indexer_topk": length}
    args = argparse.Namespace(
        **names, **settings, **DENSE, seq_length=length, swiglu=True, padded_vocab_size=100, kv_channels=2
    )
    work = ModelWork.from_dimensions(**DENSE, settings=settings)
    body, attention, head = work.of(Counts.of_lengths(np.array([length]), *work.limits))
    indexers = work.indexer_token * length + work.indexer_pair * (length * (length + 1) // 2)
    attended = attention.forward + work.indexer_token.forward * length - indexers.forward
    ours = body.total - work.indexer_token.total * length + head.total + 3 * attended * length / (length + 1)
    norms = 3 * 2 * layers * length * (6 + 7)
    assert training.num_floating_point_operations(args, batch_size=1) == pytest.approx(ours + norms, rel=1e-12)


def test_flops_of_gated_delta_net_by_hand():
    """Two heads of 3 channels for keys, and four of 5 for values; one layer has attention."""
    sizes = {
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 3,
        "linear_value_head_dim": 5,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
    }
    recurrent = 8 * (6 + 6 + 20 + 20 + 4 + 4) + 4 * (6 + 6 + 20) + 4 * (4 * 3 * 5) + 20 * 8
    attention, mlp = 4 * 64, 3 * 128
    variant = {"experimental_attention_variant": "gated_delta_net"}
    for every, layers, of_states in ((4, 4, 3), ([1, 0], 2, 1)):
        settings = sizes | variant | {"linear_attention_freq": every}
        work = ModelWork.from_dimensions(**DENSE | {"num_layers": layers}, settings=settings)
        assert work.token == 2 * (of_states * recurrent + attention + layers * mlp)
        assert work.layers == 1
    hybrid = ModelWork.from_dimensions(**DENSE, settings=sizes, pattern="G-*")
    assert (hybrid.token, hybrid.layers) == (2 * (recurrent + mlp + attention), 1)
    # The rule computes whole chunks; the state of a branch point is kept in fp32.
    assert (hybrid.unused, hybrid.state_layers, hybrid.state_bytes) == (2 * 4 * (4 * 3 * 5), 1, 4 * (4 * 3 * 5))
    # Two states in fp32, over what a token keeps in bf16: of the rule, of attention, of the MLP, and of three inputs.
    kept = 6 * 6 + 8 * 20 + 2 * 12 + 3 * 4 * 4 + 3 * 16 + 3 * 2 * 8
    assert hybrid.state_tokens == math.ceil(2 * hybrid.state_bytes / (2 * kept))
    of_unused = hybrid.of(Counts(10, 0, 0, 0, unused=7)).body
    assert of_unused == Flops(forward=10 * hybrid.token + 7 * hybrid.unused, backward=2 * of_unused.forward)


def test_flops_of_mamba_by_hand():
    """Projections of z, x, B, C and dt, the output, the convolution of x, B and C, and three products of the state."""
    sizes = {"mamba_state_dim": 3, "mamba_head_dim": 4, "mamba_num_groups": 2, "mamba_num_heads": 6}
    recurrent = 8 * (24 + 24 + 6 + 6 + 6) + 4 * (24 + 6 + 6) + 3 * (6 * 4 * 3) + 24 * 8
    work = ModelWork.from_dimensions(**DENSE, settings=sizes, pattern="M-*M")
    assert (work.token, work.layers) == (2 * (2 * recurrent + 3 * 128 + 4 * 64), 1)
    assert (work.unused, work.state_layers, work.state_bytes) == (0, 2, 2 * 4 * (6 * 4 * 3))
    kept = 2 * (13 * 24 + 6 * 6) + 3 * 16 + 3 * 4 * 4 + 4 * 2 * 8
    assert work.state_tokens == math.ceil(2 * work.state_bytes / (2 * kept))
    # Without a number of heads, they are twice as wide as the model.
    default = ModelWork.from_dimensions(**DENSE, settings=sizes | {"mamba_num_heads": None}, pattern="M-*M")
    assert default == ModelWork.from_dimensions(**DENSE, settings=sizes | {"mamba_num_heads": 4}, pattern="M-*M")


def test_flops_of_experts_by_hand():
    """The second layer is dense. A token passes a router, three experts of 6 channels and a shared one of 4."""
    settings = {"moe_router_topk": 3, "moe_ffn_hidden_size": 6, "moe_shared_expert_intermediate_size": 4}
    settings |= {"moe_layer_freq": [1, 0]}
    dense = ModelWork.from_dimensions(**DENSE)
    work = ModelWork.from_dimensions(**DENSE, settings={"num_moe_experts": 8} | settings)
    assert work.token - dense.token == 2 * (8 * 8 + 3 * 8 * (3 * 6 + 4) - 3 * 8 * 16)
    # As Megatron-LM's arguments call them, with omitted ones as None.
    assert ModelWork.from_dimensions(**DENSE, settings={"num_experts": 8, "moe_latent_size": None} | settings) == work
    narrow = ModelWork.from_dimensions(**DENSE, settings={"num_experts": 8, "moe_latent_size": 5} | settings)
    assert work.token - narrow.token == 2 * (3 * (8 - 5) * 3 * 6 - 2 * 8 * 5)
    plain = ModelWork.from_dimensions(**DENSE, settings={"num_experts": 8, "moe_ffn_hidden_size": None})
    assert plain.token - dense.token == 2 * 2 * (8 * 8 + 3 * 8 * 16)
    assert ModelWork.from_dimensions(**DENSE, settings={"num_experts": None}) == dense


def test_model_of_a_recipe():
    recipe = ModelConfig(**SMALL, num_query_groups=2, ffn_hidden_size=16)
    assert ModelWork.from_model(recipe) == ModelWork.from_dimensions(**DENSE, num_query_groups=2)
    plain = ModelConfig(**SMALL, swiglu=False, kv_channels=6, transformer={"window_size": [3, 0]})
    assert ModelWork.from_model(plain, fused_head=True) == ModelWork.from_dimensions(
        **SMALL, ffn_hidden_size=32, swiglu=False, kv_channels=6, fused_head=True, settings={"window_size": (3, 0)}
    )
    unknown = ModelConfig(num_layers=2, hidden_size=8, num_attention_heads=4, ffn_hidden_size=16)
    with pytest.raises(ValueError, match=r"model\.vocab_size"):
        ModelWork.from_model(unknown)
    assert ModelWork.from_model(unknown, vocab_size=100) == ModelWork.from_dimensions(**DENSE)
    # A scalar head is a column, for all tokens.
    for fused_head in (False, True):
        work = ModelWork.from_model(unknown, fused_head=fused_head, scalar_head=True)
        assert work == ModelWork.from_dimensions(**DENSE | {"vocab_size": 1})


def test_flops_of_a_hybrid_model_by_hand():
    """Attention, MLP, attention with a window, experts: each layer has one part, and pairs are those of attention."""
    settings = {"num_experts": 4, "moe_router_topk": 1, "window_size": (4, 0), "window_attn_skip_freq": [0, 1, 1, 1]}
    work = ModelWork.from_dimensions(**DENSE | {"num_layers": 4}, settings=settings, pattern="*-*E")
    assert work.token == 2 * (2 * 4 * 64 + 3 * 128 + (8 * 4 + 3 * 128))
    assert (work.layers, work.window_layers, work.window) == (1, 1, 5)


@pytest.mark.parametrize("skip", [None, 1, 2, 3, [1, 0, 0, 1, 1, 0, 1]])
def test_layers_with_a_window_match_megatrons(skip):
    settings = {"window_size": (4, 0), "window_attn_skip_freq": skip}
    expected = [is_layer_window_attention((4, 0), skip, layer) for layer in range(1, 8)]
    assert layers_with_window(7, settings) == expected
    assert not any(layers_with_window(7, settings | {"window_size": None}))
    work = ModelWork.from_dimensions(**DENSE | {"num_layers": 7}, settings=settings)
    assert (work.layers, work.window_layers) == (7 - sum(expected), sum(expected))
    assert work.window == (5 if any(expected) else None)


def paths(samples):
    """All prefixes of each sample that computes the tokens that its merge key does not share."""
    return [(repr(one.merge_key), tuple(one.tokens[: n + 1].tolist())) for one in samples for n in range(len(one))]


LIMIT = st.one_of(st.none(), st.integers(1, 6))


@given(sample_lists(), LIMIT, LIMIT)
def test_counts_are_those_of_prefixes(samples, window, topk):
    """A token is a prefix of a sample: folded it counts once, unfolded as often as there are samples with it."""
    layout = fold(samples)
    scored = [bool(weight) and n > 0 for one in samples for n, weight in enumerate(one.loss_mask)]
    for counts, tokens in (
        (Counts.unfolded([layout], window, topk), list(enumerate(paths(samples)))),
        (Counts.folded([layout], window, topk), [(path, path) for path in set(paths(samples))]),
    ):
        depths = [len(prefix) for _, (_, prefix) in tokens]
        assert counts.tokens == len(tokens)
        assert counts.pairs == sum(depths)
        assert counts.window_pairs == (0 if window is None else sum(min(depth, window) for depth in depths))
        assert counts.chosen_pairs == (0 if topk is None else sum(min(depth, topk) for depth in depths))
    assert Counts.unfolded([layout]).predictors == sum(scored)
    predictors = {(key, path[:-1]) for (key, path), is_scored in zip(paths(samples), scored, strict=True) if is_scored}
    assert Counts.folded([layout]).predictors == len(predictors)


def test_counts_of_micro_batches_add_up():
    samples = [Sample(tokens=[1, 2, 3]), Sample(tokens=[1, 2, 4]), Sample(tokens=[1, 5])]
    # Segments of the token 1, of 2, of 3, of 4 and of 5.
    assert Counts.folded([fold(samples)]) == Counts(5, 1 + 2 + 3 + 3 + 2, 0, 2, unused=5 * 63)
    cut = [fold(samples[:1], padded_size=8), fold(samples[1:]), fold([])]
    assert Counts.folded(cut) == Counts(7, 6 + 8, 0, 2 + 2, unused=61 + 3 * 64 - 4)
    assert Counts.unfolded(cut) == Counts.unfolded([fold(samples)]) == Counts(8, 6 + 6 + 3, 0, 5, unused=3 * 64 - 8)
    assert Counts.of_lengths(np.array([1, 64, 65])).unused == 63 + 0 + 63


def test_the_expected_speedup_is_the_mean_of_its_parts():
    work = ModelWork.from_dimensions(**DENSE, fused_head=True)
    prompt = list(range(40))
    samples = [Sample(tokens=[*prompt, 50 + n, 60], loss_mask=[0] * 40 + [1, 1]) for n in range(8)]
    expected = work.expected_speedup([fold(samples)])
    parts = expected.parts
    assert parts["body"][0] == 8 * 42 / (40 + 16)
    assert parts["head"][0] == 16 / 9, "the prompt's last token predicts eight"
    assert expected.ratio == pytest.approx(sum(ratio * share for ratio, share in parts.values()))
    assert sum(share for _, share in parts.values()) == pytest.approx(1)
    assert expected.ratio < parts["body"][0]
    # Scoring is only a forward, of which attention has less.
    assert expected.forward_ratio != expected.ratio
    said = json.loads(json.dumps(expected.to_json()))
    assert said["ratio"] == expected.ratio
    assert said["head"]["folded"] == {"forward": 9 * work.position, "backward": 18 * work.position}
    assert str(expected).startswith(f"{expected.ratio:.2f}x (body 6.00x of ")


def test_nothing_is_expected_of_no_sharing():
    work = ModelWork.from_dimensions(**DENSE)
    empty = work.expected_speedup([fold([])])
    assert empty == work.expected_speedup([])
    assert (empty.ratio, empty.forward_ratio) == (1, 1)
    assert empty.parts == {"body": (1, 0), "attention": (1, 0), "head": (1, 0)}
    alone = [fold([Sample(tokens=np.arange(9))])]
    expected = work.expected_speedup(alone)
    assert {ratio for ratio, _ in expected.parts.values()} == {expected.ratio} == {1}
    assert isinstance(expected, ExpectedSpeedup)
