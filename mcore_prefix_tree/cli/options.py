"""Options that several commands share, as the fields of a dataclass."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import MISSING, fields
from inspect import Parameter, signature
from typing import Any, TypeVar, get_type_hints

Section = TypeVar("Section")


def takes(section: type[Section]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command the fields of a dataclass as options; its first parameter receives them as one object."""
    hints = get_type_hints(section, include_extras=True)
    shared = [
        Parameter(
            field.name,
            Parameter.KEYWORD_ONLY,
            default=Parameter.empty if field.default is MISSING else field.default,
            annotation=hints[field.name],
        )
        for field in fields(section)  # type: ignore[arg-type]
    ]

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        own = [
            one.replace(kind=Parameter.KEYWORD_ONLY)
            for one in list(signature(command, eval_str=True).parameters.values())[1:]
        ]

        @functools.wraps(command)
        def with_options(**given: Any) -> None:
            values = {one.name: given.pop(one.name) for one in shared}
            command(section(**values), **given)

        # What Typer reads.
        with_options.__signature__ = signature(command).replace(parameters=[*shared, *own])  # type: ignore[attr-defined]
        with_options.__annotations__ = {one.name: one.annotation for one in [*shared, *own]}
        return with_options

    return decorate
