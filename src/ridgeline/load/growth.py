"""Check a tokenizer.json before it is loaded, and refuse one whose steps could make endless text out of little.

Loading it already runs its normalizer over the added tokens. Only the parts that matter here are parsed. The
vocabulary, which is nearly the whole file, is left to the tokenizers library.
"""

from __future__ import annotations

import base64
import binascii
import json
import math
import re
from typing import Any

from ridgeline.errors import TokenizerError

MAX_GROWTH = 4096  # most characters made from one; the largest published tokenizer (XLNet's) can make about 2,000
MAX_ADDED = 1 << 28  # most characters made from all added tokens
MAX_AROUND = 1 << 16  # most ids that the post-processor puts around a text
_MAX_PARTS = 64  # most occurrences of a part's name in the file; vocabularies contain such words, too

_ESCAPED_LETTER = re.compile(r"\\u00[2-7]")
# The most characters that Unicode's rules make from one.
_UNICODE = {"NFC": 3, "NFD": 4, "NFKC": 18, "NFKD": 18, "Lowercase": 3, "ByteLevel": 4, "BertNormalizer": 9}


def check_growth(text: str, where: str) -> None:
    """Raise TokenizerError if the text of a tokenizer.json could expand without bounds. where: the file's name, for
    messages.
    """
    try:
        parts = _parts(text, where)
        most = max((growth(part) for part in parts["normalizer"]), default=1.0)
        if most > MAX_GROWTH:
            raise TokenizerError(
                f"{where}: the normalizer can expand one character to {_count(most)}; the limit is {MAX_GROWTH}: take "
                "another tokenizer (--tokenizer)"
            )
        added = max(
            (sum(map(_normalized, part)) for part in parts["added_tokens"] if isinstance(part, list)), default=0
        )
        if added * most > MAX_ADDED:
            raise TokenizerError(
                f"{where}: the normalizer can expand the added tokens to {_count(added * most)} characters; "
                f"the limit is {MAX_ADDED}: take another tokenizer (--tokenizer)"
            )
        around = max(map(_around, parts["post_processor"]), default=0)
    except (ValueError, RecursionError, TypeError, KeyError, AttributeError) as e:
        raise TokenizerError(f"{where} is damaged or too new ({type(e).__name__}: {e}); download it again") from None
    if around > MAX_AROUND:
        raise TokenizerError(
            f"{where}: the post-processor puts {around} ids around a text; the limit is {MAX_AROUND}: take another "
            "tokenizer (--tokenizer)"
        )


def growth(step: Any) -> float:
    """Return the most characters that a step of a normalizer or decoder makes from one."""
    kind = step.get("type") if isinstance(step, dict) else None
    if kind == "Sequence":
        return math.prod(growth(inner) for inner in step.get("normalizers") or step.get("decoders") or ())
    if kind == "Replace":
        pattern = step["pattern"].get("String")
        # An empty pattern matches on both sides of a character.
        return max(1.0, len(step["content"]) / len(pattern)) if pattern else 1.0 + 2 * len(step["content"])
    if kind == "Prepend":
        return 1.0 + len(step["prepend"])
    if kind == "Precompiled":
        return _longest_replacement(step["precompiled_charsmap"] or "")
    return _UNICODE.get(str(kind), 1)


def _longest_replacement(charsmap: str) -> float:
    """Return the longest replacement in SentencePiece's table: a trie after its length in bytes, then zero-terminated
    texts.
    """
    try:
        data = base64.b64decode(charsmap)
    except binascii.Error as e:
        raise ValueError(f"precompiled_charsmap: {e}") from None
    start = 4 + int.from_bytes(data[:4], "little")
    return max(map(len, data[start:].split(b"\0")), default=1) or 1


def _parts(text: str, where: str) -> dict[str, list[Any]]:
    """Return the values of all keys in the file that have the name of a part; one of them is that part."""
    names = ("normalizer", "added_tokens", "post_processor")
    if _ESCAPED_LETTER.search(text):  # a key may be written with escapes
        whole = json.loads(text)
        return {name: [whole[name]] if whole.get(name) is not None else [] for name in names}
    decoder = json.JSONDecoder()
    found: dict[str, list[Any]] = {name: [] for name in names}
    for name, values in found.items():
        for match in re.finditer(rf'"{name}"[ \t\r\n]*:[ \t\r\n]*(?=[\[{{])', text):
            values.append(decoder.raw_decode(text, match.end())[0])
            if len(values) > _MAX_PARTS:
                raise TokenizerError(f"{where} has more than {_MAX_PARTS} parts named {name!r}; download it again")
    return found


def _normalized(token: Any) -> int:
    """Return the characters of an added token that the normalizer processes."""
    return len(token["content"]) if isinstance(token, dict) and token.get("normalized") is not False else 0


def _around(part: Any) -> int:
    """Return the number of ids that a post-processor puts around a text."""
    if isinstance(part, dict) and part.get("type") == "Sequence":
        return sum(map(_around, part["processors"]))
    if not isinstance(part, dict) or part.get("type") != "TemplateProcessing":
        return 0
    sizes = {name: len(token["ids"]) for name, token in part["special_tokens"].items()}
    return sum(sizes.get(piece["SpecialToken"]["id"], 0) for piece in part["single"] if "SpecialToken" in piece)


def _count(value: float) -> str:
    return f"{value:.3g}" if value >= 1e9 else f"{value:.0f}"
