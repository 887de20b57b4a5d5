"""Make Python texts that begin with a function, as prompts do: an unindented `def`, and the lines below it.

A file begins with a docstring and imports, so a model trained on files alone never sees a text that begins with a
`def`.
"""

from __future__ import annotations

import ast
import hashlib
import json
import tokenize
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path
from typing import Literal

import numpy as np

from ridgeline.errors import DataError
from ridgeline.evals.python_text import LINE, parse
from ridgeline.train.data.corpus import Document
from ridgeline.train.data.folder import TrainingData
from ridgeline.train.data.shards import Ints, Shard, encode, write_tokens

Form = Literal["functions", "headers", "code"]


@dataclass(frozen=True, slots=True)
class FunctionOptions:
    """num_functions: number of functions to draw, with `seed`. max_bytes: longest text in bytes; it ends with a
    complete line.
    """

    num_functions: int
    max_bytes: int
    seed: int = 0


@dataclass(frozen=True, slots=True)
class FunctionText:
    """A text that begins with a function. is_whole: whether it ends with the function's class or module, not at
    max_bytes.
    """

    document: Document
    is_whole: bool


def draw_functions(
    documents: Sequence[Document], options: FunctionOptions, *, code_only: bool = False
) -> list[FunctionText]:
    """Draw functions of the Python documents, with the rest of their class or module, without their indentation.

    code_only: remove comments and docstrings. Raises DataError if there are fewer functions than requested.
    """
    found = [source for document in documents if document.is_python for source in _functions(document)]
    if len(found) < options.num_functions:
        raise DataError(f"the documents have only {len(found):,} functions, {options.num_functions:,} are requested")
    chosen = np.random.default_rng(options.seed).permutation(len(found))[: options.num_functions]
    lines: dict[str, list[str]] = {}
    texts = []
    for i in sorted(chosen.tolist()):
        document = found[i][0]
        if document.name not in lines:
            lines[document.name] = code_lines(document.text) if code_only else LINE.findall(document.text)
        texts.append(_text(found[i], lines[document.name], options.max_bytes))
    return texts


def write_functions(folder: Path, data: TrainingData, options: FunctionOptions, form: Form) -> Shard:
    """Write a shard of the training side and of functions from it into a new folder; one of an earlier run is reused.

    form: "functions": the texts as they are. "headers": the header of every second function is encoded separately, as
    in a prompt (inside a text, a colon and the line end after it may be one token, which no prompt ends with). "code":
    like "headers", without comments and docstrings.
    """
    made_of = hashlib.sha256(json.dumps([data.manifest.hash, asdict(options), form]).encode()).hexdigest()
    if folder.exists():
        return Shard.open(folder).check_made_of(made_of)
    texts = draw_functions(data.documents, options, code_only=form == "code")
    encoded = encode([text.document for text in texts], data.tokenizer)
    functions: Iterator[Ints] = (ids if text.is_whole else ids[:-1] for ids, text in zip(encoded, texts, strict=True))
    if form != "functions":
        functions = _with_headers(functions, texts, data)
    whole = (data.train.document(i) for i in range(data.train.info.num_documents))
    num_bytes = data.train.info.num_bytes + sum(len(t.document.text.encode()) for t in texts)
    return write_tokens(folder, chain(whole, functions), data.tokenizer, made_of, num_bytes)


def code_lines(text: str) -> list[str]:
    """Return the lines of a valid Python text without comments. Lines of docstrings and lines with only a comment are
    empty.

    A docstring that is the whole body stays.
    """
    lines: list[str] = LINE.findall(text)
    tree = parse(text)
    assert tree is not None
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and len(node.body) > 1:
            first = node.body[0]
            alone = node.body[1].lineno > (first.end_lineno or 0)
            if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and alone:
                for i in range(first.lineno - 1, first.end_lineno or first.lineno):
                    lines[i] = ""
    for token in tokenize.generate_tokens(iter(LINE.findall(text)).__next__):
        if token.type == tokenize.COMMENT and lines[token.start[0] - 1]:
            line = lines[token.start[0] - 1]
            before = line[: token.start[1]].rstrip()
            lines[token.start[0] - 1] = f"{before}\n" if before else ""
    return lines


def _with_headers(functions: Iterable[Ints], texts: Sequence[FunctionText], data: TrainingData) -> Iterator[Ints]:
    """Encode every second function again in two parts: up to the first colon that ends a line, and the rest."""
    for i, (ids, text) in enumerate(zip(functions, texts, strict=True)):
        header, colon, rest = text.document.text.partition(":\n")
        if i % 2 or not colon:
            yield ids
            continue
        parts = data.tokenizer.encode_batch_fast([f"{header}:", f"\n{rest}"], add_special_tokens=False)
        end = [data.train.info.end_of_text_id]
        yield np.array([*end, *parts[0].ids, *parts[1].ids, *(end if text.is_whole else [])], np.int64)


_Source = tuple[Document, int, int, int]  # document, first and last line (from 1), indentation


def _functions(document: Document) -> Iterator[_Source]:
    tree = parse(document.text)
    if tree is None:
        return
    for parent in ast.walk(tree):
        body = getattr(parent, "body", None)
        if not isinstance(body, list):
            continue
        for node in body:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                yield document, node.lineno, body[-1].end_lineno, node.col_offset


def _text(source: _Source, lines: Sequence[str], max_bytes: int) -> FunctionText:
    document, first, last, indent = source
    text, is_whole = _cut("".join(_left(line, indent) for line in lines[first - 1 : last] if line), max_bytes)
    return FunctionText(Document(f"{document.name}:{first}", text), is_whole)


def _left(line: str, indent: int) -> str:
    """Remove up to `indent` characters of a line's indentation."""
    return line[min(indent, len(line) - len(line.lstrip(" \t"))) :] if line.strip() else "\n"


def _cut(text: str, max_bytes: int) -> tuple[str, bool]:
    """Return the lines that fit, at least one, and whether these are all."""
    if len(text.encode()) <= max_bytes:
        return text, True
    short = text.encode()[:max_bytes].decode(errors="ignore")
    end = short.rfind("\n") + 1
    return (short[:end] if end else text[: text.find("\n") + 1]), False
