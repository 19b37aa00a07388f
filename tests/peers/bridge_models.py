"""Models that Megatron-Bridge makes of tiny Hugging Face folders, on a CPU.

Layers are Megatron-Core's local ones.
"""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from harness.in_double import kept_double
from harness.packed_calls import packed, spans
from harness.seam_models import build, local_spec, tiny_config
from harness.worlds import Layout
from hf_folders import GEMMA4_31B
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.tensor_parallel import gather_from_tensor_model_parallel_region
from megatron.core.transformer.enums import AttnBackend
from stand_ins import Finder

from mcore_prefix_tree.attention.api import AUTO
from mcore_prefix_tree.cpu.emulation import cpu_emulation
from mcore_prefix_tree.cpu.hybrid import hybrid_stack
from mcore_prefix_tree.cpu.specs import cpu_spec
from mcore_prefix_tree.mcore import fold_inside
from mcore_prefix_tree.mcore.models.bridge import auto_bridge as import_bridge

# Settings of these families' configurations that fold_inside rejects.
OVERRIDES = {
    "mtp_num_layers": None,
    "moe_aux_loss_coeff": 0.0,
    "moe_router_load_balancing_type": "none",
    "moe_router_bias_update_rate": 0.0,
    "apply_rope_fusion": False,
    # Of Gemma 4 without experts transformers keeps the heads layer by layer, where Megatron-Bridge does not look.
    "global_kv_channels": GEMMA4_31B["global_head_dim"],
    "num_global_query_groups": GEMMA4_31B["num_global_key_value_heads"],
}


def auto_bridge() -> Any:
    with cpu_emulation(force=True):
        return import_bridge()


def local_layers(config: Any, vp_stage: int | None = None) -> Any:
    """A provider's layer spec."""
    return cpu_spec(
        get_gpt_decoder_block_spec(config, use_transformer_engine=False, vp_stage=vp_stage), config, vp_stage
    )


def model_of(folder: str, layout: Any, **inside: Any) -> Any:
    """The model that a trainer on Megatron-Bridge builds, folding inside if ``inside`` has settings."""
    bridge = auto_bridge().from_hf_pretrained(folder)
    bridge.hf_pretrained.config.allow_global_per_layer_attribute_access = True
    provider = bridge.to_megatron_provider(load_weights=bool(inside))
    if hasattr(provider, "hybrid_stack_spec"):
        provider.hybrid_stack_spec = hybrid_stack
        provider.attention_backend = AttnBackend.auto  # the environment of a worker has the other models' choice
    provider.transformer_layer_spec = local_layers
    if inside:
        assert fold_inside(provider, **inside) is provider
    parallel = {
        "tensor_model_parallel_size": layout.tp,
        "sequence_parallel": layout.sequence_parallel,
        "expert_model_parallel_size": layout.ep,
        "use_cpu_initialization": True,
        "gradient_accumulation_fusion": False,
        "cross_entropy_loss_fusion": False,
        "moe_token_dispatcher_type": "alltoall",
        "moe_grouped_gemm": False,
        "moe_permute_fusion": False,
        "bias_activation_fusion": False,
        "persist_layer_norm": False,
    }
    known = {name: value for name, value in (OVERRIDES | parallel).items() if hasattr(provider, name)}
    provider.apply_overrides_and_finalize(dtype=torch.float32, overrides=known)
    chunks = provider.provide_distributed_model(wrap_with_ddp=False, use_cpu_initialization=True)
    if not inside:  # the other has loaded them in a hook
        bridge.load_hf_weights(chunks)
    return chunks[0]


def run_in_double(folder: str, rows: list[Any], layout: Any) -> dict[str, Any]:
    """Run :func:`run` in double precision, with the back-end for windows."""
    with kept_double():
        return run(folder, rows, layout, "reference", torch.float64)


def run(
    folder: str, rows: list[Any], layout: Any, backend: str = AUTO, dtype: torch.dtype = torch.float32
) -> dict[str, Any]:
    """Every rank: logits of each row and the error of the gradients, from the stock model and the one that folds."""
    stock = model_of(folder, layout).to(dtype)
    folds = model_of(folder, layout, check_first=True, attention_backend=backend).to(dtype)
    assert stock.state_dict().keys() == folds.state_dict().keys()
    for module in (*stock.modules(), *folds.modules()):
        if hasattr(module, "config"):
            module.config.params_dtype = dtype  # Mamba's layers take their input to it
    multiple = layout.tp if layout.sequence_parallel else 1
    alone = []
    for row in rows:
        ids = torch.tensor([[*row, *[0] * (-len(row) % multiple)]])
        positions = torch.arange(ids.shape[1]).unsqueeze(0)
        alone.append(stock(input_ids=ids, position_ids=positions, attention_mask=None)[0, : len(row)])
    call = packed(rows, multiple=multiple)
    output = folds(**call)[0]
    together = [output[span] for span in spans(call)]
    for answers in (alone, together):
        sum(answer.square().sum() for answer in answers).backward()
    gradients = dict(folds.named_parameters())
    errors = {}
    for name, parameter in stock.named_parameters():
        expected, found = parameter.grad, gradients[name].grad
        if expected is None:  # the norm of keys that a layer takes from another
            assert found is None, name
            continue
        if getattr(parameter, "sequence_parallel", False):
            group = parallel_state.get_tensor_model_parallel_group()
            torch.distributed.all_reduce(expected, group=group)
            torch.distributed.all_reduce(found, group=group)
        errors[name] = float((found - expected).norm() / expected.norm().clamp(min=1e-6))
    wide = torch.promote_types(dtype, torch.float32)  # NumPy has no bfloat16
    whole = [
        [gather_from_tensor_model_parallel_region(answer.detach()).to(wide).numpy() for answer in answers]
        for answers in (alone, together)
    ]
    return {"alone": whole[0], "together": whole[1], "errors": errors, "report": folds.folding.last.to_log()}


def refused(folder: str, rows: list[Any], kind: str) -> list[str]:
    """Every rank: a folding model's results for adapters of Megatron-Bridge with dropout, and without."""
    model = model_of(folder, Layout(), check_first=True)
    from megatron.bridge.peft.canonical_lora import CanonicalLoRA
    from megatron.bridge.peft.dora import DoRA
    from megatron.bridge.peft.lora import LoRA

    queries = ["linear_q", "linear_k", "linear_v"]
    kinds = {
        "lora": (LoRA, ["linear_proj"]),
        "dora": (DoRA, ["linear_proj"]),
        "canonical_lora": (CanonicalLoRA, queries),
    }
    adapter, targets = kinds[kind]
    model = adapter(target_modules=targets, dim=2, dropout=0.1)(model, training=True)
    said = []
    for mode in (True, False):
        model.train(mode)
        try:
            model(**packed(rows))
        except NotImplementedError as error:
            said.append(str(error))
    return said


def refused_settings(folder: str, settings: dict[str, Any], inside: dict[str, Any]) -> str:
    """Return the refusal of a model with changed settings of its configuration and of folding; empty without any."""
    model = model_of(folder, Layout())
    with mock.patch.dict(vars(model.config), settings):
        try:
            fold_inside(model, **inside)
        except NotImplementedError as error:
            return str(error)
    return ""


def refused_core() -> str:
    """Return the refusal of Gemma 2's attention, which caps its scores."""
    auto_bridge()
    from megatron.bridge.models.gemma.gemma2_provider import Gemma2DotProductAttention

    config = tiny_config()
    config.query_pre_attn_scalar, config.attn_logit_softcapping = 8, 5.0
    spec = local_spec(config)
    spec.submodules.self_attention.submodules.core_attention = Gemma2DotProductAttention
    try:
        fold_inside(build(config, spec))
    except NotImplementedError as error:
        return str(error)
    return ""


def compare_by_token(rows: list[Any]) -> float:
    """Compare rows folded inside, and each by itself, of a model with OLMoE's attention, and return the fold ratio."""
    auto_bridge()
    from megatron.bridge.models.olmoe.olmoe_provider import OLMoESelfAttention

    config = tiny_config(qk_layernorm=True, normalization="RMSNorm", num_query_groups=None)
    spec = local_spec(config)
    spec.submodules.self_attention.module = OLMoESelfAttention
    model = fold_inside(build(config, spec), check_first=True)
    model(**packed(rows)).sum().backward()
    return float(model.folding.last.fold_ratio)


def logged(rows: list[Any]) -> dict[str, float]:
    """Megatron-Bridge's own log of a step with its callbacks, after an evaluation."""
    auto_bridge()
    with mock.patch.object(sys, "meta_path", [Finder(), *sys.meta_path]):
        from megatron.bridge.training.callbacks import CallbackContext, CallbackManager
        from megatron.bridge.training.utils.train_utils import training_log
    from megatron.bridge.models import GPTModelProvider
    from megatron.core import num_microbatches_calculator

    from mcore_prefix_tree.integrations.megatron_bridge import LogFolding

    provider = GPTModelProvider(
        num_layers=1,
        hidden_size=16,
        num_attention_heads=2,
        vocab_size=64,
        seq_length=64,
        transformer_layer_spec=local_layers,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        use_cpu_initialization=True,
        gradient_accumulation_fusion=False,
    )
    fold_inside(provider).apply_overrides_and_finalize(dtype=torch.float32, overrides={})
    chunks = provider.provide_distributed_model(wrap_with_ddp=False, use_cpu_initialization=True)
    manager = CallbackManager()
    manager.add(LogFolding())
    call, losses = packed(rows), {"lm loss": torch.tensor(2.0)}
    chunks[0](**call)
    manager.fire("on_train_step_start", CallbackContext(state=None, model=chunks))
    chunks[0](**call).sum().backward()
    manager.fire("on_train_step_end", CallbackContext(state=None, model=chunks, loss_dict=losses))

    found: dict[str, float] = {}
    writer = SimpleNamespace(add_scalar=lambda name, value, step: found.update({name: float(value)}))
    off = ("throughput", "memory", "runtime", "l2_norm_grad", "loss_scale", "world_size")
    logger = {f"log_{name}_to_tensorboard": False for name in off} | {"log_timers_to_tensorboard": False}
    logger |= {"timing_log_level": 0, "tensorboard_log_interval": 1, "log_interval": 100}
    config = SimpleNamespace(
        logger=SimpleNamespace(**logger),
        train=SimpleNamespace(micro_batch_size=1),
        data_parallel_size=1,
        profiling=None,
        optimizer=SimpleNamespace(decoupled_lr=None),
        model=provider,
    )
    state = SimpleNamespace(
        timers=None,
        train_state=SimpleNamespace(step=1, consumed_train_samples=1, skipped_train_samples=0),
        tensorboard_logger=writer,
        wandb_logger=None,
        mlflow_logger=None,
        comet_logger=None,
        energy_monitor=None,
    )
    groups = SimpleNamespace(mp=parallel_state.get_model_parallel_group())
    num_microbatches_calculator.init_num_microbatches_calculator(0, None, 1, 1, 1)
    try:
        training_log(
            losses, {}, 0.1, None, 1.0, False, 0, None, None, None, config, state, [], chunks, pg_collection=groups
        )
    finally:
        num_microbatches_calculator.destroy_num_microbatches_calculator()
    return found
