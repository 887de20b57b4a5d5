"""Split documents into training and held-out ones, so that no function is on both sides.

A file is on one side as a whole, by a hash of its name. A function that occurs in several files could then be on both
sides; such functions are removed from the held-out files. Two functions are equal if their syntax trees are: names and
docstrings count, but comments, layout and line numbers do not. Only Python files are searched for functions.
"""

from __future__ import annotations

import ast
import hashlib
import re
import textwrap
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from ridgeline.errors import DataError, RequestError
from ridgeline.evals.python_text import LINE, parse
from ridgeline.train.data.corpus import Document

_DEF = re.compile(r"([ \t]*)(?:async[ \t]+)?def[ \t]")
_Function = ast.FunctionDef | ast.AsyncFunctionDef
_Inside = ast.stmt | ast.excepthandler | ast.match_case  # nodes that can contain a function


@dataclass(frozen=True, slots=True)
class Split:
    """The two sides, each sorted by name.

    num_cut: functions that were removed from held-out documents, not counting functions inside of them. num_left:
    functions that remain there, inner ones included. dropped: names of documents that were empty or did not parse after
    the cuts.
    """

    train: tuple[Document, ...]
    held_out: tuple[Document, ...]
    num_cut: int
    num_left: int
    dropped: tuple[str, ...]


def split(documents: Sequence[Document], held_out_share: float, seed: int = 0) -> Split:
    """Hold out about `held_out_share` (0 to 1) of the documents. The choice depends only on a document's name and the
    seed.

    Python files that do not parse are always training documents. Raises RequestError for a share outside [0, 1), and
    DataError if the share is above 0 and a side is empty.
    """
    if not 0 <= held_out_share < 1:
        raise RequestError(f"the held-out share is {held_out_share}; it must be from 0 to less than 1")
    train: list[Document] = []
    candidates: list[Document] = []
    for document in documents:
        chosen = _draw(seed, document.name) < held_out_share
        may = not document.is_python or (chosen and parse(document.text) is not None)
        (candidates if chosen and may else train).append(document)
    names = {f.name for d in candidates if d.is_python for f in _functions(parse(d.text))}
    known = {key for d in train if d.is_python for key in _train_keys(d.text, names)}
    cuts = [(d, *(cut_functions(d.text, known) if d.is_python else (d.text, 0))) for d in candidates]
    held_out = tuple(Document(d.name, text) for d, text, _ in cuts if text and text.strip())
    if held_out_share and not (train and held_out):
        raise DataError(
            f"{len(documents)} documents give {len(train)} for training and {len(held_out)} held out (share "
            f"{held_out_share}, seed {seed}), and neither may be 0; give more documents, or another share or seed"
        )
    return Split(
        train=tuple(train),
        held_out=held_out,
        num_cut=sum(cut for _, _, cut in cuts),
        num_left=sum(1 for d in held_out if d.is_python for _ in _functions(parse(d.text))),
        dropped=tuple(d.name for d, text, _ in cuts if not (text and text.strip())),
    )


def function_key(function: ast.AST) -> bytes:
    """Return a key that is equal for equal trees. Unlike ast.dump, it works for trees of any depth and numbers of any
    length.
    """
    parts: list[str] = []
    todo: list[object] = [function]
    while todo:
        item = todo.pop()
        if isinstance(item, ast.AST):
            parts.append(type(item).__name__)
            todo.extend(value for _, value in ast.iter_fields(item))
        elif isinstance(item, list):
            parts.append(f"[{len(item)}")
            todo.extend(item)
        else:
            parts.append(hex(item) if type(item) is int else repr(item))
    return hashlib.sha256("\n".join(parts).encode()).digest()


def cut_functions(text: str, keys: Collection[bytes]) -> tuple[str | None, int]:
    """Return `text` without the functions that have these keys, decorators included, and the number of functions
    removed.

    A block that would become empty gets a `pass`. After a cut inside a function, the rest may itself have one of the
    keys, so this repeats until no function has one. The text is None if the rest does not parse.
    """
    num_cut = 0
    while (tree := parse(text)) is not None:
        lines: list[str] = LINE.findall(text)
        doomed = list(_doomed(tree, keys))
        if not doomed:
            return text, num_cut
        num_cut += len(doomed)
        for function, stand_in in doomed:
            first = min(n.lineno for n in (function, *function.decorator_list)) - 1
            last = function.end_lineno or function.lineno
            indent = lines[function.lineno - 1][: function.col_offset]
            lines[first:last] = [f"{indent}pass\n" if stand_in else "", *[""] * (last - first - 1)]
        text = "".join(lines)
    return None, num_cut


def _draw(seed: int, name: str) -> float:
    """Return a number in [0, 1) that depends only on the seed and the name."""
    return int.from_bytes(hashlib.sha256(f"{seed}:{name}".encode()).digest()[:6]) / 2**48


def _functions(tree: ast.Module | None) -> Iterator[_Function]:
    return (node for node in ast.walk(tree) if isinstance(node, _Function)) if tree else iter(())


def _train_keys(text: str, names: Collection[str]) -> Iterator[bytes]:
    """Yield the keys of functions with these names. If a text does not parse, its functions that parse alone
    are used.
    """
    tree = parse(text)
    for part in [tree] if tree else map(parse, _blocks(text)):
        for function in _functions(part):
            if function.name in names:
                yield function_key(function)


def _blocks(text: str) -> Iterator[str]:
    """Yield each `def` with its decorators and body: the text up to the next line that is not indented deeper."""
    lines: list[str] = LINE.findall(text)
    for number, line in enumerate(lines):
        if match := _DEF.match(line):
            first = number
            while first and lines[first - 1].startswith(f"{match[1]}@"):
                first -= 1
            inside = (i for i in range(number + 1, len(lines)) if _ends(lines[i], len(match[1])))
            yield textwrap.dedent("".join(lines[first : next(inside, len(lines))]))


def _ends(line: str, depth: int) -> bool:
    return bool(line.strip()) and len(line) - len(line.lstrip()) <= depth


def _doomed(tree: ast.Module, keys: Collection[bytes]) -> Iterator[tuple[_Function, bool]]:
    """Yield the outermost functions with these keys, and whether a `pass` must replace it: the last one of a block that
    is removed entirely.
    """
    todo: list[ast.AST] = [tree]
    while todo:
        node = todo.pop()
        for _, block in ast.iter_fields(node):
            if not isinstance(block, list):
                continue  # an expression contains no function definition
            found = [child for child in block if isinstance(child, _Function) and function_key(child) in keys]
            todo.extend(child for child in block if isinstance(child, _Inside) and child not in found)
            fills = len(found) == len(block) and node is not tree
            yield from ((function, fills and function is found[-1]) for function in found)
