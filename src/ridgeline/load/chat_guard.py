"""A Jinja sandbox that limits the cost of rendering: it raises Costly, and a helper process renders instead.

Templates are code from whoever made the checkpoint. Each step of a loop, call and filter checks the clock. Operations
that could make a large value in one step (a product, a join, a literal that holds one list many times) check its size
first. Filters and methods that are not known to be cheap are left to the helper process. The rendered text does not
change.
"""

from __future__ import annotations

import functools
import threading
import time
import types
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from jinja2 import nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.runtime import Undefined
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace, generate_lorem_ipsum

SECONDS = 0.25  # most time for rendering in this process
MAX_CHARS = 1 << 22  # most characters of a text that a template makes
MAX_PARTS = 1 << 16  # most parts of a value: elements of lists and objects (shared ones count again), and long texts
_CHARS_PER_PART = 64
_MAX_BITS = 4096  # most bits of a whole number

_METHODS = frozenset(
    "strip lstrip rstrip split rsplit splitlines startswith endswith lower upper title capitalize swapcase casefold "
    "find rfind index rindex count isdigit isalpha isalnum isspace isnumeric isdecimal isupper islower istitle isascii "
    "removeprefix removesuffix partition rpartition keys values items get copy".split()
)
_FILTERS = frozenset(
    "abs attr capitalize count d default dictsort first float int items join last length list lower map max min reject "
    "rejectattr replace reverse round safe select selectattr sort string title tojson trim unique upper indent".split()
)


class Costly(Exception):
    """A template needs more than this process may spend on it."""


class GuardedSandbox(ImmutableSandboxedEnvironment):
    """The sandbox. All rendering happens inside `limited`."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self, **options: Any) -> None:
        # The optimizer would compute constants of any size while a template is compiled.
        super().__init__(optimized=False, finalize=_checked, **options)
        self._of_thread = threading.local()

    def guard(self) -> None:
        """Wrap the registered filters and tests. Call this after all of them are registered."""
        for table, known in ((self.filters, _FILTERS), (self.tests, None)):
            for name, function in list(table.items()):
                table[name] = self._ticking(name, function, known is None or name in known)

    def limited(self, render: Callable[[], str]) -> str:
        """Render within SECONDS. Raises Costly."""
        self._of_thread.end = time.monotonic() + SECONDS
        return render()

    def tick(self) -> None:
        """Count one step. Raises Costly if the time is over."""
        if time.monotonic() > self._of_thread.end:
            raise Costly

    @property
    def stepped(self) -> bool:
        """Count one step, and return True."""
        self.tick()
        return True

    def _ticking(self, name: str, function: Callable[..., Any], cheap: bool) -> Callable[..., Any]:
        check = _CHECKS.get(name)

        @functools.wraps(function)
        def checked(*args: Any, **kwargs: Any) -> Any:
            self.tick()
            if not cheap:
                raise Costly
            if check is not None:
                args = check(*args, **kwargs)
            return function(*args, **kwargs)

        return checked

    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        """Call a function as the sandbox does. The parameters have double underscores so that templates can use any
        name.
        """
        __self.tick()
        if isinstance(__obj, types.BuiltinMethodType):
            _check_method(__obj, args)
        elif __obj is generate_lorem_ipsum or getattr(__obj, "__name__", "") in ("format", "format_map"):
            raise Costly
        value = super().call(__context, __obj, *args, **kwargs)
        return made(value) if __obj is dict else value

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        _check_operation(operator, left, right)
        return super().call_binop(context, operator, left, right)

    def concat(self, pieces: Iterable[str]) -> str:
        """Join the output of a template, macro or block. Raises Costly if it is too long."""
        found, size = [], 0
        for piece in pieces:
            size += len(piece)
            if size > MAX_CHARS:
                raise Costly
            found.append(piece)
        return "".join(found)

    def glue(self, parts: Sequence[Any]) -> str:
        """Compute the `~` operator."""
        return self.concat(str(_checked(part)) for part in parts)

    @staticmethod
    def made(value: Any) -> Any:
        """Return a literal of a template, or a dict that it made. Raises Costly if it is too large."""
        return made(value)


class _Code(CodeGenerator):
    """Generates Python code that reports its steps."""

    def blockvisit(self, body: Iterable[nodes.Node], frame: Frame) -> None:
        self.writeline("environment.tick()")
        super().blockvisit(body, frame)

    def visit_For(self, node: nodes.For, frame: Frame) -> None:
        if node.test is not None:
            step = nodes.EnvironmentAttribute("stepped", lineno=node.lineno)
            node.test = nodes.And(step, node.test, lineno=node.lineno)
        super().visit_For(node, frame)

    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:
        self.write("environment.glue((")
        for part in node.nodes:
            self.visit(part, frame)
            self.write(", ")
        self.write("))")

    def visit_List(self, node: nodes.List, frame: Frame) -> None:
        self._made(super().visit_List, node, node.items, frame)

    def visit_Tuple(self, node: nodes.Tuple, frame: Frame) -> None:
        if node.ctx == "load":
            self._made(super().visit_Tuple, node, node.items, frame)
        else:
            super().visit_Tuple(node, frame)

    def visit_Dict(self, node: nodes.Dict, frame: Frame) -> None:
        self._made(super().visit_Dict, node, [pair.value for pair in node.items], frame)

    def visit_Name(self, node: nodes.Name, frame: Frame) -> None:
        if node.ctx == "load" and node.name in ("varargs", "kwargs"):  # values that arise without a literal
            self.write("environment.made(")
            super().visit_Name(node, frame)
            self.write(")")
        else:
            super().visit_Name(node, frame)

    def _made(self, visit: Callable[..., None], node: nodes.Node, items: Sequence[nodes.Node], frame: Frame) -> None:
        if all(isinstance(item, nodes.Const) for item in items):
            visit(node, frame)
            return
        self.write("environment.made(")
        visit(node, frame)
        self.write(")")

    def _output_child_to_const(self, node: nodes.Expr, frame: Frame, finalize: Any) -> str:
        if not isinstance(node, nodes.TemplateData | nodes.Const):
            raise nodes.Impossible  # computed when it is rendered, within the limits
        return super()._output_child_to_const(node, frame, finalize)


GuardedSandbox.code_generator_class = _Code


def made(value: Any) -> Any:
    """Return the value. Raises Costly if it has too many parts; shared parts count each time they occur."""
    _weigh(value, MAX_PARTS)
    return value


def _weigh(value: Any, left: int) -> int:
    """Return how many of the allowed parts remain after those of a value."""
    kind = type(value)
    if kind is str:
        left -= 1 + len(value) // _CHARS_PER_PART
    elif kind is list or kind is tuple:
        left -= 1
        for item in value:
            left = _weigh(item, left)
    elif kind is dict:
        left -= 1
        for key, item in value.items():
            left = _weigh(item, _weigh(key, left))
    elif isinstance(value, Namespace):
        raise Costly  # it may contain itself
    else:
        left -= 1
    if left < 0:
        raise Costly
    return left


def _checked(value: Any) -> Any:
    """Return a value for output: text and numbers as they are, other values only if they are small."""
    if type(value) is not str and not isinstance(value, int | float | Undefined):
        _weigh(value, MAX_PARTS)
    return value


def _check_chars(size: int) -> None:
    if size > MAX_CHARS:
        raise Costly


def _check_operation(operator: str, left: Any, right: Any) -> None:
    whole = isinstance(left, int) and isinstance(right, int)
    if operator == "+":
        if isinstance(left, str) and isinstance(right, str):
            _check_chars(len(left) + len(right))
        elif isinstance(left, list | tuple) and isinstance(right, list | tuple):
            _weigh(right, _weigh(left, MAX_PARTS))
    elif operator == "*":
        for many, times in ((left, right), (right, left)):
            if isinstance(times, int) and isinstance(many, str):
                _check_chars(len(many) * max(times, 0))
            elif isinstance(times, int) and isinstance(many, list | tuple):
                made(
                    [many] if (MAX_PARTS - _weigh(many, MAX_PARTS)) * max(times, 0) < MAX_PARTS else [None] * MAX_PARTS
                )
        if whole and left.bit_length() + right.bit_length() > _MAX_BITS:
            raise Costly
    elif operator == "**":
        if whole and left.bit_length() * max(right, 0) > _MAX_BITS:
            raise Costly
    elif isinstance(left, str):
        raise Costly  # a format may request any width


def _check_method(method: Any, args: tuple[Any, ...]) -> None:
    """Raise Costly for a method of a text, list or object that can return a large value."""
    name, of = method.__name__, method.__self__
    if name == "replace" and isinstance(of, str):
        _check_replace(None, of, *args)
    elif name == "join" and isinstance(of, str) and len(args) == 1 and isinstance(args[0], list | tuple):
        _check_join(None, args[0], of)
    elif isinstance(of, str | list | dict | tuple | int | float | types.NoneType) and name not in _METHODS:
        raise Costly


def _check_replace(context: Any, text: Any, old: Any = "", new: Any = "", *more: Any) -> tuple[Any, ...]:
    if not (isinstance(text, str) and isinstance(old, str) and isinstance(new, str)):
        raise Costly
    _check_chars(len(text) + text.count(old) * max(0, len(new) - len(old)))
    return context, text, old, new, *more


def _check_join(context: Any, value: Any, d: Any = "", attribute: Any = None) -> tuple[Any, ...]:
    items = value if isinstance(value, list | tuple | str) else list(value)
    if attribute is not None or not isinstance(d, str):
        raise Costly
    if not isinstance(items, str):
        made(items)
    _check_chars(len(d) * len(items))
    return context, items, d


def _check_indent(text: Any, width: Any = 4, *more: Any, **_: Any) -> tuple[Any, ...]:
    if not isinstance(text, str) or not isinstance(width, int | str):
        raise Costly
    step = len(width) if isinstance(width, str) else width
    _check_chars(len(text) + step * (text.count("\n") + 1))
    return text, width, *more


def _check_tojson(value: Any, *args: Any, indent: Any = None, **_: Any) -> tuple[Any, ...]:
    if args or not (indent is None or (isinstance(indent, int) and indent <= 16)):
        raise Costly
    return (made(value),)


# Filter -> function that checks its arguments and returns them.
_CHECKS: dict[str, Callable[..., tuple[Any, ...]]] = {
    "join": _check_join,
    "replace": _check_replace,
    "indent": _check_indent,
    "tojson": _check_tojson,
    "string": lambda value: (_checked(value),),
}
