"""Turn a user's prompt (text, messages, token ids) into a request that fits the model."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from operator import index
from typing import Any

from ridgeline.diffusion import check_params
from ridgeline.errors import RequestError, TokenizerError
from ridgeline.load.tokenizer import Tokenizer
from ridgeline.runtime.generator import GenerationRequest
from ridgeline.sample.breakers import BreakerIndex
from ridgeline.sample.sampler import NoiseKey
from ridgeline.spec import CanvasDiffusion, ModelSpec
from ridgeline.spec.diffusion import WHOLE_TOKENS
from ridgeline.spec.prompt import OPTION_KEYS, PromptOptions, Side, truncated
from ridgeline.spec.request import Params, SamplingParams
from ridgeline.spec.sight import BEYOND

# Text, token ids, or an object with one of "prompt", "prompt_token_ids", "messages" (a conversation), and optionally
# some of PromptOptions.
Prompt = str | Sequence[int] | Mapping[str, Any]
PROMPT_KEYS = ("prompt", "prompt_token_ids", "messages")


@dataclass(frozen=True, slots=True)
class Rendered:
    """A conversation as the text that its chat template produced.

    add_special_tokens: see Tokenizer.encode_rendered. options: how the text is tokenized and truncated.
    """

    text: str
    add_special_tokens: bool | None = None
    options: PromptOptions = field(default_factory=PromptOptions)


@dataclass(frozen=True, slots=True)
class TextToEncode:
    """A text and how it is tokenized. is_chat: a chat template produced it. max_tokens: see Tokenizer.encode."""

    text: str
    is_chat: bool = False
    add_special_tokens: bool | None = True
    max_tokens: int | None = None
    truncation_side: Side = "left"

    def ids(self, tokenizer: Tokenizer) -> list[int]:
        """Return the token ids. Raises RequestError for text that is not valid Unicode."""
        most, side = self.max_tokens, self.truncation_side
        if self.is_chat:
            return tokenizer.encode_rendered(self.text, self.add_special_tokens, max_tokens=most, truncation_side=side)
        special = self.add_special_tokens is not False
        return tokenizer.encode(self.text, add_special_tokens=special, max_tokens=most, truncation_side=side)


class Frontend:
    """Tokenizes prompts and checks requests.

    no_tokenizer: why there is no tokenizer, if there is none. max_chars: most characters of a text; None: no limit.
    """

    def __init__(
        self,
        spec: ModelSpec,
        tokenizer: Tokenizer | None,
        no_tokenizer: str,
        max_model_len: int,
        seed: int,
        max_chars: int | None = None,
    ) -> None:
        self._spec, self._tokenizer, self._no_tokenizer = spec, tokenizer, no_tokenizer
        self._max_model_len, self._seed, self._max_chars = max_model_len, seed, max_chars

    def encode(self, prompt: Prompt | Rendered, answer_tokens: int = 1) -> list[int]:
        """Return the token ids of a prompt, with exactly one BOS if the model uses it, truncated if the prompt says so.

        answer_tokens: tokens that a truncated prompt leaves for the answer. Raises RequestError or TokenizerError.
        """
        work = self.text_of(prompt, answer_tokens)
        if work is not None:
            return self.check_ids(work.ids(self.tokenizer()))
        _, value, options = _parts(prompt)
        kept = options.kept(self._max_model_len - answer_tokens)
        return self.check_ids([*truncated([*value], kept, options.truncation_side)])

    def text_of(self, prompt: Prompt | Rendered, answer_tokens: int = 1) -> TextToEncode | None:
        """Return the text of a prompt, to be tokenized; None for a prompt of token ids. Raises the errors of `encode`.

        A text whose length shows that it cannot fit is refused, unless it is to be truncated.
        """
        kind, value, options = _parts(prompt)
        if kind == "prompt_token_ids":
            return None
        kept = options.kept(self._max_model_len - answer_tokens)
        if kind == "messages":
            given = prompt.get("add_special_tokens") if isinstance(prompt, Mapping) else None
            kind, value = "rendered", Rendered(self.tokenizer().render_chat(value), given)
        if kind == "rendered":
            text, special = value.text, value.add_special_tokens
        else:
            text, special = value, options.add_special_tokens
            if not text:
                raise RequestError("the prompt is empty; give at least one character")
        self.check_text(text) if kept is None else self.check_size(text)
        return TextToEncode(text, kind == "rendered", special, kept, options.truncation_side)

    def check_size(self, text: str) -> None:
        """Raise RequestError for a text of more than max_chars characters."""
        if self._max_chars is not None and len(text) > self._max_chars:
            raise RequestError(
                f"the text has {len(text)} characters; the limit is {self._max_chars} (--max-prompt-chars): shorten it"
            )

    def check_text(self, text: str) -> None:
        """Raise RequestError for a text whose number of characters shows that it cannot fit the context."""
        self.check_size(text)
        tokenizer, limit = self.tokenizer(), self._max_model_len
        if (least := tokenizer.least_tokens(text)) > limit:
            raise RequestError(
                f"the prompt has {len(text)} characters, which are at least {least} tokens (a token of this model has "
                f"at most {tokenizer.characters_per_token} characters); the context is {limit} tokens: shorten it"
                f"{self._longer_context()}"
            )

    def request(
        self,
        prompt: Prompt | Rendered,
        params: Params,
        index: int = 0,
        priority: int = 0,
        ids: list[int] | None = None,
    ) -> GenerationRequest:
        """Return a checked request. ids: the tokens of its text, if the result of `text_of` was tokenized elsewhere.

        index: number of the request in its call. A request with a seed draws noise from the seed alone; one without
        draws from the model's seed and its number. Raises RequestError or TokenizerError.
        """
        ids = self.encode(prompt, answer_tokens(params)) if ids is None else self.check_ids(ids)
        params = self._with_suffix(params)
        self.check_kind(params, ids)
        self.check_length(ids, params)
        params = self._with_length(ids, params)
        params = self._with_bad_words(params)
        params = self._with_breakers(params)
        params.check_vocabulary(self._spec.vocab_size)
        if type(priority) is not int:
            raise RequestError(f"priority is {priority!r}; it must be a whole number, lower is more urgent")
        noise: tuple[NoiseKey, ...] = ()
        if isinstance(params, SamplingParams):
            if params.stop and self._tokenizer is None:
                raise RequestError(f"stop needs a tokenizer: {self._no_tokenizer}; use stop_token_ids instead")
            seed, index = (self._seed, index + 1) if params.seed is None else (params.seed, 0)
            noise = tuple(NoiseKey(seed, index << 32 | choice) for choice in range(params.n))
        kind, value, options = _parts(prompt)
        whole = kind == "prompt" and options.truncate_prompt_tokens is None
        return GenerationRequest(ids, params, noise, value if whole else None, priority, options.cache_salt)

    def requests(
        self, batch: Sequence[Prompt], params: Params | Sequence[Params], priority: Sequence[int] | None,
        indices: Sequence[int] | None, lora: str | Sequence[str] = "",
    ) -> list[GenerationRequest]:  # fmt: skip
        """Return a request for every prompt. Raises RequestError, which names the first bad prompt.

        params, lora: for all prompts, or one for each. priority, indices: one for each; None: 0, and 0, 1, 2.
        """
        each = [params] * len(batch) if isinstance(params, Params) else list(params)
        adapters = [lora] * len(batch) if isinstance(lora, str) else list(lora)
        urgency = [0] * len(batch) if priority is None else list(priority)
        index = list(range(len(batch))) if indices is None else list(indices)
        given = ("sampling_params", each), ("priority", urgency), ("indices", index), ("lora", adapters)
        for name, values in given:
            if len(values) != len(batch):
                raise RequestError(f"{len(batch)} prompts, but {len(values)} {name}; give one for each")
        requests = []
        for i, (prompt, p, at, u, name) in enumerate(zip(batch, each, index, urgency, adapters, strict=True)):
            try:
                requests.append(replace(self.request(prompt, p, at, u), lora=name))
            except (RequestError, TokenizerError) as e:
                raise (type(e)(f"prompt {i + 1} of {len(batch)}: {e}") if len(batch) > 1 else e) from None
        return requests

    def check_kind(self, params: Params, ids: Sequence[int] = ()) -> None:
        """Raise RequestError for parameters, or ids of a prompt, that this kind of model cannot serve."""
        self._spec.require_logits("an answer")
        check_params(params, self._spec.diffusion, ids, self._spec.block)

    def _with_suffix(self, params: Params) -> Params:
        """Return params with the suffix as token ids, if this kind of model can have one."""
        self.check_kind(params)
        if not isinstance(params, SamplingParams) or not params.suffix:
            return params
        if self._tokenizer is None:
            raise RequestError(f"suffix needs a tokenizer: {self._no_tokenizer}; use suffix_token_ids instead")
        self.check_size(params.suffix[0])
        ids = self._tokenizer.encode(params.suffix[0], add_special_tokens=False)
        return replace(params, suffix=(), suffix_token_ids=tuple(ids))

    def _with_length(self, ids: Sequence[int], params: Params) -> Params:
        """Return params with the length of the answer, if the model needs it: it sees whole sequences."""
        if self._spec.block < BEYOND or not isinstance(params, SamplingParams) or params.max_tokens is not None:
            return params
        room = self._max_model_len - len(ids) - len(params.suffix_token_ids)
        return replace(params, max_tokens=min(room, max(WHOLE_TOKENS, params.min_tokens)))

    def _with_bad_words(self, params: Params) -> Params:
        """Return params with bad_words as token ids: each word as it is at the start of a text, and after a space."""
        if not isinstance(params, SamplingParams) or not params.bad_words:
            return params
        if self._tokenizer is None:
            raise RequestError(f"bad_words needs a tokenizer: {self._no_tokenizer}; use bad_token_sequences instead")
        words = [word.lstrip() for word in params.bad_words]
        texts = [text for word in words for text in (word, f" {word}")]
        found = [tuple(self._tokenizer.encode(text, add_special_tokens=False)) for text in texts]
        known = [ids for ids in found if ids and max(ids) < self._spec.vocab_size]  # the model can write no others
        sequences = dict.fromkeys([*params.bad_token_sequences, *known])
        return replace(params, bad_words=(), bad_token_sequences=tuple(sequences))

    def _with_breakers(self, params: Params) -> Params:
        """Return params with the sequence breakers of DRY as token ids, if DRY is on."""
        if not isinstance(params, SamplingParams) or params.dry_multiplier == 0 or not params.dry_sequence_breakers:
            return params
        if self._tokenizer is None:
            raise RequestError(
                f"dry_sequence_breakers needs a tokenizer: {self._no_tokenizer}; give [] or use dry_token_breakers"
            )
        found = self._breakers.find(params.dry_sequence_breakers)
        return replace(params, dry_sequence_breakers=(), dry_token_breakers=(*params.dry_token_breakers, *found))

    @cached_property
    def _breakers(self) -> BreakerIndex:
        """Return the index of the vocabulary. The first request with DRY makes it: some 0.1 s per 100,000 tokens."""
        return BreakerIndex(self.tokenizer(), self._spec.vocab_size)

    def check_length(self, ids: Sequence[int], params: Params) -> None:
        """Raise RequestError if a prompt and its answer do not fit the context: nothing is ever cut."""
        limit = self._max_model_len
        after = len(params.suffix_token_ids) if isinstance(params, SamplingParams) else 0
        room, given = limit - len(ids) - after, f"the prompt's {len(ids)} tokens"
        if isinstance(canvas := self._spec.diffusion, CanvasDiffusion):
            room, given = canvas.rest_of(len(ids), limit), f"{given}, canvases of {canvas.canvas}"
        if room < 1:
            has = f"{len(ids)} tokens" + (f", and the suffix {after}" if after else "")
            raise RequestError(
                f"the prompt has {has}, which leaves no room in the context of {limit}; "
                f"shorten it{self._longer_context()}"
            )
        if after:
            given += f", the suffix's {after}"
        min_tokens = params.min_tokens if isinstance(params, SamplingParams) else 0
        for name, wanted in (("max_tokens", params.max_tokens), ("min_tokens", min_tokens)):
            if wanted is not None and wanted > room:
                raise RequestError(
                    f"{given} and {name} {wanted} exceed the context of {limit}; "
                    f"lower {name} to {room}{self._longer_context()}"
                )

    def check_ids(self, ids: list[int]) -> list[int]:
        """Return the ids as ints. Raises RequestError for none, and for one that the model does not have."""
        vocab = self._spec.vocab_size
        if not ids:
            raise RequestError("the prompt is empty; give at least one token")
        for i in ids:
            whole = hasattr(i, "__index__") and not isinstance(i, bool)  # numpy's integers too
            if not whole or not 0 <= i < vocab:
                raise RequestError(f"token id {i!r} is not in 0..{vocab - 1}, this model's vocabulary")
        return [index(i) for i in ids]

    def tokenizer(self) -> Tokenizer:
        """Return the tokenizer. Raises TokenizerError where there is none."""
        if self._tokenizer is None:
            raise TokenizerError(f"text needs a tokenizer: {self._no_tokenizer}; give prompt_token_ids instead")
        return self._tokenizer

    def _longer_context(self) -> str:
        limit = self._spec.max_position_embeddings
        return f", or raise --max-model-len (up to {limit})" if limit > self._max_model_len else ""


def answer_tokens(params: Params) -> int:
    """Return how many tokens a truncated prompt leaves room for."""
    least = params.min_tokens if isinstance(params, SamplingParams) else 0
    return params.max_tokens or max(1, least)


def as_batch(prompts: Prompt | Iterable[Prompt]) -> list[Prompt]:
    """Return a list of prompts. A single prompt (text, an object, a list of token ids) becomes a list of one."""
    if isinstance(prompts, str | Mapping):
        return [prompts]
    if isinstance(prompts, bytes | bytearray) or not isinstance(prompts, Iterable):
        raise RequestError(f"prompts is {prompts!r}; give a text, token ids, an object, or a list of these")
    items: list[Any] = list(prompts)
    return [items] if items and all(hasattr(i, "__index__") for i in items) else items


def _parts(prompt: Prompt | Rendered) -> tuple[str, Any, PromptOptions]:
    """Return which of PROMPT_KEYS a prompt has ("rendered" for a Rendered), its value, and its options."""
    if isinstance(prompt, Rendered):
        return "rendered", prompt, prompt.options
    if isinstance(prompt, str):
        return "prompt", prompt, PromptOptions()
    if not isinstance(prompt, Mapping):
        if isinstance(prompt, bytes | bytearray) or not isinstance(prompt, Iterable):
            raise RequestError(f"a prompt is a text, token ids or an object; this is {prompt!r}")
        return "prompt_token_ids", prompt, PromptOptions()
    given = [key for key in PROMPT_KEYS if key in prompt]
    if len(given) != 1 or not prompt.keys() <= {given[0], *OPTION_KEYS}:
        raise RequestError(
            f"a prompt has exactly one of {', '.join(PROMPT_KEYS)}, and perhaps {', '.join(OPTION_KEYS)}; "
            f"this has {sorted(prompt)}"
        )
    kind = given[0]
    value = prompt[kind]
    if kind != "messages" and not isinstance(value, str if kind == "prompt" else list):
        raise RequestError(f"{kind} is {value!r}")
    return kind, value, PromptOptions.of(prompt)
