"""Compute the least number of tokens of a text before it is tokenized: its characters divided by the longest token's.

This holds if no step of the tokenizer deletes characters or joins any number of them in one token. Each step is judged
by its kind in tokenizer.json; for unknown kinds there is no bound.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Collection, Iterator
from typing import Any

import tokenizers

# Unicode composes at most 4 characters into one (the longest canonical decomposition).
_COMPOSED = 4
# Normalizers that never make a text shorter.
_KEEPING = frozenset({"NFD", "NFKD", "Lowercase", "Prepend", "ByteLevel"})
# Pre-tokenizers that only cut a text into pieces, unless their behavior is to remove something.
_CUTTING = frozenset({"ByteLevel", "Metaspace", "Digits", "Punctuation", "Split", "UnicodeScripts", "FixedLength"})
_BYTES = [f"<0x{byte:02X}>" for byte in range(256)]


def characters_per_token(backend: tokenizers.Tokenizer, longest: int) -> int | None:
    """Return the most characters of a text that one token can stand for, or None if there may be no such number.

    longest: characters of the vocabulary's longest entry.
    """
    if any(token.lstrip or token.rstrip for token in backend.get_added_tokens_decoder().values()):
        return None  # such tokens include the spaces around them
    cut = [*_steps(backend.pre_tokenizer, "pretokenizers")]
    if not all(step["type"] in _CUTTING and step.get("behavior") != "Removed" for step in cut):
        return None
    normalizers = [*_steps(backend.normalizer, "normalizers")]
    shrinking = math.prod(map(_shrinking, normalizers))
    as_bytes = any(step["type"] == "ByteLevel" for step in (*cut, *normalizers))
    if not math.isfinite(shrinking) or not _keeps_unknown(backend, as_bytes):
        return None
    return math.ceil(longest * shrinking)


def least_tokens(text: str, per_token: int, leading: Collection[str]) -> int:
    """Return the least tokens that a text can have. leading: tokens of which several at the start may become one."""
    tokens = "|".join(re.escape(token) for token in leading if token)
    found = re.match(f"(?:{tokens})*+", text) if tokens else None  # possessive, so that repetitions need no memory
    return -(-(len(text) - (found.end() if found else 0)) // per_token)


def _steps(part: Any, name: str) -> Iterator[dict[str, Any]]:
    """Yield the steps of a normalizer or pre-tokenizer, with sequences expanded."""
    if part is not None:
        yield from _flat(json.loads(part.__getstate__()), name)


def _flat(step: dict[str, Any], name: str) -> Iterator[dict[str, Any]]:
    if step["type"] == "Sequence":
        for inner in step[name]:
            yield from _flat(inner, name)
    else:
        yield step


def _shrinking(step: dict[str, Any]) -> float:
    """Return how many characters a normalizer can join into one; infinity if it can delete them."""
    if step["type"] in ("NFC", "NFKC"):
        return _COMPOSED
    pattern = step.get("pattern", {}).get("String")
    if step["type"] == "Replace" and pattern and step["content"]:
        return max(1.0, len(pattern) / len(step["content"]))
    return 1.0 if step["type"] in _KEEPING else math.inf


def _keeps_unknown(backend: tokenizers.Tokenizer, as_bytes: bool) -> bool:
    """Return whether each character that the vocabulary lacks becomes one or several tokens of its own."""
    model = backend.model
    if not isinstance(model, tokenizers.models.BPE):
        return False  # other models make one token of a whole word or of a run of characters
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet() if as_bytes else _BYTES if model.byte_fallback else None
    if alphabet is not None and all(backend.token_to_id(entry) is not None for entry in alphabet):
        return True
    unknown = model.unk_token
    return unknown is not None and backend.token_to_id(unknown) is not None and not model.fuse_unk
