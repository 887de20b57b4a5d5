"""POST /v1/embeddings."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from typing import Any, cast

from ridgeline.runtime.texts import Cut, Input, named_prompt, text_of
from ridgeline.runtime.vectors import Floats, Reading, Text, check_reading
from ridgeline.serve.api.types import EmbeddingBody, Truncated
from ridgeline.serve.keys import CURRENT
from ridgeline.serve.service import Service, as_prompts


async def embeddings(service: Service, body: EmbeddingBody) -> dict[str, Any]:
    """Return the answer. Raises RequestError, APIError, EngineDown."""
    service.check_model(body.model)
    vectors = service.ready.vectors
    reading = Reading("vector", body.pooling, body.dimensions, body.normalize)
    check_reading(service.ready.spec, vectors, reading)
    before = named_prompt(vectors, body.prompt, body.prompt_name)
    prompts = cast("list[Input]", as_prompts(body.input))  # EmbeddingBody takes no objects
    cut = cut_of(body, add_special_tokens=body.add_special_tokens is not False)
    service.gate.enter(len(prompts))
    try:
        texts = await _texts(service, prompts, before, cut)
        found = await service.client.embed(texts, reading)
    finally:
        service.gate.leave(len(prompts))
    service.keys.charge(CURRENT.get(), usage(texts)["total_tokens"])
    return await service.off_loop(lambda: _answer(service.name, texts, found, body.encoding_format))


def cut_of(body: Truncated, *, add_special_tokens: bool = True) -> Cut:
    """Return how the texts of a request are cut: at their end, unless it says otherwise."""
    return Cut(body.truncate_prompt_tokens, body.truncation_side or "right", add_special_tokens)


async def _texts(service: Service, prompts: Sequence[Input], before: str, cut: Cut) -> list[Text]:
    """Return the tokens of each input. A thread computes them, so that other requests get their turn."""
    most, frontend = service.max_model_len, service.frontend
    return await service.off_loop(lambda: [text_of(frontend, one, before, cut, most) for one in prompts])


def _answer(name: str, texts: Sequence[Text], found: Floats, form: str | None) -> dict[str, Any]:
    data = [{"object": "embedding", "index": i, "embedding": _encoded(row, form)} for i, row in enumerate(found)]
    return {"object": "list", "data": data, "model": name, "usage": usage(texts)}


def usage(texts: Sequence[Text]) -> dict[str, int]:
    """Return the tokens of a request in the names of OpenAI's API."""
    used = sum(len(text.ids) for text in texts)
    return {"prompt_tokens": used, "total_tokens": used}


def _encoded(row: Floats, form: str | None) -> Any:
    """Return the vector, or with "base64" its little-endian float32 numbers, as OpenAI's clients request."""
    return base64.b64encode(row.astype("<f4").tobytes()).decode("ascii") if form == "base64" else row.tolist()
