"""The criterion for completed functions: headers of real files, and the judged part of an answer."""

from __future__ import annotations

import argparse
import ast
import dataclasses
import inspect
import random
import textwrap
import typing
import warnings

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ridgeline.evals import Verdict, function_headers, judge
from ridgeline.evals.completions import parsed_length

Function = ast.FunctionDef | ast.AsyncFunctionDef


def parses(text: str) -> bool:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    return True


def functions(text: str) -> list[Function]:
    """Return the functions in the order of the file."""
    nodes = [node for node in ast.walk(ast.parse(text)) if isinstance(node, Function)]
    return sorted(nodes, key=lambda node: (node.lineno, node.col_offset))


# ---- headers --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        *map(inspect.getsource, (textwrap, argparse, dataclasses, typing)),
        inspect.getsource(argparse).replace("\n", "\r\n"),
        textwrap.indent(inspect.getsource(textwrap), "\t").join(("if True:\n\tpass\n", "")),
    ],
    ids=["textwrap", "argparse", "dataclasses", "typing", "CRLF", "tabs"],
)
def test_headers_of_the_standard_library(text: str) -> None:
    """A header with a body is the function that it was cut from: name, arguments with defaults, annotations."""
    headers, nodes = function_headers(text), functions(text)
    assert len(headers) == len(nodes) > 10
    for header, node in zip(headers, nodes, strict=True):
        assert header.startswith(("def ", "async def "))
        assert header.endswith(":")
        (found,) = ast.parse(f"{header}\n    pass").body
        assert type(found) is type(node)
        assert isinstance(found, Function)
        assert found.name == node.name
        assert ast.dump(found.args) == ast.dump(node.args)
        assert ast.dump(found.returns or ast.Pass()) == ast.dump(node.returns or ast.Pass())


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("def f(): return 1", "def f():"),
        ("def f():return{1: 2}", "def f():"),
        ("def f(a): # why: so\n    pass\n", "def f(a):"),
        ("def f(a: int, b: 'x:y' = '):') -> dict[A, B]:\n    pass", "def f(a: int, b: 'x:y' = '):') -> dict[A, B]:"),
        ("def f(k=lambda x, y=(1): x[1:2]): pass", "def f(k=lambda x, y=(1): x[1:2]):"),
        ("def f() -> lambda x: x: pass", "def f() -> lambda x: x:"),
        ("def f() -> lambda x=lambda: 0: x: pass", "def f() -> lambda x=lambda: 0: x:"),
        ("def f(a={1: 2}[1], *, b=f'{1:>2}'): pass", "def f(a={1: 2}[1], *, b=f'{1:>2}'):"),
        ("@d(x=lambda: 1)\n@e\nasync  def f(\n    a,  # one: a\n\n    b\n) -> int:  # end\n    pass",
         "async  def f(\n    a,  # one: a\n\n    b\n) -> int:"),
        ("class A:\n    def f(\n        a,\n  b,\nc\n    ) : return 1\n", "def f(\n    a,\nb,\nc\n) :"),
        ("class A:\n\tdef f(a,\n\t      b): pass\n", "def f(a,\n      b):"),
        ("class A:\n    def f(a='''x\n     : y''',\n          b=1): pass", "def f(a='''x\n     : y''',\n      b=1):"),
        ("class A:\n    def f \\\n        (a): pass\n", "def f \\\n    (a):"),
        ("if 1:\n    ü = 1\n    def ä(ö: 'é:' = 'ß'): pass", "def ä(ö: 'é:' = 'ß'):"),
        ("undef = 'def g():'\ndef f(a,\r\n  b): pass\r\n", "def f(a,\n  b):"),
    ],
)  # fmt: skip
def test_where_a_header_begins_and_ends(text: str, expected: str) -> None:
    assert function_headers(text) == [expected]
    assert len(function_headers(f"{expected} pass")) == 1


def test_many_headers_and_none() -> None:
    text = "class A:\n    def f(self):\n        async def g(): pass\n        return g\ndef h(x): pass\n"
    assert function_headers(text) == ["def f(self):", "async def g():", "def h(x):"]
    for text in ("", "x = 1\n", "def f(:\n", "def f():\n", "lambda: 1", "\0"):
        assert function_headers(text) == []


# ---- verdicts -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("covered", "rest", "statements"),
    [
        ("", "", 0),
        ("", "\n", 0),
        ("", "\n    # to do", 0),
        ("return 1", "", 1),
        ("", ":\n    return 1", 0),
        ("", ")", 0),
        (" a", "", 1),
        (" return 1; x", "", 2),
        ("\n    return 1", "", 1),
        ("\n    'doc'\n    return 1\n", "", 2),
        ("\n    if x:\n        return 1", "", 2),
        ("\n    a = 1\n    return colo", "", 2),  # cut inside a name
        ("\n    a = 1\n    return ", "'colo", 2),  # inside a string
        ("\n    a = 1\n    b ", "= (", 2),
        ("\n    return 1\nclas", "s", 2),  # a cut word is a name
        ("\n    a\n    b", ") and much more", 2),
        ("\n    pass\n\ndef g():\n    pass  # end", "", 3),  # code after the function counts
        ("\n    await x\n    async with y: z", "", 3),
        ("\n    try:\n        a\n    except E:\n        b\n    match c:\n        case 1:\n            d\n", "", 5),
        ("\n    'ä'\n    'é'\n    ", "= 'ö'", 2),  # UTF-8 bytes
        ("\n    a\n    b # ", "\0", 2),
        ("\n    '\\d'\n    1 is 1", "", 2),  # warnings
    ],
)  # fmt: skip
@pytest.mark.parametrize("header", ["async def f():", "async def f(\n    a,  # b\n) -> int:"])
def test_verdicts(header: str, covered: str, rest: str, statements: int) -> None:
    found, share = judge(header, covered + rest), len(covered.encode()) / max(1, len((covered + rest).encode()))
    assert found == Verdict(statements, share)
    assert found.passed == (statements >= 2 and share >= 0.6)


def test_the_limits_are_reached() -> None:
    assert Verdict(2, 0.6).passed
    assert not Verdict(1, 1.0).passed
    assert not Verdict(100, 0.599).passed


@pytest.mark.parametrize("unreadable", ["(" * 300 + ")" * 300, "9" * 5000, "\ud800", "-" * 9000 + "1", "\0"])
def test_texts_that_python_cannot_parse(unreadable: str) -> None:
    """Text that is nested too deep, a number that is too long, and half a character: no error, and earlier statements
    count.
    """
    assert judge(f"def f(x={unreadable}):", "\n    a\n    b") == Verdict(0, 0.0)
    assert function_headers(f"def f(x={unreadable}): pass") == []
    if len(unreadable) < 9000:  # the last text has many prefixes, and each takes long
        found = judge("def f():", f"\n    a\n    b\n    # {chr(233)}\n    {unreadable}")
        assert found.num_statements in (2, 3)  # a prefix of the number is a statement
        assert 0 < found.covered < 1


PIECES = [
    "\n",
    "    ",
    "  ",
    "a",
    " = ",
    "1",
    "(",
    ")",
    "return",
    "if",
    ":",
    "'",
    '"""',
    "#",
    "\\",
    "é",
    "\0",
    "class",
    "x",
]


@given(st.sampled_from(["def f():", "async def f(a: int = 1):", ""]), st.lists(st.sampled_from(PIECES), max_size=40))
def test_the_prefix_is_the_longest_that_parses(header: str, pieces: list[str]) -> None:
    completion = "".join(pieces)
    end = parsed_length(header, completion)
    for more in range(0 if end is None else end + 1, len(completion) + 1):
        assert not parses(header + completion[:more])
    if end is not None:
        assert parses(header + completion[:end])
        assert judge(header, completion[:end]) == dataclasses.replace(judge(header, completion), covered=float(end > 0))


@given(st.text(max_size=40))
def test_any_text_is_judged(completion: str) -> None:
    found = judge("def f():", completion)
    assert 0 <= found.covered <= 1
    assert found.num_statements >= 0
    assert (found.num_statements > 0) == (found.covered > 0)


@settings(max_examples=30)
@given(st.randoms(use_true_random=False))
def test_real_functions_that_are_cut_off(rng: random.Random) -> None:
    """A whole function is covered and has its own statements; in a part, the statements before the cut count."""
    text = inspect.getsource(textwrap)
    outer = [pair for pair in zip(function_headers(text), functions(text), strict=True) if not pair[1].col_offset]
    header, node = rng.choice(outer)
    source = ast.get_source_segment(text, node)
    assert source
    assert judge(header, source.removeprefix(header)) == Verdict(len(inner(source)), 1.0)
    cut = rng.randrange(len(header), len(source))
    ends = [sum(map(len, source.splitlines(True)[: n.end_lineno])) for n in inner(source) if n.end_lineno]
    assert judge(header, source[len(header) : cut]).num_statements >= sum(end <= cut for end in ends)


def inner(source: str) -> list[ast.stmt]:
    """Return the statements of a function."""
    return [n for n in ast.walk(ast.parse(source).body[0]) if isinstance(n, ast.stmt)][1:]
