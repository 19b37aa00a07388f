"""A scalar head on the stock model: in addition to ``tests/world/test_objective_layouts.py``."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from harness.seam_models import VOCAB, branching_samples, local_spec, tiny_config
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.module import Float16Module

from mcore_prefix_tree import fold
from mcore_prefix_tree.mcore import with_prefix_tree
from mcore_prefix_tree.mcore.engine.forward_step import tree_forward
from mcore_prefix_tree.mcore.outputs import Logits, Logprobs, Values, WeightedSum
from mcore_prefix_tree.mcore.seam.micro_batch import MicroBatch
from mcore_prefix_tree.mcore.seam.scalar_output_layer import CHECKPOINT_KEY, ScalarHead, with_scalar_head

pytestmark = [pytest.mark.usefixtures("megatron_on_the_cpu"), pytest.mark.filterwarnings("ignore:::megatron")]


def gpt(dtype: torch.dtype = torch.float64, **changes: Any) -> GPTModel:
    config = tiny_config(dtype, pipeline_dtype=dtype, bf16=dtype is torch.bfloat16)
    settings = {"vocab_size": VOCAB, "max_sequence_length": 64, "position_embedding_type": "rope"}
    model = GPTModel(config, with_prefix_tree(local_spec(config)), **(settings | changes))
    return model.to(dtype)


LAYOUT = fold(branching_samples())
BATCH = MicroBatch.from_layout(LAYOUT)


def test_values_of_bfloat16_are_not_rounded_to_it():
    torch.manual_seed(0)
    model = with_scalar_head(gpt(torch.bfloat16))
    wrapped = Float16Module(model.config, model)
    seen: list[torch.Tensor] = []
    model.output_layer.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    values = Values().read(tree_forward(wrapped, BATCH, Values()), BATCH)
    assert values.dtype == torch.float32
    assert values.shape == (LAYOUT.padded_size,)
    exact = (seen[0].double() @ model.output_layer.weight.double().T).flatten()
    torch.testing.assert_close(values.double(), exact, rtol=1e-5, atol=1e-6)
    assert not torch.equal(values, values.bfloat16().float()), "or the test says nothing"
    values.sum().backward()
    assert model.output_layer.weight.grad.dtype == torch.bfloat16


def test_initial_weights_and_parameter_names():
    torch.manual_seed(0)
    model = with_scalar_head(gpt())
    assert with_scalar_head(model) is model
    weight = model.output_layer.weight
    assert weight.shape == (1, 32)
    assert 0.5 < weight.std().item() * 33**0.5 < 1.5
    assert model.state_dict()["output_layer.weight"].shape == (1, 32)
    (part,) = (part for name, part in model.sharded_state_dict().items() if "output_layer" in name)
    assert (part.key, part.global_shape) == (CHECKPOINT_KEY, (1, 32))


def test_other_stages_stay_as_they_are():
    stage = gpt(post_process=False)
    names = [name for name, _ in stage.named_parameters()]
    assert with_scalar_head(stage) is stage
    assert [name for name, _ in stage.named_parameters()] == names
    with pytest.raises(NotImplementedError, match=r"build the model with share_embeddings_and_output_weights=False"):
        with_scalar_head(gpt(share_embeddings_and_output_weights=True))


def test_readouts_require_the_matching_head():
    vocabulary, scalar = gpt(), with_scalar_head(gpt())
    assert isinstance(scalar.output_layer, ScalarHead)
    with pytest.raises(
        ValueError, match=r"^Values reads a scalar head, but .* a vocabulary's; pass .* with_scalar_head"
    ):
        tree_forward(vocabulary, BATCH, Values())
    for readout in (Logits(), Logprobs(), WeightedSum()):
        name = type(readout).__name__
        with pytest.raises(ValueError, match=f"^{name} reads a vocabulary, but .* a scalar head; ask it for Values"):
            tree_forward(scalar, BATCH, readout)
