"""Jinja environment that bounds the output of a chat template, in memory and in time.

A template is a program that came with a model. Jinja's sandbox keeps it from the machine, but not from writing ``'a' *
10**10``. Here every operation that can grow a value pays for it before it runs, out of one budget per rendering: text
by its characters, lists and steps by :data:`STEP`. Within the budget, the output equals that of transformers'
environment: its settings, filters, globals and extensions are taken over.
"""

from __future__ import annotations

import re
import string
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import wraps
from threading import local
from typing import Any, NamedTuple

import jinja2
from jinja2 import nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.nodes import EvalContext
from jinja2.runtime import Context, LoopContext, Macro, markup_join, str_join
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace, pass_context

# Cost of a list element, a loop iteration or a call, in characters: about its memory.
STEP = 64
SMALLEST_BUDGET = 1 << 26
# Limit for one operation after another that costs little and takes long, for example a search in a long list.
SECONDS = 10.0

_CONVERSION = re.compile(r"%(?:\([^)]*\))?[#0\- +]*(\d+|\*)?(?:\.(\d+|\*))?")
# Filters that hand on elements of their value; they neither join nor write them.
_ELEMENTWISE = frozenset(
    (
        *("attr", "batch", "count", "d", "default", "dictsort", "first", "groupby", "items", "last", "length", "list"),
        *("map", "max", "min", "random", "reject", "rejectattr", "reverse", "select", "selectattr", "slice", "sort"),
        "unique",
    )
)
_CONSTANT = frozenset(["attr", "count", "d", "default", "first", "items", "last", "length"])
_UNORDERED: tuple[type, ...] = (set, frozenset, type({}.keys()), type({}.values()), type({}.items()))
_OF_CALLS = ("_block_vars", "_loop_vars", "caller")


class TooMuchError(jinja2.TemplateRuntimeError):
    """A template that produces more than its budget, or takes longer than :data:`SECONDS`."""


class _Weight(NamedTuple):
    """Size of values in characters, number of elements, levels of nesting, and the largest integer."""

    size: int
    elements: int
    levels: int
    largest: int


class Meter:
    """Budget of one rendering: the characters that it may still produce, and its time."""

    def __init__(self, budget: int) -> None:
        self._left = budget
        self._ends = time.thread_time() + SECONDS

    def spend(self, amount: int) -> None:
        """Pay for so many characters; raises TooMuchError if the budget is spent."""
        self._left -= amount
        if self._left < 0:
            raise TooMuchError("it produces far more text than the conversation has; limit its repetitions")

    def step(self) -> None:
        """Pay for a call or an iteration; raises TooMuchError too if the rendering takes too long."""
        self.spend(STEP)
        if time.thread_time() > self._ends:
            raise TooMuchError(f"it takes more than {SECONDS:g} s; limit its repetitions")

    def weigh(self, *values: Any) -> _Weight:
        """Pay for values and their content, as often as they hold it, and return their weight."""
        before, elements, levels, largest = self._left, 0, 0, 0
        level: Sequence[Any] = values
        while level:
            inner: list[Any] = []
            for value in level:
                if isinstance(value, (str, bytes)):
                    self.spend(len(value))
                elif isinstance(value, int):
                    largest = max(largest, abs(value))
                    self.spend(value.bit_length() // 3)
                elif held := _held(value):
                    elements += len(held)
                    self.spend(STEP * len(held))
                    inner += held
            level, levels = inner, levels + 1
        return _Weight(before - self._left, elements, levels, largest)


class _Counting(CodeGenerator):
    """Writes the calls that pay for loops, literals and ``~``, which the sandbox does not intercept."""

    def visit_For(self, node: nodes.For, frame: Frame) -> None:
        step = nodes.Call(nodes.EnvironmentAttribute("step"), [], [], None, None)
        if node.test is None:
            node.body = [nodes.ExprStmt(step, lineno=node.lineno), *node.body]
        else:  # items that the test drops take time too
            node.test = nodes.And(step, node.test)
        super().visit_For(node, frame)

    def visit_Call(self, node: nodes.Call, frame: Frame, forward_caller: bool = False) -> None:
        if isinstance(node.node, nodes.EnvironmentAttribute):
            self.write(f"environment.{node.node.name}()")
        else:
            super().visit_Call(node, frame, forward_caller=forward_caller)

    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:
        self.write("environment.joined(context.eval_ctx, ")
        super().visit_Tuple(nodes.Tuple(node.nodes, "load"), frame)
        self.write(")")

    def visit_List(self, node: nodes.List, frame: Frame) -> None:
        self._weighed(super().visit_List, node, frame)

    def visit_Dict(self, node: nodes.Dict, frame: Frame) -> None:
        self._weighed(super().visit_Dict, node, frame)

    def visit_Tuple(self, node: nodes.Tuple, frame: Frame) -> None:
        if node.ctx == "load":
            self._weighed(super().visit_Tuple, node, frame)
        else:
            super().visit_Tuple(node, frame)

    def _weighed(self, visit: Callable[[Any, Frame], None], node: nodes.Node, frame: Frame) -> None:
        self.write("environment.weighed(")
        visit(node, frame)
        self.write(")")


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """Renders as ``stock`` does, with its settings and extensions; raises TooMuchError for a template's excess."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})
    code_generator_class = _Counting

    def __init__(self, stock: jinja2.Environment) -> None:
        super().__init__(
            trim_blocks=stock.trim_blocks,
            lstrip_blocks=stock.lstrip_blocks,
            keep_trailing_newline=stock.keep_trailing_newline,
            autoescape=stock.autoescape,
            undefined=stock.undefined,
            extensions=[type(extension) for extension in stock.extensions.values()],
            # Constants are folded when a template is compiled, before there is a budget.
            optimized=False,
            finalize=_written,
        )
        self.globals.update(stock.globals)
        self.tests.update(stock.tests)
        self.filters.update({name: self._paid(name, function) for name, function in stock.filters.items()})
        self._of_thread = local()

    def render(self, template: jinja2.Template, variables: dict[str, Any]) -> str:
        """Render a template of this environment within a budget; raises the template's errors, or TooMuchError."""
        size = Meter(sys.maxsize).weigh(variables).size
        # Text that is written anew for each message grows with the square of the messages.
        self._of_thread.meter = Meter(SMALLEST_BUDGET + size * (64 + 4 * len(variables["messages"])))
        return template.render(variables)

    @property
    def meter(self) -> Meter:
        """Budget of the rendering that runs in this thread."""
        meter: Meter = self._of_thread.meter
        return meter

    def step(self) -> bool:
        """Pay for an iteration; return True for the test of a loop."""
        self.meter.step()
        return True

    def weighed(self, value: Any) -> Any:
        """Pay for a literal and all that it holds, so that no value holds more than was paid for."""
        self.meter.weigh(value)
        return value

    def joined(self, evaluation: EvalContext, parts: tuple[Any, ...]) -> str:
        """Return the result of ``~``."""
        self.meter.weigh(*parts)
        return markup_join(parts) if evaluation.autoescape else str_join(parts)

    def concat(self, parts: Iterable[str]) -> str:  # type: ignore[override]
        """Join the output of a template, a macro or a block, and stop when it exceeds the budget."""
        meter, written = self.meter, []
        for part in parts:
            meter.spend(len(part))
            written.append(part)
        return "".join(written)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Pay for the result of an operator before it is computed."""
        self.meter.step()
        if operator == "%":
            if isinstance(left, (str, bytes)):
                self.meter.spend(_percent_growth(left, self.meter.weigh(right)))
        elif operator == "+":
            self.meter.spend(_extent(left) + _extent(right))
        else:
            self.meter.spend(_product(operator, left, right))
        return super().call_binop(context, operator, left, right)

    def call(self, context: Context, obj: Any, /, *args: Any, **kwargs: Any) -> Any:  # type: ignore[override]
        """Pay for the possible result of a method or a function, and call it."""
        self.meter.step()
        method = getattr(obj, "__wrapped__", obj)  # the sandbox wraps str.format
        owner, name = getattr(method, "__self__", None), getattr(method, "__name__", "")
        if name == "join" and args and isinstance(args[0], Iterator):
            args = (list(args[0]), *args[1:])
        if isinstance(owner, (list, tuple, dict)) and name != "fromkeys":
            pass  # passes its content on
        elif not isinstance(obj, (Macro, LoopContext)):
            rest = [*args, *(value for key, value in kwargs.items() if key not in _OF_CALLS)]
            if isinstance(owner, (str, bytes, int)):
                self._pay(f"str.{name}", owner, rest)
            else:
                self.meter.weigh(*rest)
        result = super().call(context, obj, *args, **kwargs)
        self.meter.spend(0 if isinstance(obj, Macro) else _extent(result))
        return result

    def _paid(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a filter that pays before it runs and for its result."""
        at = int(hasattr(function, "jinja_pass_arg"))  # behind the context, which some are given first

        @wraps(function)
        def paid(*args: Any, **kwargs: Any) -> Any:
            meter = self.meter
            meter.step()
            value, rest = args[at], [*args[at + 1 :], *kwargs.values()]
            if name in ("join", "sum") and isinstance(value, Iterator):
                value = list(value)
                args = (*args[:at], value, *args[at + 1 :])
            if name not in _ELEMENTWISE:
                self._pay(name, value, rest)
            elif name not in _CONSTANT:
                meter.spend(STEP * _length(value))
                if name in ("batch", "slice"):
                    meter.spend(STEP * meter.weigh(*rest).largest)
            result = function(*args, **kwargs)
            meter.spend(0 if name in _CONSTANT else _extent(result))
            return result

        return paid

    def _pay(self, name: str, value: Any, rest: list[Any]) -> None:
        """Pay for a value, for arguments, and for the result of the filter or method ``name``."""
        growth = _GROWTH.get(name) or _GROWTH.get(name.removeprefix("str."))
        held, given = self.meter.weigh(value), self.meter.weigh(*rest)
        if growth is not None:
            self.meter.spend(growth(value, held, rest, given))


@pass_context
def _written(context: Context, value: Any) -> Any:
    """Pay for a value that is not text before it becomes text."""
    if not isinstance(value, str):
        environment = context.environment
        assert isinstance(environment, BoundedEnvironment)
        environment.meter.weigh(value)
    return value


def _held(value: Any) -> Sequence[Any]:
    """Return the content of a value, which it would write."""
    if isinstance(value, dict):
        return [*value, *value.values()]
    if isinstance(value, (list, tuple, range)):
        return value
    if type(value) in _UNORDERED:
        return list(value)
    if isinstance(value, Namespace):
        attributes: dict[str, Any] = object.__getattribute__(value, "_Namespace__attrs")
        return list(attributes.values())
    return ()


def _length(value: Any) -> int:
    return len(value) if hasattr(value, "__len__") else 0


def _extent(value: Any) -> int:
    """Return the cost of a value itself, without its content."""
    if isinstance(value, (str, bytes)):
        return len(value)
    return value.bit_length() // 3 if isinstance(value, int) else STEP * _length(value)


def _product(operator: str, left: Any, right: Any) -> int:
    """Return the cost of ``*`` or ``**``."""
    if isinstance(left, int) and isinstance(right, int):
        digits = _extent(left) * max(right, 1) if operator == "**" else max(_extent(left), _extent(right))
        return digits * digits // 16  # their time is nearly that
    if operator == "**":
        return 0
    times, repeated = (left, right) if isinstance(left, int) else (right, left)
    return _extent(repeated) * max(times, 0) if isinstance(times, int) else 0


def _percent_growth(form: Any, given: _Weight) -> int:
    text = form if isinstance(form, str) else form.decode("latin-1")
    return _conversions(_CONVERSION.findall(text), given)


def _format_growth(form: Any, _: _Weight, __: list[Any], given: _Weight) -> int:
    fields = []
    for _literal, name, spec, _conversion in string.Formatter().parse(form):
        if name is not None:
            nested = ("*",) if "{" in (spec or "") else ()
            fields.append((*nested, *re.findall(r"\d+", spec or "")))
    return _conversions(fields, given)


def _conversions(fields: list[tuple[str, ...]], given: _Weight) -> int:
    """Return the largest output of a format's fields: each all of the arguments, padded to its width."""
    widths = sum(given.largest if width == "*" else int(width) for field in fields for width in field if width)
    return len(fields) * given.size + widths


def _replaced(value: Any, _: _Weight, rest: list[Any], __: _Weight) -> int:
    if len(rest) < 2 or isinstance(value, bytes):
        return 0
    return str(value).count(str(rest[0])) * len(str(rest[1]))


# Cost of a filter or method beyond its value and its arguments: (value, its weight, arguments, their weight).
_GROWTH: dict[str, Callable[[Any, _Weight, list[Any], _Weight], int]] = {
    **dict.fromkeys(
        ("center", "ljust", "rjust", "zfill", "to_bytes", "round"), lambda value, held, rest, given: given.largest
    ),
    **dict.fromkeys(("translate", "wordwrap", "urlize"), lambda value, held, rest, given: held.size * given.size),
    "expandtabs": lambda value, held, rest, given: held.size * given.largest if "\t" in str(value) else 0,
    "indent": lambda value, held, rest, given: len(str(value).splitlines()) * (given.size + given.largest),
    "tojson": lambda value, held, rest, given: held.elements * held.levels * (given.size + given.largest),
    "pprint": lambda value, held, rest, given: held.elements * held.size,
    "sum": lambda value, held, rest, given: held.elements * _length(value) if given.elements or rest else 0,
    "replace": _replaced,
    "format": lambda value, held, rest, given: _percent_growth(str(value), given),
    "str.format": _format_growth,
    "str.format_map": _format_growth,
    "join": lambda value, held, rest, given: _length(value) * given.size,
    "str.join": lambda value, held, rest, given: sum(map(_length, rest)) * held.size,
}
