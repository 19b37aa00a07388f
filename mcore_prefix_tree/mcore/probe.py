"""Probes of upstream by signature and source, which build and call nothing, and name missing parts."""

from __future__ import annotations

import ast
import importlib
import inspect
import linecache
import re
import sys
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any


class MegatronCoreError(ImportError):
    """The installed megatron-core is not one that this package works with. The message says why."""


@dataclass(frozen=True)
class Uses:
    """A name of megatron-core and how it is used.

    Attributes:
        name: ``module:qualified name``; the parameters of a class are those of its constructor.
        positional: parameters that are passed by position, without ``self``; they have to come first, in this order.
        keywords: parameters that are passed by name.
        attributes: attributes of a class or its instances that are read.
    """

    name: str
    positional: str = ""
    keywords: str = ""
    attributes: str = ""


def import_upstream(name: str) -> Any:
    """Import a module of megatron-core; raise MegatronCoreError if it needs a missing package, for example triton."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.split(".")[0] == "megatron":
            raise
        raise MegatronCoreError(f"{name} needs the package {error.name}; pip install {error.name}") from error


def find_missing(uses: Uses) -> Iterator[str]:
    """Describe the missing parts of one entry."""
    module_name, _, qualified_name = uses.name.partition(":")
    shown = uses.name.replace(":", ".")
    try:
        target = import_upstream(module_name)
    except MegatronCoreError:
        raise
    except ImportError as error:
        yield f"{shown} ({error})"
        return
    for name in qualified_name.split("."):
        if not hasattr(target, name):
            yield shown
            return
        target = getattr(target, name)
    if uses.positional or uses.keywords:
        yield from (f"{shown}({problem})" for problem in _unusable(target, uses))
    if uses.attributes and not isinstance(target, type):
        yield f"{shown} (which is not a class)"
    elif uses.attributes:
        names = [name for name in uses.attributes.split() if not _is_plainly_set(target, name)]
        there = list_attributes(target) if names else None
        yield from (f"{shown}.{name}" for name in names if there is not None and name not in there)


def _is_plainly_set(kind: type, name: str) -> bool:
    """Return whether a class has a name, or a line of its or an ancestor's source begins with ``self.name =``."""
    # Nearly all are, and to parse the sources takes half a second at each import.
    line = re.compile(rf"^ +self\.{name}(?: *:[^=\n]*)? = ", re.MULTILINE)
    return hasattr(kind, name) or any(line.search(_text(one)) for one in kind.__mro__)


@cache
def _text(kind: type) -> str:
    """Return the text of a class in its module; it may end early; empty if it is in none."""
    file = getattr(sys.modules.get(kind.__module__), "__file__", None) or ""
    if kind.__module__.startswith("torch.") or not file.endswith(".py"):
        return ""
    found = re.search(rf"^class {kind.__name__}\b.*(?:\n(?!\w|@).*)*", "".join(linecache.getlines(file)), re.MULTILINE)
    return found[0] if found else ""


@cache
def list_attributes(kind: type) -> frozenset[str] | None:
    """Return the names that a class or an ancestor defines, or sets on ``self`` in its source; None without source."""
    # To build an instance and ask it would take process groups.
    found = set(dir(kind))
    for one in kind.__mro__:
        found |= set(vars(one).get("__annotations__", ()))
        if one.__module__.startswith(("builtins", "torch.")):
            continue
        try:
            source = inspect.getsource(one)
        except (OSError, TypeError):
            return None
        for node in ast.walk(ast.parse(textwrap.dedent(source))):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and _is_self(node.value):
                found.add(node.attr)
            elif isinstance(node, ast.Call) and _registers(node.func):
                found |= {str(word.value) for word in node.args[:1] if isinstance(word, ast.Constant)}
    return frozenset(found)


def _is_self(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id == "self"


def _registers(node: ast.expr) -> bool:
    return isinstance(node, ast.Attribute) and node.attr.startswith("register_") and _is_self(node.value)


def _unusable(target: Callable[..., Any], uses: Uses) -> Iterator[str]:
    parameters = list(inspect.signature(target).parameters.values())
    if "." in uses.name.partition(":")[2]:
        parameters = parameters[1:]  # self
    names = [parameter.name for parameter in parameters]
    positional = uses.positional.split()
    for index, name in enumerate(positional):
        if names[index : index + 1] != [name]:
            yield f"{name} at position {index + 1}"
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return
    yield from (f"{name}=" for name in uses.keywords.split() if name not in names)
