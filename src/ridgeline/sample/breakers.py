"""Turn the texts at which DRY stops to match into token ids, as llama.cpp does.

Tokenizers join characters, so a text may end inside a token, or begin in the middle of one. A breaker is therefore
every token whose text contains it, every token that ends with its beginning, followed by the tokens of the rest, and
the tokens of the text itself.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import accumulate

from ridgeline.load.tokenizer import Tokenizer
from ridgeline.spec.breakers import TokenBreaker, check_total

NAME = "dry_sequence_breakers"
_SEPARATOR = "\uffff"  # is no character
_LAST = "\U0010ffff"  # sorts behind all characters
_KNOWN = 8  # results that are kept: the prompts of a call have the same breakers


class BreakerIndex:
    """Finds the tokens of one vocabulary that contain a text or end with its beginning. Safe to share between threads.

    A text costs one scan of the vocabulary and a binary search for each of its characters.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        """vocab_size: number of tokens of the model; other tokens of the tokenizer are ignored."""
        self._tokenizer = tokenizer
        texts = tokenizer.token_texts()[:vocab_size]
        self._joined = _SEPARATOR.join(texts)
        self._starts = [0, *accumulate(len(text) + 1 for text in texts)]
        ends = sorted((text[::-1], token) for token, text in enumerate(texts) if text)
        self._ends, self._ids = [text for text, _ in ends], [token for _, token in ends]
        self.find = lru_cache(_KNOWN)(self._find)

    def _find(self, texts: tuple[str, ...]) -> tuple[TokenBreaker, ...]:
        """Return the breakers of some texts. Raises RequestError if they match too many tokens."""
        singles: set[int] = set()
        for text in texts:
            singles.update(self._containing(text))
            check_total(NAME, len(singles))
        found = [TokenBreaker(frozenset(singles))] if singles else []
        total = len(singles)
        for text in texts:
            for heads, tail in self._several(text):
                if heads := heads - singles:
                    found.append(TokenBreaker(heads, tail))
                    total += len(found[-1])
                    check_total(NAME, total)
        return tuple(found)

    def _several(self, text: str) -> Iterator[tuple[frozenset[int], tuple[int, ...]]]:
        """Yield the heads and tails of the breakers of several tokens."""
        for size in range(1, len(text)):
            yield frozenset(self._ending(text[:size])), self._encode(text[size:])
        head, *tail = self._encode(text) or (-1,)
        if tail:  # a character may be several tokens, too
            yield frozenset({head}), tuple(tail)

    def _containing(self, text: str) -> Iterator[int]:
        """Yield the tokens whose text contains `text`."""
        at = -1 if _SEPARATOR in text else self._joined.find(text)
        while at >= 0:
            token = bisect_right(self._starts, at) - 1
            yield token
            at = self._joined.find(text, self._starts[token + 1])

    def _ending(self, text: str) -> Sequence[int]:
        """Return the tokens whose text ends with `text`."""
        reverse = text[::-1]
        return self._ids[bisect_left(self._ends, reverse) : bisect_left(self._ends, reverse + _LAST)]

    def _encode(self, text: str) -> tuple[int, ...]:
        """Return the tokens of a text that follows other text: without the space that some tokenizers begin with."""
        before = self._tokenizer.encode("\n", add_special_tokens=False)
        ids = self._tokenizer.encode("\n" + text, add_special_tokens=False)
        if ids[: len(before)] == before and len(ids) > len(before):
            return tuple(ids[len(before) :])
        return tuple(self._tokenizer.encode(text, add_special_tokens=False))
