"""Compile structures (JSON schemas, regular expressions, grammars, choices) for one vocabulary.

A structure comes from a client, who may be hostile. A helper process compiles it first, under limits of time, memory
and stack (bounded/). Only a structure that passed is compiled here.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from typing import Any

from ridgeline.errors import RequestError
from ridgeline.load.tokenizer import Tokenizer
from ridgeline.sample import guidance
from ridgeline.sample.grammar_checks import GrammarChecks
from ridgeline.sample.masks import Grammar, MaskThreads, deep_threads, step_back
from ridgeline.spec.structure import StructuredOutputs

COMPILING = 2  # number of structures that are compiled at once, after their check
MAX_KEPT = 64  # number of compiled structures that are kept for later requests
KEPT_SECONDS = 0.02  # CPU time to compile a structure that is kept; one that takes longer may need much memory


class Grammars:
    """Compiles structures for one vocabulary. Safe to call from several threads.

    vocab_size: number of logits of the model. eos: its end-of-sequence tokens.
    """

    def __init__(self, tokenizer: Tokenizer | None, vocab_size: int, eos: Collection[int]) -> None:
        self._tokenizer, self._vocab_size, self._eos = tokenizer, vocab_size, sorted(eos)
        self._masks = MaskThreads()
        self._checks = GrammarChecks(self._arguments)
        self._lock = threading.Lock()
        self._kept: OrderedDict[str, Grammar] = OrderedDict()  # by source, the most recently used last

    def compile(self, structure: StructuredOutputs) -> Grammar:
        """Return a structure as a grammar. Raises RequestError if it is not valid or exceeds a limit."""
        source = self._checks.source(structure)
        with self._lock:
            if source in self._kept:
                self._kept.move_to_end(source)
                return self._kept[source]
        return self._compiling.submit(self._compile, source).result()

    def is_known(self, structure: StructuredOutputs) -> bool:
        """Return whether the structure was checked recently, so that its result is available at once."""
        return self._checks.known(structure)

    def _compile(self, source: str) -> Grammar:
        """Compile a source that passed its check, and keep the result if that was quick."""
        vocabulary = self._vocabulary
        start = time.thread_time()
        grammar = Grammar(guidance.compile_source(vocabulary, source), self._masks)
        if time.thread_time() - start < KEPT_SECONDS:
            with self._lock:
                self._kept[source] = grammar
                while len(self._kept) > MAX_KEPT:
                    self._kept.popitem(last=False)
        return grammar

    @cached_property
    def _compiling(self) -> ThreadPoolExecutor:
        return deep_threads(COMPILING, "ridgeline-grammar", step_back)

    @cached_property
    def _vocabulary(self) -> Any:
        """Return the library's form of the tokenizer; making it takes a while."""
        return guidance.vocabulary_of(*self._arguments())

    def _arguments(self) -> tuple[str, int, list[int]]:
        """Return the arguments of `vocabulary_of`. Raises RequestError if the model cannot have structures."""
        if self._tokenizer is None:
            raise RequestError("structured_outputs needs a tokenizer, and the model has none")
        if not self._eos:
            raise RequestError("structured_outputs needs an end-of-sequence token, and the model names none")
        guidance.library()
        return self._tokenizer.to_json(), max(self._vocab_size, self._tokenizer.vocab_size), self._eos
