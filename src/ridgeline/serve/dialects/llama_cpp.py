"""POST /completion and /infill: completions in the format of llama.cpp's server."""

from __future__ import annotations

import math
import uuid
from collections.abc import Iterable, Sequence
from typing import Any

from pydantic import ValidationError

from ridgeline.errors import RequestError
from ridgeline.runtime.request import TextToEncode
from ridgeline.serve.api.completions import Completion, collect
from ridgeline.serve.api.logprobs import LEAST
from ridgeline.serve.api.tally import Tally
from ridgeline.serve.api.token_texts import Piece, TokenPosition, TokenTexts
from ridgeline.serve.api.types import MAX_ITEMS, CompletionBody
from ridgeline.serve.dialects import llama_cpp_types as t
from ridgeline.serve.engine.client import Batch
from ridgeline.serve.http.errors import APIError, invalid
from ridgeline.serve.http.shapes import shaped
from ridgeline.serve.http.sse import Events, event
from ridgeline.serve.service import Service, Turn
from ridgeline.spec.request import CompletionOutput, OutputChunk, RequestOutput, TokenLogprobs

PATH = "/completion"
MAX_TEXTS = 256  # texts in one prompt, each of which is tokenized apart
Prompts = list[str | list[int]]


class LlamaCompletion:
    """Answers one request. single: the answer is an object, not a list of them."""

    def __init__(self, service: Service, body: t.LlamaBody, prompts: Prompts, single: bool, suffix: str = "") -> None:
        """Raises APIError or RequestError for an invalid request."""
        self._service, self._body, self._single = service, body, single
        try:
            given = CompletionBody.model_validate({**_fields(service, body), "prompt": "", "suffix": suffix})
        except ValidationError as e:
            raise invalid(e.errors(include_url=False)) from None
        self._work = Completion(service, given.model_copy(update={"prompt": prompts}), None)
        self._settings = _settings(service, given)

    async def open(self, *, stream: bool) -> Turn:
        """Send the request to the engine."""
        return await self._work.open(stream=stream)

    async def answer(self) -> Any:
        """Return the whole answer, or a list of answers for a list of prompts."""
        turn = await self.open(stream=False)
        try:
            outputs, _ = await collect(turn)
        finally:
            turn.close()
        found = await self._service.off_loop(lambda: [self._whole(i, one) for i, one in enumerate(outputs)])
        return found[0] if self._single else found

    def _whole(self, index: int, output: RequestOutput) -> dict[str, Any]:
        (answer,) = output.outputs
        tokens = answer.token_ids if self._body.return_tokens else []
        last = {"content": answer.text, "tokens": tokens, **self.last(index, answer, output, answer.text)}
        if answer.logprobs is not None:
            last["completion_probabilities"] = self._probabilities(
                self.position(output.prompt_token_ids), answer.logprobs
            )
        return _chosen(last, self._body.response_fields)

    def last(self, index: int, end: CompletionOutput | OutputChunk, output: RequestOutput, text: str) -> dict[str, Any]:
        """Return the fields that the end of an answer has. text: the whole answer."""
        (answer,) = output.outputs
        word = end.stop_reason if isinstance(end.stop_reason, str) else ""
        tokenizer, ids = self._service.tokenizer, output.prompt_token_ids
        return {
            "index": index, "id_slot": -1, "stop": True, "model": self._service.name,
            "tokens_predicted": len(answer.token_ids), "tokens_evaluated": len(ids),
            "generation_settings": self._settings,
            "prompt": tokenizer.decode(ids, skip_special_tokens=False) if tokenizer else "",
            "has_new_line": "\n" in text, "truncated": False,
            "stop_type": "word" if word else "limit" if end.finish_reason == "length" else "eos",
            "stopping_word": word, "tokens_cached": output.num_cached_tokens, "timings": _timings(output),
        }  # fmt: skip

    def part(self, index: int, chunk: OutputChunk, position: TokenPosition, done: int, prompt: int) -> dict[str, Any]:
        """Return the event of a chunk. done: tokens of the answer so far; prompt: those of the prompt."""
        found = {
            "index": index, "content": chunk.text, "tokens": list(chunk.token_ids), "stop": False, "id_slot": -1,
            "tokens_predicted": done, "tokens_evaluated": prompt,
        }  # fmt: skip
        more = {"completion_probabilities": self._probabilities(position, chunk.logprobs)} if chunk.logprobs else {}
        return found | more

    def events(self, turn: Turn) -> Events:
        """Return the answer as events without names."""
        return _Events(self, turn)

    def position(self, prompt: Sequence[int]) -> TokenPosition:
        """Return the position where an answer begins."""
        return TokenTexts(self._service.tokenizer).after(prompt)

    def _probabilities(self, position: TokenPosition, entries: Iterable[TokenLogprobs]) -> list[dict[str, Any]]:
        after = bool(self._body.post_sampling_probs)

        def one(token: int, piece: Piece, logprob: float) -> dict[str, Any]:
            value = {"prob": math.exp(logprob)} if after else {"logprob": max(logprob, LEAST)}
            return {"id": token, "token": piece.text, "bytes": list(piece.bytes), **value}

        found = []
        for e in entries:
            top = [one(token, position.peek(token), logprob) for token, logprob in e.top]
            name = "top_probs" if after else "top_logprobs"
            found.append({**one(e.token_id, position.push(e.token_id), e.logprob), name: top})
        return found


class _Events:
    """Writes the events of one request (sse.Events)."""

    def __init__(self, work: LlamaCompletion, turn: Turn) -> None:
        self._work, self._tally = work, Tally(turn.requests)
        self._prompts = [len(one.prompt_token_ids) for one in turn.requests]
        self._positions = [work.position(one.prompt_token_ids) for one in turn.requests]
        self._texts, self._counts = [""] * len(turn.requests), [0] * len(turn.requests)

    def begin(self) -> bytes:
        return b""

    def chunks(self, batch: Batch) -> bytes:
        data = b""
        for index, chunk in batch:
            self._tally.take(chunk)
            self._texts[index] += chunk.text
            self._counts[index] += len(chunk.token_ids)
            if chunk.token_ids or chunk.text:
                position = self._positions[index]
                data += event(self._work.part(index, chunk, position, self._counts[index], self._prompts[index]))
            if chunk.output is not None:
                ended = self._work.last(index, chunk, chunk.output, self._texts[index])
                data += event({"content": "", "tokens": [], **ended})
        return data

    def end(self) -> bytes:
        return b""

    def failed(self, error: APIError) -> bytes:
        return event(shaped(error, PATH))


def _chosen(answer: dict[str, Any], names: Sequence[str] | None) -> dict[str, Any]:
    """Return the fields that a request asks for, all without names. Unknown names are left out, as llama.cpp does."""
    found = {}
    for name in names or ():
        value: Any = answer
        for step in name.split("/"):
            value = value.get(step) if isinstance(value, dict) else None
        if value is not None:
            found[name] = value
    return found if names else answer


def _timings(output: RequestOutput) -> dict[str, float]:
    """Return how long an answer took, in milliseconds."""
    times, predicted = output.timing, len(output.outputs[0].token_ids)
    computed = len(output.prompt_token_ids) - output.num_cached_tokens
    first, rest = times.ttft_s - times.queued_s, times.total_s - times.ttft_s
    found: dict[str, float] = {"cache_n": output.num_cached_tokens}
    for name, count, seconds in (("prompt", computed, first), ("predicted", predicted, rest)):
        found |= {
            f"{name}_n": count, f"{name}_ms": seconds * 1e3, f"{name}_per_token_ms": seconds * 1e3 / max(count, 1),
            f"{name}_per_second": count / seconds if seconds > 0 else 0.0,
        }  # fmt: skip
    return found


# Requests ----------------------------------------------------------------------------------------------


async def completion(service: Service, body: t.LlamaCompletionBody) -> LlamaCompletion:
    """Return the work of a request to /completion. Raises APIError, RequestError, TokenizerError."""
    given = body.prompt
    several = isinstance(given, list) and any(not isinstance(one, int | str) for one in given)
    several = several or (isinstance(given, list) and len(given) > 0 and all(isinstance(one, str) for one in given))
    if several and isinstance(given, list):
        if len(given) > MAX_ITEMS:
            raise RequestError(f"the request has {len(given)} prompts; the limit is {MAX_ITEMS}: send several requests")
        return LlamaCompletion(service, body, [await _prompt(service, one) for one in given], single=False)
    return LlamaCompletion(service, body, [await _prompt(service, given)], single=True)


async def _prompt(service: Service, given: Any) -> str | list[int]:
    """Return a prompt as a text, or as token ids if it has any."""
    if isinstance(given, t.PromptString):
        return given.prompt_string
    if isinstance(given, int):
        return [given]
    return given if isinstance(given, str) else await joined(service, given)


async def joined(service: Service, parts: Sequence[int | str]) -> list[int]:
    """Return the token ids of texts and ids in a row. Only a text at the start gets the tokens around a text."""
    if (texts := sum(isinstance(part, str) for part in parts)) > MAX_TEXTS:
        raise RequestError(f"a prompt has {texts} texts among its token ids; the limit is {MAX_TEXTS}: join them")
    found: list[int] = []
    for index, part in enumerate(parts):
        found += [part] if isinstance(part, int) else await service.tokenize(TextToEncode(part, False, index == 0))
    return found


def _fields(service: Service, body: t.LlamaBody) -> dict[str, Any]:
    """Return the fields of a completion. Raises RequestError."""
    fields = {name: getattr(body, name) for name in (*t.SAME, "model", "stream")}
    fields |= {"repetition_penalty": body.repeat_penalty, "logprobs": body.n_probs or None}
    fields["seed"] = None if body.seed == -1 else body.seed
    fields["max_tokens"] = None if body.n_predict in (-1, -2) else body.n_predict
    fields["cache_salt"] = uuid.uuid4().hex if body.cache_prompt is False else None
    if body.post_sampling_probs:
        fields["logprobs_mode"] = "processed"
    structures = {"grammar": body.grammar or None, "json": body.json_schema}
    fields["structured_outputs"] = {k: v for k, v in structures.items() if v is not None} or None
    return fields | _biases(service, body.logit_bias)


def _biases(service: Service, given: Any) -> dict[str, Any]:
    """Return logit_bias and bad_token_ids. Raises RequestError for an entry that is not a pair."""
    biases, never = dict[str, float](), list[int]()
    for pair in given.items() if isinstance(given, dict) else given or ():
        if len(pair) != 2 or not isinstance(pair[0], int | str) or not isinstance(pair[1], int | float):
            raise RequestError(f"logit_bias has {pair!r:.60}; an entry is a token id or a text, and a number or false")
        token, bias = pair
        ids = [int(token)] if str(token).isdecimal() and len(str(token)) < 10 else None
        for one in ids or service.frontend.tokenizer().encode(str(token), add_special_tokens=False):
            if bias is False:
                never.append(one)
            else:
                biases[str(one)] = float(bias)
    return {"logit_bias": biases or None, "bad_token_ids": never or None}


def _settings(service: Service, body: CompletionBody) -> dict[str, Any]:
    """Return the settings of a request as llama.cpp shows them: its own, and the model's defaults."""
    shown = {**service.defaults(), **{name: v for name in t.SAME if (v := getattr(body, name)) is not None}}
    seed = service.options.seed if body.seed is None else body.seed
    bias = [{"token": int(token), "bias": value} for token, value in (body.logit_bias or {}).items()]
    never = [*(body.bad_token_ids or ()), *(_ends(service) if body.ignore_eos else ())]
    bias += [{"token": token, "bias": None} for token in never]
    return {
        **shown, "n_predict": -1 if body.max_tokens is None else body.max_tokens, "seed": seed, "logit_bias": bias,
        "n_probs": body.logprobs or 0, "stream": bool(body.stream),
        "grammar": body.structured_outputs.grammar or "" if body.structured_outputs else "",
    }  # fmt: skip


def _ends(service: Service) -> list[int]:
    """Return the token that ends a text, if the tokenizer names one."""
    tokenizer = service.tokenizer
    found = tokenizer.token_id(tokenizer.special_tokens.get("eos_token", "")) if tokenizer else None
    return [] if found is None else [found]
