"""The kernel of an indexer's scores, and the keys that they choose, against torch in fp64 from the same numbers."""

from __future__ import annotations

import contextlib
from unittest import mock

import pytest
import torch
from harness.marks import quick
from harness.oracles import forest_samples, metadata_of, random_forest
from interpreted_bf16 import bfloat16
from kernel_cases import DEVICE, INTERPRETED

from mcore_prefix_tree import Sample, TreeMetadata, fold
from mcore_prefix_tree.attention import chosen_keys
from mcore_prefix_tree.attention.chosen_keys import choose_keys, path_mask, score_by_kernel
from mcore_prefix_tree.attention.chosen_keys.index_scores import index_scores

HOME = "mcore_prefix_tree.attention.chosen_keys.index_scores"
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
# Of a sum in fp32 of a few thousand products, relative to the sum of their sizes.
LIMIT = 1e-6


def prefixes_and_duplicates():
    """Samples that end inside of others, some of them twice, in segments of several nodes."""
    path = list(range(150))
    samples = [Sample(tokens=path[:length]) for length in (150, 150, 1, 40, 40, 64, 65)]
    return fold([*samples, Sample(tokens=[*path[:64], *range(200, 290)]), Sample(tokens=[7])], padded_size=260)


FORESTS = {
    "a token": lambda: metadata_of([1], [-1]),
    "an odd tail": lambda: metadata_of([131], [-1]),
    "branch points in blocks": lambda: metadata_of([60, 30, 1, 40, 70, 7], [-1, 0, 0, 2, 2, -1], padding=3),
    "forest": lambda: metadata_of(*random_forest(4, nodes=12, node_lens=(0, 1, 17, 33)), padding=5),
    "prefixes and duplicates": lambda: TreeMetadata.from_layout(prefixes_and_duplicates()),
    "one sample a node": lambda: TreeMetadata.from_layout(fold(forest_samples([30, 20, 50, 1], [-1, 0, 0, 2]))),
}
OFTEN = quick("an odd tail", "branch points in blocks", "prefixes and duplicates", of=FORESTS)
# heads, size, whether products below 0 count as 0
SHAPES = [((3, 24), True), ((5, 128), False)]


class Case:
    """A forest, an indexer's inputs, and their exact scores ``[P, P]``."""

    def __init__(self, forest, shape, dtype, *, relu):
        self.metadata, self.relu = FORESTS[forest]().with_plans_on(DEVICE), relu
        size, (heads, dim) = self.metadata.padded_size, shape
        generator = torch.Generator().manual_seed(size)
        sizes = ((size, heads, dim), (size, dim), (size, heads))
        self.inputs = [torch.randn(one, generator=generator).to(DEVICE, dtype) for one in sizes]
        query, key, weight = (one.double() for one in self.inputs)
        products = torch.einsum("bhe,ne->hbn", query, key)
        terms = (products.relu() if relu else products) * weight.T[:, :, None]
        mask = path_mask(self.metadata, slice(0, size), torch.arange(size, device=DEVICE))
        self.scores = terms.sum(0).masked_fill(~mask, -torch.inf)
        self.limit = LIMIT * torch.einsum("bhe,ne,bh->bn", query.abs(), key.abs(), weight.abs())

    def choose(self, topk, *, exact=False):
        score = score_by_kernel(*self.inputs, self.metadata, relu=self.relu)
        assert score is not None
        if exact:
            return choose_keys(lambda rows, columns: self.scores[rows, columns], self.metadata, topk, 1)
        with bfloat16() if INTERPRETED else contextlib.nullcontext():
            return choose_keys(score, self.metadata, topk, 1)

    def score(self, rows, columns):
        (query, key, weight), subtree_end = self.inputs, self.metadata.subtree_end
        with bfloat16() if INTERPRETED else contextlib.nullcontext():
            return index_scores(query[rows], key, weight[rows], subtree_end, columns, rows.start, self.relu)


@pytest.mark.parametrize(("shape", "relu"), SHAPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("forest", OFTEN)
def test_scores(forest, dtype, shape, relu):
    """All pairs, and some rows with keys that do not follow each other."""
    case = Case(forest, shape, dtype, relu=relu)
    every = torch.arange(case.metadata.padded_size, device=DEVICE)
    some = torch.cat([every[:7], every[20:]])
    for rows, columns in ((slice(0, len(every)), every), (slice(len(every) // 3, len(every) - len(every) // 5), some)):
        found, wanted = case.score(rows, columns), case.scores[rows, columns]
        assert found.dtype == torch.float32
        seen = wanted > -torch.inf
        assert torch.equal(found > -torch.inf, seen)
        assert ((found.double() - wanted).abs()[seen] <= case.limit[rows, columns][seen]).all()


@pytest.mark.parametrize("topk", [12, 1000])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("forest", OFTEN)
def test_choice(monkeypatch, forest, dtype, topk):
    """In blocks that cut segments, of an indexer with so many heads that no score is 0."""
    monkeypatch.setattr(chosen_keys, "_QUERIES", 48)
    monkeypatch.setattr(chosen_keys, "_KEYS", 40)
    case = Case(forest, (20, 16), dtype, relu=True)
    found, wanted = case.choose(topk), case.choose(topk, exact=True)
    assert torch.equal(found < 0, wanted < 0)
    clear = torch.ones(len(found), dtype=torch.bool, device=DEVICE)
    if wanted.shape[1] < len(found):
        # Rounding may exchange the last key for the next one if their scores are as good as equal.
        scores, places = case.scores.topk(wanted.shape[1] + 1)
        rounding = 2 * case.limit.gather(1, places[:, -2:-1])
        clear = (scores[:, -2] - scores[:, -1]).nan_to_num(nan=torch.inf) > rounding[:, 0]
    assert clear.float().mean() > 0.95
    assert torch.equal(found[clear].sort().values, wanted[clear].sort().values)


def test_no_number_hides_a_fault():
    case = Case("an odd tail", (3, 24), torch.float32, relu=True)
    case.inputs[1][40, 3] = torch.nan
    every = torch.arange(case.metadata.padded_size, device=DEVICE)
    found = case.score(slice(0, len(every)), every)
    assert torch.equal(found.isnan(), (every[:, None] >= 40) & (every[None, :] == 40))


def test_other_inputs_are_scored_by_torch():
    """Heads above 128, fp64, and keys in another dtype are scored by torch."""
    metadata = metadata_of([30], [-1])

    def score(dim, dtype, key_dtype=None):
        query, key, weight = (torch.zeros(size, dtype=dtype) for size in ((30, 2, dim), (30, dim), (30, 2)))
        inputs = (one.to(DEVICE) for one in (query, key.to(key_dtype or dtype), weight))
        return score_by_kernel(*inputs, metadata, relu=False)

    assert score(128, torch.float16) is not None
    assert score(136, torch.float16) is None
    assert score(128, torch.float64) is None
    assert score(128, torch.float16, torch.float32) is None


def test_offsets_beyond_31_bits():
    """Pages that are never touched cost nothing on the CPU; on a GPU these are 4.3 GB."""
    heads, dim, count = 64, 128, 40
    size = (1 << 31) // (heads * dim) + 2 * count
    ends = torch.full((size,), size, dtype=torch.int32, device=DEVICE)
    shapes = (size, heads, dim), (size, dim), (size, heads)
    inputs = [torch.empty(shape, dtype=torch.float16, device=DEVICE) for shape in shapes]
    generator = torch.Generator().manual_seed(0)
    columns = torch.arange(size - count, size, device=DEVICE)
    for one in inputs:
        one[-count:] = torch.randn(one[-count:].shape, generator=generator).to(DEVICE)
    query, key, weight = inputs
    found = index_scores(query[-count:], key, weight[-count:], ends, columns, size - count, False)
    near = [one[-count:].contiguous() for one in inputs]
    ends, columns = torch.full_like(ends[:count], count), columns - (size - count)
    assert torch.equal(found, index_scores(*near, ends, columns, 0, False))


@pytest.mark.skipif(not INTERPRETED, reason="on a GPU, Megatron-Core is not emulated")
@pytest.mark.usefixtures("megatron_on_the_cpu")
def test_a_model_chooses_by_the_kernel(monkeypatch):
    pytest.importorskip("megatron.core.transformer.experimental_attention_variant.dsa_masking")
    from harness.seam_models import branching_samples, tiny_config, twins
    from harness.seam_runs import SPARSE, batch_of

    from mcore_prefix_tree.mcore.engine.forward_step import tree_forward

    # So many heads that no score is 0 in all of them.
    more = {"dsa_indexer_scoring_relu": True, "dsa_indexer_n_heads": 32, "dsa_indexer_topk": 5, "num_layers": 1}
    _, model = twins(tiny_config(torch.float32, **SPARSE | more))
    batch = batch_of(branching_samples())
    with mock.patch(f"{HOME}.index_scores", wraps=index_scores) as kernel:
        found = tree_forward(model, batch).detach()
    assert kernel.called
    monkeypatch.setattr(chosen_keys, "kernels_run_on", lambda tensor: False)
    torch.testing.assert_close(found, tree_forward(model, batch).detach(), rtol=1e-4, atol=1e-5)
