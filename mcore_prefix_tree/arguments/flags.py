"""Settings of recipes as arguments of Megatron-LM's scripts: the one table of how this door spells them.

A ``--prefix-tree-...`` argument is a field of a section of settings, which has its type, default and help. The other
settings of the table are Megatron-LM's own arguments. ``pretrain_*.py`` takes the arguments with
``extra_args_provider=add_prefix_tree_args``, which also checks the job; see :mod:`mcore_prefix_tree.mcore.megatron_lm`.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import MISSING, dataclass
from functools import partial
from typing import Any, Literal, get_args, get_origin

from pydantic import TypeAdapter, ValidationError

from mcore_prefix_tree.objectives import OBJECTIVES
from mcore_prefix_tree.settings import BatchConfig, DataConfig, ModelConfig, ObjectiveConfig, ParallelConfig, Recipe
from mcore_prefix_tree.settings.score_section import ScoreConfig
from mcore_prefix_tree.settings.section import Setting, find_setting
from mcore_prefix_tree.utils.errors import is_of_this_package, naming, readable_errors, spell, spelled
from mcore_prefix_tree.utils.inputs import MOST, parse_json

PREFIX = "--prefix-tree"


@dataclass(frozen=True)
class Flag:
    """A setting, by its recipe's key, as an argument."""

    key: str
    name: str = ""  # name after the prefix; by default the last part of the key
    metavar: str | None = None
    note: str = ""  # sentence that the help adds for this door

    @property
    def setting(self) -> Setting:
        section, _, name = self.key.rpartition(".")
        return find_setting(ScoreConfig, name) if section == "score" else find_setting(Recipe, self.key)

    @property
    def dest(self) -> str:
        return f"prefix_tree_{(self.name or self.key.rpartition('.')[2]).replace('-', '_')}"

    @property
    def option(self) -> str:
        """Return the argument as it is typed; it turns off a setting that is on by default."""
        if self.setting.default is not True:
            return spell_option(self.dest)
        last = self.key.rpartition(".")[2]
        return spell_option(f"{self.dest.removesuffix(last)}no_{last}")


# How micro-batches are folded and computed, for every script.
FOLDING = (
    Flag("batch.share"),
    Flag("batch.min_shared_tokens", metavar="N"),
    Flag("batch.use_first_samples_routes"),
    Flag("batch.length_buckets", metavar="N"),
    Flag("attention_backend", metavar="NAME"),
    Flag("deterministic_attention"),
    Flag("fused_head"),
)
# Additional arguments of scripts that train on files.
FILES = (
    Flag("data.path", "data-path", "FILE", "Standard input is for recipes."),
    Flag("validation.path", "valid-data-path", "FILE"),
    Flag("data.format", metavar="NAME", note="One of trl, verl, slime and vllm."),
    Flag("data.fields", metavar="JSON", note="""For example '{"group": "task_id", "tokens": "input_ids"}'."""),
    Flag(
        "model.hf",
        metavar="DIR",
        note="Its architecture sets the model's arguments. Needs Megatron-Bridge, Python 3.12 and core_v0.19.0.",
    ),
    Flag("data.tokenizer", metavar="NAME", note="Sets the vocabulary if --tokenizer-type and --vocab-size do not."),
    Flag("data.chat_template_kwargs", metavar="JSON", note="""For example '{"enable_thinking": false}'."""),
    Flag("data.expand_turns"),
    Flag("objective.name", "objective", "NAME", f"One of {', '.join(OBJECTIVES)}."),
    Flag("objective.options", "objective-options", "JSON", """For example '{"kl_coef": 0.01}'."""),
    Flag("objective.teacher_recipe", "teacher", "RECIPE"),
    Flag(
        "objective.teacher_tensor_model_parallel_size",
        metavar="N",
        note="On a pipeline the last stage has all layers of a teacher.",
    ),
    Flag("data.order"),
    Flag("data.on_error"),
    Flag("data.streaming", note="--num-workers processes of each rank read ahead."),
    Flag("batch.max_tokens", metavar="N"),
    Flag("batch.over_budget", note="With carry a first pass takes micro-batches as well."),
)
SCORING = (
    Flag(
        "score.output",
        "score",
        "FILE",
        "Trains nothing: scores the data under the checkpoint of --load. --global-batch-size samples at a time are "
        "planned together.",
    ),
    Flag("score.reference", "score-reference", "DIR"),
    Flag("score.all_tokens", "score-all-tokens"),
    Flag("score.entropy", "score-entropy"),
    Flag("score.teacher_top_k", "score-teacher-top-k", "K"),
    Flag("score.record_routes", "score-record-routes"),
)
FLAGS = (*FILES, *FOLDING, *SCORING)
# Settings that are Megatron-LM's own arguments, by its names.
MEGATRON = {
    "batch.global_batch_size": "global_batch_size",
    "data.num_workers": "num_workers",
    "parallel.tensor_model_parallel_size": "tensor_model_parallel_size",
    "parallel.pipeline_model_parallel_size": "pipeline_model_parallel_size",
    "parallel.context_parallel_size": "context_parallel_size",
    "parallel.expert_model_parallel_size": "expert_model_parallel_size",
    "parallel.sequence_parallel": "sequence_parallel",
    "model.num_layers": "num_layers",
    "model.hidden_size": "hidden_size",
    "model.num_attention_heads": "num_attention_heads",
    "model.vocab_size": "vocab_size",
    "model.max_position_embeddings": "max_position_embeddings",
    "checkpoint.pretrained_checkpoint": "pretrained_checkpoint",
}


def spell_option(name: str) -> str:
    """Return the option of an argument's name."""
    return f"--{name.replace('_', '-')}"


def _spellings() -> Iterator[tuple[str, str]]:
    for key, name in MEGATRON.items():
        yield key, spell_option(name)
    for flag in FLAGS:
        yield flag.key, flag.option
        if flag.setting.hint is bool:
            default = bool(flag.setting.default)
            yield f"{flag.key}={str(not default).lower()}", flag.option
            yield f"{flag.key}={str(default).lower()}", f"no {flag.option}"


# This door's spelling of each setting, and of the commands that have an argument here.
SPELLINGS = dict(_spellings()) | {
    "model.transformer.mtp_num_layers": "--mtp-num-layers",
    "set batch.groups_per_step and batch.global_batch_size=null": "use `mcore-prefix-tree train` with "
    "batch.groups_per_step",
    "mcore-prefix-tree score": f"{PREFIX}-score FILE",
    "mcore-prefix-tree score --reference FOLDER": f"{PREFIX}-score FILE {PREFIX}-score-reference DIR",
    "mcore-prefix-tree score --teacher-top-k K": f"{PREFIX}-score FILE {PREFIX}-score-teacher-top-k K",
}


@contextmanager
def readable_arguments() -> Iterator[None]:
    """End the process with one sentence for a mistake of the user; it names settings as this door spells them."""
    with readable_errors(is_of_this_package), spelled(SPELLINGS):
        yield


def add_flags(group: argparse._ArgumentGroup, flags: Sequence[Flag]) -> None:
    """Add arguments to a parser: type, default, choices and help are those of the settings."""
    for flag in flags:
        setting = flag.setting
        options: dict[str, Any] = {"dest": flag.dest, "help": spell(_help(flag), SPELLINGS).replace("%", "%%")}
        if setting.hint is bool:
            options |= {"action": "store_false" if setting.default else "store_true"}
        else:
            default = None if setting.default is MISSING else setting.default
            options |= {"default": default, "metavar": flag.metavar}
            if get_origin(setting.hint) is Literal:
                options["choices"] = get_args(setting.hint)
            else:
                options["type"] = partial(_read_word, setting)
            if _takes(setting, list):
                options["nargs"] = "+"
        group.add_argument(flag.option, **options)


def _help(flag: Flag) -> str:
    """Return a section's description of a setting, as the help of its argument."""
    setting = flag.setting
    text = f"Turn off: {setting.text}" if setting.default is True else setting.text[:1].upper() + setting.text[1:]
    shown = setting.default if isinstance(setting.default, str | int) and setting.hint is not bool else None
    default = "" if shown is None else f"Default: {shown}."
    return " ".join(filter(None, (text.replace("``", ""), flag.note, default)))


def _takes(setting: Setting, kind: type) -> bool:
    """Return whether values of a kind, for example ``list``, are among those of a setting."""
    return any(kind in (part, get_origin(part)) for part in _parts(setting.hint))


def _parts(hint: Any) -> Iterator[Any]:
    """Yield the types of a union, without their annotations."""
    yield hint
    if get_origin(hint) not in (list, dict, Literal):
        for part in get_args(hint):
            yield from _parts(part)


def _read_word(setting: Setting, word: str) -> Any:
    """Return the value of a word of the command line, which the setting's own type checks; a type of ``argparse``."""
    is_item = _takes(setting, list) and not _takes(setting, str)
    value: Any = word
    if _takes(setting, dict):
        with naming("", argparse.ArgumentTypeError):
            value = parse_json(word)
        if not isinstance(value, dict):
            raise argparse.ArgumentTypeError(f"{word!r} is not a JSON object")
    elif _takes(setting, int) or is_item:
        if not re.fullmatch(r"-?[0-9]{1,10}", word) or abs(int(word)) > MOST:
            raise argparse.ArgumentTypeError(f"{word[:40]!r} is not a number of at most {MOST}")
        value = int(word)
    try:
        read = TypeAdapter(setting.hint).validate_python([value] if is_item else value)
    except ValidationError as error:
        message = error.errors()[0]["msg"]
        raise argparse.ArgumentTypeError(f"{message[0].lower()}{message[1:]} (given {word[:60]!r})") from None
    return read[0] if is_item else read


class _Enable(argparse.Action):
    """``--prefix-tree``, which also sets the arguments that folding always needs before Megatron validates them."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        namespace.prefix_tree = True
        # Micro-batches hold different numbers of scored tokens: the step has one denominator.
        namespace.calculate_per_token_loss = True
        if namespace.dataloader_type is None:  # another one, before or after the flag, is refused
            namespace.dataloader_type = "external"


def add_argument_group(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add the group "prefix-tree" and return the parser."""
    group = parser.add_argument_group(
        title="prefix-tree",
        description="Fold samples that begin with the same tokens and compute every unique token once. "
        "--global-batch-size, --train-samples and the schedules count samples as they are before folding. "
        "--micro-batch-size sets how many of them are folded into one micro-batch on average: a step always has "
        "global-batch-size / (micro-batch-size * data-parallel-size) micro-batches per rank, and samples that share "
        "their beginning are dealt to the same one. --prefix-tree-dry-run finds the size that fills "
        "--prefix-tree-max-tokens.",
    )
    group.add_argument(
        PREFIX,
        action=_Enable,
        nargs=0,
        default=False,
        help="Train folded. Implies --calculate-per-token-loss and --dataloader-type external.",
    )
    add_checkout_argument(group, "core_v0.16.1, core_v0.19.0 or main")
    add_flags(group, (*FILES, *FOLDING))
    group.add_argument(
        f"{PREFIX}-new-data",
        action="store_true",
        help="Resume with other samples than the checkpoint was trained on, and begin with the first of them; "
        "otherwise they are rejected. With the same samples training continues after the last that was trained on.",
    )
    group.add_argument(
        f"{PREFIX}-dry-run",
        action="store_true",
        help="Print the plan of the first step and its expected speed-up, and stop. "
        "Needs no GPU and starts no job; set WORLD_SIZE to the ranks of the job to plan for. Finds --micro-batch-size "
        "and --seq-length in the data if they are omitted.",
    )
    add_flags(group, SCORING)
    return parser


def add_checkout_argument(group: argparse._ArgumentGroup, versions: str) -> None:
    """Add the argument that names the checkout of Megatron-LM."""
    group.add_argument(
        "--megatron-lm-path",
        metavar="DIR",
        help=f"Checkout of Megatron-LM, {versions}; its own megatron.core is used. Default: the environment's "
        "MEGATRON_LM_PATH, else the megatron.training that Python finds.",
    )


def add_rl_argument_group(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add the group "prefix-tree" of ``train_rl.py`` and return the parser."""
    group = parser.add_argument_group(
        title="prefix-tree",
        description="Fold trajectories that begin with the same tokens and compute every unique token once. All "
        "arguments of train_rl.py keep their meaning. --micro-batch-size sets how many trajectories are folded into "
        "one micro-batch on average, and how many may share in the passes that compute log-probabilities; "
        "--micro-batch-size times --seq-length bounds the tokens of a micro-batch, as without folding.",
    )
    group.add_argument(PREFIX, action="store_true", help="Train folded. Needs --perform-rl-step.")
    add_checkout_argument(group, "core_v0.19.0 or main")
    add_flags(group, FOLDING)
    return parser


_DESTS = MEGATRON | {flag.key: flag.dest for flag in FLAGS}


def read_section(args: argparse.Namespace, section: str) -> dict[str, Any]:
    """Return the fields of a section, for example ``batch``, that the arguments set; "" is the recipe."""
    values = {}
    for key, dest in _DESTS.items():
        place, _, name = key.rpartition(".")
        value = getattr(args, dest, None)
        if place == section and value is not None:
            values[name] = value
    return values


def read_data(args: argparse.Namespace) -> DataConfig:
    """Return the data that the arguments name."""
    try:
        return DataConfig(**{"path": []} | read_section(args, "data"))  # a script may bring its own data
    except ValidationError as error:
        raise ValueError("; ".join(fault["msg"] for fault in error.errors())) from None


def read_objective(args: argparse.Namespace) -> ObjectiveConfig:
    """Return the objective that the arguments set."""
    return ObjectiveConfig(**read_section(args, "objective"))


def read_score(args: argparse.Namespace) -> ScoreConfig | None:
    """Return the scoring run that the arguments set; None for a job that trains."""
    values = read_section(args, "score")
    return ScoreConfig(**values) if "output" in values else None


def read_recipe(args: argparse.Namespace) -> Recipe:
    """Return the job that validated arguments describe.

    Its model has the sizes that data and teachers depend on; Megatron-LM builds the model from its own arguments.
    """
    model = read_section(args, "model") | {
        "hf": None,
        "kv_channels": args.kv_channels,
        "position_embedding_type": "learned_absolute" if args.position_embedding_type == "learned_absolute" else "none",
        "dtype": "bfloat16" if args.bf16 else "float32",
        "transformer_impl": "transformer_engine" if args.transformer_impl == "transformer_engine" else "local",
        "transformer": {"fp8": args.fp8, "fp8_recipe": args.fp8_recipe} if args.fp8 else {},
    }
    layout = read_section(args, "parallel")
    return Recipe(
        data=read_data(args),
        model=ModelConfig(**model),
        batch=BatchConfig(**read_section(args, "batch")),
        objective=read_objective(args),
        parallel=ParallelConfig(
            **layout, virtual_pipeline_model_parallel_size=args.virtual_pipeline_model_parallel_size
        ),
        train_iters=1,
        **read_section(args, ""),
    )


def render_help(script: str, *, rl: bool) -> str:
    """Return the help of ``--prefix-tree``'s arguments; Megatron-LM's ``script`` itself shows the others."""
    usage = f"%(prog)s <arguments of {script}> {PREFIX} ..."
    parser = argparse.ArgumentParser(usage=usage, add_help=False)
    (add_rl_argument_group if rl else add_argument_group)(parser)
    others = f"The other arguments are Megatron-LM's: python {script} --help in its checkout shows them"
    return f"{parser.format_help()}\n{others}\n"
