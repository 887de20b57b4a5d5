"""POST /v1/embeddings."""

from __future__ import annotations

import base64
from array import array
from collections.abc import Mapping, Sequence
from typing import Any

from ridgeline.errors import RequestError
from ridgeline.runtime.request import Prompt
from ridgeline.serve.api.params import prompt_options
from ridgeline.serve.api.types import EmbeddingBody
from ridgeline.serve.service import Service, as_prompts, read_as


async def embeddings(service: Service, body: EmbeddingBody) -> dict[str, Any]:
    """Return the answer. Raises RequestError, APIError, EngineDown."""
    service.check_model(body.model)
    size = service.ready.spec.hidden_size
    if body.dimensions is not None and body.dimensions != size:
        raise RequestError(f"dimensions is {body.dimensions}; this model's vectors always have {size}")
    prompts = as_prompts(body.input)
    service.gate.enter(len(prompts))
    try:
        ids = await _checked(service, prompts, prompt_options(body))
        vectors = await service.client.embed(ids, body.pooling or "mean")
    finally:
        service.gate.leave(len(prompts))
    data = [
        {"object": "embedding", "index": i, "embedding": _encoded(vector, body.encoding_format)}
        for i, vector in enumerate(vectors)
    ]
    used = sum(map(len, ids))
    usage = {"prompt_tokens": used, "total_tokens": used}
    return {"object": "list", "data": data, "model": service.name, "usage": usage}


async def _checked(service: Service, prompts: Sequence[Prompt], reading: Mapping[str, Any]) -> list[list[int]]:
    """Return the token ids of the prompts. Raises RequestError if a prompt exceeds the context length.

    The length of a list of ids is checked before its ids, so that a long list costs little.
    """
    for prompt in prompts:
        if isinstance(prompt, list) and "truncate_prompt_tokens" not in reading:
            _fits(service, len(prompt))
    found = await service.token_ids([read_as(prompt, reading) for prompt in prompts], answer_tokens=0)
    for ids in found:
        _fits(service, len(ids))
    return found


def _fits(service: Service, tokens: int) -> None:
    if tokens > service.max_model_len:
        raise RequestError(
            f"an input has {tokens} tokens, but the context length is {service.max_model_len}; shorten it or set "
            "truncate_prompt_tokens"
        )


def _encoded(vector: Sequence[float], form: str | None) -> Sequence[float] | str:
    """Return the vector, or with "base64" its little-endian float32 numbers, as OpenAI's clients request."""
    return base64.b64encode(array("f", vector).tobytes()).decode("ascii") if form == "base64" else vector
