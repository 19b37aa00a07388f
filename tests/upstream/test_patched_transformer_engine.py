"""The patched Python layer of TransformerEngine, as far as a machine without its compiled part can run it.

``import transformer_engine.pytorch`` loads a CUDA library, and ``DotProductAttention.forward`` asserts CUDA tensors
before it dispatches. So the signature and the dispatch are read in the source here, and the method that is dispatched
to is run by itself, on the CPU. That TransformerEngine calls it is not tested without a GPU.
"""

from __future__ import annotations

import ast
import re
import shutil
import typing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from harness.wheels import wheel
from sources import PATCHES, TRANSFORMER_ENGINE, apply_patches

from mcore_prefix_tree import Sample, TreeMetadata, fold
from mcore_prefix_tree.attention import tree_attention

SOURCE = "transformer_engine/pytorch/attention/dot_product_attention/dot_product_attention.py"


@pytest.fixture(scope="module")
def patched(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ast.ClassDef:
    """DotProductAttention after the patch."""
    released, folder = (
        wheel("transformer-engine", TRANSFORMER_ENGINE, request.config.cache),
        tmp_path_factory.mktemp("te"),
    )
    (folder / SOURCE).parent.mkdir(parents=True)
    shutil.copy(released / SOURCE, folder / SOURCE)
    apply_patches("transformer-engine", folder, f"--include={SOURCE}")
    compile((folder / SOURCE).read_text(), SOURCE, "exec")
    return class_in(folder / SOURCE)


def class_in(path: Path) -> ast.ClassDef:
    (found,) = [
        node
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.ClassDef) and node.name == "DotProductAttention"
    ]
    return found


def method(cls: ast.ClassDef, name: str) -> ast.FunctionDef:
    (found,) = [node for node in cls.body if isinstance(node, ast.FunctionDef) and node.name == name]
    return found


def test_forward_takes_megatron_cores_new_arguments(patched: ast.ClassDef) -> None:
    arguments = method(patched, "forward").args
    defaults = dict(zip([arg.arg for arg in arguments.args[::-1]], arguments.defaults[::-1], strict=False))
    for path in PATCHES["megatron-lm"][2:3]:
        added = re.findall(r'^\+ +packed_seq_kwargs\["(\w+)"\] = ', path.read_text(), flags=re.MULTILINE)
        assert added == ["tree_metadata", "tree_attention"]
        for name in added:
            assert ast.literal_eval(defaults[name]) is None, "without it nothing changes"


def test_forward_dispatches_on_the_data_after_its_own_checks(patched: ast.ClassDef) -> None:
    forward = method(patched, "forward")
    (dispatch,) = [
        node
        for node in ast.walk(forward)
        if isinstance(node, ast.If) and ast.unparse(node.test) == "tree_metadata is not None"
    ]
    assert not dispatch.orelse
    assert isinstance(dispatch.body[-1], ast.Return)
    assert ast.unparse(dispatch.body[-1]).startswith("return self._tree_attention(")
    (context,) = [node for node in forward.body if isinstance(node, ast.With)]
    assert dispatch in context.body
    before = "\n".join(ast.unparse(node) for node in context.body[: context.body.index(dispatch)])
    assert "DotProductAttention only supports CUDA tensors." in before
    assert "Keys and values must have num_gqa_group" in before
    assert "get_attention_backend" not in before
    used = {node.id for node in ast.walk(forward) if isinstance(node, ast.Name) and node.id.startswith("tree_")}
    uses = [node for node in ast.walk(forward) if isinstance(node, ast.Name) and node.id in used]
    assert all(node in list(ast.walk(dispatch)) for node in uses)


def tree_attention_method(cls: ast.ClassDef) -> Any:
    """The method as a function, with the names that its module gives it."""
    namespace = {
        "torch": torch,
        "Any": Any,
        "Dict": typing.Dict,  # noqa: UP006
        "Callable": typing.Callable,
        "Optional": typing.Optional,
        "Tuple": typing.Tuple,  # noqa: UP006
        "dist_group_type": Group,
        "get_distributed_world_size": lambda group: group.size,
    }
    exec(compile(ast.Module([method(cls, "_tree_attention")], []), SOURCE, "exec"), namespace)
    return namespace["_tree_attention"]


@dataclass(frozen=True)
class Group:
    size: int


SCALE = 0.3


def attention_of_te(**changes: Any) -> SimpleNamespace:
    """The attributes that the method reads of a DotProductAttention."""
    attributes: dict[str, Any] = {
        "cp_group": None,
        "attention_type": "self",
        "attention_dropout": 0.0,
        "softmax_offset": None,
        "window_size": (-1, 0),
        "return_max_logit": False,
        "fp8": False,
        "fp8_meta": {},
        "unfused_attention": SimpleNamespace(softmax_scale=SCALE),
    }
    return SimpleNamespace(**(attributes | changes))


def metadata_of_a_tree() -> TreeMetadata:
    samples = [Sample(tokens=tokens) for tokens in ([1, 2, 3, 4], [1, 2, 5], [1, 2, 5, 6, 7], [8, 9])]
    return TreeMetadata.from_layout(fold(samples, padded_size=12))


def heads(count: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(count)
    return torch.randn(12, count, 8, dtype=torch.float64, generator=generator)


@pytest.mark.parametrize("layout", ["sbhd", "bshd", "thd"])
@pytest.mark.parametrize(
    ("attributes", "window_size", "expected"),
    [
        ({}, None, {}),
        ({"window_size": (2, 0)}, None, {"window": 3}),
        ({"window_size": (2, 0)}, (1, 0), {"window": 2}),
        ({"softmax_offset": torch.linspace(-1, 1, 4, dtype=torch.float64)}, None, {"sinks": True}),
    ],
    ids=["plain", "window of the module", "window of the call", "sinks"],
)
def test_the_method_attends_along_the_tree(
    patched: ast.ClassDef,
    layout: str,
    attributes: dict[str, Any],
    window_size: tuple[int, int] | None,
    expected: dict[str, Any],
) -> None:
    metadata = metadata_of_a_tree()
    flat = [heads(4), heads(2), heads(2) + 1]
    axis = {"sbhd": 1, "bshd": 0}.get(layout)
    shaped = flat if axis is None else [tensor.unsqueeze(axis) for tensor in flat]
    # The fast one knows neither windows nor sinks.
    function = partial(tree_attention, backend="reference" if expected else "path")
    output = tree_attention_method(patched)(attention_of_te(**attributes), *shaped, metadata, function, window_size, {})
    if "sinks" in expected:
        expected = {"sinks": attributes["softmax_offset"]}
    alone = tree_attention(*flat, metadata, softmax_scale=SCALE, backend="reference", **expected).flatten(1)
    assert output.shape == (alone if axis is None else alone.unsqueeze(axis)).shape
    torch.testing.assert_close(output.reshape(alone.shape), alone, rtol=1e-12, atol=1e-12)


def test_trees_need_an_attention(patched: ast.ClassDef) -> None:
    with pytest.raises(ValueError, match="tree_metadata needs a tree_attention"):
        tree_attention_method(patched)(
            attention_of_te(), heads(4), heads(2), heads(2), metadata_of_a_tree(), None, None, {}
        )


def test_more_than_one_batch_is_refused(patched: ast.ClassDef) -> None:
    twice = [tensor.unsqueeze(1).expand(-1, 2, -1, -1) for tensor in (heads(4), heads(2), heads(2))]
    with pytest.raises(NotImplementedError, match="does not support more than one batch"):
        tree_attention_method(patched)(attention_of_te(), *twice, metadata_of_a_tree(), tree_attention, None, {})


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"cp_group": Group(2)}, "context parallelism"),
        ({"cp_group": [Group(1), Group(2)]}, "context parallelism"),
        ({"attention_type": "cross"}, "cross-attention"),
        ({"attention_dropout": 0.1}, "attention_dropout"),
        ({"window_size": (2, 2)}, "window_size"),
        ({"return_max_logit": True}, "return_max_logit"),
        ({"fp8": True, "fp8_meta": {"recipe": SimpleNamespace(fp8_dpa=True)}}, "fp8_dpa"),
    ],
    ids=str,
)
def test_unsupported_settings_of_trees_are_rejected_by_name(
    patched: ast.ClassDef, changes: dict[str, Any], name: str
) -> None:
    tensors = [heads(4), heads(2), heads(2)]
    with pytest.raises(NotImplementedError, match=f"tree_metadata does not support {name}.$"):
        tree_attention_method(patched)(
            attention_of_te(**changes), *tensors, metadata_of_a_tree(), tree_attention, None, {}
        )


def test_arguments_that_a_tree_has_no_use_for_are_refused_by_name(patched: ast.ClassDef) -> None:
    with pytest.raises(NotImplementedError, match=r"attention_mask, score_mod\.$"):
        tree_attention_method(patched)(
            attention_of_te(cp_group=[Group(1)], fp8=True, fp8_meta={"recipe": SimpleNamespace(fp8_dpa=False)}),
            *[heads(4), heads(2), heads(2)],
            metadata_of_a_tree(),
            tree_attention,
            None,
            {"attention_mask": True, "cu_seqlens": False, "score_mod": True},
        )


def test_every_argument_of_a_call_is_looked_at_or_harmless(patched: ast.ClassDef) -> None:
    """An argument that a tree cannot honour must not be dropped silently when TransformerEngine adds one."""
    forward = method(patched, "forward")
    (dispatch,) = [
        node
        for node in ast.walk(forward)
        if isinstance(node, ast.If) and ast.unparse(node.test) == "tree_metadata is not None"
    ]
    looked_at = {node.id for node in ast.walk(dispatch) if isinstance(node, ast.Name)}
    harmless = {
        "qkv_format",  # the tensors hold one batch in any
        *("cu_seqlens_q_padded", "cu_seqlens_kv_padded", "max_seqlen_q", "max_seqlen_kv"),  # belong to cu_seqlens
        "bottom_right_diagonal",  # the same for queries and keys of one length
        *("alibi_slopes", "core_attention_bias"),  # belong to core_attention_bias_type
        *("fast_zero_fill", "pad_between_seqs", "num_splits"),  # implementation only
        *("qkv_layer", "kv_layer", "qkv_interleave_dim"),  # unpacked before
        "thd_attention_policy_dispatch",  # belongs to thd_attention_policies
        "bf16_backward",  # of FP8 attention
        "fp8_output",  # switched off where attention is not FP8
        *("score_mod_bprop", "score_mod_tensors", "score_mod_bprop_tensors"),  # belong to score_mod
    }
    arguments = {argument.arg for argument in forward.args.args} - {"self"}
    assert arguments - looked_at <= harmless
