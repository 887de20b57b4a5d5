"""Functions that run in the server's helper processes. This file imports as little as possible."""

from __future__ import annotations

import json
from array import array
from pathlib import Path
from typing import Any

from ridgeline.bounded import job
from ridgeline.errors import RequestError
from ridgeline.load.tokenizer import Tokenizer
from ridgeline.runtime.request import TextToEncode
from ridgeline.serve.helpers.packed import pack
from ridgeline.serve.helpers.parse import parse
from ridgeline.spec.prompt import Side

MAX_REST = 2 << 20  # bytes of a parsed body without its long texts and lists of token ids


@job
def open_tokenizer(folder: str) -> Tokenizer:
    """Load the tokenizer that a helper process keeps."""
    return Tokenizer.from_folder(Path(folder))


@job
def encode_text(
    tokenizer: Tokenizer, text: bytes, is_chat: bool, special: bool | None, most: int | None, side: Side
) -> bytes:
    """Tokenize the text of a TextToEncode. Return the ids, 4 bytes each."""
    work = TextToEncode(text.decode("utf-8", "surrogatepass"), is_chat, special, most, side)
    return array("I", work.ids(tokenizer)).tobytes()


@job
def parse_body(_: None, body: bytes) -> tuple[Any, ...]:
    """Parse a body. Return "" and the packed value, or the error and its position. Raises RequestError for a body that
    is too large without its long texts and lists.
    """
    try:
        parts = pack(parse(body))
    except json.JSONDecodeError as e:
        return e.msg, e.pos
    except UnicodeDecodeError as e:
        return "it is not UTF-8", e.start
    rest = len(json.dumps(parts[:2], ensure_ascii=False).encode("utf-8", "surrogatepass"))
    if rest > MAX_REST:
        raise RequestError(
            f"the body has {rest} bytes without its long texts and lists of token ids; the limit is {MAX_REST}; split "
            "the request"
        )
    return "", *parts
