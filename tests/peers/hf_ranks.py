"""Work of a world's ranks on a Hugging Face folder, in layouts for which no recipe has a key."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from bridge_models import auto_bridge
from harness.models import Trainer
from hf_folders import rows
from hf_jobs import REFERENCE, exported_gradients

from mcore_prefix_tree import Sample, fold
from mcore_prefix_tree.mcore.engine.forward_step import forward_step
from mcore_prefix_tree.mcore.loop.export_folder import export
from mcore_prefix_tree.mcore.models.bridge import load_folder, make_provider
from mcore_prefix_tree.mcore.models.build_gpt import build_chunks
from mcore_prefix_tree.mcore.outputs import WeightedSum
from mcore_prefix_tree.mcore.seam.micro_batch import MicroBatch
from mcore_prefix_tree.settings import ModelConfig, ParallelConfig
from mcore_prefix_tree.settings.hf_folder import HuggingFaceFolder


def export_again(source: str, target: str, layers: Any, ep: int) -> int:
    """Load a folder with its experts spread over ranks, and export it again.

    Returns:
        How many weights this rank has.
    """
    auto_bridge()
    model = ModelConfig(hf=source, transformer_impl=layers, **HuggingFaceFolder.read(source).sizes)
    provider = make_provider(model, ParallelConfig(), on_gpu=False)
    provider.apply_overrides_and_finalize(
        overrides={"expert_model_parallel_size": ep, "expert_tensor_parallel_size": 1}
    )
    assert model.vocab_size is not None
    chunks = build_chunks(model, provider, vocab_size=model.vocab_size, device=torch.device("cpu"))
    load_folder(source, chunks)
    export(source, chunks, target)
    return sum(parameter.numel() for parameter in chunks[0].parameters())


def gradients_with_depth(source: str, layout: Any) -> dict[str, torch.Tensor]:
    """Every rank: the gradients of all rows by the folder's names, through TransformerEngine's layers."""
    auto_bridge()
    sizes: dict[str, Any] = HuggingFaceFolder.read(source).sizes
    depth = {"mtp_num_layers": 1}
    model = ModelConfig(hf=source, transformer_impl="transformer_engine", transformer=depth, **sizes)
    parallel = ParallelConfig(tensor_model_parallel_size=layout.tp, sequence_parallel=layout.sequence_parallel)
    provider = make_provider(model, parallel, on_gpu=False)
    assert model.vocab_size is not None
    chunks: Any = build_chunks(model, provider, vocab_size=model.vocab_size, device=torch.device("cpu"))
    load_folder(source, chunks)
    folded = fold([Sample(tokens=row) for row in rows()], pad_to_multiple_of=layout.tp, depths=1)
    batch = MicroBatch.from_layout(folded, attention_backend=REFERENCE.partition("=")[2])
    trainer = Trainer.of(chunks)
    trainer.backward(partial(forward_step, readout=WeightedSum()), [batch], seq_length=1)
    return exported_gradients(source, chunks, [parameter.main_grad for parameter in chunks[0].parameters()])
