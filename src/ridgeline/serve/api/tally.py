"""Count the tokens of a request for its usage, and make the fields that all answers begin with."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from typing import Any

from ridgeline.runtime.generator import GenerationRequest
from ridgeline.serve.http.errors import APIError
from ridgeline.spec.request import OutputChunk


class Tally:
    """Counts the tokens of a request's prompts and answers."""

    def __init__(self, requests: Sequence[GenerationRequest]) -> None:
        self.prompt = sum(len(r.prompt_token_ids) for r in requests)
        self.completion = self.cached = 0

    def take(self, chunk: OutputChunk, *, whole: bool = False) -> None:
        """Count a chunk. whole: True if the answer is not streamed, so that the last chunk has all tokens.

        Raises APIError for an answer that failed.
        """
        if chunk.error is not None:
            raise APIError(400, chunk.error, code="answer_failed")
        if chunk.output is not None:
            self.cached += chunk.output.num_cached_tokens
            if whole:
                for answer in chunk.output.outputs:
                    if answer.error is not None:
                        raise APIError(400, answer.error, code="answer_failed")
                    self.completion += len(answer.token_ids)
        if not whole:
            self.completion += len(chunk.token_ids)

    def usage(self) -> dict[str, Any]:
        """Return OpenAI's usage object."""
        return {
            "prompt_tokens": self.prompt,
            "completion_tokens": self.completion,
            "total_tokens": self.prompt + self.completion,
            "prompt_tokens_details": {"cached_tokens": self.cached},
        }


def head(kind: str, prefix: str, model: str, fingerprint: str, request_id: str | None) -> dict[str, Any]:
    """Return the fields that every answer begins with. request_id: the client's id of the request, if it sent one."""
    return {
        "id": f"{prefix}-{request_id or uuid.uuid4().hex}",
        "object": kind,
        "created": int(time.time()),
        "model": model,
        "system_fingerprint": fingerprint,
    }
