"""Megatron-Bridge's Qwen3-VL and Qwen3.5-VL on a CPU, folding and stock, in a step of Megatron-Core's schedule.

Layers are Megatron-Core's local ones. In place of the tower, which needs TransformerEngine, are linear layers.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from bridge_models import auto_bridge
from harness.folded_jobs import stock_spec
from harness.in_double import kept_double
from harness.packed_calls import packed
from harness.worlds import Layout
from megatron.core import parallel_state

from mcore_prefix_tree.mcore import RoutedPackedSeqParams, fold_inside

PICTURE, VIDEO, BEGIN, END, PIXELS, HIDDEN = 7, 8, 9, 10, 3, 32
# Grids of patches; "c" has the pixels of "a" in another grid.
GRIDS = {"a": (1, 4, 6), "b": (1, 4, 6), "c": (1, 6, 4)}
# Duplicates, branches before, after and at a picture, a prefix that ends in one, two pictures, and text.
ROWS = [[5, "a", 6, 3], [5, "a", 6, 11], [5, "b", 6, 3], [5, "a", 6, 3], [5, "c", 6, 3], [5, "a"], [5, "a", "b", 2]]
ROWS += [["b", 12], [5, 6, 3], [5, 6, 4], [5]]
TEXT = [row for row in ROWS if all(isinstance(part, int) for part in row)]
FAMILIES: dict[str, dict[str, Any]] = {
    "Qwen3VL": {},
    "Qwen3VLMoE": {
        "num_moe_experts": 4, "moe_router_topk": 2, "moe_ffn_hidden_size": 16, "moe_aux_loss_coeff": 0.0,
        "moe_router_load_balancing_type": "none", "moe_grouped_gemm": False, "moe_permute_fusion": False,
        "freeze_language_model": False, "freeze_vision_model": False, "moe_router_bias_update_rate": 0.0,
    },
    "Qwen35VL": {
        "linear_attention_freq": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8, "linear_num_key_heads": 2,
        "linear_num_value_heads": 4, "rotary_percent": 0.75, "layernorm_zero_centered_gamma": False,
    },
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class VisionJob:
    family: str
    rows: tuple[tuple[Any, ...], ...] = tuple(map(tuple, ROWS))
    by_rows: bool = False  # whether the trainer gives rows of equal length, which the model packs
    routed: bool = False  # whether tokens bring their experts; here the model routes all
    recompute: bool = False


class Tower(torch.nn.Module):
    """Features of each picture's token, and of ``layers`` more that the language model adds."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.heads = torch.nn.ModuleList(
            torch.nn.Linear(4 * PIXELS, HIDDEN, dtype=torch.float64) for _ in range(1 + layers)
        )

    def forward(self, hidden_states: torch.Tensor, grid_thw: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
        self.pictures = len(grid_thw)
        merged = hidden_states.reshape(-1, 4 * PIXELS)
        features, *deep = (head(merged) for head in self.heads)
        return features, deep


@contextlib.contextmanager
def on_the_cpu(provider: Any) -> Iterator[None]:
    """Build local layers, and no tower."""
    from mcore_prefix_tree.cpu.specs import PackedAttention, exchanged

    with contextlib.ExitStack() as stack:
        from megatron.bridge.models.qwen_vl import qwen3_vl_provider, qwen35_vl_provider
        from megatron.bridge.models.qwen_vl.modelling_qwen3_vl import model
        from megatron.bridge.models.qwen_vl.modelling_qwen3_vl.attention import Qwen3VLSelfAttention
        from megatron.core.transformer.dot_product_attention import DotProductAttention

        def block(config: Any, vp_stage: int | None = None, pp_rank: int | None = None) -> Any:
            return exchanged(stock_spec(config, vp_stage), {DotProductAttention: PackedAttention})

        def layers(**_: Any) -> Any:
            """Return a block, which brings the norm behind it; Bridge's own has TransformerEngine's."""
            made = block(provider)
            for one in made.layer_specs:
                one.submodules.self_attention.module = Qwen3VLSelfAttention
            return made

        nothing = SimpleNamespace(self_attention=SimpleNamespace())
        deep = 0 if provider.experimental_attention_variant else 2
        for room, name, found in (
            (qwen3_vl_provider, "get_gpt_layer_with_transformer_engine_spec", layers),
            (qwen35_vl_provider, "get_transformer_block_with_experimental_attention_variant_spec", block),
            (model, "get_vit_layer_with_transformer_engine_spec", lambda: SimpleNamespace(submodules=nothing)),
            (model, "get_vision_model_config", lambda *_, **__: SimpleNamespace()),
            (model, "Qwen3VLVisionModel", lambda *_, **__: Tower(deep)),
        ):
            stack.enter_context(mock.patch.object(room, name, found))
        yield


def model_of(job: VisionJob, layout: Any, *, hooks: Sequence[Any] = (), **inside: Any) -> Any:
    """The model that a trainer on Megatron-Bridge builds, folding inside if ``inside`` has settings.

    ``hooks`` change its chunks before they are wrapped.
    """
    from megatron.bridge.models.qwen_vl import qwen3_vl_provider, qwen35_vl_provider

    kind = getattr(qwen35_vl_provider if job.family == "Qwen35VL" else qwen3_vl_provider, f"{job.family}ModelProvider")
    recompute = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    provider = kind(
        num_layers=4, hidden_size=HIDDEN, num_attention_heads=4, num_query_groups=2, kv_channels=8,
        ffn_hidden_size=48, vocab_size=64, seq_length=128, mrope_section=[2, 1, 1], rotary_base=10000,
        normalization="RMSNorm", gated_linear_unit=True, add_bias_linear=False, hidden_dropout=0.0,
        activation_func=torch.nn.functional.silu, share_embeddings_and_output_weights=False,
        image_token_id=PICTURE, video_token_id=VIDEO, vision_start_token_id=BEGIN, vision_end_token_id=END,
        apply_rope_fusion=False, bias_activation_fusion=False, persist_layer_norm=False,
        use_cpu_initialization=True, gradient_accumulation_fusion=False, cross_entropy_loss_fusion=False,
        tensor_model_parallel_size=layout.tp, pipeline_model_parallel_size=layout.pp,
        sequence_parallel=layout.sequence_parallel, variable_seq_lengths=layout.pp > 1,
        moe_token_dispatcher_type="alltoall", pipeline_dtype=torch.float64, params_dtype=torch.float64,
        **(recompute if job.recompute else {}), **FAMILIES[job.family],
    )  # fmt: skip
    provider.vision_config.spatial_merge_size = 2
    if hasattr(provider.vision_config, "deepstack_visual_indexes"):
        provider.vision_config.deepstack_visual_indexes = [0, 1]
    if inside:
        assert fold_inside(provider, **inside) is provider
    for hook in hooks:
        provider.register_pre_wrap_hook(hook)
    provider.finalize()
    provider.params_dtype = torch.float64
    torch.manual_seed(0)
    with on_the_cpu(provider):
        (chunk,) = provider.provide_distributed_model(
            wrap_with_ddp=False, use_cpu_initialization=True, mixed_precision_wrapper=None
        )
    torch.manual_seed(1)
    for name, parameter in sorted(chunk.named_parameters()):
        if "heads" in name:
            torch.nn.init.normal_(parameter, std=0.3)
    return chunk.double()


def tokens_of(row: Sequence[Any]) -> list[int]:
    parts = [[part] if isinstance(part, int) else [BEGIN, *[PICTURE] * 6, END] for part in row]
    return [token for part in parts for token in part]


def pictures_of(rows: Sequence[Sequence[Any]]) -> dict[str, torch.Tensor]:
    """The pixels and grids of the pictures of rows, in their order."""
    drawn = torch.randn(2, 24, PIXELS, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    names = [part for row in rows for part in row if isinstance(part, str)]
    if not names:
        return {}
    pixels = {"a": drawn[0], "b": drawn[1], "c": drawn[0]}
    grids = torch.tensor([GRIDS[name] for name in names])
    return {"pixel_values": torch.cat([pixels[name] for name in names]), "image_grid_thw": grids}


def scored(ids: list[int], seed: int, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Labels and weights of a row's tokens, with padding; its last token has none."""
    labels, weights = torch.zeros(size, dtype=torch.long), torch.zeros(size, dtype=torch.float64)
    last = len(ids) - 1
    labels[:last] = torch.tensor(ids[1:], dtype=torch.long)
    weights[:last] = torch.randn(last, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return labels, weights


def call_of(rows: Sequence[Sequence[Any]], multiple: int, *, by_rows: bool = False) -> dict[str, Any]:
    """A call with packed rows, or with padded ones that the model packs; and the weights of its tokens' losses."""
    ids = [tokens_of(row) for row in rows]
    size = max(map(len, ids)) + -max(map(len, ids)) % multiple
    call = packed([[*row, *[0] * (size - len(row))] for row in ids] if by_rows else ids, multiple=multiple, fill=0)
    if by_rows:
        call["input_ids"] = call["input_ids"].view(len(ids), size)
    slots = call["packed_seq_params"].cu_seqlens_q_padded.diff().tolist()
    targets = [scored(row, at, slot) for at, (row, slot) in enumerate(zip(ids, slots, strict=True))]
    labels, weights = (torch.cat(one) for one in zip(*targets, strict=True))
    return call | pictures_of(rows) | {"labels": labels[None], "weights": weights}


def calls_by_row(rows: Sequence[Sequence[Any]], multiple: int) -> list[dict[str, Any]]:
    """Calls of the stock model, one for each row, not packed."""
    calls = []
    for at, row in enumerate(rows):
        ids = tokens_of(row)
        size = len(ids) + -len(ids) % multiple
        labels, weights = scored(ids, at, size)
        inputs = {"input_ids": torch.tensor([[*ids, *[0] * (size - len(ids))]]), "position_ids": None}
        calls.append(inputs | pictures_of([row]) | {"attention_mask": None, "labels": labels[None], "weights": weights})
    return calls


def step(model: Any, calls: list[dict[str, Any]]) -> list[torch.Tensor]:
    """Run forward and backward; return the last stage's losses of each call."""
    from megatron.core.pipeline_parallel import get_forward_backward_func

    losses: list[torch.Tensor] = []

    def forward(batches: Iterator[dict[str, Any]], model: Any) -> Any:
        call = dict(next(batches))
        weights = call.pop("weights")

        def loss_of(output: torch.Tensor) -> Any:
            losses.append(output.detach())
            return (output * weights).sum() * len(calls), {}

        return model(**call), loss_of

    get_forward_backward_func()(
        forward_step_func=forward,
        data_iterator=iter(calls),
        model=[model],
        num_microbatches=len(calls),
        seq_length=calls[0]["input_ids"].shape[1],
        micro_batch_size=1,
        forward_only=False,
    )
    return losses


def errors(job: VisionJob, layout: Any) -> tuple[dict[str, float], float]:
    """Every rank: relative errors of losses and gradients, for each row by itself, and the fold ratio."""
    auto_bridge()
    multiple = layout.tp if layout.sequence_parallel else 1
    with kept_double():
        stock, folds = model_of(job, layout), model_of(job, layout, log_every=0)
        assert stock.state_dict().keys() == folds.state_dict().keys()
        folds.load_state_dict(stock.state_dict())
        wanted = step(stock, calls_by_row(job.rows, multiple))
        call = call_of(job.rows, multiple, by_rows=job.by_rows)
        if job.routed:
            routes = torch.full((call["input_ids"].numel(), 4, 2), -1)
            call["packed_seq_params"] = RoutedPackedSeqParams.of(call["packed_seq_params"], routes)
        found = step(folds, [call])
    different_pictures = {part for row in job.rows for part in row if isinstance(part, str)}
    if folds.vision_model is not None and different_pictures:
        assert folds.vision_model.pictures == len(different_pictures)
    slots = call["packed_seq_params"].cu_seqlens_q_padded.tolist()
    different = {}
    for at, loss in enumerate(wanted):
        last = len(tokens_of(job.rows[at])) - 1
        start = slots[at]
        different[f"row {at}"] = float((found[0][0, start : start + last] - loss[0, :last]).abs().max()) if last else 0
    gradients = dict(folds.named_parameters())
    for name, parameter in stock.named_parameters():
        expected, actual = parameter.grad, gradients[name].grad
        assert (expected is None) == (actual is None), name
        if expected is None:
            continue
        # Each rank of sequence parallelism has the gradients of its tokens; Megatron-Bridge leaves deepstack's so, too.
        if getattr(parameter, "sequence_parallel", False) or (layout.sequence_parallel and "heads" in name):
            group = parallel_state.get_tensor_model_parallel_group()
            torch.distributed.all_reduce(expected, group=group)
            torch.distributed.all_reduce(actual, group=group)
        different[name] = float((actual - expected).norm() / expected.norm().clamp(min=1e-6))
    return different, folds.folding.last.fold_ratio


def said() -> list[str]:
    """The errors of calls that cannot be folded, and of settings."""
    auto_bridge()
    job, layout = VisionJob(family="Qwen3VL"), Layout()
    folds = model_of(job, layout, log_every=0)
    call = call_of(job.rows, 1)
    del call["weights"]
    positions = torch.zeros_like(call["labels"]).expand(3, 1, -1)
    wrong: tuple[dict[str, Any], ...] = (
        {"pixel_values_videos": call["pixel_values"]},
        {"pixel_values": None},
        {"pixel_values": None, "image_grid_thw": None, "position_ids": positions},
        {"image_grid_thw": call["image_grid_thw"][1:]},
        {"packed_seq_params": None},
    )
    attempts = [partial(folds, **call | one) for one in wrong]
    attempts += [partial(model_of, job, layout, **one) for one in ({"max_tokens": 9}, {"check_first": True})]
    attempts += [partial(fold_inside, folds)]
    return [error_of(attempt) for attempt in attempts]


def error_of(attempt: Callable[[], Any]) -> str:
    try:
        attempt()
    except (ValueError, NotImplementedError) as error:
        return str(error)
    return "nothing was refused"
