"""Megatron-LM's arguments as the settings of a recipe."""

from __future__ import annotations

import argparse
from typing import Any

from pydantic import ValidationError

from mcore_prefix_tree.arguments.flags import FLAGS, MEGATRON, SCORING
from mcore_prefix_tree.settings import BatchConfig, DataConfig, ModelConfig, ObjectiveConfig, ParallelConfig, Recipe
from mcore_prefix_tree.settings.score_section import ScoreConfig

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


def list_score_options(args: argparse.Namespace) -> list[str]:
    """Return the options of scoring that are set, except the file."""
    values = read_section(args, "score")
    return [
        flag.option
        for flag in SCORING
        if (name := flag.key.rpartition(".")[2]) != "output" and name in values and values[name] != flag.setting.default
    ]


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
