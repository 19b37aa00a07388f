"""Arguments that Megatron-LM's ``pretrain_*.py`` scripts gain.

Scripts take them with ``extra_args_provider=add_prefix_tree_args``, which also checks the job; see
:mod:`mcore_prefix_tree.mcore.megatron_lm`.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from typing import Any

from mcore_prefix_tree.arguments.folding import add_folding_arguments, whole_number
from mcore_prefix_tree.data.fields import check_names
from mcore_prefix_tree.inputs import HUB, json_of, local_path
from mcore_prefix_tree.objectives import OBJECTIVES


class _Enable(argparse.Action):
    """``--prefix-tree``, which also sets what folding always needs, for Megatron to validate the arguments with."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[Any] | None,
        option_string: str | None = None,
    ) -> None:
        namespace.prefix_tree = True
        # Micro-batches hold different numbers of scored tokens: the step has one denominator.
        namespace.calculate_per_token_loss = True
        if namespace.dataloader_type is None:  # another one, before or after the flag, is refused
            namespace.dataloader_type = "external"


def _json_object(text: str) -> dict[str, Any]:
    try:
        found = json_of(text)
    except json.JSONDecodeError:
        found = None
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    if not isinstance(found, dict):
        raise argparse.ArgumentTypeError(f"{text!r} is not a JSON object")
    return found


def _local(text: str) -> str:
    try:
        return local_path(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _data(text: str) -> str:
    return text if text.startswith(HUB) else _local(text)


def _field_names(text: str) -> dict[str, Any]:
    found = _json_object(text)
    try:
        check_names(found)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return found


def add_argument_group(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add the group "prefix-tree" and return the parser."""
    group = parser.add_argument_group(
        title="prefix-tree",
        description="Fold samples that begin with the same tokens and compute every unique token once. "
        "--global-batch-size, --train-samples and the schedules count samples as they are before folding. "
        "--micro-batch-size says how many of them are folded into one micro-batch on average: a step always has "
        "global-batch-size / (micro-batch-size * data-parallel-size) micro-batches a rank, and samples that share "
        "their beginning are dealt to the same one. --prefix-tree-dry-run finds the size that fills "
        "--prefix-tree-max-tokens.",
    )
    group.add_argument(
        "--prefix-tree",
        action=_Enable,
        nargs=0,
        default=False,
        help="Train folded. Implies --calculate-per-token-loss and --dataloader-type external.",
    )
    group.add_argument(
        "--megatron-lm-path",
        metavar="DIR",
        help="Checkout of Megatron-LM, core_v0.16.1, core_v0.19.0 or main; its own megatron.core is used. Default: the "
        "environment's MEGATRON_LM_PATH, else the megatron.training that Python finds.",
    )
    group.add_argument(
        "--prefix-tree-data-path",
        type=_data,
        nargs="+",
        metavar="FILE",
        help="JSONL, Parquet or Arrow files or globs: lines or rows with tokens (and loss_mask, merge_key) or with "
        "chat messages.",
    )
    group.add_argument(
        "--prefix-tree-valid-data-path",
        type=_data,
        nargs="+",
        metavar="FILE",
        help="The same, for validation. Without it nothing is evaluated.",
    )
    group.add_argument(
        "--prefix-tree-fields",
        type=_field_names,
        default={},
        metavar="JSON",
        help="The files' names of our fields, such as "
        """'{"group": "task_id", "tokens": "input_ids"}'; null for one of ours that the files mean otherwise.""",
    )
    group.add_argument(
        "--prefix-tree-hf",
        type=_local,
        metavar="DIR",
        help="Folder of a Hugging Face model, whose architecture sets the model's arguments. Training starts from its "
        "weights unless it loads a checkpoint. Needs Megatron-Bridge, Python 3.12 and core_v0.19.0.",
    )
    group.add_argument(
        "--prefix-tree-tokenizer",
        type=_local,
        metavar="NAME",
        help="For chat messages: mistral-v7, mistral-v3, mistral-v3-tekken, or the folder of a Hugging Face "
        "tokenizer. Sets the vocabulary where --tokenizer-type and --vocab-size do not.",
    )
    group.add_argument(
        "--prefix-tree-chat-template-kwargs",
        type=_json_object,
        metavar="JSON",
        help="What the chat template of a Hugging Face tokenizer is given besides, such as "
        """'{"enable_thinking": false}'; with strftime_now, a date as 2026-11-20, its clock shows that date.""",
    )
    group.add_argument(
        "--prefix-tree-expand-turns",
        action="store_true",
        help="One sample per assistant turn, with its whole history as prefix.",
    )
    group.add_argument(
        "--prefix-tree-objective",
        default="sft",
        choices=sorted(OBJECTIVES),
        metavar="NAME",
        help=f"What the samples are trained with: {', '.join(OBJECTIVES)}. Groups and pairs stay in one step. critic "
        "and reward_model train a scalar head, which is new above the weights of a language model "
        "(--pretrained-checkpoint). Default: %(default)s.",
    )
    group.add_argument(
        "--prefix-tree-objective-options",
        type=_json_object,
        metavar="JSON",
        help="""Options of the objective, such as '{"kl_coef": 0.01}'; docs/objectives.md lists them.""",
    )
    group.add_argument(
        "--prefix-tree-teacher",
        type=_local,
        nargs="+",
        metavar="RECIPE",
        help="Recipes of the models that distill with teacher=full, and xtoken, learn from: model, checkpoint.save or "
        "model.hf, data.tokenizer and attention_backend are read of them. The folder of a Hugging Face model can take "
        "a recipe's place.",
    )
    group.add_argument(
        "--prefix-tree-teacher-tensor-model-parallel-size",
        type=whole_number,
        metavar="N",
        help="Ranks that a teacher is cut over: 1, which leaves it whole on each, or a multiple of "
        "--tensor-model-parallel-size. Default: that. On a pipeline the last stage has all layers of a teacher.",
    )
    group.add_argument(
        "--prefix-tree-order",
        choices=["shuffled", "folded", "file"],
        default="shuffled",
        help="shuffled: draw lines in a new order each epoch, by --seed. folded: deal samples that begin with the same "
        "tokens to the same step of --global-batch-size, anew each epoch, by --seed; needs the samples in memory. "
        "file: keep the order of the files. Default: %(default)s.",
    )
    group.add_argument(
        "--prefix-tree-new-data",
        action="store_true",
        help="A job that resumes with other samples than its checkpoint was trained on, which it knows again, begins "
        "with the first of them. Otherwise they are refused. With the same samples it goes on where it stopped.",
    )
    group.add_argument(
        "--prefix-tree-on-error",
        choices=["raise", "skip"],
        default="raise",
        help="raise: end before training at the first bad line. skip: leave out and count the lines that cannot be "
        "used and the samples that are too long. Default: %(default)s.",
    )
    group.add_argument(
        "--prefix-tree-streaming",
        action="store_true",
        help="Hold no samples: --num-workers processes of each rank read and encode lines when a step needs them, for "
        "files larger than memory. All ranks together go through the files once at the start. A step that does not fit "
        "its micro-batches is reported while the one before computes; --prefix-tree-dry-run looks at all of an epoch.",
    )
    group.add_argument(
        "--prefix-tree-max-tokens",
        type=whole_number,
        metavar="N",
        help="Most physical tokens (after folding, before padding) of a micro-batch. Bounds its memory.",
    )
    add_folding_arguments(group)
    group.add_argument(
        "--prefix-tree-dry-run",
        action="store_true",
        help="Print the plan of the first step, its expected speed-up and an estimate of each rank's memory, and stop. "
        "Needs no GPU and starts no job; set WORLD_SIZE to the ranks of the job to plan for. Finds --micro-batch-size "
        "and --seq-length in the data if they are omitted.",
    )
    _add_score_options(group)
    return parser


def _add_score_options(group: argparse._ArgumentGroup) -> None:
    """Add the options of ``mcore-prefix-tree score``, under their names."""
    group.add_argument(
        "--prefix-tree-score",
        type=_local,
        metavar="FILE",
        help="Train nothing: write every sample with what the checkpoint of --load says of it, one a line in the "
        "data's order, as `mcore-prefix-tree score --output FILE` does. JSON Lines (.jsonl, .json, also .gz), "
        ".parquet, .arrow or .feather. --global-batch-size samples at a time are planned together.",
    )
    group.add_argument(
        "--prefix-tree-score-reference",
        type=_local,
        metavar="DIR",
        help="Checkpoints of a reference model of the same arguments; adds ref_logprobs.",
    )
    group.add_argument(
        "--prefix-tree-score-all-tokens",
        action="store_true",
        help="Score every token, not only those of the loss mask.",
    )
    group.add_argument(
        "--prefix-tree-score-no-entropy",
        action="store_false",
        dest="prefix_tree_score_entropy",
        help="Leave out the entropies.",
    )
    group.add_argument(
        "--prefix-tree-score-teacher-top-k",
        type=whole_number,
        metavar="K",
        help="Write the K likeliest tokens instead, to distil from.",
    )
