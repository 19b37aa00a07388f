"""verl's Megatron engines with a model that folds inside, for ``VERL_ENGINE_VENDOR=mcore_prefix_tree``.

They are subclasses of verl's own, which build the model, own the optimizer and keep checkpoints. They differ in the
provider's layer spec, the head, and the cut of micro-batches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from copy import copy
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func
from tensordict import TensorDict
from verl.models.mcore.mtp_patch import unpatch_mtp_layer_get_embeddings, unpatch_postprocess
from verl.models.mcore.util import postprocess_thd_engine, preprocess_thd_engine
from verl.utils import tensordict_utils as tu
from verl.utils.device import get_device_id
from verl.utils.megatron.pipeline_parallel import make_batch_generator
from verl.utils.megatron.router_replay_utils import align_r3_router_replay_data
from verl.utils.megatron_utils import get_megatron_mtp_loss, unwrap_model
from verl.utils.model import extract_multi_modal_inputs
from verl.workers.engine import EngineRegistry
from verl.workers.engine.megatron.transformer_impl import MegatronEngineWithLMHead, MegatronEngineWithValueHead
from verl.workers.engine.utils import postprocess_batch_func, prepare_micro_batches

from mcore_prefix_tree.integrations.verl import VENDOR
from mcore_prefix_tree.integrations.verl.micro_batches import cut
from mcore_prefix_tree.layout.picture_features import compare_pictures, number_features, read_grids
from mcore_prefix_tree.mcore.packed import RoutedPackedSeqParams, RowLogprobs, fold_inside

# Requests of a batch that only verl's own engine supports.
_NEED_LOGITS = ("calculate_sum_pi_squared", "distillation_use_topk", "distillation_only")
# verl's TrainingWorker averages metrics of these prefixes over data-parallel ranks. It makes lists of the others,
# which SFT's trackers get as they are and TensorBoard rejects; train_mini_batch, of the RL trainers, flattens them.
_AVERAGED = "mtp_losses/"
# Of a row's multi_modal_inputs, what verl's own engine gives the model.
_OF_PICTURES = ("pixel_values", "image_grid_thw", "pixel_values_videos", "video_grid_thw")
# No tokenizer has as many tokens; the features of a mini-batch's pictures are numbered from here.
_ABOVE_IDS = 1 << 30
_register = partial(EngineRegistry.register, backend="megatron", vendor=VENDOR)


def _refuse(asked: dict[str, Any]) -> None:
    """Raise NotImplementedError with the name of the first setting that is set."""
    for setting in (name for name, value in asked.items() if value):
        raise NotImplementedError(f"VERL_ENGINE_VENDOR={VENDOR} does not support {setting}; change it")


def _routes(batch: TensorDict) -> torch.Tensor | None:
    """Return the experts of each row's tokens, jagged ``[n, tokens, layers, top-k]``, -1 where the model routes."""
    # None without replay. Raises ValueError if the rollout has no routes.
    if not tu.get_non_tensor_data(batch, key="enable_routing_replay", default=False):
        return None
    given = batch.get("routed_experts", None)
    if given is None:
        raise ValueError(
            "router_replay.mode=R3: the batch has no routed_experts; set "
            "actor_rollout_ref.rollout.enable_rollout_routing_replay=True"
        )
    routes = align_r3_router_replay_data(given, batch["input_ids"])
    experts = routes.values()
    # verl fills tokens that the engine did not run with expert 0, which no engine chooses twice.
    absent = (experts == 0).flatten(1).all(1) if experts.shape[-1] > 1 else torch.zeros(len(experts), dtype=torch.bool)
    filled = experts.masked_fill(absent[:, None, None], -1)
    return torch.nested.nested_tensor_from_jagged(filled, offsets=routes.offsets())


def _loss_mask(batch: TensorDict) -> torch.Tensor:
    """Return the loss mask of each row's tokens, jagged ``[n, tokens]``."""
    # The batch has that of the answers, or of all. Raises NotImplementedError for the first token of a row, which the
    # depths of verl predict from the row before.
    rows, mask = batch["input_ids"], batch["loss_mask"]
    answers = mask.offsets().diff() if mask.is_nested else batch["attention_mask"][:, -mask.shape[1] :].sum(1)
    sizes = zip(mask.unbind(), answers.tolist(), rows.offsets().diff().tolist(), strict=True)
    values = torch.cat([F.pad(one[:size], (length - size, 0)) for one, size, length in sizes])
    _refuse({"mtp.enable_train=True with the first token of a row in loss_mask": values[rows.offsets()[:-1]].any()})
    return torch.nested.nested_tensor_from_jagged(values, rows.offsets())


@_register(model_type="language_model")
class FoldingEngine(MegatronEngineWithLMHead):  # type: ignore[misc]
    """Computes every unique token of a micro-batch once. Its log-probabilities and entropies make no full logits.

    ``override_mcore_model_config.prefix_tree`` takes the settings of :func:`fold_inside`.
    """

    _is_critic = False

    def __init__(self, model_config: Any, engine_config: Any, optimizer_config: Any, checkpoint_config: Any) -> None:
        replay = engine_config.router_replay
        _refuse(
            {
                "vanilla_mbridge=True": engine_config.vanilla_mbridge,
                "use_remove_padding=False": not engine_config.use_remove_padding,
                "use_fused_kernels=True (the head is fused already)": engine_config.use_fused_kernels,
                "dynamic_context_parallel=True": engine_config.dynamic_context_parallel,
                "pad_to_length=True": engine_config.pad_to_length,
                "use_megatron_fsdp=True": engine_config.use_megatron_fsdp,
                "router_replay.mode=R2 (R3 replays the rollout engine's routes)": replay.mode == "R2",
                "qat.enable=True": engine_config.qat.enable,
                "a vision model as a critic": self._is_critic and hasattr(model_config.hf_config, "vision_config"),
            }
        )
        if replay.mode != "disabled":
            # Routes ride on the tree of a micro-batch; verl's own replay would give every router the rows' routes.
            engine_config = copy(engine_config)
            object.__setattr__(engine_config, "router_replay", replace(replay, mode="disabled"))  # a frozen field
        super().__init__(model_config, engine_config, optimizer_config, checkpoint_config)
        self._trains_depths = model_config.mtp.enable and model_config.mtp.enable_train and not self._is_critic

    def initialize(self) -> None:
        """Build the engine as verl does, without its methods for depths that learn, which roll tokens."""
        super().initialize()
        for chunk in self.module if self._trains_depths else ():
            unpatch_postprocess(chunk)
            if unpatch_mtp_layer_get_embeddings(chunk):
                # Megatron's setting detaches what detach_encoder does, and in the model the output layer as well.
                depths = unwrap_model(chunk).mtp
                for module in (depths, *depths.layers):
                    module.config = copy(module.config)
                    module.config.mtp_detach_heads = True

    def _build_tf_config(self) -> None:
        super()._build_tf_config()
        _refuse({"calculate_per_token_loss=True": getattr(self.provider, "calculate_per_token_loss", False)})
        # verl logs the report of each update by itself.
        settings = self.engine_config.override_mcore_model_config.get("prefix_tree", {})
        fold_inside(self.provider, **{"log_every": 0, **settings})

    def forward_backward_batch(
        self, data: TensorDict, loss_function: Callable[..., Any] | None, forward_only: bool = False
    ) -> dict[str, Any]:
        """Run a mini-batch; see verl's ``BaseEngine``. The metrics gain the report of folding.

        Raises:
            NotImplementedError: the batch requests values that need full logits; names them.
            ValueError: see :func:`cut`.
        """
        _refuse({f"{name}=True": tu.get_non_tensor_data(data, key=name, default=False) for name in _NEED_LOGITS})
        mask, group = data["loss_mask"], self.get_data_parallel_group()
        tokens = (mask.values() if mask.is_nested else mask).sum().to(get_device_id())
        dist.all_reduce(tokens, group=group)
        micro_batches, indices = self._micro_batches(data)
        shared = {"batch_num_tokens": tokens.item(), "dp_size": self.get_data_parallel_size()}
        for part in (data, *micro_batches):
            tu.assign_non_tensor(part, **shared, num_micro_batch=len(micro_batches))
        finish = partial(self.postprocess_micro_batch_func, forward_only=forward_only, loss_function=loss_function)
        step = partial(self.forward_step, logits_processor_func=None, postprocess_micro_batch_func=finish)
        outputs = get_forward_backward_func()(
            forward_step_func=step,
            data_iterator=make_batch_generator(micro_batches, vpp_size=len(self.module)),
            model=self.module,
            num_microbatches=len(micro_batches),
            seq_length=1,  # pipeline stages send the sizes: variable_seq_lengths
            micro_batch_size=1,
            forward_only=forward_only,
        )
        report = unwrap_model(self.module[-1]).folding.report().over_ranks(group, tokens.device)
        if not parallel_state.is_pipeline_last_stage(ignore_virtual=True):
            return {}
        if self.model_config.mtp.enable:
            outputs[0]["metrics"].update(get_megatron_mtp_loss(len(micro_batches)))
        output: dict[str, Any] = postprocess_batch_func(output_lst=outputs, indices=indices, data=data)
        # Of verl's callers, train_mini_batch sets it.
        flattened = tu.get_non_tensor_data(data, key="disable_auto_offload", default=False)
        prefix = "" if flattened else _AVERAGED
        output["metrics"] |= {f"{prefix}{name}": [value] for name, value in report.to_log().items()}
        return output

    def _micro_batches(self, data: TensorDict) -> tuple[list[TensorDict], list[list[int]] | None]:
        """Return the micro-batches, and the rows of each if they are not in the order of the mini-batch."""
        if not tu.get_non_tensor_data(data, key="use_dynamic_bsz", default=True):
            chunks: list[TensorDict] = prepare_micro_batches(data)[0]
            return chunks, None
        stages = parallel_state.get_virtual_pipeline_model_parallel_world_size() or 1
        routes = _routes(data)
        indices = cut(
            self._compared_rows(data).unbind(),
            max_tokens=data["max_token_len_per_gpu"],
            group=self.get_data_parallel_group(),
            device=get_device_id(),
            multiple=self.tf_config.microbatch_group_size_per_vp_stage if stages > 1 else 1,
            group_size=tu.get_non_tensor_data(data, key="force_group_size", default=1),
            routes=None if routes is None else routes.unbind(),
        )
        return [tu.index_select_tensor_dict(data, rows) for rows in indices], indices

    def _compared_rows(self, data: TensorDict) -> Any:
        """Return the rows' token ids; tokens of pictures are equal only where their pictures and places are."""
        rows: Any = data["input_ids"]
        config = self.model_config.hf_config
        given = extract_multi_modal_inputs(data.get("multi_modal_inputs", []))
        grids = read_grids(given.get("pixel_values"), given.get("image_grid_thw"))
        if not len(grids):
            return rows
        sizes = grids.prod(1) // config.vision_config.spatial_merge_size**2
        ids = rows.values().cpu().clone()
        numbers = number_features(sizes, *compare_pictures(given["pixel_values"], grids))
        ids[ids == config.image_token_id] = torch.from_numpy(_ABOVE_IDS + numbers).to(ids.dtype)
        return torch.nested.nested_tensor_from_jagged(ids, offsets=rows.offsets().cpu())

    def forward_step(
        self,
        batch_iter: Iterator[TensorDict],
        model: Any,
        logits_processor_func: Any,
        postprocess_micro_batch_func: Callable[..., Any],
    ) -> tuple[Any, Callable[[Any], Any]]:
        """Run one micro-batch; Megatron's ``forward_step_func``. Rows are folded on the host, which already holds them.

        Raises:
            NotImplementedError: the rows have different temperatures.
        """
        batch = next(batch_iter)
        rows = batch["input_ids"]
        packed, params, _ = preprocess_thd_engine(rows)
        routes = _routes(batch)
        if routes is not None:
            params = RoutedPackedSeqParams.of(params, preprocess_thd_engine(routes)[0][0])
        given = extract_multi_modal_inputs(batch.get("multi_modal_inputs", []))
        asked = self._asked(batch) | {name: given[name].to(packed.device) for name in _OF_PICTURES if name in given}
        output = model(input_ids=packed, position_ids=None, attention_mask=None, packed_seq_params=params, **asked)
        if unwrap_model(model).post_process:
            answers = [postprocess_thd_engine(column, params, rows, len(rows)) for column in output.unbind(-1)]
            output = self._named(answers)
        return output, partial(postprocess_micro_batch_func, data=batch.to(get_device_id()))

    def _asked(self, batch: TensorDict) -> dict[str, Any]:
        temperature = torch.as_tensor(batch["temperature"]).unique()
        _refuse({f"different temperatures in a micro-batch, {temperature.tolist()}": len(temperature) != 1})
        labels, _, _ = preprocess_thd_engine(batch["input_ids"], need_roll=True)
        entropy = tu.get_non_tensor_data(batch, key="calculate_entropy", default=False)
        # verl's own engine takes a temperature of 0 for 1e-8.
        scored = RowLogprobs(labels=labels, temperature=max(temperature.item(), 1e-8), entropy=entropy)
        mask = {"loss_mask": preprocess_thd_engine(_loss_mask(batch))[0]} if self._trains_depths else {}
        return {"output_processor": scored} | mask

    def _named(self, answers: list[torch.Tensor]) -> Any:
        return dict(zip(("log_probs", "entropy"), answers, strict=False))


@_register(model_type="value_model")
class FoldingValueEngine(FoldingEngine, MegatronEngineWithValueHead):  # type: ignore[misc]
    """verl's engine for critics, folding inside."""

    _is_critic = True

    def _asked(self, batch: TensorDict) -> dict[str, Any]:
        return {}

    def _named(self, answers: list[torch.Tensor]) -> Any:
        return answers[0]
