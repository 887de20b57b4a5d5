"""Make a first request that works well with the served model, for the curl command of `serve` and for the page."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from ridgeline.load.hub import BUILT_IN
from ridgeline.serve.service import Service


@dataclass(frozen=True, slots=True)
class Example:
    """A prompt, and sampling parameters that suit it, under the API's names."""

    prompt: str
    parameters: Mapping[str, float]


# pocket was trained on Python's standard library only and repeats itself without a penalty (docs/pocket.md).
_POCKET = Example(
    "def __init__(self, path):", MappingProxyType({"temperature": 0, "repetition_penalty": 1.2, "max_tokens": 64})
)
_BASE = Example("Once upon a time", MappingProxyType({"max_tokens": 64}))
_GREETING = "Hello"


def example_of(tokenizer: Path | None) -> Example | None:
    """Return a prompt for the model whose tokenizer is in this folder, or None for a model without a tokenizer."""
    if tokenizer is None:
        return None
    return _POCKET if tokenizer in (BUILT_IN["pocket"], BUILT_IN["pocket-draft"]) else _BASE


def curl_line(service: Service, url: str) -> str:
    """Return a shell command that tries the server at this URL.

    It is a chat if the chat template reads the messages' roles, else a completion. An encoder embeds or ranks.
    """
    path, body = _request(service)
    key = " -H 'Authorization: Bearer KEY'" if service.options.key_hashes else ""
    return f"curl {url}/v1/{path}{key} -H 'Content-Type: application/json' -d {shlex.quote(json.dumps(body))}"


def _request(service: Service) -> tuple[str, dict[str, Any]]:
    if encoder := service.ready.spec.encoder:
        if encoder.head:
            return "rerank", {"query": _GREETING, "documents": ["Good morning", "Good night"]}
        return "embeddings", {"input": _GREETING}
    if service.knows_roles:
        return "chat/completions", {"messages": [{"role": "user", "content": _GREETING}], "max_tokens": 64}
    example = example_of(service.ready.tokenizer)
    if example is None:
        return "completions", {"prompt": [1, 2, 3], "max_tokens": 16}
    return "completions", {"prompt": example.prompt, **example.parameters}
