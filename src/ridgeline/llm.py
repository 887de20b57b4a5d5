"""The offline entry point: prompts in, answers out."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from ridgeline.errors import RequestError, TokenizerError
from ridgeline.load.checkpoint import Checkpoint
from ridgeline.load.detokenize import Detokenizer
from ridgeline.load.hub import SMALL_FILES, find_model
from ridgeline.load.tokenizer import Tokenizer
from ridgeline.runtime.load import LoadedModel, LoadOptions, ProgressBar, load_model, no_progress
from ridgeline.runtime.naive import NaiveGenerator, NaiveRequest
from ridgeline.runtime.step import DenseStep
from ridgeline.spec.request import RequestOutput, SamplingParams

if TYPE_CHECKING:
    import numpy as np

# Text, token ids, or an object with one of "prompt", "prompt_token_ids", "messages" (a conversation).
Prompt = str | Sequence[int] | Mapping[str, Any]
PROMPT_KEYS = ("prompt", "prompt_token_ids", "messages")


class LLM:
    """A model that is ready to answer, in this process.

    model: a folder or a Hugging Face hub id. tokenizer: where to find it if not with the model. The other options are
    those of `LoadOptions`, with vLLM's names: device, dtype, max_model_len, load_format, revision, seed, ops.
    Raises a RidgelineError, one line, for anything that cannot be loaded.
    """

    def __init__(
        self,
        model: str,
        *,
        tokenizer: str | None = None,
        skip_tokenizer_init: bool = False,
        progress_bar: ProgressBar = no_progress,
        **options: Any,
    ) -> None:
        known = {f.name for f in fields(LoadOptions)}
        if unknown := sorted(set(options) - known):
            raise RequestError(f"LLM has no option {', '.join(unknown)}; known are {', '.join(sorted(known))}")
        self.options = LoadOptions(**options)
        self.loaded: LoadedModel = load_model(model, self.options, progress_bar)
        self.tokenizer: Tokenizer | None = None
        self._no_tokenizer = "the tokenizer was left out (skip_tokenizer_init)"
        if not skip_tokenizer_init:
            self._open_tokenizer(tokenizer)

    @property
    def checkpoint(self) -> Checkpoint:
        return self.loaded.checkpoint

    @property
    def max_model_len(self) -> int:
        """The longest context in tokens: prompt and answer together."""
        return self.loaded.max_model_len

    def default_sampling_fields(self) -> dict[str, Any]:
        """The sampling parameters that the model's generation_config.json recommends."""
        return dict(self.checkpoint.sampling_defaults)

    def generate(
        self,
        prompts: Prompt | Iterable[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        on_text: Callable[[int, int, str], None] | None = None,
        on_done: Callable[[int], None] = lambda request: None,
    ) -> list[RequestOutput]:
        """Answer one prompt or many; results in the order given.

        sampling_params: for all prompts, or one for each; default: what generation_config.json recommends.
        on_text: called with (prompt index, choice, new text) as it comes, never with a broken character.
        on_done: called with the index of each prompt whose answers are complete.
        Raises RequestError if any prompt is empty, too long, or not understood; nothing has run then.
        """
        batch = _as_batch(prompts)
        encoded = [self.encode(p) for p in batch]
        requests = self._requests(encoded, sampling_params)
        streams = _TextStreams(self.tokenizer, requests, on_text)

        def done(request: int) -> None:
            streams.finish(request)
            on_done(request)

        results = NaiveGenerator(self.loaded).run(requests, streams.push, done)
        outputs = []
        for i, (prompt, ids, result) in enumerate(zip(batch, encoded, results, strict=True)):
            for output in result.outputs:
                output.text = streams.text(i, output.index)
            text = prompt.get("prompt") if isinstance(prompt, Mapping) else prompt if isinstance(prompt, str) else None
            outputs.append(RequestOutput(text, ids, result.outputs, result.timing))
        return outputs

    def logits(self, sequences: Sequence[Sequence[int]]) -> list[np.ndarray[Any, Any]]:
        """Logits [tokens, vocabulary] at every position of each token list, computed in one ragged batch."""
        for ids in sequences:
            self._check_ids(list(ids))
            if len(ids) > self.max_model_len:
                raise RequestError(f"a sequence has {len(ids)} tokens; max_model_len is {self.max_model_len}")
        if not sequences:
            return []
        memory = self.loaded.table.memory
        step = DenseStep.build(sequences, memory)
        rows = memory.get(self.loaded.model(step))
        starts = [sum(step.lengths[:i]) for i in range(len(sequences))]
        return [rows[start : start + n] for start, n in zip(starts, step.lengths, strict=True)]

    def encode(self, prompt: Prompt) -> list[int]:
        """Token ids of a prompt, exactly one BOS where the model uses one. Raises RequestError or TokenizerError."""
        if isinstance(prompt, Mapping):
            given = [key for key in PROMPT_KEYS if key in prompt]
            if len(given) != 1 or len(prompt) != 1:
                raise RequestError(f"a prompt has exactly one of {', '.join(PROMPT_KEYS)}; this has {sorted(prompt)}")
            value = prompt[given[0]]
            if given[0] == "messages":
                return self._check_ids(self._tokenizer().encode_chat(value))
            if not isinstance(value, str if given[0] == "prompt" else list):
                raise RequestError(f"{given[0]} is {value!r}")
            prompt = value
        if isinstance(prompt, str):
            if not prompt:
                raise RequestError("the prompt is empty; give at least one character")
            return self._check_ids(self._tokenizer().encode(prompt))
        if not isinstance(prompt, Sequence):
            raise RequestError(f"a prompt is a text, token ids or an object; this is {prompt!r}")
        return self._check_ids([*prompt])

    def _requests(
        self, encoded: Sequence[list[int]], params: SamplingParams | Sequence[SamplingParams] | None
    ) -> list[NaiveRequest]:
        if params is None:
            params = SamplingParams(**self.default_sampling_fields())
        each = [params] * len(encoded) if isinstance(params, SamplingParams) else list(params)
        if len(each) != len(encoded):
            raise RequestError(f"{len(encoded)} prompts, but {len(each)} sampling_params; give one, or one for each")
        for ids, p in zip(encoded, each, strict=True):
            self.check_length(ids, p)
        return [
            NaiveRequest(ids, p, self.options.seed + i) for i, (ids, p) in enumerate(zip(encoded, each, strict=True))
        ]

    def check_length(self, ids: Sequence[int], params: SamplingParams) -> None:
        """Raise RequestError if a prompt and its answer do not fit the context: nothing is ever cut."""
        room = self.max_model_len - len(ids)
        if room < 1:
            raise RequestError(
                f"the prompt has {len(ids)} tokens, which leaves no room in the context of {self.max_model_len}; "
                f"shorten it{self._longer_context()}"
            )
        if params.max_tokens is not None and params.max_tokens > room:
            raise RequestError(
                f"the prompt's {len(ids)} tokens and max_tokens {params.max_tokens} exceed the context of "
                f"{self.max_model_len}; lower max_tokens to {room}{self._longer_context()}"
            )

    def _longer_context(self) -> str:
        limit = self.loaded.spec.max_position_embeddings
        return f", or raise --max-model-len (up to {limit})" if limit > self.max_model_len else ""

    def _check_ids(self, ids: list[int]) -> list[int]:
        vocab = self.loaded.spec.vocab_size
        if not ids:
            raise RequestError("the prompt is empty; give at least one token")
        for i in ids:
            if type(i) is not int or not 0 <= i < vocab:
                raise RequestError(f"token id {i!r} is not in 0..{vocab - 1}, this model's vocabulary")
        return ids

    def _tokenizer(self) -> Tokenizer:
        if self.tokenizer is None:
            raise TokenizerError(f"text needs a tokenizer: {self._no_tokenizer}; give prompt_token_ids instead")
        return self.tokenizer

    def _open_tokenizer(self, other: str | None) -> None:
        """A tokenizer that is absent is an error only when text arrives; one that does not fit is one now."""
        folder = find_model(other, files=SMALL_FILES) if other else self.checkpoint.folder
        if not other and not any(folder.glob("tokenizer*")):
            self._no_tokenizer = f"{folder} has none"
            return
        self.tokenizer = Tokenizer.from_folder(folder)
        # Added tokens past the model's vocabulary are another model's business (Gemma 3's image token): an error
        # if text holds one, not before.
        if self.tokenizer.base_vocab_size > self.loaded.spec.vocab_size:
            raise TokenizerError(
                f"the tokenizer has {self.tokenizer.base_vocab_size} tokens, the model {self.loaded.spec.vocab_size}: "
                "they do not belong together"
            )


def _as_batch(prompts: Prompt | Iterable[Prompt]) -> list[Prompt]:
    """One prompt (text, an object, a list of token ids) as a list of one; many as a list."""
    if isinstance(prompts, str | Mapping):
        return [prompts]
    if not isinstance(prompts, Iterable):
        raise RequestError(f"prompts is {prompts!r}; give a text, token ids, an object, or a list of these")
    items: list[Any] = list(prompts)
    return [items] if items and all(isinstance(i, int) for i in items) else items


class _TextStreams:
    """Text of every answer, piece by piece."""

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        requests: Sequence[NaiveRequest],
        on_text: Callable[[int, int, str], None] | None,
    ) -> None:
        self._on_text = on_text
        self._pieces: dict[tuple[int, int], list[str]] = {}
        self._detokenizers: dict[tuple[int, int], Detokenizer] = {}
        self._choices = [r.params.n for r in requests]
        if tokenizer is not None:
            for i, r in enumerate(requests):
                for choice in range(r.params.n):
                    self._detokenizers[i, choice] = tokenizer.detokenizer(
                        r.params.skip_special_tokens, r.prompt_token_ids
                    )

    def push(self, request: int, choice: int, token: int) -> None:
        if detokenizer := self._detokenizers.get((request, choice)):
            self._emit(request, choice, detokenizer.push(token))

    def finish(self, request: int) -> None:
        """All answers to a request are complete: what was held back comes out."""
        for choice in range(self._choices[request]):
            if detokenizer := self._detokenizers.get((request, choice)):
                self._emit(request, choice, detokenizer.flush())

    def text(self, request: int, choice: int) -> str:
        return "".join(self._pieces.get((request, choice), []))

    def _emit(self, request: int, choice: int, piece: str) -> None:
        if piece:
            self._pieces.setdefault((request, choice), []).append(piece)
            if self._on_text:
                self._on_text(request, choice, piece)
