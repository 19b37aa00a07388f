"""The check at first use passes correct kernels and stops kernels with a single wrong pair."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from attention_cases import case_of
from harness.marks import quick
from torch.utils.checkpoint import checkpoint

from mcore_prefix_tree import TreeMetadata
from mcore_prefix_tree.attention import AttentionOptions, Case, cascade, path, reference
from mcore_prefix_tree.attention.parity import _forest, check_parity
from mcore_prefix_tree.utils.triton_here import ParityError

SHAPES = ((1, 1, 64, 64), (8, 2, 128, 128), (8, 1, 32, 32), (2, 2, 192, 128))
# Every shape and every dtype; together, they are slow.
CASES = [
    pytest.param(
        case_of(dtype=dtype, heads=heads, kv_heads=kv_heads, head_dim=head_dim, value_dim=value_dim),
        marks=pytest.mark.slow if (number + (dtype is torch.float16)) % 2 else [],
    )
    for dtype in (torch.bfloat16, torch.float16)
    for number, (heads, kv_heads, head_dim, value_dim) in enumerate(SHAPES)
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_sound_back_ends_pass(case):
    check_parity("cascade", cascade.attention, case)
    check_parity("path", path.attention, case)


def test_options_reach_the_kernel():
    case = case_of(dtype=torch.bfloat16, sinks=torch.zeros(4))
    check_parity("cascade", cascade.attention, case)
    with pytest.raises(ParityError, match="out is off"):
        check_parity("forgets", forgets_the_sink, case)


def forgets_the_sink(query, key, value, metadata, options):
    return cascade.attention(query, key, value, metadata, replace(options, sinks=options.sinks - 1e3))


def test_a_first_use_under_activation_recompute():
    """Tensors saved by the comparison do not count for the checkpoint, which compares forward and recompute."""
    metadata = TreeMetadata.from_nodes([0, 20, 30, 40], [-1, 0, 0])
    options = AttentionOptions(softmax_scale=0.2)
    compared = []

    def attention(*arguments):
        compared.append(len(arguments[0]))
        return path.attention(*arguments)

    def layer(query):
        check_parity("path", attention, Case.of(query, query, query, options))
        return path.attention(query, query, query, metadata, options)

    query = torch.randn(40, 2, 32, dtype=torch.bfloat16, requires_grad=True)
    checkpoint(layer, query, use_reentrant=False).float().sum().backward()
    assert len(compared) == 1
    recomputed = query.grad
    query.grad = None
    layer(query).float().sum().backward()
    assert torch.equal(query.grad, recomputed)


def test_forest_covers_known_kernel_errors():
    metadata = _forest(torch.device("cpu"))
    lens = (metadata.cu_node_lens[1:] - metadata.cu_node_lens[:-1]).tolist()
    assert {0, 1, 57, 63, 64, 65, 121, 127, 128, 130} <= set(lens)
    assert metadata.padded_size > metadata.num_tokens
    assert (metadata.node_parent < 0).sum() > 1
    assert metadata.padded_size % 64


def one_key_too_few(key_index):
    def attention(query, key, value, metadata, options):
        end = metadata.subtree_end.clone()
        end[key_index] -= 1
        wrong = replace(metadata, subtree_end=end, cache={})
        return reference.attention(query, key, value, wrong, options)

    return attention


def stops_a_gradient(token):
    def attention(query, key, value, metadata, options):
        keep = torch.arange(len(value))[:, None, None] != token
        return cascade.attention(query, key, torch.where(keep, value, value.detach()), metadata, options)

    return attention


@pytest.mark.parametrize("dtype", quick(torch.bfloat16, of=[torch.bfloat16, torch.float16]))
@pytest.mark.parametrize("key_index", [0, 130, 300, 400])
def test_one_missing_pair_is_found(dtype, key_index):
    with pytest.raises(ParityError, match=r"attention backend 'wrong' is wrong on this machine: \w+ is off by"):
        check_parity("wrong", one_key_too_few(key_index), case_of(dtype=dtype))


@pytest.mark.parametrize("token", [5, 191, 700])
def test_one_tokens_missing_gradient_is_found(token):
    with pytest.raises(ParityError, match=r"dV is off by 1\.0e"):
        check_parity("wrong", stops_a_gradient(token), case_of(dtype=torch.bfloat16))


def test_nan_is_an_error():
    def attention(query, key, value, metadata, options):
        return cascade.attention(query, key, value, metadata, options) * float("nan")

    with pytest.raises(ParityError, match="out is off by nan"):
        check_parity("wrong", attention, case_of(dtype=torch.bfloat16))


def test_check_runs_once():
    calls = 0

    def attention(*arguments):
        nonlocal calls
        calls += 1
        return cascade.attention(*arguments)

    for heads, kv_heads in ((4, 2), (8, 4)):
        check_parity("counted", attention, case_of(dtype=torch.bfloat16, heads=heads, kv_heads=kv_heads))
    assert calls == 1
    check_parity("counted", attention, case_of(dtype=torch.bfloat16, heads=8, kv_heads=2))
    assert calls == 2


def test_scoring_compares_no_gradient():
    """The kernel may have no backward in that mode; training with it later is another question."""
    asked = []

    def attention(query, key, value, metadata, options):
        asked.append(torch.is_grad_enabled() and query.requires_grad)
        return cascade.attention(query, key, value, metadata, options)

    def no_backward(query, key, value, metadata, options):
        return cascade.attention(query.detach(), key.detach(), value.detach(), metadata, options)

    scores = case_of(dtype=torch.bfloat16, needs_grad=False)
    check_parity("scores", attention, scores)
    assert asked == [False]
    check_parity("scores", attention, replace(scores, needs_grad=True))
    assert asked == [False, True]
    check_parity("no backward", no_backward, scores)
    with pytest.raises(ParityError, match=r"does not run on this machine: RuntimeError: .* does not require grad"):
        check_parity("no backward", no_backward, replace(scores, needs_grad=True))


def test_scores_are_compared_without_gradients():
    for key_index in (0, 400):
        with pytest.raises(ParityError, match="out is off by"):
            check_parity("wrong", one_key_too_few(key_index), case_of(dtype=torch.bfloat16, needs_grad=False))


@pytest.mark.parametrize(("name", "other"), [("fa4", "triton"), ("triton", "flex")])
def test_error_suggests_another_back_end(name, other):
    with pytest.raises(ParityError, match=f"backend '{name}' is wrong .*; use attention backend '{other}' and report"):
        check_parity(name, one_key_too_few(0), case_of(dtype=torch.bfloat16))


def test_a_failure_is_not_remembered_as_a_pass():
    attention = stops_a_gradient(9)
    for _ in range(2):
        with pytest.raises(ParityError):
            check_parity("wrong", attention, case_of(dtype=torch.bfloat16))


def test_check_preserves_the_random_state():
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    with torch.no_grad():
        check_parity("fresh", lambda *arguments: cascade.attention(*arguments), case_of(dtype=torch.bfloat16))
    assert torch.equal(torch.rand(2), expected)
