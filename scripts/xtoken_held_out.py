#!/usr/bin/env python3
"""Distil across tokenizers on a CPU, and compare a student's held-out loss with and without its teacher.

    scripts/xtoken_held_out.py --output benchmarks/results/xtoken.json --plot docs/xtoken.png
    scripts/xtoken_held_out.py --prepare

Use an environment with the package, for example the one of scripts/quickstart: .venv/bin/python
scripts/xtoken_held_out.py

Splits the shipped rollouts, builds the projection, trains the teacher of recipes/xtoken_teacher.yaml on most of them,
and trains the student of recipes/xtoken.yaml twice on a part of these: with the teacher, and with the objective sft.
All files are in runs/xtoken; an existing teacher or projection is used again.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from mcore_prefix_tree.bench.machine import describe_machine
from mcore_prefix_tree.data import load_tokenizer
from mcore_prefix_tree.data.write import check_output, make_row, rows_file
from mcore_prefix_tree.mcore.engine.evaluation import Evaluation
from mcore_prefix_tree.mcore.loop.jobs import run_train
from mcore_prefix_tree.settings import ObjectiveConfig, Recipe, load_recipe
from mcore_prefix_tree.xtoken.pairs import Pairing, iter_pairs
from mcore_prefix_tree.xtoken.projection_build import BuildSettings, Vocabularies
from mcore_prefix_tree.xtoken.projection_file import write_projection

ROLLOUTS = Path("recipes/data/quickstart_rollouts.jsonl")
FOLDER = Path("runs/xtoken")
STUDENT, TEACHER = "mistral-v7", "mistral-v3-tekken"
# Rollouts for the teacher; the student learns from a part of them; the rest are held out.
FOR_TEACHER, FOR_STUDENT = 40, 12


class Reporter:
    """Print the reports of ``train``, and keep the evaluations."""

    def __init__(self) -> None:
        self.evaluations: list[Evaluation] = []

    def message(self, text: str) -> None:
        print(text, flush=True)

    def reading(self, done: int, total: int) -> None:
        pass

    def comparing(self, what: str, done: int, total: int) -> None: ...

    def finished(self, checkpoint: str | None) -> None: ...

    def verified(self, report: Any) -> None:
        pass

    def started(self, first: int, last: int) -> None:
        print(f"steps {first} to {last}", flush=True)

    def step(self, report: Any) -> None:
        print(f"step {report.iteration} | loss {report.loss:.4f} | {report.seconds:.1f} s", flush=True)

    def evaluated(self, evaluation: Evaluation) -> None:
        self.evaluations.append(evaluation)
        print(f"held out after {evaluation.iteration}: {evaluation.loss:.4f} {dict(evaluation.metrics)}", flush=True)

    def compared(self, comparison: Any) -> None:
        pass


def prepare() -> None:
    """Write the splits, the teacher's data and the projection."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    lines = ROLLOUTS.read_text().splitlines(keepends=True)
    splits = {
        "student": lines[:FOR_STUDENT],
        "train": lines[:FOR_TEACHER],
        "held_out": lines[FOR_TEACHER:],
    }
    for name, part in splits.items():
        (FOLDER / f"{name}.jsonl").write_text("".join(part))
    student, teacher = load_tokenizer(STUDENT), load_tokenizer(TEACHER)
    # The chat format of this Tekken has no turns with both text and a call, so the teacher reads the student's text.
    pairing = Pairing(student, teacher)
    for source, target in (("train", "teacher"), ("held_out", "teacher_held_out")):
        with rows_file(FOLDER / f"{target}.jsonl") as writer:
            for pairs in iter_pairs([FOLDER / f"{source}.jsonl"], pairing, expand_turns=True):
                writer.add([make_row(pair.teacher) for pair in pairs])
    projection = FOLDER / "projection.safetensors"
    if not projection.exists():
        built = Vocabularies(student, teacher).build(BuildSettings())
        write_projection(projection, built, student_name=STUDENT, teacher_name=TEACHER)


def train(recipe: Recipe) -> list[Evaluation]:
    """Run ``train``; return its evaluations."""
    reporter = Reporter()
    run_train(recipe, reporter)
    return reporter.evaluations


def held_out_of_student(overrides: list[str], *, taught: bool) -> list[dict[str, float]]:
    """Train the student; return its held-out cross-entropy by step."""
    recipe = load_recipe("recipes/xtoken.yaml", ["device=cpu", "checkpoint.save=null", *overrides])
    found = train(recipe if taught else replace(recipe, objective=ObjectiveConfig(name="sft")))
    return [{"step": one.iteration, "ce": one.metrics["ce"] if taught else one.loss} for one in found]


def draw(curves: dict[str, list[dict[str, float]]], path: str) -> None:
    """Draw a PNG of both students' held-out cross-entropy."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7.0, 3.5), layout="constrained")
    for name, points in curves.items():
        axes.plot([point["step"] for point in points], [point["ce"] for point in points], marker="o", label=name)
    axes.set_xlabel("step")
    axes.set_ylabel("held-out cross-entropy, nats per token")
    axes.legend()
    figure.savefig(path, dpi=150, metadata={"Software": None})
    pyplot.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="overrides of the student's recipe")
    parser.add_argument("--output", help="JSON with both curves")
    parser.add_argument("--plot", help="PNG of both curves")
    parser.add_argument("--prepare", action="store_true", help="only write the data and the projection")
    args = parser.parse_args()
    # Report a missing package now, not after minutes.
    for file in (args.output, args.plot):
        if file is not None:
            try:
                check_output(file)
            except ValueError as error:
                parser.error(str(error))
    if args.plot is not None:
        try:
            import matplotlib  # noqa: F401
        except ImportError:
            parser.error("--plot needs matplotlib; install it with: pip install matplotlib")
    torch.set_num_threads(1)
    prepare()
    if args.prepare:
        return
    if not (FOLDER / "teacher").exists():
        train(load_recipe("recipes/xtoken_teacher.yaml", ["device=cpu"]))
    curves = {
        name: held_out_of_student(args.overrides, taught=taught)
        for name, taught in (("without the teacher", False), ("with the teacher", True))
    }
    result = {"machine": describe_machine(), "overrides": args.overrides, "curves": curves}
    if args.output is not None:
        Path(args.output).write_text(json.dumps(result, indent=1) + "\n")
    if args.plot is not None:
        draw(curves, args.plot)


if __name__ == "__main__":
    main()
