"""Add pages to the site that are not files in docs/, and resolve links from pages to files of the repository.

MkDocs calls the functions ``on_...`` (``hooks`` in mkdocs.yml). The README and similar files become
pages; recipe keys, the command line and the objectives' options are written from the code. A link to a file that is
not a page becomes plain text, because the site has no repository to link to.
"""

from __future__ import annotations

import argparse
import inspect
import posixpath
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[2]
# The package is read from this checkout, installed or not.
sys.path.insert(0, str(ROOT))

FILES = {
    "index.md": "README.md",
    "shipped-recipes.md": "recipes/README.md",
    "contributing.md": "CONTRIBUTING.md",
    "tests.md": "tests/README.md",
    "patches.md": "patches/README.md",
    "security.md": "SECURITY.md",
    "changelog.md": "CHANGELOG.md",
}
# Files and folders of the repository that become pages.
PAGES_OF = {source: page for page, source in FILES.items()} | {
    "mcore_prefix_tree/settings/sections.py": "reference/recipe.md",
    "mcore_prefix_tree/arguments/flags.py": "reference/command-line.md",
    "mcore_prefix_tree/objectives": "reference/objectives.md",
    "docs": "index.md",
}
_FENCED = re.compile(r"(^```.*?^```\n)", flags=re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)\s]+)\)")


def on_files(files: Files, config: Any) -> Files:
    """Add the generated pages."""
    for page, source in FILES.items():
        files.append(File.generated(config, page, content=(ROOT / source).read_text()))
    for page, make in GENERATED.items():
        files.append(File.generated(config, page, content=make()))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Point links at the site's pages."""
    here = page.file.src_uri
    source = FILES.get(here, f"docs/{here}")

    def relinked(found: re.Match[str]) -> str:
        image, text, link = found.groups()
        path, mark, anchor = link.partition("#")
        if "://" in path or not path:
            return found[0]
        target = posixpath.normpath(posixpath.join(posixpath.dirname(source), path))
        target = PAGES_OF.get(target, target.removeprefix("docs/") if target.startswith("docs/") else "")
        if not target:
            return text
        text = re.sub(r"^(?:[\w-]+/)*([\w-]+)\.md$", r"\1", text)  # a page's file name is its title here
        return f"{image}[{text}]({posixpath.relpath(target, posixpath.dirname(here) or '.')}{mark}{anchor})"

    parts = _FENCED.split(markdown)
    return "".join(part if part.startswith("```") else _LINK.sub(relinked, part) for part in parts)


def on_page_content(html: str, **_: Any) -> str:
    """Show only the last part of a name in a Sphinx role of a docstring."""
    return re.sub(r":(?:class|mod|func|meth|data|attr):<code>~?(?:[\w.]*\.)?(\w+)</code>", r"<code>\1</code>", html)


def cell(text: object) -> str:
    """Return a table cell: one line, with code in Markdown."""
    return " ".join(str(text).replace("``", "`").replace("|", "\\|").split())


def table(headings: tuple[str, ...], rows: Iterator[tuple[object, ...]]) -> str:
    lines = [f"| {' | '.join(headings)} |", "|" + "---|" * len(headings)]
    return "\n".join([*lines, *(f"| {' | '.join(map(cell, row))} |" for row in rows)])


def attributes_of(kind: type) -> dict[str, str]:
    """Return the meaning of each field, from the section ``Attributes`` of a docstring."""
    _, _, section = inspect.getdoc(kind).partition("Attributes:\n")  # type: ignore[union-attr]
    found = re.findall(r"^ {4}(\w+): (.*?)(?=^ {4}\w|\Z)", section, flags=re.MULTILINE | re.DOTALL)
    return dict(found)


def type_text(hint: Any) -> str:
    """Return a type in words."""
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is Literal:
        return ", ".join(f"`{one}`" for one in arguments)
    if origin in (Union, UnionType):
        return " or ".join(type_text(one) for one in arguments)
    if origin is list:
        return f"list of {type_text(arguments[0])}s"
    names = {int: "integer", float: "number", bool: "true or false", str: "text", dict: "mapping", type(None): "null"}
    return names.get(origin or hint, getattr(hint, "__name__", str(hint)))


def default_text(default: Any) -> str:
    """Return a default in YAML."""
    if default is None:
        return "null"
    return f"`{str(default).lower() if isinstance(default, bool) else default}`" if default != "" else "empty"


def fields_table(kind: type) -> str:
    """Return a table of a dataclass's fields, except those that have their own section."""
    hints, meanings = get_type_hints(kind), attributes_of(kind)

    def rows() -> Iterator[tuple[object, ...]]:
        for field in fields(kind):
            if is_dataclass(hints[field.name]):
                continue
            default = "required"
            if field.default is not MISSING:
                default = default_text(getattr(field.default, "default", field.default))
            elif field.default_factory is not MISSING:
                default = ", ".join(f"`{one}`" for one in field.default_factory()) or "empty"
            yield f"`{field.name}`", type_text(hints[field.name]), default, meanings.get(field.name, "")

    return table(("key", "value", "default", "meaning"), rows())


def recipe_page() -> str:
    """Return the page of all keys of a recipe."""
    from mcore_prefix_tree.settings import LoraConfig, Recipe, YarnConfig

    hints = get_type_hints(Recipe)
    sources = "`settings/sections.py`, `settings/model_section.py` and `settings/monitoring.py`"
    parts = ["# Recipe keys", f"Written from {sources}. How to use them: [Recipes](../recipes.md)."]
    parts += ["## Top level", fields_table(Recipe)]
    for name, kind in hints.items():
        if is_dataclass(kind):
            parts += [f"## {name}", summary_of(kind), fields_table(kind)]  # type: ignore[arg-type]
    for name, section in {"model.yarn": YarnConfig, "model.lora": LoraConfig}.items():
        parts += [f"## {name}", summary_of(section), fields_table(section)]
    return "\n\n".join(parts) + "\n"


def summary_of(kind: Any) -> str:
    """Return a docstring without its sections."""
    return re.split(r"\n\n(?:Attributes|Args|Raises):", inspect.getdoc(kind) or "")[0].replace("``", "`")


def command_page() -> str:
    """Return the page of our commands, and of the arguments under Megatron-LM."""
    import typer

    from mcore_prefix_tree.arguments.flags import add_argument_group
    from mcore_prefix_tree.cli.main import app

    parts = ["# Command line", "Written from the commands; `mcore-prefix-tree COMMAND --help` prints the same."]
    parts += commands_of(typer.main.get_command(app), "mcore-prefix-tree")
    group = add_argument_group(argparse.ArgumentParser(add_help=False))
    parts += ["## pretrain_gpt --prefix-tree", "In addition to all arguments of Megatron-LM's `pretrain_gpt.py`:"]
    rows = (
        (f"`{action.option_strings[0]}`", action.metavar or "", (action.help or "") % {"default": action.default})
        for action in group._actions
    )
    parts.append(table(("option", "value", "meaning"), rows))
    return "\n\n".join(parts) + "\n"


def commands_of(command: Any, name: str) -> Iterator[str]:
    """Yield heading, help and parameters of a command and those below it."""
    if hasattr(command, "commands"):
        for below, one in command.commands.items():
            yield from commands_of(one, f"{name} {below}")
        return
    yield f"## {name.removeprefix('mcore-prefix-tree ')}"
    given = [one for one in command.params if one.param_type_name == "argument"]
    yield f"```\n{name} {' '.join(one.metavar or one.name.upper() for one in given)} [OPTIONS]\n```"
    yield inspect.cleandoc(command.help or "")
    yield table(("argument or option", "value", "default", "meaning"), (row_of(one) for one in command.params))


def row_of(one: Any) -> tuple[object, ...]:
    """Return the table row of one parameter of a command."""
    if one.param_type_name == "argument":
        return f"`{one.metavar or one.name.upper()}`", "", "", one.help or ""
    names = ", ".join(f"`{name}`" for name in (*one.opts, *one.secondary_opts))
    default = "" if one.default in (None, False, ()) or callable(one.default) else default_text(one.default)
    hint = one.type_descriptor.annotation
    value = type_text(hint) if get_origin(hint) is Literal else one.metavar or ""
    return names, value, "required" if one.required else default, one.help or ""


# Modules whose docstrings have the formulas, in the order of the page.
_FORMULAS = {
    "Policy gradients": ("policy", "advantages", "kl"),
    "Preferences": ("preference", "kto"),
    "Supervised": ("sft",),
    "Values and rewards": ("scalar_head",),
    "Distillation": ("distill", "divergence"),
    "One normaliser": ("scored",),
}


def objectives_page() -> str:
    """Return the page of formulas, then of each objective's options."""
    from mcore_prefix_tree.objectives import OBJECTIVES

    parts = [
        "# Formulas of the objectives",
        "Written from the modules of `mcore_prefix_tree/objectives`. For the fields that each reads, see "
        "[Objectives](../objectives.md).",
    ]
    for heading, modules in _FORMULAS.items():
        parts.append(f"## {heading}")
        for name in modules:
            # In these modules, functions have the formulas.
            members = {"advantages": "true", "scored": "[normalise]"}.get(name, "[]")
            parts.append(
                f"::: mcore_prefix_tree.objectives.{name}\n    options: {{members: {members}, heading_level: 3}}"
            )
    parts.append("## Options")
    for kind in dict.fromkeys(made for made, _ in OBJECTIVES.values()):
        names = [name for name, (made, _) in OBJECTIVES.items() if made is kind]
        parts += [f"### {', '.join(names)}", fields_table(kind)]
        for name in names:
            changed = OBJECTIVES[name][1]
            if changed and len(names) > 1:
                given = ", ".join(f"`{key}: {value}`".lower() for key, value in changed.items())
                parts.append(f"- `{name}` sets {given}")
    return "\n\n".join(parts) + "\n"


GENERATED: dict[str, Callable[[], str]] = {
    "reference/recipe.md": recipe_page,
    "reference/command-line.md": command_page,
    "reference/objectives.md": objectives_page,
}
