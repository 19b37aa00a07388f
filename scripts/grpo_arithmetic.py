#!/usr/bin/env python3
"""Run GRPO that learns to add up to nine on a CPU, folded or unfolded; the script samples the completions itself.

    scripts/grpo_arithmetic.py --output benchmarks/results/grpo_arithmetic.json --plot docs/grpo_arithmetic.png
    scripts/grpo_arithmetic.py --output ... --plot ... --unfolded

Use an environment with the package, for example the one of scripts/quickstart: .venv/bin/python
scripts/grpo_arithmetic.py

A completion is the text after ``3+5=`` up to the full stop. Its reward is the share of correct characters, so
the reward 1 is the correct sum without other text. The output holds both curves, each with its recipe, seed and other
settings; each run replaces its curve.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch

from mcore_prefix_tree import Sample
from mcore_prefix_tree.bench.machine import describe_machine
from mcore_prefix_tree.data import Ranks, Skipped, iter_sample_groups
from mcore_prefix_tree.data.batches import SampleOrder
from mcore_prefix_tree.data.write import check_output
from mcore_prefix_tree.mcore.engine.scoring import score
from mcore_prefix_tree.mcore.loop.logs import open_logs
from mcore_prefix_tree.mcore.loop.resolve_recipe import Data, resolve
from mcore_prefix_tree.mcore.loop.session import session
from mcore_prefix_tree.mcore.loop.trainer import Trainer
from mcore_prefix_tree.mcore.outputs import Logprobs
from mcore_prefix_tree.settings import Recipe, load_recipe
from mcore_prefix_tree.settings.bind_objective import make_bound_objective
from mcore_prefix_tree.settings.sample_source import make_source

ALPHABET = "0123456789+=. efhmostu"
PROMPT = "the sum of {}+{}="
COMPLETIONS = 8
UPDATES = 2
WARM_UP = 80
LONGEST = 2  # a digit and the full stop
STOP = ALPHABET.index(".")


def encode(text: str) -> list[int]:
    """Return token ids, one per character."""
    return [ALPHABET.index(character) for character in text]


def answer(prompt: Sequence[int]) -> list[int]:
    """Return the correct completion."""
    one, plus, other, _equals = "".join(ALPHABET[token] for token in prompt[-4:])
    assert plus == "+"
    return encode(f"{int(one) + int(other)}.")


def reward(completion: Sequence[int], right: Sequence[int]) -> float:
    """Return the share of correct characters."""
    matches = sum(one == other for one, other in zip(completion, right, strict=False))
    return matches / max(len(completion), len(right))


def sample_completions(
    model: torch.nn.Module, prompts: Sequence[Sequence[int]], generator: torch.Generator
) -> list[list[int]]:
    """Return one completion per prompt, at temperature 1, by plain forward passes over their distinct rows.

    All prompts are equally long.
    """
    tokens = torch.tensor([list(prompt) for prompt in prompts])
    start = tokens.shape[1]
    with torch.no_grad():
        for _ in range(LONGEST):
            rows, row = tokens.unique(dim=0, return_inverse=True)
            positions = torch.arange(rows.shape[1]).expand_as(rows)
            logits = model(input_ids=rows, position_ids=positions, attention_mask=None)
            below = torch.softmax(logits[:, -1].double(), dim=-1).cumsum(dim=-1)[row]
            drawn = torch.rand(len(tokens), 1, generator=generator, dtype=torch.float64) * below[:, -1:]
            tokens = torch.cat([tokens, torch.searchsorted(below, drawn)], dim=1)
    completions = tokens[:, start:].tolist()
    return [own[: own.index(STOP) + 1] if STOP in own else own for own in completions]


def roll_out(model: torch.nn.Module, prompts: Sequence[Sample], generator: torch.Generator) -> list[Sample]:
    """Groups of rewarded completions."""
    repeated = [prompt.tokens.tolist() for prompt in prompts for _ in range(COMPLETIONS)]
    return [
        Sample(
            tokens=prompt + completion,
            loss_mask=[0.0] * len(prompt) + [1.0] * len(completion),
            source=f"completion {number}",
            reward=reward(completion, answer(prompt)),
            group=number // COMPLETIONS,
        )
        for number, (prompt, completion) in enumerate(
            zip(repeated, sample_completions(model, repeated, generator), strict=True)
        )
    ]


def warm_up(model: torch.nn.Module, prompts: Sequence[Sequence[int]], steps: int) -> None:
    """Train a few supervised steps, so that some completions are right and there is something to reinforce."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    tokens = torch.tensor([[*prompt, *answer(prompt)] for prompt in prompts])
    positions = torch.arange(tokens.shape[1]).expand_as(tokens)
    start = len(prompts[0])
    for _ in range(steps):
        logits = model(input_ids=tokens, position_ids=positions, attention_mask=None)
        labels = tokens[:, start:]
        torch.nn.functional.cross_entropy(logits[:, start - 1 : -1].flatten(0, 1), labels.flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()


def with_old_logprobs(chunks: list[Any], samples: list[Sample], folding: Any, readout: Logprobs) -> list[Sample]:
    """Return the samples with their log-probabilities under the weights that sampled them, computed folded."""
    return [
        Sample(
            tokens=sample.tokens,
            loss_mask=sample.loss_mask,
            source=sample.source,
            reward=sample.signals.reward,
            group=sample.signals.group,
            old_logprobs=own.logprobs.astype(np.float64),
        )
        for sample, own in zip(samples, score(chunks, samples, folding, readout), strict=True)
    ]


def recipe_of(path: str, overrides: list[str], *, unfolded: bool) -> Recipe:
    """Return the recipe of the job; if unfolded, no prefix is long enough to be shared."""
    return load_recipe(path, [*overrides, *(["batch.min_shared_tokens=1000000"] if unfolded else [])])


def settings_of(path: str, overrides: list[str], *, unfolded: bool, warm_up_steps: int) -> dict[str, Any]:
    """Return the settings and versions that a curve depends on, other than the machine."""
    recipe = recipe_of(path, overrides, unfolded=unfolded)
    return {
        "recipe_file": path,
        "overrides": overrides,
        "seed": recipe.seed,
        "warm_up_steps": warm_up_steps,
        "completions_per_prompt": COMPLETIONS,
        "steps_per_batch": UPDATES,
        "recipe": asdict(recipe),
    }


def run(
    recipe_path: str, overrides: list[str], *, unfolded: bool, warm_up_steps: int = WARM_UP
) -> list[dict[str, float]]:
    """Train, and print the reward of each batch of completions."""
    recipe = recipe_of(recipe_path, overrides, unfolded=unfolded)
    prompts_per_step = recipe.batch.per_step // COMPLETIONS
    lines = [line for line in iter_sample_groups(recipe.data.path) if line]
    order = SampleOrder(lines, seed=recipe.seed, order="shuffled", step=prompts_per_step, whole_steps=True)
    generator = torch.Generator().manual_seed(recipe.seed)
    curve = []
    objective = make_bound_objective(recipe)
    source = make_source(recipe, objective, ranks=Ranks())
    with session(recipe) as joined, open_logs(recipe.log, done=0, say=print) as log:
        run = resolve(joined, objective, Data(source=source, order=order, skipped=Skipped()))
        chunks = run.new_model()
        warm_up(chunks[0], [line[0].tokens.tolist() for line in lines], warm_up_steps)
        trainer = Trainer(run, chunks)
        folding, readout = run.job.folding, Logprobs(fused=recipe.fused_head)
        for batch in range(recipe.train_iters // UPDATES):
            prompts = order.take(batch * prompts_per_step, prompts_per_step)
            samples = with_old_logprobs(chunks, roll_out(chunks[0], prompts, generator), folding, readout)
            started = time.perf_counter()
            reports = [trainer.step(batch * UPDATES + update, samples) for update in range(1, UPDATES + 1)]
            for report in reports:
                log.step(report)
            curve.append(
                {
                    "reward": reports[0].metrics["reward"],
                    "right": float(np.mean([sample.signals.reward == 1.0 for sample in samples])),
                    "entropy": reports[0].metrics["entropy"],
                    "first_ratio": reports[0].metrics["ratio"],
                    "clip_fraction": reports[-1].metrics["clip_fraction"],
                    "logical_tokens": reports[0].logical_tokens,
                    "physical_tokens": reports[0].physical_tokens,
                    "training_seconds": time.perf_counter() - started,
                }
            )
            if batch % 10 == 0:
                last = curve[-1]
                print(
                    f"batch {batch} | reward {last['reward']:.3f} | right {last['right']:.3f} | entropy "
                    f"{last['entropy']:.3f} | tokens {last['logical_tokens']:,} -> {last['physical_tokens']:,} | "
                    f"{last['training_seconds']:.2f} s",
                    flush=True,
                )
    return curve


def draw(curves: dict[str, list[dict[str, float]]], path: str) -> None:
    """Draw a PNG of the rewards of both runs."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7.0, 3.5), layout="constrained")
    styles = {"unfolded": {"linewidth": 4, "alpha": 0.35}, "folded": {"linewidth": 1, "color": "black"}}
    for name, style in styles.items():
        if name in curves:
            axes.plot([point["reward"] for point in curves[name]], label=name, **style)
    axes.set_xlabel("batch of completions")
    axes.set_ylabel("mean reward")
    axes.set_ylim(0, 1)
    axes.legend(loc="lower right")
    figure.savefig(path, dpi=150, metadata={"Software": None})
    pyplot.close(figure)


def write_prompts(path: str) -> None:
    """Write the 55 prompts whose sum is one digit, as data for a recipe."""
    with Path(path).open("w") as stream:
        for one in range(10):
            for other in range(10 - one):
                tokens = encode(PROMPT.format(one, other))
                stream.write(json.dumps({"tokens": tokens, "loss_mask": [0] * len(tokens)}) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="of the recipe")
    parser.add_argument("--recipe", default="recipes/grpo_arithmetic.yaml")
    parser.add_argument("--output", help="JSON with both curves")
    parser.add_argument("--plot", help="PNG of both curves")
    parser.add_argument("--warm-up", type=int, default=WARM_UP, help="supervised steps before")
    parser.add_argument("--unfolded", action="store_true", help="share nothing")
    parser.add_argument("--write-prompts", metavar="PATH", help="only write the prompts")
    args = parser.parse_args()
    if args.write_prompts:
        write_prompts(args.write_prompts)
        return
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
    output = None if args.output is None else Path(args.output)
    result: dict[str, Any] = json.loads(output.read_text()) if output is not None and output.exists() else {}
    curve = run(args.recipe, args.overrides, unfolded=args.unfolded, warm_up_steps=args.warm_up)
    name = "unfolded" if args.unfolded else "folded"
    result["machine"] = describe_machine()
    result.setdefault("settings", {})[name] = settings_of(
        args.recipe, args.overrides, unfolded=args.unfolded, warm_up_steps=args.warm_up
    )
    result.setdefault("curves", {})[name] = curve
    if output is not None:
        output.write_text(json.dumps(result, indent=1) + "\n")
    if args.plot is not None:
        draw(result["curves"], args.plot)


if __name__ == "__main__":
    main()
