"""The calls of PrefixGrouper and of NeMo Automodel, against unfolded samples in double precision."""

from __future__ import annotations

import pytest
import torch
from harness.oracles import causal_attention, worst

transformers = pytest.importorskip("transformers")
from harness.transformers_models import InDouble, gradients, tiny, unfolded_logprobs  # noqa: E402

from mcore_prefix_tree import Sample  # noqa: E402
from mcore_prefix_tree.integrations.automodel import fold_shared_prefix_rollouts, prefix_tree_collate_fn  # noqa: E402
from mcore_prefix_tree.integrations.prefix_grouper import PrefixGrouper, register_attention  # noqa: E402
from mcore_prefix_tree.integrations.transformers import check_model  # noqa: E402

PROMPTS = [[5, 6, 7, 8, 9], [5, 6, 3], [4]]
COMPLETIONS = [[[1, 2, 3], [1, 2], [11]], [[12, 13, 14, 15]], [[16, 17], [16, 17]]]
SIZES = [len(group) for group in COMPLETIONS]
OWNERS = [prompt for prompt, size in zip(PROMPTS, SIZES, strict=True) for _ in range(size)]
FLAT = [completion for group in COMPLETIONS for completion in group]
INFO = [[len(prompt), *map(len, group)] for prompt, group in zip(PROMPTS, COMPLETIONS, strict=True)]


def padded(rows, side):
    size = max(map(len, rows))

    def fill(row):
        gap = [0] * (size - len(row))
        return gap + row if side == "left" else row + gap

    return torch.tensor([fill(row) for row in rows]), torch.tensor([fill([1] * len(row)) for row in rows])


def completion_loss(model):
    """Mean over completions of the mean probability of their tokens, as in the original's tests, each by itself."""
    terms = []
    for prompt, completion in zip(OWNERS, FLAT, strict=True):
        terms.append(unfolded_logprobs(model, Sample(tokens=prompt + completion))[len(prompt) :].exp().mean())
    return torch.stack(terms).mean()


def compare(model, loss):
    actual = gradients(model, loss)
    model.set_attn_implementation("eager")
    expected_loss = completion_loss(model)
    assert worst(loss, expected_loss) < 1e-12
    expected = gradients(model, expected_loss)
    assert max(worst(actual[weight], expected[weight]) for weight in expected) < 1e-12


def uneven_mask():
    """Gaps before, in and behind the tokens of each row."""
    totals = [sum(row) for row in INFO]
    mask = torch.zeros(len(INFO), max(totals) + 3, dtype=torch.bool)
    for row, total in enumerate(totals):
        mask[row, [place + (place > 1) + 1 for place in range(total)]] = True
    return mask


@pytest.mark.parametrize("mode", ["right", "left", uneven_mask()], ids=["right", "left", "mask"])
@pytest.mark.parametrize("prompt_side", ["left", "right"])
def test_prefix_grouper_trains_like_unfolded_samples(mode, prompt_side):
    register_attention()
    model = tiny("qwen3")
    model.set_attn_implementation("prefix_grouper_attention")
    check_model(model)
    prompt_ids, prompt_mask = padded(PROMPTS, prompt_side)
    ids, mask = padded(FLAT, "left")
    grouper = PrefixGrouper.from_ungrouped_masks(prompt_mask, mask, SIZES, padding_mode=mode)
    assert [[group.prefix_len, *group.suffix_lens] for group in grouper.group_info] == INFO
    with InDouble():
        output = model(
            input_ids=grouper.concat_input(prompt_ids, prompt_mask, ids, mask),
            position_ids=grouper.position_ids,
            attention_mask=grouper.padding_mask,
            prefix_grouper=grouper,
            prefix_grouper_attn_func="sdpa",
            use_cache=False,
        )
        prefix, prefix_mask, suffix, suffix_mask = grouper.split_output(output.logits, include_prefix_last=1)
        assert prefix.shape[:2] == prefix_mask.shape == (3, 4)
        ids = grouper.convert_padding(ids, mask, padding_mode="right")
        suffix, suffix_mask = suffix[:, :-1], suffix_mask[:, 1:]
        terms = (suffix.gather(-1, ids[..., None])[..., 0] - suffix.logsumexp(-1)).exp() * suffix_mask
        compare(model, (terms.sum(-1) / suffix_mask.sum(-1)).mean())


def test_prefix_grouper_splits_without_the_last_prompt_token():
    """The original's second case: the last prompt token is the first token of each completion."""
    register_attention()
    model = tiny("llama")
    model.set_attn_implementation("prefix_grouper_attention")
    prompts, suffixes = [p[:-1] for p in PROMPTS], [p[-1:] + c for p, c in zip(OWNERS, FLAT, strict=True)]
    grouper = PrefixGrouper([[len(p), *(n + 1 for n in row[1:])] for p, row in zip(prompts, INFO, strict=True)])
    (prompt_ids, prompt_mask), (ids, mask) = padded(prompts, "left"), padded(suffixes, "right")
    with InDouble():
        rows = grouper.concat_input(prompt_ids, prompt_mask, ids, mask)
        output = model(input_ids=rows, position_ids=grouper.position_ids, prefix_grouper=grouper, use_cache=False)
        suffix, suffix_mask = grouper.split_output(output.logits)[2:]
        suffix, suffix_mask = suffix[:, :-1], suffix_mask[:, 1:]
        terms = (suffix.gather(-1, ids[:, 1:, None])[..., 0] - suffix.logsumexp(-1)).exp() * suffix_mask
        compare(model, (terms.sum(-1) / suffix_mask.sum(-1)).mean())


def bias_of(q, k, mask):
    """Additive: causal, the last query sees all keys, padding is hidden."""
    queries, keys = q.shape[2], k.shape[2]
    seen = torch.ones(queries, keys, dtype=torch.bool).tril(keys - queries) & mask[:, None, None].bool()
    return torch.zeros(seen.shape, dtype=q.dtype).masked_fill(~seen, torch.finfo(q.dtype).min)


def eager(q, k, v, mask, scale):
    return ((scale * q @ k.mT + bias_of(q, k, mask)).softmax(-1) @ v).transpose(1, 2)


def sdpa(q, k, v, mask, scale):
    bias = bias_of(q, k, mask)
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=bias, scale=scale).transpose(1, 2)


def flash(q, k, v, mask, scale):
    """Results of flash attention with variable lengths: every row without its padding, aligned at its end."""
    out = q.new_zeros(q.transpose(1, 2).shape)
    for row in range(len(q)):
        keys, queries = mask[row].bool(), mask[row, -q.shape[2] :].bool()
        parts = (q[row : row + 1, :, queries], k[row : row + 1, :, keys], v[row : row + 1, :, keys])
        if queries.any():
            out[row, queries] = eager(*parts, torch.ones(1, int(keys.sum())), scale)[0]
    return out


@pytest.mark.parametrize("attention", [eager, sdpa, flash])
def test_prefix_grouper_calls_the_attention_of_its_caller(attention):
    grouper = PrefixGrouper()
    grouper.init(INFO, padding_mode="left")
    shape = (3, 2, grouper.padding_mask.shape[1], 4)
    torch.manual_seed(0)
    q, k, v = (torch.randn(shape, dtype=torch.float64, requires_grad=True) for _ in range(3))
    grad = torch.randn(3, shape[2], 2, 4, dtype=torch.float64) * grouper.padding_mask[..., None, None]
    out = grouper.forward(attention, q, k, v, scale=0.3)
    expected = torch.zeros_like(out)
    for row, (group, mask) in enumerate(zip(grouper.group_info, grouper.padding_mask, strict=True)):
        place = mask.nonzero()[:, 0]
        begin = group.prefix_len
        for length in group.suffix_lens:
            path = torch.cat([place[: group.prefix_len], place[begin : begin + length]])
            expected[row, path] = causal_attention(*(x[row, :, path].transpose(0, 1) for x in (q, k, v)), 0.3)
            begin += length
    assert worst(out, expected) < 1e-12
    pairs = zip(torch.autograd.grad(out, (q, k, v), grad), torch.autograd.grad(expected, (q, k, v), grad), strict=True)
    assert max(worst(one, other) for one, other in pairs) < 1e-12


def test_prefix_grouper_rejects_mismatched_shapes():
    prompt_ids, prompt_mask = padded(PROMPTS, "left")
    ids, mask = padded(FLAT, "right")
    with pytest.raises(ValueError, match="group_sizes=3 do not fit 3 prompts and 6 completions"):
        PrefixGrouper.from_ungrouped_masks(prompt_mask, mask, 3)
    with pytest.raises(ValueError, match="a completion"):
        PrefixGrouper([[3]])
    with pytest.raises(ValueError, match="padding_mode='middle'"):
        PrefixGrouper(INFO, padding_mode="middle")
    with pytest.raises(ValueError, match="tokens in its rows"):
        PrefixGrouper(INFO, padding_mode=torch.ones(3, 20))
    grouper = PrefixGrouper(INFO)
    with pytest.raises(ValueError, match="prefix_mask has"):
        grouper.concat_input(prompt_ids, torch.ones_like(prompt_mask), ids, mask)
    with pytest.raises(ValueError, match="prompt of 1 tokens"):
        grouper.split_output(torch.ones(3, 11, 2), include_prefix_last=2)


def test_automodel_layout_supervises_every_completion_token():
    folded = fold_shared_prefix_rollouts([5, 6, 7], [[1, 2], [1, 2, 3]])
    assert [sum(folded.node_lengths[node] for node in path) for path in folded.sample_paths] == [5, 6]
    starts = torch.tensor([0, *folded.node_lengths]).cumsum(0).tolist()
    for path, completion in zip(folded.sample_paths, [[1, 2], [1, 2, 3]], strict=True):
        flat = [at for node in path for at in range(starts[node], starts[node + 1])]
        assert [folded.input_ids[at] for at in flat] == [5, 6, 7, *completion]
        assert [folded.position_ids[at] for at in flat] == list(range(len(flat)))
        assert [folded.labels[at] for at in flat] == [-100, -100, *completion, -100]


@pytest.mark.parametrize("prompt", [[], [7]])
def test_automodel_shares_no_prompt_of_one_token(prompt):
    folded = fold_shared_prefix_rollouts(prompt, [[1, 2], [1, 3]], ignore_idx=-1)
    assert folded.sample_paths in ([[0], [1]], [[1], [0]])
    assert sorted(label for label in folded.labels if label >= 0) == ([1, 1, 2, 3] if prompt else [2, 3])


def test_automodel_trains_any_number_of_groups_like_unfolded_samples():
    model = tiny("llama")
    groups = [{"prompt_ids": p, "completions": c} for p, c in zip(PROMPTS, COMPLETIONS, strict=True)]
    batch = prefix_tree_collate_fn(groups)
    # 5, 6 of two groups and 7, 8 of one are there once; each completion has a copy of its last prompt token.
    assert batch["input_ids"].shape == (1, 4 + sum(1 + len(completion) for completion in FLAT))
    with InDouble():
        loss = model(**batch, shift_labels=batch["labels"], use_cache=False).loss
        actual = gradients(model, loss)
        model.set_attn_implementation("eager")
        rows = [unfolded_logprobs(model, Sample(tokens=p + c))[len(p) :] for p, c in zip(OWNERS, FLAT, strict=True)]
        expected_loss = -torch.cat(rows).mean()
        expected = gradients(model, expected_loss)
    assert worst(loss, expected_loss) < 1e-12
    assert max(worst(actual[weight], expected[weight]) for weight in expected) < 1e-12


def test_automodel_refuses_empty_groups():
    for groups in ([], [([1], [])], [([1], [[2], []])]):
        with pytest.raises(ValueError, match="group"):
            prefix_tree_collate_fn([{"prompt_ids": p, "completions": c} for p, c in groups])
