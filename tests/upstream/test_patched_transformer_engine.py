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
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sources import ROOT, TRANSFORMER_ENGINE, patches, wheel

from mcore_prefix_tree import Sample, TreeMetadata, fold
from mcore_prefix_tree.attention import tree_attention
from mcore_prefix_tree.mcore import TreePackedSeqParams
from mcore_prefix_tree.mcore.seam import native

SOURCE = "transformer_engine/pytorch/attention/dot_product_attention/dot_product_attention.py"


@pytest.fixture(scope="module", params=TRANSFORMER_ENGINE)
def patched(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ast.ClassDef:
    """DotProductAttention after the patch."""
    released, folder = wheel("transformer-engine", request.param, request.config.cache), tmp_path_factory.mktemp("te")
    (folder / SOURCE).parent.mkdir(parents=True)
    shutil.copy(released / SOURCE, folder / SOURCE)
    for info in released.glob("*.dist-info"):
        shutil.copytree(info, folder / info.name)
    result = patches("apply", "--transformer-engine", folder)
    assert result.returncode == 0, result.stderr
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


def test_forward_takes_what_megatron_core_adds(patched: ast.ClassDef, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = method(patched, "forward").args
    defaults = dict(zip([arg.arg for arg in arguments.args[::-1]], arguments.defaults[::-1], strict=False))
    monkeypatch.setattr(native, "_transformer_engine_knows_trees", lambda: True)
    module = SimpleNamespace(config=SimpleNamespace(attention_backend=SimpleNamespace(name="tree")))
    metadata = metadata_of_a_tree()
    added = native.transformer_engine_keywords(
        module, TreePackedSeqParams.from_metadata(metadata, attention_backend="reference")
    )
    assert added == {"tree_metadata": metadata, "tree_attention_backend": "reference"}
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
        "Optional": typing.Optional,
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
    """What the method reads of a DotProductAttention."""
    attributes: dict[str, Any] = {
        "cp_group": None,
        "attention_type": "self",
        "attention_dropout": 0.0,
        "softmax_type": "vanilla",
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
@pytest.mark.parametrize("backend", [None, "reference"])
def test_the_method_attends_along_the_tree(patched: ast.ClassDef, layout: str, backend: str | None) -> None:
    metadata = metadata_of_a_tree()
    flat = [heads(4), heads(2), heads(2) + 1]
    axis = {"sbhd": 1, "bshd": 0}.get(layout)
    shaped = flat if axis is None else [tensor.unsqueeze(axis) for tensor in flat]
    output = tree_attention_method(patched)(attention_of_te(), *shaped, metadata, backend, {})
    expected = tree_attention(*flat, metadata, softmax_scale=SCALE, backend="reference").flatten(1)
    assert output.shape == (expected if axis is None else expected.unsqueeze(axis)).shape
    torch.testing.assert_close(output.reshape(expected.shape), expected, rtol=1e-12, atol=1e-12)


def test_more_than_one_batch_is_refused(patched: ast.ClassDef) -> None:
    twice = [tensor.unsqueeze(1).expand(-1, 2, -1, -1) for tensor in (heads(4), heads(2), heads(2))]
    with pytest.raises(ValueError, match="12 tokens of the tree metadata"):
        tree_attention_method(patched)(attention_of_te(), *twice, metadata_of_a_tree(), None, {})


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"cp_group": Group(2)}, "context parallelism"),
        ({"cp_group": [Group(1), Group(2)]}, "context parallelism"),
        ({"attention_type": "cross"}, "cross-attention"),
        ({"attention_dropout": 0.1}, "attention_dropout"),
        ({"softmax_type": "learnable"}, "softmax_type"),
        ({"return_max_logit": True}, "return_max_logit"),
        ({"fp8": True, "fp8_meta": {"recipe": SimpleNamespace(fp8_dpa=True)}}, "fp8_dpa"),
    ],
    ids=str,
)
def test_what_a_tree_cannot_do_is_refused_by_name(patched: ast.ClassDef, changes: dict[str, Any], name: str) -> None:
    tensors = [heads(4), heads(2), heads(2)]
    with pytest.raises(NotImplementedError, match=f"tree_metadata does not support {name}.$"):
        tree_attention_method(patched)(attention_of_te(**changes), *tensors, metadata_of_a_tree(), None, {})


def test_arguments_that_a_tree_has_no_use_for_are_refused_by_name(patched: ast.ClassDef) -> None:
    with pytest.raises(NotImplementedError, match=r"attention_mask, window_size\.$"):
        tree_attention_method(patched)(
            attention_of_te(cp_group=[Group(1)], fp8=True, fp8_meta={"recipe": SimpleNamespace(fp8_dpa=False)}),
            *[heads(4), heads(2), heads(2)],
            metadata_of_a_tree(),
            None,
            {"attention_mask": True, "cu_seqlens": False, "window_size": True},
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
        *("fast_zero_fill", "pad_between_seqs", "num_splits"),  # how, not what
        "fp8_output",  # switched off where attention is not FP8
        *("score_mod_bprop", "score_mod_tensors", "score_mod_bprop_tensors"),  # belong to score_mod
    }
    arguments = {argument.arg for argument in forward.args.args} - {"self"}
    assert arguments - looked_at <= harmless


def test_megatron_core_says_where_transformer_engine_lacks_the_patch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "_transformer_engine_knows_trees", lambda: False)
    module = SimpleNamespace(config=SimpleNamespace(attention_backend=SimpleNamespace(name="tree")))
    with pytest.raises(NotImplementedError, match=r"takes no tree_metadata: apply patches/transformer-engine"):
        native.transformer_engine_keywords(module, TreePackedSeqParams.from_metadata(metadata_of_a_tree()))


def test_a_setting_that_the_patch_does_not_carry_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "_transformer_engine_knows_trees", lambda: True)
    module = SimpleNamespace(config=SimpleNamespace(attention_backend=SimpleNamespace(name="tree")))
    params = TreePackedSeqParams.from_metadata(metadata_of_a_tree(), deterministic_attention=False)
    with pytest.raises(NotImplementedError, match="deterministic_attention=False does not reach"):
        native.transformer_engine_keywords(module, params)


def test_the_megatron_patches_call_transformer_engine_as_patched() -> None:
    for path in sorted((ROOT / "patches" / "megatron-lm").glob("*/0001-*.patch")):
        added = re.findall(r"^\+(.*)", path.read_text(), flags=re.MULTILINE)
        assert any(
            "packed_seq_kwargs |= transformer_engine_keywords(self, packed_seq_params)" in line for line in added
        )
