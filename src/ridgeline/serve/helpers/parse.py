"""A request's body, from bytes to JSON: what would take long, or much memory, is refused before it is parsed."""

from __future__ import annotations

import json
from typing import Any

from ridgeline.errors import RequestError

# Of lists and objects, all together: as many as token ids in a list (types.MAX_IDS). An empty list is 3 bytes of JSON
# and 64 of memory, and Python's parser holds up all threads until it is done.
MAX_ELEMENTS = 1 << 20
_SEPARATORS = (b",", b"[", b"{")


def parse(body: bytes) -> Any:
    """The JSON. Raises RequestError for too many elements, ValueError or RecursionError for what is no JSON."""
    if _separators(body) > MAX_ELEMENTS:  # some of them may be in texts, which are cheap
        outside = body.replace(rb"\\", b"").replace(rb"\"", b"")
        if outside.count(b'"') > 2 * MAX_ELEMENTS or sum(map(_separators, outside.split(b'"')[::2])) > MAX_ELEMENTS:
            raise RequestError(f"the body has more than {MAX_ELEMENTS} elements; send less at once")
    return json.loads(body.decode("utf-8-sig"))  # no other encoding: the separators were counted in this one


def _separators(part: bytes) -> int:
    return sum(map(part.count, _SEPARATORS))
