"""``mcore-prefix-tree verify``: check the installation, or folded against unfolded on a recipe's first batch."""

from __future__ import annotations

import json
import warnings
from contextlib import closing
from functools import partial
from typing import Annotated

import typer

from mcore_prefix_tree.cli.boundary import quiet_upstream
from mcore_prefix_tree.cli.options import HuggingFace, load_job, overrides_like
from mcore_prefix_tree.utils.errors import FAILED, exit_with


def verify(
    recipe: Annotated[
        str | None,
        typer.Argument(metavar="[RECIPE]", help="A YAML file; see recipes/. Without it the installation is checked."),
    ] = None,
    overrides: Annotated[list[str] | None, overrides_like("model.dtype=float64")] = None,
    hf: HuggingFace = None,
    megatron_lm_path: Annotated[
        str | None, typer.Option(metavar="DIR", help="Without RECIPE: a checkout of Megatron-LM to check, too.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of a table.")] = False,
) -> None:
    """Show that folding changes nothing but the cost: log-probabilities, loss and every gradient, on your model.

    Without a recipe: whether the installed megatron-core has every name that this package relies on.

    Exit code 1 if an error is above its limit, or if a name is missing.
    """
    if recipe is None:
        if hf is not None:
            raise ValueError("verify --hf needs a RECIPE, whose first batch it compares")
        if not show_installed(megatron_lm_path, as_json=as_json):
            exit_with(FAILED)
        return
    if megatron_lm_path is not None:
        raise ValueError("--megatron-lm-path goes with no RECIPE: mcore-prefix-tree verify --megatron-lm-path DIR")
    loaded = load_job(recipe, overrides, "verify", hf=hf)
    from rich.console import Console

    from mcore_prefix_tree.cli.console import ConsoleReporter, print_verified
    from mcore_prefix_tree.mcore.loop.jobs import run_once, verify_first

    # Standard output is for the result.
    with closing(ConsoleReporter(Console(stderr=True))) as reporter:
        work = partial(verify_first, progress=partial(reporter.comparing, "verify"))
        report, is_main = run_once(loaded, work)
    if is_main and as_json:
        print(json.dumps(report.to_json()))
    elif is_main:
        print_verified(Console(), report)
    if not report.passed:
        exit_with(FAILED)


def show_installed(megatron_lm_path: str | None, *, as_json: bool) -> bool:
    """Print the upstream names that each room lacks or finds different; return whether nothing is missing.

    ``megatron_lm_path`` is a checkout to check with its own megatron-core. Raises ValueError if it is none, or if its
    ``pretrain()`` has an unknown form; ImportError if the seam, without which nothing can be checked, lacks something.
    """
    quiet_upstream()
    if megatron_lm_path is not None:
        from mcore_prefix_tree.pretrain_gpt import use_megatron_lm

        use_megatron_lm(megatron_lm_path)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the first line says whether a test has seen this version
        from mcore_prefix_tree.mcore import compat

        missing = compat.missing_by_room(megatron_lm=megatron_lm_path is not None)
        whole = not any(missing.values())
        if whole and megatron_lm_path is not None:
            from mcore_prefix_tree.mcore.megatron_lm.pretrain_forms import check_megatron_lm

            check_megatron_lm()
    version, folder = compat.installed_version(), str(compat.installed_folder())
    tested = compat.is_tested(version)
    if as_json:
        print(json.dumps({"megatron-core": version, "path": folder, "tested": tested, "missing": missing}))
        return whole
    from rich.console import Console

    from mcore_prefix_tree.cli.console import grid, say_line

    console = Console()
    said = "a tested series" if tested else f"which no test has seen; {compat.SUPPORTED}"
    say_line(console, f"megatron-core {version} in {folder}, {said}")
    table = grid(("room", "missing or different"))
    for room, names in missing.items():
        table.add_row(room, str(len(names)))
    console.print(table)
    for name in (one for names in missing.values() for one in names):
        say_line(console, f"missing or different: {name}")
    return whole
