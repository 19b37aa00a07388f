"""The cascade's arguments fit the released functions of TransformerEngine's fused attention, by their source.

``import transformer_engine.pytorch`` loads a CUDA library, so nothing of it runs here.
"""

from __future__ import annotations

import ast
import inspect
from pathlib import Path

import pytest
from attention_cases import assert_close_to_reference
from fused_attention import FusedAttention, install
from harness.oracles import metadata_of, random_forest
from harness.wheels import wheel

from mcore_prefix_tree.attention.cascade import attention_through
from mcore_prefix_tree.attention.cascade.cuda import TransformerEngine

PYTORCH = Path("transformer_engine", "pytorch")


@pytest.fixture(params=["2.17.1", "2.18.0", "2.20.2"])
def released(request: pytest.FixtureRequest) -> Path:
    return wheel("transformer-engine", request.param, request.config.cache) / PYTORCH


def signatures_in(path: Path) -> dict[str, inspect.Signature]:
    """Signatures of the module's functions: names of parameters, and which have defaults."""
    found = {}
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.FunctionDef):
            plain = len(node.args.args) - len(node.args.defaults)
            found[node.name] = inspect.Signature(
                inspect.Parameter(
                    argument.arg,
                    inspect.Parameter.POSITIONAL_OR_KEYWORD,
                    default=inspect.Parameter.empty if place < plain else None,
                )
                for place, argument in enumerate(node.args.args)
            )
    return found


def test_calls_fit_the_released_functions(released: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    signatures = signatures_in(released / "cpp_extensions" / "fused_attn.py")
    fused_attention = FusedAttention({name: signatures[name] for name in FusedAttention().calls})
    install(monkeypatch, fused_attention)
    metadata = metadata_of(*random_forest(2, node_lens=(1, 4, 9)), padding=2)
    assert_close_to_reference(
        lambda *arguments: attention_through(TransformerEngine(), *arguments), metadata, limit=1e-12
    )
    assert min(fused_attention.calls.values()) > 1


def test_its_own_context_parallelism_hands_merged_statistics_to_the_same_backward(released: Path) -> None:
    """That this is meant to work is in no documentation; that TransformerEngine lives by it is in its source."""
    source = (released / "attention" / "dot_product_attention" / "context_parallel.py").read_text()
    assert "flash_attn_fwd_softmax_lse_correction(" in source
    assert "aux_tensors = [softmax_lse, rng_states[" in source


def test_module_has_no_statistics_argument_or_result(released: Path) -> None:
    """If a later version does so, the cascade can rely on it instead of on the code below."""
    path = released / "attention" / "dot_product_attention" / "dot_product_attention.py"
    (module,) = [
        node
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.ClassDef) and node.name == "DotProductAttention"
    ]
    arguments = {
        argument.arg
        for node in module.body
        if isinstance(node, ast.FunctionDef) and node.name in ("__init__", "forward")
        for argument in node.args.args
    }
    assert "max_seqlen_q" in arguments
    assert not [name for name in arguments if "lse" in name or "softmax_stat" in name]
