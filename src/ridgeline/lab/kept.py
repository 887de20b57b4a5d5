"""Keep what training found in the cache folder, by content, so that the same run is not repeated."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from hashlib import blake2b
from importlib.metadata import version
from typing import Any

from ridgeline.load.fingerprint import model_fingerprint
from ridgeline.load.hub import MODEL_FILES, find_model
from ridgeline.spec.folders import cache_folder, read_text, write_whole

MOST_BYTES = 1 << 20  # of a result; ours have some 100 bytes


def kept(model: str | None, facts: Mapping[str, Any], make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Return the result of a run of this model and these facts from the cache folder, or make and keep it.

    A result that cannot be read is made again. model: the model that a run begins with, or None for random weights.
    facts: everything else that the result depends on, as JSON.
    """
    content = None if model is None else model_fingerprint(find_model(model), MODEL_FILES, size=16)
    whole = {"model": content, "version": version("ridgeline")}
    key = blake2b(json.dumps({**whole, **facts}, sort_keys=True).encode(), digest_size=16).hexdigest()
    path = cache_folder() / "lab" / f"{key}.json"
    try:
        found = json.loads(read_text(path, MOST_BYTES))
        if isinstance(found, dict):
            return found
    except (OSError, ValueError):
        pass
    made = make()
    write_whole(path, json.dumps(made))
    return made
