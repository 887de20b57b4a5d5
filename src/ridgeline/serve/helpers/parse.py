"""Parse a request's body. A body that would take much time or memory is refused before it is parsed."""

from __future__ import annotations

import json
from typing import Any

from ridgeline.errors import RequestError

# Number of elements of all lists and objects, equal to the limit of token ids in a list (types.MAX_IDS). An empty list
# is 3 bytes of JSON but 64 bytes of memory, and Python's parser blocks all threads until it is done.
MAX_ELEMENTS = 1 << 20
_SEPARATORS = (b",", b"[", b"{")


def parse(body: bytes) -> Any:
    """Return the JSON value of a body.

    Raises RequestError for too many elements, ValueError or RecursionError for invalid JSON.
    """
    if _separators(body) > MAX_ELEMENTS:  # some of these may be inside texts, which are not elements
        outside = body.replace(rb"\\", b"").replace(rb"\"", b"")
        if outside.count(b'"') > 2 * MAX_ELEMENTS or sum(map(_separators, outside.split(b'"')[::2])) > MAX_ELEMENTS:
            raise RequestError(f"the body has more than {MAX_ELEMENTS} elements; send less at once")
    return json.loads(body.decode("utf-8-sig"))  # only UTF-8, in which the separators were counted


def _separators(part: bytes) -> int:
    return sum(map(part.count, _SEPARATORS))
