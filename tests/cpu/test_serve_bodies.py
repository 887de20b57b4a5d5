"""Invalid bodies of the largest size: each is refused with one error and little memory."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from ridgeline.errors import RequestError
from ridgeline.serve.api.sampling_fields import MAX_STOP
from ridgeline.serve.api.types import Body, CompletionBody, DetokenizeBody, EmbeddingBody
from ridgeline.serve.helpers.parse import MAX_ELEMENTS, parse
from ridgeline.serve.options import ServeOptions

LARGEST = ServeOptions(("m",)).max_body_bytes
MOST_BYTES = 256 << 20  # sixteen times the size of the body


BODIES = [
    b'{"prompt":[%snull]}' % (b"null," * (LARGEST // 5)),
    b'{"prompt":[%s[]]}' % (b"[]," * (LARGEST // 3)),
    b'{"prompt":[%s""]}' % (b'"",' * (LARGEST // 3)),
    b'{"prompt":"%s"}' % (b"," * LARGEST),
    b'{"prompt":"%s"}' % (b'\\"' * (LARGEST // 2)),
    b'{"prompt":[%snull]}' % (b"null," * (MAX_ELEMENTS - 9)),
    b'{"prompt":[%s[]]}' % (b"[null]," * (MAX_ELEMENTS // 2 - 9)),
]
TEXTS = (3, 4)  # indices of the bodies that are valid and whose texts exceed the context


def test_memory() -> None:
    """Measure in a new process, since the peak of memory is per process."""
    script = "from cpu.test_serve_bodies import measure; measure()"
    found = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, cwd=Path(__file__).parents[1], check=True
    )
    assert int(found.stdout) < MOST_BYTES


def measure() -> None:
    """Print the additional bytes of memory that reading BODIES takes."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for index, body in enumerate(BODIES):
        try:
            CompletionBody.model_validate(parse(body))
        except ValidationError as e:
            assert len(e.errors()) == 1 and index not in TEXTS
        except RequestError:
            assert index not in TEXTS
        else:
            assert index in TEXTS, body[:40]
    print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) << 10)


@pytest.mark.parametrize(
    ("kind", "body", "path"),
    [
        (CompletionBody, {"prompt": [None] * 999}, ("prompt", "ids", 0)),
        (CompletionBody, {"prompt": ["x", *range(999)]}, ("prompt", "texts", 1)),
        (CompletionBody, {"prompt": [[1, "x", "y"], [""]]}, ("prompt", "lists", 0, 1)),
        (EmbeddingBody, {"input": [1, *"abc"]}, ("input", "ids", 1)),
        (DetokenizeBody, {"tokens": [*"abc"]}, ("tokens", 0)),
        (CompletionBody, {"prompt": "x", "logit_bias": dict.fromkeys("abc", "x")}, ("logit_bias", "a")),
        (CompletionBody, {"prompt": "x", **{f"f{i}": 0 for i in range(999)}}, ()),
        (CompletionBody, {"prompt": "x", "priority": 10**400}, ("priority",)),
        (CompletionBody, {"prompt": "x", "seed": 10**400}, ("seed",)),
        (CompletionBody, {"prompt": "x", "temperature": 10**400}, ("temperature",)),
    ],
)
def test_each_invalid_body_gives_one_error(kind: type[Body], body: Any, path: tuple[Any, ...]) -> None:
    with pytest.raises(ValidationError) as e:
        kind.model_validate(body)
    assert [error["loc"] for error in e.value.errors()] == [path]


@pytest.mark.parametrize("prompt", ["x", "", [], ["x", ""], [1, 2], [[1], [2, 3]], [[]]])
def test_prompts_in_every_shape(prompt: Any) -> None:
    assert CompletionBody(prompt=prompt).prompt == EmbeddingBody(input=prompt).input == prompt


def test_elements_are_counted_outside_of_texts() -> None:
    text = '[{,"\\' * 3
    assert parse(json.dumps([text] * (MAX_ELEMENTS // 9)).encode())[-1] == text
    for wrong in (b"[" + b"0," * MAX_ELEMENTS + b"0]", b'[""' + b',{"":[' * (MAX_ELEMENTS // 2)):
        with pytest.raises(RequestError, match="elements"):
            parse(wrong)


def test_stop_texts_are_limited_and_ids_count_once() -> None:
    body = CompletionBody(prompt="x", stop=["a"] * MAX_STOP, bad_token_ids=[3, 1, 3, 1], stop_token_ids=[2] * 9,
                          allowed_token_ids=[5, 5])  # fmt: skip
    assert (body.bad_token_ids, body.stop_token_ids, body.allowed_token_ids) == ([3, 1], [2], [5])
    with pytest.raises(ValidationError) as e:
        CompletionBody(prompt="x", stop=["a"] * (MAX_STOP + 1))
    assert any("32" in error["msg"] for error in e.value.errors())
