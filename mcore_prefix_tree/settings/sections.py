"""The keys of a recipe: the purpose, default and values of each.

Field names are Megatron's if Megatron has one.
"""

from __future__ import annotations

from dataclasses import field
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import AfterValidator, Field
from pydantic.dataclasses import dataclass

from mcore_prefix_tree.attention.api import check_setting
from mcore_prefix_tree.layout import Padding, row_multiple
from mcore_prefix_tree.settings.model_section import ModelConfig
from mcore_prefix_tree.settings.monitoring import LogConfig, ValidationConfig, VerifyConfig
from mcore_prefix_tree.settings.section import (
    STRICT,
    DataPath,
    Fields,
    LocalPath,
    NonNegativeFloat,
    NonNegativeInt,
    Number,
    PositiveFloat,
    PositiveInt,
    Section,
    Seed,
    local,
)
from mcore_prefix_tree.trie import Sharing
from mcore_prefix_tree.utils.choices import DataFormat, OnError, Order, OverBudget, Share
from mcore_prefix_tree.utils.errors import naming

if TYPE_CHECKING:
    from mcore_prefix_tree.objectives import Objective


class RecipeError(ValueError):
    """A recipe that cannot be used. The message names the file and the key."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class DataConfig(Section):
    """Training data.

    Attributes:
        path: a JSONL, Parquet (``.parquet``) or Arrow file (``.arrow``, ``.feather``), a glob, a saved Hugging Face
            data set, ``hf://`` name, ``-`` for JSONL on standard input, or a list of these.
        format: trainer or engine whose names of fields the files have; ``fields`` wins over it.
        fields: the files' names of our fields, for example ``{group: task_id}``; null leaves a field of ours unread.
        tokenizer: a tokenizer that mistral-common carries, or the path of a Hugging Face tokenizer folder; for chat
            messages. None if all records have ``tokens``.
        chat_template_kwargs: further variables of such a folder's chat template, for example
            ``{enable_thinking: false}``; with ``strftime_now``, a date as ``2026-11-20``, its clock shows that date.
        expand_turns: whether to make one sample per assistant turn, with its complete history as prefix.
        order: ``shuffled`` draws lines, or rows, in a new order each epoch; the turns of one stay together. ``folded``
            assigns samples that begin with the same tokens to the same step, anew each epoch; steps fold better and
            depend more on their samples, see docs/planning.md. ``file`` keeps the order of the files.
        on_error: ``raise`` ends before training at the first bad line. ``skip`` skips and counts the lines that cannot
            be used and the samples that are too long, and nothing else.
        streaming: whether to hold no samples, and read and encode a line or row when a step needs it, for files larger
            than memory. The files are scanned once at the start, all ranks together. Plain files only.
        num_workers: number of processes of each rank that read and encode ahead, under ``streaming``; 0 for none.
    """

    path: Annotated[str | list[str], DataPath]
    format: DataFormat | None = None
    fields: Fields = field(default_factory=dict)
    tokenizer: Annotated[str | None, LocalPath] = None
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    expand_turns: bool = False
    order: Order = "shuffled"
    on_error: OnError = "raise"
    streaming: bool = False
    num_workers: Annotated[NonNegativeInt, Field(le=256)] = 2

    def _check_order(self) -> None:
        if self.order == "folded" and self.streaming:
            raise ValueError(
                "data.order=folded sorts all samples in memory and needs data.streaming=false; or use shuffled"
            )


@dataclass(frozen=True, kw_only=True, config=STRICT)
class ParallelConfig(Section):
    """Parallel layout of the model; the remaining ranks are data parallel.

    Attributes:
        expert_model_parallel_size: number of tensor- and data-parallel ranks that share the experts of a layer: each
            has some of them, uncut. 1 gives all experts to each, cut as other layers are.
    """

    tensor_model_parallel_size: PositiveInt = 1
    pipeline_model_parallel_size: PositiveInt = 1
    virtual_pipeline_model_parallel_size: PositiveInt | None = None
    context_parallel_size: PositiveInt = 1
    expert_model_parallel_size: PositiveInt = 1
    sequence_parallel: bool = False

    def _check_stages(self) -> None:
        if self.virtual_pipeline_model_parallel_size is not None and self.pipeline_model_parallel_size == 1:
            raise ValueError(
                "parallel.virtual_pipeline_model_parallel_size cuts the stages of a pipeline; it needs "
                "parallel.pipeline_model_parallel_size above 1"
            )

    @property
    def expert_tensor_parallel_size(self) -> int:
        """Return how many ranks share one expert."""
        return 1 if self.expert_model_parallel_size > 1 else self.tensor_model_parallel_size

    @property
    def micro_batch_multiple(self) -> int:
        """Return the number that divides a rank's micro-batches: interleaved stages take them in groups."""
        return 1 if self.virtual_pipeline_model_parallel_size is None else self.pipeline_model_parallel_size

    def padded_vocab_size(self, size: int) -> int:
        """Return the rows of the embedding: a vocabulary up to a multiple of the tensor-parallel ranks."""
        ranks = self.tensor_model_parallel_size
        return -(-size // ranks) * ranks

    @property
    def bubble(self) -> float:
        """Return the cost of the pipeline's filling and draining, in times of a rank's largest micro-batch."""
        return (self.pipeline_model_parallel_size - 1) / (self.virtual_pipeline_model_parallel_size or 1)


@dataclass(frozen=True, kw_only=True, config=STRICT)
class BatchConfig(Section):
    """Size of a step, and how it folds.

    Attributes:
        global_batch_size: number of logical samples per step, over all ranks. An objective that compares samples with
            each other, or counts several as one, takes complete groups (prompts), rollouts or pairs: all must have the
            same size then, and this is a multiple of it.
        groups_per_step: number of complete groups, rollouts or pairs that a step takes, in place of
            ``global_batch_size``, over all ranks, of any sizes. Rollouts that become one sample per turn
            (``data.expand_turns``) usually need it.
        max_tokens: number of physical tokens that a micro-batch may hold, before padding. States of recurrent layers
            count as tokens, too.
        over_budget: way to cut a tree above ``max_tokens``. ``repeat`` cuts between samples, and each side computes
            their common tokens. ``carry`` cuts anywhere, within a sample too: a side reads keys and values of the
            others, and tokens that others read run forward once more. ``auto`` takes the cheaper way, and ``carry`` for
            a sample above ``max_tokens``.
        share: ``all`` shares every common prefix; ``prompt`` only tokens before the first scored one, so that each
            completion is computed separately. Either is exact.
        min_shared_tokens: number of tokens below which a common prefix is not shared.
        use_first_samples_routes: whether samples share a token for which ``routed_experts`` differ, with those of the
            first sample. This is not exact; by default they share tokens only while the experts agree.
        length_buckets: the only sizes that micro-batches are padded to, for code that is compiled or captured once per
            size; the largest holds ``max_tokens``. None pads only as far as the parallel layout needs.
    """

    max_tokens: PositiveInt
    over_budget: OverBudget = "auto"
    global_batch_size: PositiveInt | None = None
    groups_per_step: PositiveInt | None = None
    share: Share = "all"
    min_shared_tokens: NonNegativeInt = 0
    use_first_samples_routes: bool = False
    length_buckets: list[PositiveInt] | None = None

    def _check_step(self) -> None:
        if (self.global_batch_size is None) == (self.groups_per_step is None):
            raise ValueError(
                "batch: give either global_batch_size, the samples of a step, or groups_per_step, its groups, rollouts "
                "or pairs, and set the other to null"
            )

    @property
    def sharing(self) -> Sharing:
        return Sharing(
            share=self.share,
            min_shared_tokens=self.min_shared_tokens,
            use_first_samples_routes=self.use_first_samples_routes,
        )

    def padding(self, multiple: int) -> Padding:
        """Return the sizes that micro-batches are padded to, each a multiple of a number; raises RecipeError."""
        with naming("batch.length_buckets: ", RecipeError):
            padding = Padding(multiple=multiple, buckets=tuple(self.length_buckets or ()))
            padding.check_holds(self.max_tokens)
        return padding

    @property
    def per_step(self) -> int:
        """Return the number of samples per step, or of its groups, rollouts or pairs."""
        size = self.groups_per_step or self.global_batch_size
        assert size is not None
        return size


def _with_local_projection(options: dict[str, Any]) -> dict[str, Any]:
    given = options.get("projection")
    is_path = isinstance(given, str) or (isinstance(given, list) and all(isinstance(one, str) for one in given))
    return options | {"projection": local(given)} if is_path else options


@dataclass(frozen=True, kw_only=True, config=STRICT)
class ObjectiveConfig(Section):
    """Objective that the samples are trained with.

    Attributes:
        name: name in ``mcore_prefix_tree.objectives.OBJECTIVES``, for example ``sft``, ``grpo`` or ``dpo``. With
            ``critic`` and ``reward_model`` the model ends in a scalar head instead of the vocabulary's.
        options: options of its class there, for example ``{kl_coef: 0.01}``.
        teacher_recipe: recipe of the model that ``distill`` with ``teacher: full`` learns from. Read are its ``model``,
            of the same vocabulary, its ``checkpoint.save``, which holds the weights, and its ``attention_backend``.
            ``xtoken`` also reads its ``data.tokenizer``, and may have a list of teachers. A Hugging Face folder can
            take a recipe's place. Without its ``checkpoint.save`` the weights are those of its ``model.hf``.
        teacher_tensor_model_parallel_size: number of ranks that a teacher is cut over. 1 keeps it uncut on each rank, a
            multiple of the student's cuts it over several replicas of the student; None is the student's.
    """

    name: str = "sft"
    options: Annotated[dict[str, Any], AfterValidator(_with_local_projection)] = field(default_factory=dict)
    teacher_recipe: Annotated[str | list[str] | None, LocalPath] = None
    teacher_tensor_model_parallel_size: PositiveInt | None = None

    @property
    def teacher_recipes(self) -> list[str]:
        return [given] if isinstance(given := self.teacher_recipe, str) else given or []

    @property
    def kind(self) -> type[Objective]:
        """Return the class of the objective; the supervised one for an unknown name, which ``objective_of`` rejects."""
        from mcore_prefix_tree.objectives import OBJECTIVES  # torch, which few readers of a recipe need

        return OBJECTIVES.get(self.name, OBJECTIVES["sft"])[0]

    @property
    def has_scalar_head(self) -> bool:
        """Return whether the model gives a value of each token instead of a distribution."""
        return self.kind.has_scalar_head


@dataclass(frozen=True, kw_only=True, config=STRICT)
class OptimizerConfig(Section):
    """AdamW and its schedule: the learning rate rises from 0 to ``lr``, and decays to ``min_lr`` at the last step.

    Attributes:
        lr_warmup_steps: number of steps that the learning rate rises, less than ``train_iters``.
        lr_warmup_fraction: part of ``train_iters`` that it rises instead, from 0 and below 1, as Megatron-LM's
            ``--lr-warmup-fraction``: it fits every ``train_iters``, and may end between two steps.
    """

    lr: PositiveFloat = 1e-3
    min_lr: NonNegativeFloat = 0.0
    lr_decay_style: Literal["constant", "linear", "cosine"] = "cosine"
    lr_warmup_steps: NonNegativeInt = 0
    lr_warmup_fraction: Annotated[float, Number, Field(ge=0, lt=1)] | None = None
    weight_decay: NonNegativeFloat = 0.01
    adam_beta1: Annotated[float, Number, Field(ge=0, lt=1)] = 0.9
    adam_beta2: Annotated[float, Number, Field(ge=0, lt=1)] = 0.95
    clip_grad: NonNegativeFloat = 1.0
    use_distributed_optimizer: bool = False

    def _check_warmup(self) -> None:
        if self.lr_warmup_steps and self.lr_warmup_fraction is not None:
            raise ValueError(
                f"optimizer: lr_warmup_steps={self.lr_warmup_steps} and lr_warmup_fraction="
                f"{self.lr_warmup_fraction:g} both set the warm-up; give one of them"
            )


@dataclass(frozen=True, kw_only=True, config=STRICT)
class CheckpointConfig(Section):
    """Checkpoints: where and how often.

    Attributes:
        save: folder of the checkpoints; None saves nothing.
        save_interval: number of steps between checkpoints; the last step always saves.
        keep_last: number of checkpoints that stay in ``save``; older ones are removed once a new one is complete. None
            keeps all.
        pretrained_checkpoint: folder of another run, of Megatron-LM too, whose last checkpoint's weights a run starts
            from; its optimizer and data are not read. A critic or reward model may start from a language model, and a
            critic from a reward model: a scalar head that the checkpoint does not have starts anew.
        export_hf: folder that the weights of the last step are written to, in the format of ``model.hf``, which it
            needs, or with ``model.lora`` in PEFT's; it must not exist. None exports nothing.
    """

    save: Annotated[str | None, LocalPath] = None
    pretrained_checkpoint: Annotated[str | None, LocalPath] = None
    save_interval: PositiveInt = 100
    keep_last: PositiveInt | None = None
    export_hf: Annotated[str | None, LocalPath] = None


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Recipe(Section):
    """A complete job.

    Attributes:
        train_iters: number of steps.
        seed: seed of the weights and of the order of the samples.
        attention_backend: name in ``mcore_prefix_tree.attention.BACKENDS``, or ``auto``: the fastest measured on a tree
            like that of the first step, kept for the entire run.
        deterministic_attention: whether attention gives the same bits twice, as with Megatron's deterministic mode.
            Without it, the fastest kernels add up gradients in any order.
        fused_head: whether to score the supervised tokens in chunks of logits. False keeps the logits of all tokens.
        head_chunk_rows: maximum number of predictors of a chunk. None takes 256 on a CPU and 2,048 on a GPU, or more if
            a rank's part of the vocabulary is small. If samples (of ``gspo``, ``kto``) or pairs score more positions
            than that, a larger number saves time and costs memory: see docs/head.md.
        device: ``auto`` takes the GPU if there is one; ``cpu`` runs megatron-core under emulation.
        distributed_timeout_minutes: minutes that ranks wait for each other before the job ends; None takes torch's and
            Megatron's defaults, 10 minutes on GPUs for all ranks together and 30 for parts of them.
        compare: whether to end with the speed of the last batch folded and unfolded, by the loss of ``verify``. The
            unfolded runs take as long as steps without folding would; there are at least four.
    """

    data: DataConfig
    model: ModelConfig
    batch: BatchConfig
    train_iters: PositiveInt
    seed: Seed = 1234
    attention_backend: str = "auto"
    deterministic_attention: bool = False
    fused_head: bool = True
    head_chunk_rows: PositiveInt | None = None
    device: Literal["auto", "cpu", "cuda"] = "auto"
    distributed_timeout_minutes: Annotated[PositiveInt, Field(le=525_600)] | None = None
    compare: bool = False
    objective: ObjectiveConfig = field(default_factory=ObjectiveConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    validation: ValidationConfig = field(default_factory=ValidationConfig)
    log: LogConfig = field(default_factory=LogConfig)
    verify: VerifyConfig = field(default_factory=VerifyConfig)

    def _check_backend(self) -> None:
        check_setting(self.attention_backend)

    def _check_objective(self) -> None:
        from mcore_prefix_tree.settings.bind_objective import check_teachers_named, make_settings  # they read sections

        check_teachers_named(make_settings(self.objective), self.objective, fused_head=self.fused_head)

    def _check_export(self) -> None:
        if self.checkpoint.export_hf is not None and self.model.hf is None:
            raise ValueError("checkpoint.export_hf writes the format of model.hf, which is not set; unset export_hf")

    def _check_head(self) -> None:
        if self.head_chunk_rows is not None and (not self.fused_head or self.objective.has_scalar_head):
            why = "fused_head=false" if not self.fused_head else f"objective.name={self.objective.name}"
            raise ValueError(f"head_chunk_rows requires the fused head, which {why} disables; unset it")

    def _check_lora(self) -> None:
        if self.model.lora is None:
            return
        why = None
        if self.model.hf is None:
            why = "puts adapters on the layers of model.hf, which is not set; set it"
        elif self.checkpoint.pretrained_checkpoint is not None:
            why = "starts from model.hf; export the checkpoint and name that folder there instead of "
            why += "checkpoint.pretrained_checkpoint"
        elif self.objective.has_scalar_head:
            why = f"trains no scalar head, which objective.name={self.objective.name} needs; unset it"
        else:
            given = self.model.transformer
            unproven = next(
                (name for name in ("fp8", "cuda_graph_impl") if given.get(name) not in (None, "none")), None
            )
            why = unproven and f"with model.transformer.{unproven} is not proven yet; remove one of them"
        if why is not None:
            raise ValueError(f"model.lora {why}")

    def _check_graphs(self) -> None:
        graphs = self.model.transformer.get("cuda_graph_impl", "none")
        if graphs != "none" and not self.batch.length_buckets:
            raise ValueError(
                f"model.transformer.cuda_graph_impl={graphs} captures graphs for each length of micro-batches; set "
                "batch.length_buckets"
            )

    @property
    def inputs(self) -> list[str]:
        """Return the files, globs and folders that the recipe names, without those of its teachers' recipes."""
        projections = self.objective.options.get("projection")
        named = (
            self.data.path,
            self.validation.path,
            self.objective.teacher_recipe,
            self.data.tokenizer,
            self.model.hf,
            self.model.adapter,
            self.checkpoint.save,
            self.checkpoint.pretrained_checkpoint,
            # Of another type it is rejected with the options.
            projections if isinstance(projections, str | list) else None,
        )
        return [path for one in named if one is not None for path in ([one] if isinstance(one, str) else one)]

    @property
    def padding(self) -> Padding:
        """Return the padding of micro-batches; raises RecipeError if buckets do not fit the layout or the budget."""
        ranks = self.parallel.tensor_model_parallel_size if self.parallel.sequence_parallel else 1
        given = self.model.transformer
        return self.batch.padding(row_multiple(ranks, given.get("fp8"), given.get("fp8_recipe")))
