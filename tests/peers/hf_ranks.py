"""Work of a world's ranks on a Hugging Face folder, in layouts for which no recipe has a key."""

from __future__ import annotations

from typing import Any

import torch
from bridge_models import auto_bridge

from mcore_prefix_tree.mcore.loop.export_folder import export
from mcore_prefix_tree.mcore.models.bridge import load_folder, make_provider
from mcore_prefix_tree.mcore.models.build_gpt import build_chunks
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
