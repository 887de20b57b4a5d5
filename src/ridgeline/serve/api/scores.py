"""POST /v1/score and /v1/rerank: how well documents fit a query."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any
from uuid import uuid4

from ridgeline.errors import RequestError
from ridgeline.runtime.texts import Scoring, Template, scoring
from ridgeline.serve.api.embeddings import cut_of, usage
from ridgeline.serve.api.types import RerankBody, ScoreBody, Scored
from ridgeline.serve.keys import CURRENT
from ridgeline.serve.service import Service


async def score(service: Service, body: ScoreBody) -> dict[str, Any]:
    """Return the answer of /v1/score. Raises RequestError, APIError, EngineDown."""
    service.check_model(body.model)
    found, own = await _scores(service, body, _pairs(body.text_1, body.text_2))
    data = [{"index": i, "object": "score", "score": one} for i, one in enumerate(found)]
    return {
        "id": f"score-{uuid4().hex}", "object": "list", "created": int(time.time()), "model": service.name,
        "data": data, "usage": usage(own.texts),
    }  # fmt: skip


async def rerank(service: Service, body: RerankBody) -> dict[str, Any]:
    """Return the answer of /v1/rerank: the best documents first. Raises RequestError, APIError, EngineDown."""
    service.check_model(body.model)
    documents = [one if isinstance(one, str) else one.text for one in body.documents]
    if not documents:
        raise RequestError("documents is an empty list; give at least one text")
    found, own = await _scores(service, body, [(body.query, one) for one in documents])
    order = sorted(range(len(found)), key=lambda i: -found[i])[: body.top_n]
    results: list[dict[str, Any]] = [{"index": i, "relevance_score": found[i]} for i in order]
    if body.return_documents is not False:
        for entry in results:
            entry["document"] = {"text": documents[entry["index"]]}
    return {"id": f"rerank-{uuid4().hex}", "model": service.name, "results": results, "usage": usage(own.texts)}


async def _scores(service: Service, body: Scored, pairs: Sequence[tuple[str, str]]) -> tuple[list[float], Scoring]:
    """Return a score for each pair, and how it was computed."""
    template, ready = _template(body), service.ready
    service.gate.enter(len(pairs))
    try:
        own = await service.off_loop(
            lambda: scoring(
                ready.spec, ready.vectors, service.frontend, pairs, cut_of(body), service.max_model_len, template
            )
        )
        found = own.scores(await service.client.embed(own.texts, own.reading))
        service.keys.charge(CURRENT.get(), usage(own.texts)["total_tokens"])
        return found, own
    finally:
        service.gate.leave(len(pairs))


def _template(body: Scored) -> Template | None:
    parts = (body.score_template, body.score_no, body.score_yes)
    if all(part is None for part in parts):
        return None
    text, no, yes = parts
    if text is None or no is None or yes is None:
        raise RequestError("score_template, score_no and score_yes belong together; give all three or none")
    return Template(text, no, yes)


def _pairs(first: str | list[str], second: str | list[str]) -> list[tuple[str, str]]:
    """Return pairs of texts: one with each of the others, or two lists of equal length in order."""
    left, right = ([one] if isinstance(one, str) else one for one in (first, second))
    if not left or not right:
        raise RequestError("text_1 or text_2 is an empty list; give at least one text")
    if len(left) == 1:
        left = left * len(right)
    if len(left) != len(right):
        raise RequestError(f"text_1 has {len(left)} texts and text_2 {len(right)}; give one, or as many of each")
    return list(zip(left, right, strict=True))
