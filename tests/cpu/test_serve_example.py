"""The example request of `serve` and of the page: a chat if the template reads roles, else a completion."""

from __future__ import annotations

import json
import shlex
from types import SimpleNamespace
from typing import Any, cast

import pytest

from ridgeline.load.hub import BUILT_IN
from ridgeline.serve.api.example import curl_line, example_of
from ridgeline.serve.service import Service
from ridgeline.spec.request import SamplingParams

URL = "http://127.0.0.1:8000"


def curl(*, roles: bool, tokenizer: Any = BUILT_IN["pocket"], keys: tuple[bytes, ...] = ()) -> list[str]:
    """Return the words of the line, as a shell splits it."""
    ready, options = (
        SimpleNamespace(tokenizer=tokenizer, spec=SimpleNamespace(encoder=None)),
        SimpleNamespace(key_hashes=keys),
    )
    return shlex.split(curl_line(cast(Service, SimpleNamespace(knows_roles=roles, ready=ready, options=options)), URL))


def test_a_template_that_reads_roles_gets_a_chat() -> None:
    command, url, *_, body = curl(roles=True)
    assert (command, url) == ("curl", f"{URL}/v1/chat/completions")
    assert json.loads(body)["messages"] == [{"role": "user", "content": "Hello"}]


@pytest.mark.parametrize("folder", [*BUILT_IN.values(), BUILT_IN["pocket"].parent])
def test_any_other_model_gets_a_prompt_that_suits_it(folder: Any) -> None:
    url, body = (words := curl(roles=False, tokenizer=folder))[1], json.loads(words[-1])
    example = example_of(folder)
    assert example is not None and url == f"{URL}/v1/completions"
    assert body == {"prompt": example.prompt, **example.parameters}
    SamplingParams(**example.parameters)  # names and values are valid
    assert body["prompt"].startswith("def ") == (folder in BUILT_IN.values())


def test_token_ids_without_a_tokenizer_and_a_key_if_needed() -> None:
    words = curl(roles=False, tokenizer=None, keys=(b"hash",))
    assert json.loads(words[-1])["prompt"] == [1, 2, 3] and "Authorization: Bearer KEY" in words
    assert example_of(None) is None
