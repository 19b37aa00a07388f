"""Settings of recipes as arguments of Megatron-LM: the one table of how this door spells them.

A ``--prefix-tree-...`` argument is a field of a section of settings, which has its type, default and help. The other
settings of the table are Megatron-LM's own arguments.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import MISSING, dataclass
from typing import Any, Literal, get_args, get_origin

from pydantic import TypeAdapter, ValidationError

from mcore_prefix_tree.objectives import OBJECTIVES
from mcore_prefix_tree.settings.score_section import ScoreConfig
from mcore_prefix_tree.settings.section import Setting, find_setting
from mcore_prefix_tree.settings.sections import Recipe
from mcore_prefix_tree.utils.errors import is_of_this_package, readable_errors, spell, spelled
from mcore_prefix_tree.utils.inputs import MOST, parse_json

PREFIX = "--prefix-tree"


@dataclass(frozen=True)
class Flag:
    """A setting, by its recipe's key, as an argument.

    Attributes:
        name: name after the prefix; by default the last part of the key.
        note: sentence that the help adds for this door.
    """

    key: str
    name: str = ""
    metavar: str | None = None
    note: str = ""

    @property
    def setting(self) -> Setting:
        section, _, name = self.key.rpartition(".")
        return find_setting(ScoreConfig, name) if section == "score" else find_setting(Recipe, self.key)

    @property
    def dest(self) -> str:
        """Return the name of the argument in the parsed namespace."""
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
    Flag("data.fields", metavar="JSON", note="""For example '{"group": "task_id", "tokens": "input_ids"}'."""),
    Flag(
        "model.hf",
        metavar="DIR",
        note="Its architecture sets the model's arguments. Needs Megatron-Bridge, Python 3.12 and core_v0.19.0.",
    ),
    Flag(
        "data.tokenizer",
        metavar="NAME",
        note="Sets the vocabulary if --tokenizer-type and --vocab-size do not.",
    ),
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
                options["type"] = _Reader(setting)
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


class _Reader:
    """Reader of a word of the command line for ``argparse``: the setting's own type checks it."""

    def __init__(self, setting: Setting) -> None:
        self._setting = setting

    def __call__(self, word: str) -> Any:
        setting = self._setting
        is_item = _takes(setting, list) and not _takes(setting, str)
        value: Any = word
        if _takes(setting, dict):
            value = read_json_object(word)
        elif _takes(setting, int) or is_item:
            value = read_whole_number(word)
        try:
            read = TypeAdapter(setting.hint).validate_python([value] if is_item else value)
        except ValidationError as error:
            message = error.errors()[0]["msg"]
            raise argparse.ArgumentTypeError(f"{message[0].lower()}{message[1:]} (given {word[:60]!r})") from None
        return read[0] if is_item else read


def read_whole_number(word: str) -> int:
    """Return a word as a number; raises the error that ``argparse`` reports."""
    if not re.fullmatch(r"-?[0-9]{1,10}", word) or abs(int(word)) > MOST:
        raise argparse.ArgumentTypeError(f"{word[:40]!r} is not a number of at most {MOST}")
    return int(word)


def read_json_object(word: str) -> dict[str, Any]:
    """Return the object that a word is in JSON; raises the error that ``argparse`` reports."""
    try:
        found = parse_json(word)
    except json.JSONDecodeError:
        found = None
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    if not isinstance(found, dict):
        raise argparse.ArgumentTypeError(f"{word!r} is not a JSON object")
    return found
