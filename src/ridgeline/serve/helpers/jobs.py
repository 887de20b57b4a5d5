"""What the helper processes of a server run. They import no more than they need."""

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

MAX_REST = 2 << 20  # bytes of a parsed body besides its long texts and lists of token ids


@job
def open_tokenizer(folder: str) -> Tokenizer:
    """The tokenizer that a helper keeps."""
    return Tokenizer.from_folder(Path(folder))


@job
def encode_text(
    tokenizer: Tokenizer, text: bytes, is_chat: bool, special: bool | None, most: int | None, side: Side
) -> bytes:
    """The ids of a TextToEncode, 4 bytes each."""
    work = TextToEncode(text.decode("utf-8", "surrogatepass"), is_chat, special, most, side)
    return array("I", work.ids(tokenizer)).tobytes()


@job
def parse_body(_: None, body: bytes) -> tuple[Any, ...]:
    """Why a body is no JSON and where, or "" and what it holds, packed. Raises RequestError for too much of it."""
    try:
        parts = pack(parse(body))
    except json.JSONDecodeError as e:
        return e.msg, e.pos
    except UnicodeDecodeError as e:
        return "it is not UTF-8", e.start
    rest = len(json.dumps(parts[:2], ensure_ascii=False).encode("utf-8", "surrogatepass"))
    if rest > MAX_REST:
        raise RequestError(
            f"the body has {rest} bytes besides its long texts and lists of token ids; the limit is {MAX_REST}: "
            "send less at once"
        )
    return "", *parts
