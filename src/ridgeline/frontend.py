"""From what a user gives (text, messages, ids) to a request that is known to fit the model."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import index
from typing import Any

from ridgeline.errors import RequestError, TokenizerError
from ridgeline.load.tokenizer import Tokenizer
from ridgeline.runtime.generator import GenerationRequest
from ridgeline.runtime.sampler import NoiseKey
from ridgeline.spec import ModelSpec
from ridgeline.spec.request import Params, SamplingParams

# Text, token ids, or an object with one of "prompt", "prompt_token_ids", "messages" (a conversation), and perhaps a
# "cache_salt" (prefixes are shared only under the same one).
Prompt = str | Sequence[int] | Mapping[str, Any]
PROMPT_KEYS = ("prompt", "prompt_token_ids", "messages")
CACHE_SALT = "cache_salt"


@dataclass(frozen=True, slots=True)
class Rendered:
    """A conversation as the text that its chat template made of it."""

    text: str


class Frontend:
    """Tokenises and checks. no_tokenizer: why there is none, where there is none.

    max_chars: characters that a text may have; None: any number.
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

    def encode(self, prompt: Prompt | Rendered) -> list[int]:
        """Token ids of a prompt, exactly one BOS where the model uses one. Raises RequestError or TokenizerError."""
        if isinstance(prompt, Rendered):
            self.check_text(prompt.text)
            return self.check_ids(self.tokenizer().encode_rendered(prompt.text))
        kind, value, _ = _parts(prompt)
        if kind == "messages":
            return self.encode(Rendered(self.tokenizer().render_chat(value)))
        if kind == "prompt":
            if not value:
                raise RequestError("the prompt is empty; give at least one character")
            self.check_text(value)
            return self.check_ids(self.tokenizer().encode(value))
        return self.check_ids([*value])

    def check_size(self, text: str) -> None:
        """Raise RequestError for a text of more characters than may be tokenized at once."""
        if self._max_chars is not None and len(text) > self._max_chars:
            raise RequestError(
                f"the text has {len(text)} characters; the limit is {self._max_chars} (--max-prompt-chars): shorten it"
            )

    def check_text(self, text: str) -> None:
        """Raise RequestError for a prompt that cannot fit the context, by arithmetic, before it is tokenized."""
        tokenizer, limit = self.tokenizer(), self._max_model_len
        if (least := tokenizer.least_tokens(text)) > limit:
            raise RequestError(
                f"the prompt has {len(text)} characters, which are at least {least} tokens (a token of this model has "
                f"at most {tokenizer.characters_per_token} characters); the context is {limit} tokens: shorten it"
                f"{self._longer_context()}"
            )
        self.check_size(text)

    def request(
        self,
        prompt: Prompt,
        params: Params,
        place: int = 0,
        priority: int = 0,
        ids: list[int] | None = None,
    ) -> GenerationRequest:
        """A prompt and how to continue it, checked. ids: of its text, if that has been tokenized elsewhere.

        place: the request's number in its call. Under a seed of its own a request's noise depends on nothing else;
        under the model's, on its place. Raises RequestError or TokenizerError.
        """
        ids = self.encode(prompt) if ids is None else self.check_ids(ids)
        self.check_length(ids, params)
        params.check_vocabulary(self._spec.vocab_size)
        if type(priority) is not int:
            raise RequestError(f"priority is {priority!r}; it must be a whole number, lower is more urgent")
        noise: tuple[NoiseKey, ...] = ()
        if isinstance(params, SamplingParams):
            if params.stop and self._tokenizer is None:
                raise RequestError(f"stop needs a tokenizer: {self._no_tokenizer}; use stop_token_ids instead")
            seed, place = (self._seed, place + 1) if params.seed is None else (params.seed, 0)
            noise = tuple(NoiseKey(seed, place << 32 | choice) for choice in range(params.n))
        kind, value, salt = _parts(prompt)
        return GenerationRequest(ids, params, noise, value if kind == "prompt" else None, priority, salt)

    def check_length(self, ids: Sequence[int], params: Params) -> None:
        """Raise RequestError if a prompt and its answer do not fit the context: nothing is ever cut."""
        limit = self._max_model_len
        room = limit - len(ids)
        if room < 1:
            raise RequestError(
                f"the prompt has {len(ids)} tokens, which leaves no room in the context of {limit}; "
                f"shorten it{self._longer_context()}"
            )
        min_tokens = params.min_tokens if isinstance(params, SamplingParams) else 0
        for name, wanted in (("max_tokens", params.max_tokens), ("min_tokens", min_tokens)):
            if wanted is not None and wanted > room:
                raise RequestError(
                    f"the prompt's {len(ids)} tokens and {name} {wanted} exceed the context of {limit}; "
                    f"lower {name} to {room}{self._longer_context()}"
                )

    def check_ids(self, ids: list[int]) -> list[int]:
        """The ids as ints. Raises RequestError for none, and for one that the model does not have."""
        vocab = self._spec.vocab_size
        if not ids:
            raise RequestError("the prompt is empty; give at least one token")
        for i in ids:
            whole = hasattr(i, "__index__") and not isinstance(i, bool)  # numpy's integers too
            if not whole or not 0 <= i < vocab:
                raise RequestError(f"token id {i!r} is not in 0..{vocab - 1}, this model's vocabulary")
        return [index(i) for i in ids]

    def tokenizer(self) -> Tokenizer:
        """The tokenizer. Raises TokenizerError where there is none."""
        if self._tokenizer is None:
            raise TokenizerError(f"text needs a tokenizer: {self._no_tokenizer}; give prompt_token_ids instead")
        return self._tokenizer

    def _longer_context(self) -> str:
        limit = self._spec.max_position_embeddings
        return f", or raise --max-model-len (up to {limit})" if limit > self._max_model_len else ""


def as_batch(prompts: Prompt | Iterable[Prompt]) -> list[Prompt]:
    """One prompt (text, an object, a list of token ids) as a list of one; many as a list."""
    if isinstance(prompts, str | Mapping):
        return [prompts]
    if isinstance(prompts, bytes | bytearray) or not isinstance(prompts, Iterable):
        raise RequestError(f"prompts is {prompts!r}; give a text, token ids, an object, or a list of these")
    items: list[Any] = list(prompts)
    return [items] if items and all(hasattr(i, "__index__") for i in items) else items


def _parts(prompt: Prompt) -> tuple[str, Any, str]:
    """Which of PROMPT_KEYS a prompt has, its value, and its cache salt."""
    if isinstance(prompt, str):
        return "prompt", prompt, ""
    if not isinstance(prompt, Mapping):
        if isinstance(prompt, bytes | bytearray) or not isinstance(prompt, Iterable):
            raise RequestError(f"a prompt is a text, token ids or an object; this is {prompt!r}")
        return "prompt_token_ids", prompt, ""
    given = [key for key in PROMPT_KEYS if key in prompt]
    if len(given) != 1 or len(prompt) != 1 + (CACHE_SALT in prompt):
        raise RequestError(
            f"a prompt has exactly one of {', '.join(PROMPT_KEYS)}, and perhaps {CACHE_SALT}; this has {sorted(prompt)}"
        )
    kind, salt = given[0], prompt.get(CACHE_SALT, "")
    value = prompt[kind]
    if kind != "messages" and not isinstance(value, str if kind == "prompt" else list):
        raise RequestError(f"{kind} is {value!r}")
    if not isinstance(salt, str):
        raise RequestError(f"{CACHE_SALT} is {salt!r}; it must be a text")
    try:
        salt.encode("utf-8")
    except UnicodeEncodeError as error:
        raise RequestError(f"{CACHE_SALT} has the lone surrogate {salt[error.start]!r}; send valid Unicode") from None
    return kind, value, salt
