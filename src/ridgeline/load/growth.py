"""Refuses a tokenizer.json whose steps could make endless text out of little: it is looked at before it is loaded.

Loading one already runs its normalizer, over the added tokens. Only the parts that matter are parsed; the vocabulary,
which is nearly all of the file, is left to the tokenizers library.
"""

from __future__ import annotations

import base64
import binascii
import json
import math
import re
from typing import Any

from ridgeline.errors import TokenizerError

MAX_GROWTH = 4096  # characters that may come of one; the largest published one (XLNet's) has about 2,000 by this count
MAX_ADDED = 1 << 28  # characters that may come of all added tokens
MAX_AROUND = 1 << 16  # ids that the post-processor may put around a text
_MAX_PARTS = 64  # places where a part's name may stand; vocabularies hold such words too

_ESCAPED_LETTER = re.compile(r"\\u00[2-7]")
# The most characters that Unicode's own rules make of one.
_UNICODE = {"NFC": 3, "NFD": 4, "NFKC": 18, "NFKD": 18, "Lowercase": 3, "ByteLevel": 4, "BertNormalizer": 9}


def check_growth(text: str, where: str) -> None:
    """Raise TokenizerError for the text of a tokenizer.json that is a bomb. where: names it."""
    try:
        parts = _parts(text, where)
        most = max((growth(part) for part in parts["normalizer"]), default=1.0)
        if most > MAX_GROWTH:
            raise TokenizerError(
                f"{where}: the normalizer can make {_count(most)} characters of one; the limit is {MAX_GROWTH}"
            )
        added = max(
            (sum(map(_normalized, part)) for part in parts["added_tokens"] if isinstance(part, list)), default=0
        )
        if added * most > MAX_ADDED:
            raise TokenizerError(
                f"{where}: the normalizer can make {_count(added * most)} characters of the added tokens; "
                f"the limit is {MAX_ADDED}"
            )
        around = max(map(_around, parts["post_processor"]), default=0)
    except (ValueError, RecursionError, TypeError, KeyError, AttributeError) as e:
        raise TokenizerError(f"{where} is damaged or too new ({type(e).__name__}: {e}); download it again") from None
    if around > MAX_AROUND:
        raise TokenizerError(f"{where}: the post-processor puts {around} ids around a text; the limit is {MAX_AROUND}")


def growth(step: Any) -> float:
    """The most characters that a step of a normalizer or decoder makes of one."""
    kind = step.get("type") if isinstance(step, dict) else None
    if kind == "Sequence":
        return math.prod(growth(inner) for inner in step.get("normalizers") or step.get("decoders") or ())
    if kind == "Replace":
        pattern = step["pattern"].get("String")
        # A pattern that matches nothing does so on both sides of a character.
        return max(1.0, len(step["content"]) / len(pattern)) if pattern else 1.0 + 2 * len(step["content"])
    if kind == "Prepend":
        return 1.0 + len(step["prepend"])
    if kind == "Precompiled":
        return _longest_replacement(step["precompiled_charsmap"] or "")
    return _UNICODE.get(str(kind), 1)


def _longest_replacement(charsmap: str) -> float:
    """Of SentencePiece's table: a trie behind its length in bytes, then the replacements, each ended by a zero byte."""
    try:
        data = base64.b64decode(charsmap)
    except binascii.Error as e:
        raise ValueError(f"precompiled_charsmap: {e}") from None
    start = 4 + int.from_bytes(data[:4], "little")
    return max(map(len, data[start:].split(b"\0")), default=1) or 1


def _parts(text: str, where: str) -> dict[str, list[Any]]:
    """The values of all keys that have the name of a part, in the whole file: one of them is the part."""
    names = ("normalizer", "added_tokens", "post_processor")
    if _ESCAPED_LETTER.search(text):  # a key may be spelled with escapes
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
    """Characters of an added token that the normalizer sees."""
    return len(token["content"]) if isinstance(token, dict) and token.get("normalized") is not False else 0


def _around(part: Any) -> int:
    """Ids that a post-processor puts around a text."""
    if isinstance(part, dict) and part.get("type") == "Sequence":
        return sum(map(_around, part["processors"]))
    if not isinstance(part, dict) or part.get("type") != "TemplateProcessing":
        return 0
    sizes = {name: len(token["ids"]) for name, token in part["special_tokens"].items()}
    return sum(sizes.get(piece["SpecialToken"]["id"], 0) for piece in part["single"] if "SpecialToken" in piece)


def _count(value: float) -> str:
    return f"{value:.3g}" if value >= 1e9 else f"{value:.0f}"
