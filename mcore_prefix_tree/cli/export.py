"""``mcore-prefix-tree export``: a recipe's last checkpoint as a Hugging Face folder."""

from __future__ import annotations

from typing import Annotated

import typer

from mcore_prefix_tree.cli.options import HuggingFace, load_job, local, overrides_like


def export(
    recipe: Annotated[str, typer.Argument(metavar="RECIPE", help="A YAML file that sets model.hf.")],
    path: Annotated[str, typer.Argument(parser=local, metavar="PATH", help="The folder to make; it must not exist.")],
    overrides: Annotated[list[str] | None, overrides_like("checkpoint.save=runs/mine")] = None,
    hf: HuggingFace = None,
) -> None:
    """Write the last checkpoint in checkpoint.save with the names, types, configuration and tokenizer of model.hf.

    With model.lora, write only the adapter, in PEFT's format.

    Any parallel layout reads the checkpoint; under torchrun for several ranks.
    """
    from mcore_prefix_tree.settings.command_checks import check_new

    loaded = load_job(recipe, overrides, "export", hf=hf, outputs=[lambda inputs: check_new(path, f"PATH={path}")])
    from mcore_prefix_tree.mcore.loop.export_folder import run_export

    iteration, is_main = run_export(loaded, path)
    if is_main:
        by = iteration if isinstance(iteration, str) else f"iteration {iteration}"
        if loaded.model.lora is not None:
            print(f"{path}: the adapter of {by} in PEFT's format, for {loaded.model.hf}")
        else:
            print(f"{path}: the weights of {by} in the format of {loaded.model.hf}")
