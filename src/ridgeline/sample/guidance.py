"""Use llguidance (github.com/guidance-ai/llguidance), an extra: its notation, its compiler and its limits.

A structure is compiled twice: first in a helper process, which may run out of time, memory or stack without harm, and
then, if that succeeded, in the process of the engine. Both compile the same text under the same limits.
"""

from __future__ import annotations

import importlib
import json
import os
import re
import sys
from collections.abc import Sequence
from typing import Any

from ridgeline.bounded import Limits, job
from ridgeline.errors import RequestError
from ridgeline.sample.guidance_errors import sentence
from ridgeline.sample.schema_ends import endless
from ridgeline.spec.structure import MAX_STRUCTURE_CHARACTERS, StructuredOutputs

# Allowed between two tokens of JSON: nothing, a space, or a new line with its indentation. Without a bound, small
# models write white space until max_tokens.
JSON_STYLE = {"whitespace_pattern": r"| |\n[ ]{0,16}"}
GBNF = re.compile(r"(?m)^\s*[\w-]+\s*::=")  # a rule in llama.cpp's notation; Lark has no such line
# The library's own limits. A state of its lexer takes about 1 KiB of each answer, and long texts need many: a text of
# 10,000 characters about 60,000. The others are its defaults, written down: fuel is about 50 and 14 units a
# microsecond, items about 20.
PARSER_LIMITS = {
    "max_lexer_states": 100_000,
    "initial_lexer_fuel": 1_000_000,
    "step_lexer_fuel": 200_000,
    "max_items_in_row": 2_000,
    "step_max_items": 50_000,
    "max_grammar_size": 500_000,
    "verbose_errors": False,
}
CHECK_LIMITS = Limits(seconds=5.0, memory_bytes=512 << 20, stack_bytes=8 << 20)
# Stack of the threads that compile checked structures and make masks. It is far larger than the check allows, since an
# overflow there would end the process.
STACK_BYTES = 64 << 20
NICENESS = 10  # priority of slow work on clients' structures


def library() -> Any:
    """Return the module. Raises RequestError if it is not installed."""
    try:
        return importlib.import_module("llguidance")
    except ImportError:
        raise RequestError("structured_outputs needs llguidance: pip install 'ridgeline[structured]'") from None


def source_of(structure: StructuredOutputs) -> str:
    """Return the structure in llguidance's notation. Raises RequestError if it is not valid or too long."""
    source = _source(library().LLMatcher, structure)
    if len(source) > MAX_STRUCTURE_CHARACTERS:
        raise RequestError(
            f"structured_outputs takes {len(source)} characters in the notation of its compiler; the limit is "
            f"{MAX_STRUCTURE_CHARACTERS}: simplify it"
        )
    return source


def compile_source(vocabulary: Any, source: str) -> Any:
    """Return a new matcher. Raises RequestError if the source cannot be compiled, or if no text satisfies it."""
    guidance = library()
    try:
        matcher = guidance.LLMatcher(vocabulary, source, log_level=0, limits=guidance.LLParserLimits(**PARSER_LIMITS))
    except (ValueError, TypeError) as e:
        raise RequestError(sentence(str(e))) from None
    if not matcher.is_error():
        matcher.compute_bitmask()  # finds out whether any text satisfies it
    if matcher.is_error():
        raise RequestError(sentence(matcher.get_error()))
    return matcher


@job
def set_up(tokenizer_json: str, size: int, eos: Sequence[int]) -> Any:
    """Prepare a helper process: lower its priority, and return the vocabulary."""
    if sys.platform != "win32":
        os.nice(NICENESS)
    return vocabulary_of(tokenizer_json, size, eos)


def vocabulary_of(tokenizer_json: str, size: int, eos: Sequence[int]) -> Any:
    """Return the library's form of a tokenizer. size: number of the model's tokens; eos: its end-of-sequence tokens."""
    return library().LLTokenizer(tokenizer_json, n_vocab=size, eos_token=list(eos))


@job
def check(vocabulary: Any, kind: str, value: Any, whitespace_pattern: str | None) -> str:
    """Compile a structure, make its first mask, and return its source. Raises RequestError.

    kind, value: the field of StructuredOutputs that is set, besides whitespace_pattern.
    """
    source = source_of(StructuredOutputs(**{kind: value, "whitespace_pattern": whitespace_pattern}))
    compile_source(vocabulary, source)
    return source


def _source(matcher: Any, structure: StructuredOutputs) -> str:
    if structure.json_object or structure.json is not None:
        schema = '{"type": "object"}' if structure.json is None else _schema(structure.json)
        pattern = structure.whitespace_pattern
        style = JSON_STYLE if pattern is None else {"whitespace_pattern": pattern}
        try:
            return str(matcher.grammar_from_json_schema(schema, overrides=style))
        except (ValueError, RecursionError) as e:
            raise RequestError(sentence(str(e))) from None
    if structure.regex is not None:
        return str(matcher.grammar_from_regex(structure.regex))
    if structure.choice is not None:
        return str(matcher.grammar_from_lark("start: " + " | ".join(json.dumps(c) for c in structure.choice)))
    return str(matcher.grammar_from_lark(_lark(structure.grammar or "")))


def _lark(text: str) -> str:
    """Return a grammar in Lark's notation, given in Lark's or in llama.cpp's (GBNF). Raises RequestError."""
    if not GBNF.search(text):
        return text
    try:
        return str(importlib.import_module("llguidance.gbnf_to_lark").gbnf_to_lark(text))
    except RecursionError:
        raise RequestError(sentence("too deeply nested")) from None
    except Exception as e:  # the module's errors have no common class
        raise RequestError(
            f"structured_outputs: the grammar is not valid GBNF: {' '.join(str(e).split()):.200}"
        ) from None


def _schema(text: str) -> str:
    """Return a JSON schema as an object. Raises RequestError if it is not valid."""
    try:
        schema = json.loads(text, parse_constant=_not_json)
    except RecursionError:
        raise RequestError(sentence("recursion limit exceeded")) from None
    except ValueError as e:
        raise RequestError(f"structured_outputs: the schema is not JSON: {e}") from None
    if schema is True:  # every value is valid, as with an empty schema
        return "{}"
    if schema is False:
        raise RequestError("structured_outputs: the schema is false, so no value satisfies it")
    if not isinstance(schema, dict):
        raise RequestError(f"structured_outputs: a JSON schema is an object, true or false; this one is {text!r:.40}")
    if (place := endless(schema)) is not None:
        raise RequestError(
            f"structured_outputs: no value satisfies the schema, because {place} demands itself again without end: "
            "make the reference optional, or allow null beside it"
        )
    return text


def _not_json(name: str) -> None:
    raise ValueError(f"{name} is not a number of JSON")
