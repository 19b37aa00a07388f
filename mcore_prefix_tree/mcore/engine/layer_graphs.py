"""CUDA graphs of dense MLPs and routers: Megatron-Core captures them, once for each length of micro-batches.

What a layer does before and after, attention among it, runs as without graphs; so does a batch of another length.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from megatron.core import num_microbatches_calculator, parallel_state
from megatron.core.transformer.cuda_graphs import TECudaGraphHelper
from megatron.core.utils import get_model_config

from mcore_prefix_tree.mcore.seam.core_attention import change_class
from mcore_prefix_tree.utils.errors import naming_memory


class GraphedLayerMixin:
    """A layer that replays the graphs of its input's shape ``[rows, 1, hidden]``, if there are any."""

    graphs_of_shape: dict[tuple[int, ...], list[Any]]
    cuda_graphs: list[Any]

    def _should_call_te_cudagraph(self, *args: Any, **kwargs: Any) -> bool:
        """Select the graphs that Megatron-Core's layer replays, and return whether it does."""
        hidden_states = args[0] if args else kwargs["hidden_states"]
        self.cuda_graphs = self.graphs_of_shape.get(tuple(hidden_states.shape), [])
        called: bool = super()._should_call_te_cudagraph(*args, **kwargs)  # type: ignore[misc]
        return called


@contextmanager
def layer_graphs(chunks: Sequence[torch.nn.Module], optimizer: Any, lengths: Sequence[int]) -> Iterator[None]:
    """Capture the graphs that the model's ``cuda_graph_modules`` name, and replay them meanwhile.

    Args:
        chunks: model chunks in Megatron's DDP; their gradients are zero afterwards.
        lengths: padded tokens of micro-batches.

    Raises:
        ValueError: Megatron-Core cannot capture here: without TransformerEngine, or under settings of the allocator.
        OutOfMemoryError: the graphs do not fit.
    """
    config = get_model_config(chunks[0])
    if config.cuda_graph_impl == "none":
        yield
        return
    layers: dict[Any, dict[tuple[int, ...], list[Any]]] = defaultdict(dict)
    ranks = config.tensor_model_parallel_size if config.sequence_parallel else 1
    with _one_micro_batch(), naming_memory(lambda: f"CUDA graphs of {len(lengths)} lengths do not fit; give fewer"):
        for length in lengths:
            try:
                helper = TECudaGraphHelper(list(chunks), config, length, 1, [optimizer])
            except AssertionError as error:
                raise ValueError(f"cuda_graph_impl={config.cuda_graph_impl!r}: {error} Or set it to 'none'") from None
            helper.create_cudagraphs()
            for layer in helper.flattened_callables:
                # A layer that has graphs is not captured again.
                shape = (length // ranks, 1, config.hidden_size)
                layers[layer][shape], layer.cuda_graphs = layer.cuda_graphs, []
    for layer, graphs in layers.items():
        layer.graphs_of_shape = graphs
        change_class(layer, GraphedLayerMixin)
    try:
        yield
    finally:
        # Before the process groups: a graph may hold their communication.
        for layer, graphs in layers.items():
            layer.graphs_of_shape, layer.cuda_graphs = {}, []
            for graph in itertools.chain(*graphs.values()):
                graph.reset()


@contextmanager
def _one_micro_batch() -> Iterator[None]:
    """Give Megatron-Core the number of micro-batches that it has to capture: without stages, one."""
    ranks = parallel_state.get_data_parallel_world_size()
    num_microbatches_calculator.init_num_microbatches_calculator(
        rank=torch.distributed.get_rank(), global_batch_size=ranks, micro_batch_size=1, data_parallel_size=ranks
    )
    try:
        yield
    finally:
        num_microbatches_calculator.unset_num_microbatches_calculator()
