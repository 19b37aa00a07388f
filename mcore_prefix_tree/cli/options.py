"""Options that several commands share, as the fields of a dataclass; and their checks."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from importlib import import_module
from inspect import Parameter, signature
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from mcore_prefix_tree.cli.boundary import quiet_upstream
from mcore_prefix_tree.utils.errors import naming, spelled
from mcore_prefix_tree.utils.inputs import HUB, MOST, local_path

if TYPE_CHECKING:
    from mcore_prefix_tree.settings import Recipe
    from mcore_prefix_tree.settings.command_checks import Task

Section = TypeVar("Section")


def local(given: str | Path) -> str:
    """Return the path that an option gives, with ``~`` as the home folder; the parser of every path of a command."""
    try:
        return local_path(str(given))
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None


def local_data(given: str) -> str:
    """Return :func:`local` of a file of samples, which may be a name on the hub."""
    return given if given.startswith(HUB) else local(given)


def local_file(given: str | Path) -> Path:
    """Return :func:`local` as a path."""
    return Path(local(given))


def accept_count(metavar: str, text: str, *, least: int = 1, most: int = MOST) -> Any:
    """Return an option whose value is a number of things, with its help."""
    return typer.Option(min=least, max=most, metavar=metavar, help=text)


def accept_path(metavar: str, text: str, parser: Callable[[str], str | Path] = local) -> Any:
    """Return an option whose value is a path of this machine, with its help."""
    return typer.Option(parser=parser, metavar=metavar, help=text)


HuggingFace = Annotated[
    str | None, typer.Option("--hf", metavar="PATH", help="Folder of a Hugging Face model; the same as model.hf=PATH.")
]
RecipeFile = Annotated[str, typer.Argument(metavar="RECIPE", help="A YAML file; see recipes/.")]
Repeats = Annotated[int, accept_count("N", "Timed rounds.")]
RANKS = 2**14
SEEDS = 2**63 - 1


def overrides_like(example: str) -> Any:
    """Return the argument of a command that changes settings of its recipe, with an example for the help."""
    return typer.Argument(metavar="[KEY=VALUE]...", help=f"For example {example}.")


def check_output_option(
    option: str, path: str | Path | None, inputs: Iterable[str | Path], *, is_of_rows: bool = False
) -> None:
    """Raise ValueError, which names the option, if an output cannot be written or is one of the inputs."""
    from mcore_prefix_tree.data.write import check_output, check_rows_output

    if path is not None:
        with naming(f"{option} "):
            (check_rows_output if is_of_rows else check_output)(path, inputs)


def with_hf(overrides: list[str] | None, path: str | None) -> list[str]:
    """Return a recipe's overrides, with ``model.hf`` if ``--hf`` gives a path."""
    given = overrides or []
    return given if path is None else [*given, f"model.hf={json.dumps(path, ensure_ascii=False)}"]


def load_job(
    recipe: str,
    overrides: list[str] | None,
    task: Task,
    *,
    hf: str | None = None,
    outputs: Iterable[Callable[[list[str]], object]] = (),
) -> Recipe:
    """Load a command's recipe before heavy imports; raise ValueError for all mistakes of it, its files and the outputs.

    ``outputs`` are checks of the outputs, which receive all files and folders that the command reads.
    """
    from mcore_prefix_tree.settings import load_recipe
    from mcore_prefix_tree.settings.command_checks import CHECKS, check_metrics
    from mcore_prefix_tree.settings.teachers import list_teacher_inputs

    checks: list[Callable[[Recipe], object]] = [*CHECKS[task]]
    if task == "train":
        checks.append(lambda loaded: check_metrics(loaded.log.metrics, [recipe]))

    def checked(check_output: Callable[[list[str]], object]) -> Callable[[Recipe], object]:
        return lambda loaded: check_output([recipe, *loaded.inputs, *list_teacher_inputs(loaded.objective)])

    loaded = load_recipe(recipe, with_hf(overrides, hf), [*checks, *map(checked, outputs)])
    quiet_upstream()
    _import_megatron(loaded.device)
    return loaded


def _import_megatron(device: str) -> None:
    """Import what all jobs share; where they run on a CPU, without the compiler that only a GPU's would use."""
    import torch

    from mcore_prefix_tree.cpu.emulation import eager_functions

    with nullcontext() if device != "cpu" and torch.cuda.is_available() else eager_functions():
        import_module("mcore_prefix_tree.mcore.loop.session")


def takes(section: type[Section]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command the fields of a dataclass as options; its first parameter receives them as one object.

    If the dataclass has ``spellings``, errors of the command name settings by its options.
    """
    shared = list(signature(section, eval_str=True).parameters.values())

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        own = [
            one.replace(kind=Parameter.KEYWORD_ONLY)
            for one in list(signature(command, eval_str=True).parameters.values())[1:]
        ]

        @functools.wraps(command)
        def with_options(**given: Any) -> None:
            values = {one.name: given.pop(one.name) for one in shared}
            options = section(**values)
            with spelled(getattr(options, "spellings", {})):
                command(options, **given)

        # The signature that Typer reads.
        with_options.__signature__ = signature(command).replace(parameters=[*shared, *own])  # type: ignore[attr-defined]
        with_options.__annotations__ = {one.name: one.annotation for one in [*shared, *own]}
        return with_options

    return decorate
