"""``mcore-prefix-tree score``: log-probabilities and entropies of a recipe's data under its checkpoint."""

from __future__ import annotations

from typing import Annotated

import typer

from mcore_prefix_tree.cli.options import (
    HuggingFace,
    RecipeFile,
    accept_count,
    accept_path,
    check_output_option,
    load_job,
    overrides_like,
)
from mcore_prefix_tree.utils.errors import spelled

_SPELLINGS = {
    f"score.{name}": f"--{name.replace('_', '-')}" for name in ("output", "reference", "teacher_top_k", "record_routes")
}


def score(
    recipe: RecipeFile,
    output: Annotated[
        str,
        accept_path(
            "FILE",
            "File to write, one sample per line in the data's order: JSON Lines (.jsonl, .json, also .gz), "
            ".parquet, .arrow or .feather. An existing file is replaced once all samples are scored.",
        ),
    ],
    overrides: Annotated[list[str] | None, overrides_like("checkpoint.save=runs/mine")] = None,
    hf: HuggingFace = None,
    reference: Annotated[
        str | None, accept_path("FOLDER", "Checkpoints of a reference model; adds ref_logprobs.")
    ] = None,
    all_tokens: Annotated[
        bool, typer.Option("--all-tokens", help="Score every token, not only those of the loss mask.")
    ] = False,
    entropy: Annotated[bool, typer.Option("--entropy/--no-entropy", help="Write the entropies too.")] = True,
    teacher_top_k: Annotated[
        int | None, accept_count("K", "Write the K likeliest tokens instead, to distil from.")
    ] = None,
    record_routes: Annotated[
        bool, typer.Option("--record-routes", help="Write routed_experts too, the experts of each token.")
    ] = False,
) -> None:
    """Write every sample with its log-probabilities under the last checkpoint in checkpoint.save.

    checkpoint.save is the folder of a run, in the recipe or given here; it is only read. With checkpoint.save=null the
    weights of model.hf score.

    The lines can be trained on: old_logprobs, ref_logprobs and entropy have a number for each token, null if none was
    asked for. The recipe of a critic writes values, of a reward model reward. Under torchrun for several ranks.
    """

    def check_written(inputs: list[str]) -> None:
        inputs = inputs if reference is None else [*inputs, str(reference)]
        check_output_option("--output", output, inputs, is_of_rows=True)

    loaded = load_job(recipe, overrides, "score", hf=hf, outputs=[check_written])
    from mcore_prefix_tree.mcore.loop.score_recipe import run_score
    from mcore_prefix_tree.settings.score_section import ScoreConfig

    with spelled(_SPELLINGS):
        options = ScoreConfig(
            output=output,
            reference=reference,
            all_tokens=all_tokens,
            entropy=entropy,
            teacher_top_k=teacher_top_k,
            record_routes=record_routes,
        )
        report, is_main = run_score(loaded, options)
    if is_main:
        print(*report.lines(output), sep="\n")
