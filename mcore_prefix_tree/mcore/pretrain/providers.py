"""The model and data providers that Megatron-LM's ``pretrain`` is given."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.num_microbatches_calculator import get_num_microbatches
from megatron.core.transformer.spec_utils import import_module
from megatron.training import get_args, get_timers, print_rank_0
from megatron.training.arguments import core_transformer_config_from_args

from mcore_prefix_tree.data import (
    LineOptions,
    Skipped,
    StreamedGroups,
    check_same_samples,
    iter_sample_groups,
    load_tokenizer,
    resolve_paths,
)
from mcore_prefix_tree.data.batches import SampleOrder
from mcore_prefix_tree.layout import Padding, sequence_multiple
from mcore_prefix_tree.mcore.arguments import ArgumentError, add_prefix_tree_args, check_arguments
from mcore_prefix_tree.mcore.folding import Folding
from mcore_prefix_tree.mcore.layer_specs import stock_block_spec, with_prefix_tree
from mcore_prefix_tree.mcore.output_layer import with_edge_head
from mcore_prefix_tree.mcore.pretrain.adapter import model_arguments
from mcore_prefix_tree.mcore.pretrain.backend import device_of_this_rank, with_backend
from mcore_prefix_tree.mcore.pretrain.resumed import consumed_before
from mcore_prefix_tree.mcore.pretrain.step import tree_forward_step
from mcore_prefix_tree.mcore.pretrain.steps import StepDealer, StepIterator, StepSize, check_steps
from mcore_prefix_tree.mcore.ranks import all_ranks
from mcore_prefix_tree.mcore.validation import check_config, check_model
from mcore_prefix_tree.plan import CostModel, ModelWork
from mcore_prefix_tree.sample import Sample
from mcore_prefix_tree.testing.specs import cpu_spec

__all__ = ["add_prefix_tree_args", "prefix_tree_providers"]

Provider = Callable[..., Any]


def tree_transformer_config(args: argparse.Namespace) -> Any:
    """Megatron's ``TransformerConfig`` of validated arguments, with what folding needs, and nothing that it cannot do.

    Raises:
        ArgumentError: see :func:`check_arguments`.
        NotImplementedError: see :func:`check_config`.
    """
    check_arguments(args)
    # Micro-batches differ in length. Megatron's validation switches this off and leaves it to whoever brings the data.
    args.variable_seq_lengths = True
    if args.num_experts is None:
        # Upstream refuses allgather, its default, with variable lengths even where no expert is dispatched to.
        args.moe_token_dispatcher_type = "alltoall"
    config = core_transformer_config_from_args(args)
    check_config(config)
    return config


def tree_model_provider(
    pre_process: bool = True,
    post_process: bool = True,
    vp_stage: int | None = None,
    config: Any = None,
    pg_collection: Any = None,
) -> Any:
    """The GPT that the arguments describe, tree-capable; its state-dict keys are those of the stock model.

    Raises:
        ArgumentError, NotImplementedError: for what folding cannot do, before anything is built.
    """
    args = get_args()
    print_rank_0("building GPT model, tree-capable ...")
    if config is None:
        config = tree_transformer_config(args)
    model = GPTModel(
        config=config,
        transformer_layer_spec=with_prefix_tree(_stock_spec(args, config, vp_stage)),
        vocab_size=args.padded_vocab_size,
        max_sequence_length=args.max_position_embeddings,
        pre_process=pre_process,
        post_process=post_process,
        fp16_lm_cross_entropy=args.fp16_lm_cross_entropy,
        parallel_output=True,
        share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
        position_embedding_type=args.position_embedding_type,
        rotary_percent=args.rotary_percent,
        rotary_base=args.rotary_base,
        rope_scaling=args.use_rope_scaling,
        **model_arguments(args),
        vp_stage=vp_stage,
        pg_collection=pg_collection,
    )
    check_model(model)
    return with_edge_head(model) if args.prefix_tree_fused_head else model


def _stock_spec(args: argparse.Namespace, config: Any, vp_stage: int | None) -> Any:
    """The layers that the arguments select."""
    use_te = args.transformer_impl == "transformer_engine"
    if args.spec is not None:
        spec = import_module(args.spec)
    elif args.heterogeneous_layers_config_path is not None:
        from megatron.core.models.gpt.heterogeneous.heterogeneous_layer_specs import get_gpt_heterogeneous_layer_spec

        spec = get_gpt_heterogeneous_layer_spec(config, use_te)
    else:
        spec = stock_block_spec(config, use_transformer_engine=use_te, vp_stage=vp_stage)
    if not use_te and not torch.cuda.is_available():
        # The emulation is for trying things out, also what upstream's own layers lack on a CPU.
        spec = cpu_spec(spec, config, vp_stage)
    return spec


def folding_of(args: argparse.Namespace, *, device: torch.device) -> Folding:
    """How the job folds under these arguments, validated ones.

    Raises:
        ArgumentError: the length buckets fit neither the budget nor the parallel layout.
    """
    stages, interleaved = args.pipeline_model_parallel_size, args.virtual_pipeline_model_parallel_size is not None
    # Groups of another size may leave a rest of micro-batches, which Megatron checks.
    in_stages = interleaved and (args.microbatch_group_size_per_vp_stage or stages) == stages
    return Folding(
        max_tokens=args.prefix_tree_max_tokens,
        dp_size=args.data_parallel_size,
        cost_model=CostModel.from_work(work_of(args)),
        device=device,
        micro_batch_multiple=stages if in_stages else 1,
        bubble=(stages - 1) / (args.virtual_pipeline_model_parallel_size or 1),
        share=args.prefix_tree_share,
        min_shared_tokens=args.prefix_tree_min_shared_tokens,
        padding=_padding_of(args),
        attention_backend=args.prefix_tree_attention_backend,
        deterministic_attention=args.prefix_tree_deterministic_attention,
        output="weighted_sum" if args.prefix_tree_fused_head else "logits",
        only_supervised=args.prefix_tree_fused_head,
    )


def _padding_of(args: argparse.Namespace) -> Padding:
    multiple = sequence_multiple(
        tensor_model_parallel_size=args.tensor_model_parallel_size,
        sequence_parallel=args.sequence_parallel,
        fp8=args.fp8,
        fp8_recipe=args.fp8_recipe,
    )
    try:
        padding = Padding(multiple=multiple, buckets=tuple(args.prefix_tree_length_buckets or ()))
        padding.check_holds(args.prefix_tree_max_tokens)
    except ValueError as error:
        raise ArgumentError(f"--prefix-tree-{str(error).replace('_', '-')}") from None
    return padding


def work_of(args: argparse.Namespace) -> ModelWork:
    """Return the FLOPs of the model that the arguments describe."""
    return ModelWork.from_dimensions(
        num_layers=args.num_layers,
        hidden_size=args.hidden_size,
        ffn_hidden_size=args.ffn_hidden_size,
        num_attention_heads=args.num_attention_heads,
        vocab_size=args.padded_vocab_size,
        num_query_groups=args.num_query_groups if args.group_query_attention else None,
        kv_channels=args.kv_channels,
        swiglu=args.swiglu,
        fused_head=args.prefix_tree_fused_head,
        settings=vars(args),
    )


def read_order(args: argparse.Namespace, paths: Sequence[str], *, shuffle: bool) -> SampleOrder:
    """The samples of the files, in the order that steps take them; says what was skipped.

    Raises:
        SampleError: bad data, or a sample that is longer than the arguments allow; names file, line and argument. Or
            ranks read different samples.
    """
    name = args.prefix_tree_tokenizer
    options = LineOptions(
        tokenizer=None if name is None else load_tokenizer(name, args.prefix_tree_chat_template_kwargs),
        expand_turns=args.prefix_tree_expand_turns,
        vocab_size=args.padded_vocab_size,
        limits={"--seq-length": args.seq_length, "--prefix-tree-max-tokens": args.prefix_tree_max_tokens},
    )
    skipped, on_error = Skipped(), args.prefix_tree_on_error
    groups: Sequence[Sequence[Sample]]
    if args.prefix_tree_streaming:
        groups = StreamedGroups(
            paths, options, on_error=on_error, skipped=skipped, ranks=all_ranks(), progress=_ReadingProgress()
        )
    else:
        groups = list(iter_sample_groups(paths, **vars(options), on_error=on_error, skipped=skipped))
        check_same_samples(groups, resolve_paths(paths), all_ranks())
    if skipped.count:
        print_rank_0(f"> {skipped}")
    return SampleOrder(groups, seed=args.seed, shuffle=shuffle)


def training_order(args: argparse.Namespace) -> SampleOrder:
    """The training samples, in the order that steps take them."""
    return read_order(args, args.prefix_tree_data_path, shuffle=args.prefix_tree_shuffle)


def validation_order(args: argparse.Namespace) -> SampleOrder:
    """The validation samples, in the order of their files."""
    return read_order(args, args.prefix_tree_valid_data_path, shuffle=False)


class _ReadingProgress:
    """A line for every tenth."""

    def __init__(self) -> None:
        self._tenths = 0

    def __call__(self, done: int, total: int) -> None:
        if 10 * done // total > self._tenths:
            self._tenths = 10 * done // total
            print_rank_0(f"> reading data: {self._tenths}0 %")


def training_seconds() -> float:
    """Wall-clock seconds without those that Megatron's timers gave to evaluation and checkpoints."""
    timers = get_timers()
    paused = sum(timers(name, log_level=0).active_time() for name in ("eval-time", "save-checkpoint"))
    return time.perf_counter() - float(paused)


class TreeDatasetsProvider:
    """Megatron's ``train_valid_test_datasets_provider``: iterators over folded micro-batches, on every rank.

    Called once for each model chunk of a rank; the chunks share their data and plans.
    """

    # All pipeline stages and tensor-parallel ranks read the data themselves and make the same plan.
    is_distributed = True

    def __init__(self) -> None:
        self._training: StepDealer | None = None
        self._consumed_before = 0  # samples, of other data than these
        self._validation: StepDealer | None = None

    def __call__(
        self, train_val_test_num_samples: Sequence[int | None], vp_stage: int | None = None
    ) -> tuple[StepIterator | None, StepIterator | None, None]:
        """Iterators for training, validation and no test.

        Raises:
            ArgumentError: a step does not fit its micro-batches, or the job resumes with other samples than it had.
            SampleError: bad data.
        """
        args = get_args()
        device = device_of_this_rank()
        dp_rank = parallel_state.get_data_parallel_rank()
        chunks = args.virtual_pipeline_model_parallel_size or 1
        folding = folding_of(args, device=device)
        train = None
        if not args.skip_train:
            if self._training is None:
                order = training_order(args)
                print_rank_0(f"> {order.samples_per_epoch} samples an epoch from {args.prefix_tree_data_path}")
                self._consumed_before = consumed_before(args, order)
                # Streamed data would be read and encoded once more, which a dry run does for who wants to know: here a
                # step that does not fit is told when it is planned, while the one before computes.
                constant = args.rampup_batch_size is None and getattr(args, "step_batch_size_schedule", None) is None
                if constant and not order.is_streamed:
                    check_steps(
                        order,
                        constant_size(args),
                        folding,
                        consumed=args.consumed_train_samples - self._consumed_before,
                        end=(train_val_test_num_samples[0] or 0) - self._consumed_before,
                    )
                folding = with_backend(folding, args, order)
                self._training = StepDealer(
                    order,
                    folding,
                    dp_rank=dp_rank,
                    chunks=chunks,
                    num_workers=args.num_workers,
                    clock=training_seconds,
                )
            consumed = args.consumed_train_samples - self._consumed_before
            train = StepIterator(self._training, consumed=consumed, size=lambda: _current_size(args))
        if not args.prefix_tree_valid_data_path:
            if args.eval_iters:
                print_rank_0("> no --prefix-tree-valid-data-path: nothing is evaluated")
            args.eval_iters = 0
            return train, None, None
        if self._validation is None:
            order = validation_order(args)
            if not order.is_streamed:
                check_steps(
                    order,
                    evaluation_size(args),
                    folding,
                    consumed=0 if args.skip_train else args.consumed_valid_samples,
                    end=train_val_test_num_samples[1] or 0,
                )
            # Training has chosen before: validation runs the same back-end.
            folding = with_backend(folding, args, order)
            self._validation = StepDealer(order, folding, dp_rank=dp_rank, chunks=chunks, num_workers=args.num_workers)
        consumed = 0 if args.skip_train else args.consumed_valid_samples
        valid = StepIterator(self._validation, consumed=consumed, size=lambda: evaluation_size(args))
        return train, valid, None


def _current_size(args: argparse.Namespace) -> StepSize:
    return StepSize(
        micro_batches=get_num_microbatches(), micro_batch_size=args.micro_batch_size, dp_size=args.data_parallel_size
    )


def constant_size(args: argparse.Namespace) -> StepSize:
    """A step's size without ramp-up."""
    return StepSize(
        micro_batches=args.global_batch_size // (args.micro_batch_size * args.data_parallel_size),
        micro_batch_size=args.micro_batch_size,
        dp_size=args.data_parallel_size,
    )


def evaluation_size(args: argparse.Namespace) -> StepSize:
    """With which Megatron evaluates: a step's, which since core_v0.18 has arguments of its own."""
    micro_batch_size = getattr(args, "eval_micro_batch_size", args.micro_batch_size)
    samples = getattr(args, "eval_global_batch_size", args.global_batch_size)
    return StepSize(
        micro_batches=samples // (micro_batch_size * args.data_parallel_size),
        micro_batch_size=micro_batch_size,
        dp_size=args.data_parallel_size,
    )


def prefix_tree_providers(
    datasets_provider: Provider, model_provider: Provider | None, forward_step: Provider
) -> tuple[Provider, Provider, Provider]:
    """A script's own three providers where ``--prefix-tree`` is absent, and the folding ones where it is given.

    Args:
        datasets_provider: the script's.
        model_provider: the script's; None where, since core_v0.19, its model comes from a ``ModelConfig``.
        forward_step: the script's.

    Returns:
        To be passed to ``pretrain`` in their place. The data provider is called on every rank under the flag; without
        it on the ranks that the script's own asks for with ``is_distributed``.
    """
    folded = TreeDatasetsProvider()

    class _Datasets:
        @property
        def is_distributed(self) -> bool:
            return bool(getattr(datasets_provider, "is_distributed", False)) or bool(get_args().prefix_tree)

        def __call__(self, num_samples: Sequence[int | None], vp_stage: int | None = None) -> Any:
            provider = folded if get_args().prefix_tree else datasets_provider
            return provider(num_samples) if vp_stage is None else provider(num_samples, vp_stage=vp_stage)

    def model(*args: Any, **kwargs: Any) -> Any:
        arguments = get_args()
        # --attention-backend tree: Megatron-Core is patched (patches/README.md), the script's own layers follow it.
        native = model_provider is not None and arguments.attention_backend.name == "tree"
        if arguments.prefix_tree and not native:
            return tree_model_provider(*args, **kwargs)
        if arguments.prefix_tree:
            tree_transformer_config(arguments)
        assert model_provider is not None, "without --prefix-tree the script's ModelConfig builds its model"
        stock = model_provider(*args, **kwargs)
        return with_edge_head(stock) if arguments.prefix_tree and arguments.prefix_tree_fused_head else stock

    def step(data_iterator: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
        return (tree_forward_step if get_args().prefix_tree else forward_step)(data_iterator, model, *args, **kwargs)

    return _Datasets(), model, step
