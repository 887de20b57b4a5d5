"""The offline entry point: prompts in, answers out."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from operator import index
from typing import TYPE_CHECKING, Any, Literal

from ridgeline.engine.batch import EngineGenerator
from ridgeline.errors import RequestError, TokenizerError
from ridgeline.load.checkpoint import Checkpoint
from ridgeline.load.hub import SMALL_FILES, find_model
from ridgeline.load.tokenizer import Tokenizer
from ridgeline.plan import EngineConfig, EngineOptions, resolve
from ridgeline.runtime.batch import GenerationRequest, GenerationResult, Generator
from ridgeline.runtime.load import LoadedModel, LoadOptions, ProgressBar, load_model, no_progress
from ridgeline.runtime.naive import NaiveGenerator
from ridgeline.runtime.sampler import NoiseKey
from ridgeline.runtime.step import DenseStep
from ridgeline.runtime.text import TextStreams
from ridgeline.spec.request import RequestOutput, SamplingParams

if TYPE_CHECKING:
    import numpy as np

# Text, token ids, or an object with one of "prompt", "prompt_token_ids", "messages" (a conversation).
Prompt = str | Sequence[int] | Mapping[str, Any]
PROMPT_KEYS = ("prompt", "prompt_token_ids", "messages")
UNKNOWN_FREE_BYTES = 1 << 32  # where the system does not say: 4 GiB


class LLM:
    """A model that is ready to answer, in this process. Calls from several threads must take turns.

    model: a folder or a Hugging Face hub id. tokenizer: where to find it if not with the model. cache: "on" is the
    engine (paged state, continuous batching), "off" naive sampling, the baseline. The other options have vLLM's names:
    see `LoadOptions` and `EngineOptions`; what is left open is chosen, and explained by `config.reasons`.
    Raises a RidgelineError, one line, for anything that cannot be loaded.
    """

    def __init__(
        self,
        model: str,
        *,
        tokenizer: str | None = None,
        skip_tokenizer_init: bool = False,
        cache: Literal["on", "off"] = "on",
        device: str = "auto",
        dtype: str = "auto",
        max_model_len: int | None = None,
        load_format: str = "auto",
        revision: str | None = None,
        seed: int = 0,
        ops: Mapping[str, str] | None = None,
        engine: EngineOptions | None = None,
        progress_bar: ProgressBar = no_progress,
    ) -> None:
        if cache not in ("on", "off"):
            raise RequestError(f"cache is {cache!r}; it must be 'on' or 'off'")
        self.options = LoadOptions(device, dtype, max_model_len, load_format, revision, seed, ops)
        self.loaded: LoadedModel = load_model(model, self.options, progress_bar)
        self.tokenizer: Tokenizer | None = None
        self._no_tokenizer = "the tokenizer was left out (skip_tokenizer_init)"
        if not skip_tokenizer_init:
            self._open_tokenizer(tokenizer)
        self.config: EngineConfig | None = None
        self._generator: Generator = NaiveGenerator(self.loaded)
        if cache == "on":
            self.config = self._resolve(engine or EngineOptions())
            self._generator = EngineGenerator(self.loaded, self.config)

    def _resolve(self, options: EngineOptions) -> EngineConfig:
        memory, on_cpu = self.loaded.table.memory, self.loaded.table.memory.device == "cpu"
        free = memory.free_bytes()
        return resolve(
            self.loaded.spec,
            self.loaded.max_model_len,
            options,
            free_bytes=(UNKNOWN_FREE_BYTES if free is None else free) - self.loaded.mapped_bytes,
            fixed_len=self.options.max_model_len is not None,
            fraction=0.5 if on_cpu else 0.9,  # a CPU's memory is also everybody else's
        )

    @property
    def checkpoint(self) -> Checkpoint:
        return self.loaded.checkpoint

    @property
    def max_model_len(self) -> int:
        """The longest context in tokens: prompt and answer together."""
        return self.config.max_model_len if self.config else self.loaded.max_model_len

    def default_sampling_fields(self) -> dict[str, Any]:
        """The sampling parameters that the model's generation_config.json recommends."""
        return dict(self.checkpoint.sampling_defaults)

    def generate(
        self,
        prompts: Prompt | Iterable[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        on_text: Callable[[int, int, str], None] | None = None,
        on_done: Callable[[int, RequestOutput], None] = lambda request, output: None,
    ) -> list[RequestOutput]:
        """Answer one prompt or many; results in the order given.

        sampling_params: for all prompts, or one for each; default: what generation_config.json recommends.
        on_text: called with (prompt index, choice, new text) as it comes, never with a broken character.
        on_done: called with each prompt's index and result as soon as its answers are complete.
        Raises RequestError if any prompt is empty, too long, or not understood; nothing has run then. What fails on
        its own while running has finish_reason "error".
        """
        batch = _as_batch(prompts)
        requests = self._requests(batch, sampling_params)
        streams = TextStreams(self.tokenizer, requests, on_text)
        outputs: list[RequestOutput | None] = [None] * len(batch)

        def done(index: int, result: GenerationResult) -> None:
            streams.finish(index)
            for answer in result.outputs:
                answer.text = streams.text(index, answer.index)
            ids = list(requests[index].prompt_token_ids)
            output = RequestOutput(
                _text_of(batch[index]), ids, result.outputs, result.timing, result.num_cached_tokens,
                prompt_logprobs=result.prompt_logprobs,
            )  # fmt: skip
            outputs[index] = output
            on_done(index, output)

        self._generator.run(requests, streams.push, done)
        return [output for output in outputs if output is not None]

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
        if isinstance(prompt, bytes | bytearray) or not isinstance(prompt, Iterable):
            raise RequestError(f"a prompt is a text, token ids or an object; this is {prompt!r}")
        return self._check_ids([*prompt])

    def _requests(
        self, batch: Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] | None
    ) -> list[GenerationRequest]:
        """Every prompt, checked. Raises RequestError that names the first one which cannot be served."""
        if params is None:
            params = SamplingParams(**self.default_sampling_fields())
        each = [params] * len(batch) if isinstance(params, SamplingParams) else list(params)
        if len(each) != len(batch):
            raise RequestError(f"{len(batch)} prompts, but {len(each)} sampling_params; give one, or one for each")
        requests = []
        for i, (prompt, p) in enumerate(zip(batch, each, strict=True)):
            try:
                requests.append(self._request(i, prompt, p))
            except (RequestError, TokenizerError) as e:
                raise (type(e)(f"prompt {i + 1} of {len(batch)}: {e}") if len(batch) > 1 else e) from None
        return requests

    def _request(self, index: int, prompt: Prompt, params: SamplingParams) -> GenerationRequest:
        ids = self.encode(prompt)
        self.check_length(ids, params)
        params.check_vocabulary(self.loaded.spec.vocab_size)
        if params.stop and self.tokenizer is None:
            raise RequestError(f"stop needs a tokenizer: {self._no_tokenizer}; use stop_token_ids instead")
        # Under a seed of its own a request's noise depends on nothing else; under the model's, on its place.
        seed, place = (self.options.seed, index + 1) if params.seed is None else (params.seed, 0)
        return GenerationRequest(ids, params, tuple(NoiseKey(seed, place << 32 | choice) for choice in range(params.n)))

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
        if params.min_tokens > room:
            raise RequestError(
                f"the prompt's {len(ids)} tokens and min_tokens {params.min_tokens} exceed the context of "
                f"{self.max_model_len}; lower min_tokens to {room}{self._longer_context()}"
            )

    def _longer_context(self) -> str:
        limit = self.loaded.spec.max_position_embeddings
        return f", or raise --max-model-len (up to {limit})" if limit > self.max_model_len else ""

    def _check_ids(self, ids: list[int]) -> list[int]:
        vocab = self.loaded.spec.vocab_size
        if not ids:
            raise RequestError("the prompt is empty; give at least one token")
        for i in ids:
            whole = hasattr(i, "__index__") and not isinstance(i, bool)  # numpy's integers too
            if not whole or not 0 <= i < vocab:
                raise RequestError(f"token id {i!r} is not in 0..{vocab - 1}, this model's vocabulary")
        return [index(i) for i in ids]

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
        if (eos := self.tokenizer.eos_token_id) is not None:  # many configs leave it to the tokenizer
            self.loaded = replace(self.loaded, eos_token_ids=self.loaded.eos_token_ids | {eos})


def _text_of(prompt: Prompt) -> str | None:
    text = prompt.get("prompt") if isinstance(prompt, Mapping) else prompt
    return text if isinstance(text, str) else None


def _as_batch(prompts: Prompt | Iterable[Prompt]) -> list[Prompt]:
    """One prompt (text, an object, a list of token ids) as a list of one; many as a list."""
    if isinstance(prompts, str | Mapping):
        return [prompts]
    if isinstance(prompts, bytes | bytearray) or not isinstance(prompts, Iterable):
        raise RequestError(f"prompts is {prompts!r}; give a text, token ids, an object, or a list of these")
    items: list[Any] = list(prompts)
    return [items] if items and all(hasattr(i, "__index__") for i in items) else items
