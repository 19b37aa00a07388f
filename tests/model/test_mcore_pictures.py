"""M-RoPE and pictures inside a model that folds, against the stock model on each row by itself in double precision."""

from __future__ import annotations

import pytest
import torch
from harness.oracles import worst
from harness.packed_calls import check_gradients, cotangent, packed, spans
from harness.seam_models import RECOMPUTE, tiny_config, twins

from mcore_prefix_tree.mcore import PicturePackedSeqParams, RowLogprobs, fold_inside

pytestmark = [pytest.mark.usefixtures("megatron_on_the_cpu"), pytest.mark.filterwarnings("ignore:::megatron")]

PICTURE = 7
# Heights and widths; "c" has the embeddings of "a" in another grid, so other positions.
GRIDS = {"a": (2, 3), "b": (2, 3), "c": (3, 2)}
SOURCE = {"a": 0, "b": 6, "c": 0}
# Duplicates, branches before, after and at a picture, a prefix that ends in one, two pictures, and text.
ROWS = [[5, "a", 6, 3], [5, "a", 6, 8], [5, "b", 6, 3], [5, "a", 6, 3], [5, "c", 6, 3], [5, "a"], [5, "a", "b", 2]]
ROWS += [["b", 9], [5, 6, 3], [5, 6, 4], [5]]


def tokens_of(row):
    """Ids, numbers of pictures' tokens, and positions ``[3, n]`` of a row, by Qwen's rule."""
    ids, numbers, positions, at = [], [], [], 0
    for part in row:
        if isinstance(part, int):
            ids, numbers, positions, at = [*ids, part], [*numbers, -1], [*positions, (at, at, at)], at + 1
        else:
            height, width = GRIDS[part]
            ids += [PICTURE] * (height * width)
            numbers += range(SOURCE[part], SOURCE[part] + height * width)
            positions += [(at, at + one // width, at + one % width) for one in range(height * width)]
            at += max(height, width)
    return torch.tensor(ids), torch.tensor(numbers), torch.tensor(positions).T


def embed(model, ids, numbers, positions, features):
    """The input ``[T, 1, h]`` of the decoder: of text the embeddings, of pictures rows of ``features``."""
    embeddings = model.embedding(input_ids=ids[None], position_ids=positions)
    return torch.where((numbers >= 0)[:, None, None], features[numbers.clamp(min=0)][:, None], embeddings)


def models(**changes):
    config = tiny_config(mrope_section=[2, 1, 1], **changes)
    stock, tree = twins(config, position_embedding_type="mrope")
    return stock.train(), fold_inside(tree.train())


def packed_call(rows, **padding):
    """Packed rows with M-RoPE's positions, also of padding, and the numbers of their pictures' tokens."""
    parts = [tokens_of(row) for row in rows]
    call = packed([ids.numpy() for ids, _, _ in parts], **padding)
    size = call["input_ids"].shape[1]
    numbers, positions = torch.full((size,), -1), torch.arange(3 * size).view(3, 1, size)
    for span, part in zip(spans(call), parts, strict=True):
        numbers[span], positions[:, 0, span] = part[1], part[2]
    return call | {"position_ids": positions}, numbers


def leaf():
    return torch.randn(12, 32, generator=torch.Generator().manual_seed(4), dtype=torch.float64).requires_grad_()


@pytest.mark.parametrize("recompute", RECOMPUTE)
@pytest.mark.parametrize("padding", [{}, {"gap": 2, "tail": 3}])
def test_rows_with_pictures_equal_each_row_by_itself(padding, recompute):
    stock, folds = models(**RECOMPUTE[recompute])
    features = leaf(), leaf()
    call, numbers = packed_call(ROWS, **padding)
    embeddings = embed(folds, call["input_ids"][0], numbers, call["position_ids"], features[1])
    params = PicturePackedSeqParams.of(call["packed_seq_params"], numbers)
    logits = folds(**call | {"packed_seq_params": params, "decoder_input": embeddings})
    expected = []
    for row in ROWS:
        ids, own, positions = tokens_of(row)
        inputs = embed(stock, ids, own, positions[:, None], features[0])
        expected.append(stock(ids[None], positions[:, None], None, decoder_input=inputs)[0])
    for span, wanted in zip(spans(call), expected, strict=True):
        assert worst(logits[0, span], wanted) < 1e-12
    weight = cotangent(logits.shape, logits.dtype)
    (logits * weight).sum().backward()
    sum((wanted * weight[0, span]).sum() for span, wanted in zip(spans(call), expected, strict=True)).backward()
    assert worst(features[1].grad, features[0].grad) < 1e-12
    check_gradients(folds, stock, 1e-12)
    # A picture's token counts once for each path and grid.
    paths = set()
    for row in ROWS:
        ids, own, positions = (part.tolist() for part in tokens_of(row))
        keys = list(zip(ids, own, *positions, strict=True))
        paths |= {tuple(keys[: end + 1]) for end in range(len(keys))}
    assert folds.folding.last.unique_tokens == len(paths)


def test_rows_of_text_need_no_embeddings_and_score_labels():
    stock, folds = models()
    rows = [[5, 6, 3, 2], [5, 6, 4], [9]]
    call, _ = packed_call(rows, tail=1)
    scored = folds(**call, output_processor=RowLogprobs(labels=call["input_ids"].roll(-1, 1)))
    for span, row in zip(spans(call), rows, strict=True):
        ids, _, positions = tokens_of(row)
        logits = stock(ids[None], positions[:, None], None)[0]
        wanted = logits.log_softmax(-1).gather(1, call["input_ids"].roll(-1, 1)[0, span, None])
        assert worst(scored[0, span], wanted) < 1e-12


def numbered(call, numbers, **changes):
    return call | {"packed_seq_params": PicturePackedSeqParams.of(call["packed_seq_params"], numbers)} | changes


CALL, NUMBERS = packed_call([[5, "a"], [5, 6]])
EMBEDDINGS = torch.zeros(9, 1, 32, dtype=torch.float64)
REFUSED = {
    r"needs position_ids \[3, 1, 9\] on every stage, not None": CALL | {"position_ids": None},
    r"needs position_ids .* not \[1, 9\]": CALL | {"position_ids": torch.arange(9)[None]},
    r"picture_tokens must be \[9\], .* not \[8\]": numbered(CALL, NUMBERS[1:], decoder_input=EMBEDDINGS),
    r"does not support decoder_input except with .*PicturePackedSeqParams": CALL | {"decoder_input": EMBEDDINGS},
    r"pictures need decoder_input \[T, 1, h\] .* not None": numbered(CALL, NUMBERS),
    r"pictures need decoder_input .* not \[8, 1, 32\]": numbered(CALL, NUMBERS, decoder_input=EMBEDDINGS[1:]),
}


@pytest.mark.parametrize("message", REFUSED)
def test_calls_that_cannot_be_compared_are_refused_by_name(message):
    _, folds = models()
    with pytest.raises((ValueError, NotImplementedError), match=message):
        folds(**REFUSED[message])


def test_settings_that_pictures_do_not_support_are_refused():
    _, tree = twins(tiny_config(mrope_section=[2, 1, 1]), position_embedding_type="mrope")
    with pytest.raises(NotImplementedError, match="check_first does not support position_embedding_type='mrope'"):
        fold_inside(tree, check_first=True)

    class Deepstack(type(tree)):
        def forward(self, *args, deepstack_visual_embeds=None, **kwargs):
            return super().forward(*args, **kwargs)

    tree.__class__ = Deepstack
    with pytest.raises(NotImplementedError, match="'mrope' of Deepstack, whose own forward"):
        fold_inside(tree)
