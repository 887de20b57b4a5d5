"""What an answer must follow, as masks over the vocabulary: JSON schemas, regular expressions, grammars, choices.

llguidance compiles a structure and walks it token by token (github.com/guidance-ai/llguidance); it is an extra. It
works on the bytes of the vocabulary, and is told the model's vocabulary size and its end-of-sequence tokens.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Collection
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from ridgeline.errors import RequestError
from ridgeline.load.tokenizer import Tokenizer
from ridgeline.spec.request import SamplingParams, StructuredOutputs

if TYPE_CHECKING:
    from ridgeline.runtime.generator import GenerationRequest

Mask = np.ndarray[Any, np.dtype[np.bool_]]
MAX_GRAMMAR_BYTES = 1 << 18
# Between two tokens of JSON: nothing, a space, or a new line and its indentation. Without a bound small models write
# white space until their tokens are used up.
JSON_STYLE = {"whitespace_pattern": r"| |\n[ ]{0,16}"}
_SHOWN = 300  # characters of llguidance's errors


class Matcher:
    """One answer on its way through a grammar."""

    def __init__(self, matcher: Any) -> None:
        self._matcher = matcher
        self._bits: bytes | None = None  # of the next token's mask

    def prepare(self) -> None:
        """Make the mask of the next token, for `allowed` to hand over."""
        if self._bits is None:
            self._bits = self._matcher.compute_bitmask()

    def allowed(self) -> Mask:
        """Which tokens may come next [at least vocabulary]. Raises RequestError where the grammar is too complex."""
        self.prepare()
        if self._matcher.is_error():
            raise RequestError(f"structured_outputs: {_line(self._matcher.get_error())}")
        return np.unpackbits(np.frombuffer(self._bits or b"", np.uint8), bitorder="little").astype(np.bool_)

    def push(self, token: int) -> None:
        """One more token of the answer, which was allowed."""
        self._bits = None
        self._matcher.consume_token(token)


class Grammar:
    """A compiled structure; any number of answers may follow it."""

    def __init__(self, matcher: Any) -> None:
        self._matcher = matcher

    def start(self) -> Matcher:
        """At its beginning."""
        return Matcher(self._matcher.deep_copy())


class Grammars:
    """Compiles structures for one vocabulary. Safe to call from several threads.

    vocab_size: of the model; its logits have as many. eos: its end-of-sequence tokens.
    """

    def __init__(self, tokenizer: Tokenizer | None, vocab_size: int, eos: Collection[int]) -> None:
        self._tokenizer, self._vocab_size, self._eos = tokenizer, vocab_size, sorted(eos)

    def compile(self, structure: StructuredOutputs) -> Grammar:
        """Raises RequestError for a structure that cannot be understood, or that is too complex."""
        guidance, vocabulary = self._vocabulary
        source = _source(guidance.LLMatcher, structure)
        if len(source) > MAX_GRAMMAR_BYTES:
            raise RequestError(
                f"structured_outputs has {len(source)} characters; the limit is {MAX_GRAMMAR_BYTES}: simplify it"
            )
        try:
            matcher = guidance.LLMatcher(
                vocabulary, source, log_level=0, limits=guidance.LLParserLimits(verbose_errors=False)
            )
        except (ValueError, TypeError) as e:
            raise RequestError(f"structured_outputs: {_line(str(e))}") from None
        if matcher.is_error():
            raise RequestError(f"structured_outputs: {_line(matcher.get_error())}")
        return Grammar(matcher)

    def bound(self, request: GenerationRequest) -> GenerationRequest:
        """The request with its grammar, if it asks for one and has none yet. Raises as `compile`."""
        params = request.params
        if not isinstance(params, SamplingParams) or params.structured_outputs is None or request.grammar is not None:
            return request
        return replace(request, grammar=self.compile(params.structured_outputs))

    @cached_property
    def _vocabulary(self) -> tuple[Any, Any]:
        """The library, and what it makes of the tokenizer, which takes a while."""
        if self._tokenizer is None:
            raise RequestError("structured_outputs needs a tokenizer, and the model has none")
        if not self._eos:
            raise RequestError("structured_outputs needs an end-of-sequence token, and the model names none")
        try:
            guidance = importlib.import_module("llguidance")
        except ImportError:
            raise RequestError("structured_outputs needs llguidance: pip install 'ridgeline[structured]'") from None
        size = max(self._vocab_size, self._tokenizer.vocab_size)
        return guidance, guidance.LLTokenizer(self._tokenizer.to_json(), n_vocab=size, eos_token=self._eos)


def _source(matcher: Any, structure: StructuredOutputs) -> str:
    """The structure in llguidance's own notation."""
    try:
        if structure.json_object:
            return str(matcher.grammar_from_json_schema('{"type": "object"}', overrides=JSON_STYLE))
        if structure.json is not None:
            return str(matcher.grammar_from_json_schema(structure.json, overrides=JSON_STYLE))
        if structure.regex is not None:
            return str(matcher.grammar_from_regex(structure.regex))
    except (ValueError, RecursionError) as e:
        raise RequestError(f"structured_outputs: {_line(str(e))}") from None
    if structure.choice is not None:
        return str(matcher.grammar_from_lark("start: " + " | ".join(json.dumps(c) for c in structure.choice)))
    return str(matcher.grammar_from_lark(structure.grammar or ""))


def _line(text: str) -> str:
    return " ".join(text.split())[:_SHOWN]
