"""Provide the offline entry point: prompts in, answers out."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Generator, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from ridgeline.engine import Session, StaticGenerator
from ridgeline.engine.adapted import HasAdapters
from ridgeline.engine.given import check_batching, engine_options
from ridgeline.engine.opening import open_engine
from ridgeline.engine.session import error_output
from ridgeline.errors import RequestError, TokenizerError
from ridgeline.load.adapter import rank_of
from ridgeline.load.checkpoint import Checkpoint, open_checkpoint
from ridgeline.load.described import with_description
from ridgeline.load.hub import SMALL_FILES, find_model
from ridgeline.load.tokenizer import Tokenizer, has_tokenizer
from ridgeline.ops.devices import threads_of
from ridgeline.propose import PROPOSERS, Proposer, proposer_of
from ridgeline.runtime import generator
from ridgeline.runtime.captured import Receive, capture
from ridgeline.runtime.embeddings import Embeddings, EmbedsTexts
from ridgeline.runtime.generator import GenerationRequest
from ridgeline.runtime.kv_notes import scale_notes
from ridgeline.runtime.load import LoadedModel, LoadOptions, ProgressBar, adapter_bytes, load_model, no_progress
from ridgeline.runtime.naive import MAX_STEP_TOKENS
from ridgeline.runtime.naive_blocks import open_naive
from ridgeline.runtime.ranks import check_ranks, load_ranks, unmeasured
from ridgeline.runtime.request import Frontend, Prompt, as_batch
from ridgeline.sample.grammar import Grammars
from ridgeline.sched.stats import Stats, StepShape
from ridgeline.settings import EngineConfig, EngineOptions, choose_storage, resolve, storage_name
from ridgeline.settings.advice import Advice, machine_advice
from ridgeline.settings.attention import EXACT, ROUNDED, choose_attention
from ridgeline.settings.encoders import resolve_encoder
from ridgeline.settings.given import check_choices
from ridgeline.settings.speculative import AUTO
from ridgeline.spec import ModelSpec
from ridgeline.spec.quant import PLAIN, format_of
from ridgeline.spec.request import OutputChunk, Params, RequestOutput, SamplingParams
from ridgeline.spec.storage import has_rows
from ridgeline.system import free_bytes, num_cores, return_freed_memory

if TYPE_CHECKING:
    import numpy as np

    from ridgeline.load.chat import Message
    from ridgeline.runtime.heads import LoadedHead
    from ridgeline.spec.heads import HeadSpec

UNKNOWN_FREE_BYTES = 1 << 32  # 4 GiB, if the system does not tell the free memory
LEFT_OUT = "the tokenizer was left out (skip_tokenizer_init)"
STATIC = "chosen, because static batching is a baseline without drafts"
OWN = "chosen, because LLM(proposer=...) proposes drafts"
ChunkStream = Generator[OutputChunk, None, None]


class LLM(EmbedsTexts, HasAdapters):
    """A model that is ready to answer, in this process. Only one thread at a time may call it.

    model: a folder, a GGUF file or a hub id. tokenizer: folder or hub id of the tokenizer, if not the model's. cache:
    "on" is the engine (paged state), "off" naive sampling. batching: "continuous", or "static" for whole batches with
    room for the longest context. "off" and "static" are baselines to measure against. kv_cache_dtype: data type of the
    KV cache, "auto", "float32", "bfloat16", "float16", "int8" or "fp8"; "auto" is float16 for weights of 16 bits or
    fewer and float32 for others; with cache="off" keys and values are rounded in the same way. attention: "exact", or
    "bf16" to round queries, keys, values and weights of attention to bfloat16, which is faster for prompts on CPUs with
    AVX-512 BF16 and needs keys and values of 16 bits. speculative: short for
    EngineOptions(speculative=...). sharing: number of engines that share the cores and the memory of this machine; each
    takes its part of what is free. most_threads: the most threads of each where `threads` is not set.
    tensor_parallel_size: number of processes (ranks) that compute the model together, a part of each matrix each.
    lora_modules: folders or hub ids of adapters (LoRA, rsLoRA, DoRA) by the names that `generate(lora=...)` takes;
    max_loras: room for so many at one time, default: their number; max_lora_rank: the largest rank of a term, default:
    that of lora_modules. spec: JSON file that describes the model in place of its
    config.json (docs/models.md). The other options have vLLM's names: see `LoadOptions` and `EngineOptions`. An option
    that is not given is chosen, and `config.reasons` explains the choice. `loaded.notes` has the cost in accuracy of
    quantized weights, of a type that kv_cache_dtype names, and of rounded attention. It is measured once; on_wait is
    called with a message when that takes a while.
    Raises a RidgelineError, one line, for anything that cannot be loaded.
    """

    draft_spec: ModelSpec | HeadSpec | None = None  # of the draft model or head

    def __init__(
        self,
        model: str,
        *,
        tokenizer: str | None = None,
        skip_tokenizer_init: bool = False,
        cache: Literal["on", "off"] = "on",
        batching: Literal["continuous", "static"] = "continuous",
        device: str = "auto",
        dtype: str = "auto",
        kv_cache_dtype: str = "auto",
        attention: str = EXACT,
        max_model_len: int | None = None,
        load_format: str = "auto",
        revision: str | None = None,
        spec: str | None = None,
        seed: int = 0,
        ops: Mapping[str, str] | None = None,
        weights: str = "auto",
        activations: str | None = None,
        threads: int | None = None,
        diffusion_block: int | None = None,
        block_cache: str | None = None,
        sharing: int = 1,
        most_threads: int | None = None,
        tensor_parallel_size: int = 1,
        lora_modules: Mapping[str, str] | None = None,
        max_loras: int | None = None,
        max_lora_rank: int | None = None,
        engine: EngineOptions | None = None,
        speculative: str | None = None,
        proposer: Proposer | None = None,
        progress_bar: ProgressBar = no_progress,
        on_wait: Callable[[str], None] = lambda why: None,
    ) -> None:
        model, revision = with_description(model, revision, spec)
        check_choices({"cache": cache, "batching": batching, "attention": attention})
        check_ranks(tensor_parallel_size, device, cache)
        self._ranks, sharing = tensor_parallel_size, sharing * tensor_parallel_size
        options = engine_options(engine, speculative, proposer, cache)
        self.options = LoadOptions(
            device, dtype, max_model_len, load_format, revision, seed, ops, weights, activations,
            threads_of(device, threads, sharing, most_threads), diffusion_block, block_cache,
            len(lora_modules or ()) if max_loras is None else max_loras, rank_of(lora_modules, max_lora_rank),
        )  # fmt: skip
        self._kv_cache_dtype, self._attention, self._sharing = storage_name(kv_cache_dtype), attention, sharing
        self.loaded: LoadedModel = self._load(model, tokenizer, progress_bar, on_wait)
        check_batching(self.loaded.spec, batching)
        self.tokenizer: Tokenizer | None = None
        self.tokenizer_folder: Path | None = None
        self.no_tokenizer = LEFT_OUT if skip_tokenizer_init else self._open_tokenizer(tokenizer)  # why there is none
        self.config: EngineConfig | None = None
        source = self._open_source(options, cache, batching, proposer, progress_bar)
        for name, folder in (lora_modules or {}).items():
            self.load_lora(name, folder)
        self.grammars = Grammars(self.tokenizer, self.loaded.spec.vocab_size, self.loaded.eos_token_ids)
        self.session = Session(source, self.tokenizer, self.grammars)
        self.frontend = Frontend(self.loaded.spec, self.tokenizer, self.no_tokenizer, self.max_model_len, seed)
        self.batch_tokens = self.config.max_num_batched_tokens if self.config else MAX_STEP_TOKENS
        self.embeddings = Embeddings(self.loaded, self.frontend, self.max_model_len, self.batch_tokens)

    def _open_source(
        self, options: EngineOptions, cache: str, batching: str, proposer: Proposer | None, progress_bar: ProgressBar
    ) -> generator.Generator:
        """Return what generates tokens, and choose the settings."""
        if self.loaded.spec.encoder:  # it keeps no state, and refuses requests for tokens
            self.config = self._resolve(options, None, None)
        if cache == "off" or self.loaded.spec.encoder:
            return open_naive(self.loaded)
        draft = self._load_draft(options.speculative, progress_bar)
        self.draft_spec = None if draft is None else draft.spec
        reason = STATIC if batching == "static" else OWN if proposer is not None else None
        engine, note = open_engine(
            self.loaded, lambda share: self._resolve(options, draft, reason, share),
            proposer=lambda config: proposer or proposer_of(config.speculative), draft=draft,
            is_fixed=options.kv_cache_memory_bytes is not None,
        )  # fmt: skip
        self.config = engine.config
        self.loaded = replace(self.loaded, notes=(*self.loaded.notes, *([note] if note else [])))
        self._engine = engine
        return StaticGenerator(engine) if batching == "static" else engine

    def _load(
        self, model: str, tokenizer: str | None, progress_bar: ProgressBar, on_wait: Callable[[str], None]
    ) -> LoadedModel:
        """Return the model, with rounded attention if that is asked for.

        Its notes have the cost in accuracy of quantized weights, of a KV cache as given, and of rounded attention.
        """
        loaded, notes = self._load_weights(model, tokenizer, progress_bar, on_wait)
        if loaded.spec.encoder:
            return replace(loaded, notes=(*loaded.notes, *notes))
        storage, _ = choose_storage(self._kv_cache_dtype, loaded.stored_weights)
        loaded = replace(loaded, storage=storage)
        notes = (*notes, *scale_notes(loaded))
        if loaded.spec.diffusion is not None:
            from ridgeline.diffusion import length_notes
            from ridgeline.evals.block_cache import describe_block_cache
            from ridgeline.evals.blocks import describe_blocks

            given = model, self.options, tokenizer, loaded, on_wait
            notes = (*notes, *length_notes(loaded.spec), *describe_blocks(*given), *describe_block_cache(*given))
        if self._ranks > 1:
            return replace(loaded, notes=(*loaded.notes, *notes, *unmeasured(self._kv_cache_dtype, self._attention)))
        if self._kv_cache_dtype != AUTO and not storage.is_exact and has_rows(loaded.spec):
            from ridgeline.evals.price import describe_state

            notes = (*notes, describe_state(model, self.options, tokenizer, loaded, on_wait))
        if choose_attention(self._attention, storage.dtype, loaded.spec)[0] == ROUNDED:
            from ridgeline.evals.price import describe_attention

            notes = (*notes, describe_attention(model, self.options, tokenizer, loaded, on_wait))
        return replace(loaded, notes=(*loaded.notes, *notes))

    def _load_weights(
        self, model: str, tokenizer: str | None, progress_bar: ProgressBar, on_wait: Callable[[str], None]
    ) -> tuple[LoadedModel, tuple[str, ...]]:
        """Return the model with an exact KV cache, and notes on the cost of rounded weights or activations."""
        if self._ranks > 1 or format_of(self.options.weights, self.options.activations) == PLAIN:
            return load_ranks(model, self.options, self._ranks, progress_bar), ()
        folder = find_model(model, revision=self.options.revision, files=SMALL_FILES)
        if open_checkpoint(folder).spec.encoder:
            from ridgeline.evals.vectors import describe_vectors

            loaded = load_model(model, self.options, progress_bar)
            return loaded, (describe_vectors(model, self.options, tokenizer, loaded, on_wait),)
        from ridgeline.evals.price import Appraisal

        appraisal = Appraisal(model, self.options, tokenizer, on_wait)
        loaded = load_model(model, self.options, progress_bar)
        return loaded, (appraisal.describe(loaded),)

    def _load_draft(self, name: str | None, progress_bar: ProgressBar) -> LoadedModel | LoadedHead | None:
        """Return the draft model or head that `speculative` names; None for other values."""
        if name is None or name in (AUTO, *PROPOSERS):
            return None
        from ridgeline.runtime.load_draft import load_draft

        return load_draft(name, self.loaded, self.tokenizer, self.options, progress_bar)

    def _resolve(
        self, options: EngineOptions, draft: LoadedModel | LoadedHead | None, undrafted: str | None, share: float = 1.0
    ) -> EngineConfig:
        memory, driver = self.loaded.table.memory, self.loaded.table.driver
        threads = driver.threads if driver else None  # None: the device has no kernels of ours for this CPU
        return_freed_memory()  # loading a model and a tokenizer takes more memory for a while than they keep
        free = memory.free_bytes()
        loaded = self.loaded
        fraction = (0.5 if memory.on_host else 0.9) * share / self._sharing  # other programs use a CPU's memory too
        usable = (UNKNOWN_FREE_BYTES if free is None else free) - loaded.mapped_bytes
        usable -= adapter_bytes(loaded.spec, self.options)  # which the system gives at the first use
        if loaded.spec.encoder:
            own = resolve_encoder(
                loaded.spec, loaded.max_model_len, options, free_bytes=usable, fraction=fraction,
                on_host=memory.on_host, float_bytes=memory.float_bytes,
            )  # fmt: skip
            return self._with_threads(own, None, threads)
        advice = self._advice() if threads else None
        config = resolve(
            self.loaded.spec,
            self.loaded.max_model_len,
            options,
            kv_cache_dtype=self._kv_cache_dtype,
            attention=self._attention,
            weights=self.loaded.stored_weights,
            free_bytes=usable - (0 if draft is None else draft.mapped_bytes),
            fixed_len=self.options.max_model_len is not None,
            fraction=fraction,
            device_is_host=memory.on_host,
            float_bytes=memory.float_bytes,
            host_free_bytes=free_bytes(),
            advice=advice,
            draft=None if draft is None else draft.spec,
            undrafted=undrafted if threads else "chosen, because only device cpu is calibrated",
        )
        return self._with_threads(config, advice, threads)

    def _with_threads(self, config: EngineConfig, advice: Advice | None, threads: int | None) -> EngineConfig:
        if threads is None:
            return config
        why = f"one per physical core that this process may use; the machine has {num_cores()} CPUs"
        more = {"threads": why} | {
            name: reason for name, reason in (advice.reasons if advice else {}).items() if name not in config.reasons
        }
        if self.options.threads is not None:
            more["threads"] = (
                "as given" if self._sharing == 1 else f"{self._sharing} processes share the physical cores"
            )
        return replace(config, threads=threads, reasons={**config.reasons, **more})

    def _advice(self) -> Advice | None:
        """Return the settings that the cost model advises, if this machine was calibrated."""
        loaded = self.loaded
        return machine_advice(loaded.spec, loaded.weights, loaded.storage.dtype, self.options.threads)

    def __repr__(self) -> str:
        """Return model, device, types and context on one line."""
        loaded = self.loaded
        return (
            f"LLM({str(self.checkpoint.folder)!r}, {loaded.spec.family}, device={loaded.table.memory.device!r}, "
            f"weights={loaded.weights!r}, max_model_len={self.max_model_len})"
        )

    @property
    def checkpoint(self) -> Checkpoint:
        return self.loaded.checkpoint

    @property
    def max_model_len(self) -> int:
        """Return the longest context in tokens: prompt and answer together."""
        return self.config.max_model_len if self.config else self.loaded.max_model_len

    def default_sampling_fields(self) -> dict[str, Any]:
        """Return the sampling parameters that the model's generation_config.json recommends."""
        return dict(self.checkpoint.sampling_defaults)

    def stats(self) -> Stats | None:
        """Return pages used, waste inside pages, prefix hit rate and preemptions; None with cache="off"."""
        return self.session.stats()

    def generate(
        self,
        prompts: Prompt | Iterable[Prompt],
        sampling_params: Params | Sequence[Params] | None = None,
        *,
        priority: Sequence[int] | None = None,
        indices: Sequence[int] | None = None,
        lora: str | Sequence[str] = "",
        on_text: Callable[[int, int, str], None] = lambda request, choice, text: None,
        on_done: Callable[[int, RequestOutput], None] = lambda request, output: None,
        on_step: Callable[[StepShape], None] = lambda shape: None,
    ) -> list[RequestOutput]:
        """Answer one prompt or many; return the results in the order of the prompts.

        sampling_params: for all prompts, or one for each; default: what generation_config.json recommends. With
        BeamSearchParams the answers come from a beam search, and only whole.
        priority: one number for each prompt, lower is more urgent; default: the order of the prompts.
        indices: one number for each prompt, from which its noise derives if it has no seed of its own; default: 0, 1,
        2. To answer the rest of a list with the same tokens, give the indices of the prompts in the whole list.
        lora: name of the adapter that answers, for all prompts or one for each; empty: the model itself.
        on_text: called with (prompt index, choice, new text) as text is generated; it never ends inside a character.
        on_done: called with each prompt's index and result as soon as its answers are complete.
        on_step: called after each step with what it computed: for each sequence its number of new tokens, its context
        with them, and its rows of logits.
        Raises RequestError, before anything runs, if a prompt is empty, too long, or not understood. An answer that
        fails while it runs has finish_reason "error". If the run is cut short (by an interrupt, or an error in a
        callback), incomplete results are lost, and the LLM can be used again.
        """
        requests = self._requests(as_batch(prompts), sampling_params, priority, indices, lora)
        self._check_adapters(requests)
        return self.answer(requests, on_text=on_text, on_done=on_done, on_step=on_step)

    def answer(
        self,
        requests: Sequence[GenerationRequest],
        *,
        on_text: Callable[[int, int, str], None] = lambda request, choice, text: None,
        on_done: Callable[[int, RequestOutput], None] = lambda request, output: None,
        on_step: Callable[[StepShape], None] = lambda shape: None,
    ) -> list[RequestOutput]:
        """Answer requests that `frontend.request` has made; arguments and results of `generate`."""
        outputs: dict[int, RequestOutput] = {}
        ids = []

        def sink(index: int, chunk: OutputChunk) -> None:
            if chunk.text:
                on_text(index, chunk.index, chunk.text)
            if chunk.output is not None:
                outputs[index] = chunk.output
                on_done(index, chunk.output)

        try:
            for i, request in enumerate(requests):
                try:
                    ids.append(self.session.add(request, lambda chunk, i=i: sink(i, chunk)))  # type: ignore[misc]
                except RequestError as e:  # this one can never fit; run the others
                    sink(i, OutputChunk(0, output=error_output(request, e)))
            while len(outputs) < len(requests):
                self.session.step()
                on_step(self.session.last_step())
        finally:
            for request_id in ids:
                self.session.abort(request_id)
        return [outputs[i] for i in range(len(requests))]

    def chat(
        self,
        conversations: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: Params | Sequence[Params] | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        lora: str | Sequence[str] = "",
    ) -> list[RequestOutput]:
        """Answer one conversation (a list of messages) or many, through the model's own chat template.

        tools: functions that the model may call, as JSON schemas, for templates that support tools. `lora`, results and
        errors are those of `generate`.
        """
        one = not conversations or isinstance(conversations[0], Mapping)
        many: Sequence[Any] = [conversations] if one else conversations
        tokenizer = self.frontend.tokenizer()
        prompts = [tokenizer.encode_chat(messages, tools=tools) for messages in many]
        return self.generate(prompts, sampling_params, lora=lora)

    def stream(
        self,
        prompt: Prompt,
        sampling_params: Params | None = None,
        *,
        lora: str = "",
        on_step: Callable[[StepShape], None] = lambda shape: None,
    ) -> ChunkStream:
        """Answer one prompt, piece by piece; the last chunk has the whole result as `output`. Others: see `generate`.

        Closing the iterator early ends the request. Several streams may be open, and other calls may be made between
        chunks. Raises the errors of `generate`, at once.
        """
        (request,) = self._check_adapters(self._requests([prompt], sampling_params, lora=lora))
        return self._chunks(request, on_step)

    def _chunks(self, request: GenerationRequest, on_step: Callable[[StepShape], None]) -> ChunkStream:
        chunks: deque[OutputChunk] = deque()
        request_id = self.session.add(request, chunks.append)
        try:
            while True:
                while not chunks:
                    if request_id not in self.session:
                        raise RequestError("this stream was lost when another call on the same LLM was cut short")
                    self.session.step()
                    on_step(self.session.last_step())
                chunk = chunks.popleft()
                yield chunk
                if chunk.output is not None:
                    return
        finally:
            self.session.abort(request_id)

    def logits(self, sequences: Sequence[Sequence[int]]) -> list[np.ndarray[Any, Any]]:
        """Return logits [tokens, vocabulary] at every position of each token list, computed in one ragged batch."""
        self.loaded.spec.require_logits("logits")
        self._check_sequences(sequences)
        if not sequences:
            return []
        memory = self.loaded.table.memory
        step = self.loaded.dense_step(sequences)
        rows = memory.get(self.loaded.model(step))
        starts = [sum(step.lengths[:i]) for i in range(len(sequences))]
        return [rows[start : start + n] for start, n in zip(starts, step.lengths, strict=True)]

    def capture(
        self, prompts: Prompt | Iterable[Prompt], names: Collection[str], receive: Receive, *, batch_tokens: int = 2048
    ) -> None:
        """Run prompts through the model, and pass on outputs of its layers and inputs of its matrices.

        names: names out of `ridgeline.nn.output_names(spec)` and `input_names(spec)`, with `llm.loaded.spec`.
        receive: called with (name, indices of prompts, rows) as soon as an array is computed. rows: float32 [tokens,
        columns], the tokens of these prompts one after the other; an expert's input has only the tokens that were sent
        to it. Nothing is kept, so the memory does not grow with the number of prompts.
        batch_tokens: largest number of tokens in a pass. Prompts of equal length are computed together.
        Raises RequestError for an unknown name, and for a prompt that is empty, too long, or not understood.
        """
        if type(batch_tokens) is not int or batch_tokens < 1:
            raise RequestError(f"batch_tokens is {batch_tokens!r}; it must be a whole number of at least 1")
        sequences = [self.encode(prompt) for prompt in as_batch(prompts)]
        self._check_sequences(sequences)
        capture(self.loaded, sequences, names, receive, batch_tokens)

    def encode(self, prompt: Prompt) -> list[int]:
        """Return the token ids of a prompt, with one BOS if the model uses one.

        Raises RequestError or TokenizerError.
        """
        return self.frontend.encode(prompt)

    def _check_sequences(self, sequences: Sequence[Sequence[int]]) -> None:
        """Raise RequestError for a sequence that is empty or too long, and for an unknown token id."""
        for ids in sequences:
            self.frontend.check_ids(list(ids))
            if len(ids) > self.max_model_len:
                raise RequestError(f"a sequence has {len(ids)} tokens; max_model_len is {self.max_model_len}")

    def _requests(
        self,
        batch: Sequence[Prompt],
        params: Params | Sequence[Params] | None,
        priority: Sequence[int] | None = None,
        indices: Sequence[int] | None = None,
        lora: str | Sequence[str] = "",
    ) -> list[GenerationRequest]:
        """Return a request for every prompt. Raises RequestError, which names the first bad prompt."""
        if params is None:
            params = SamplingParams(**self.default_sampling_fields())
        return self.frontend.requests(batch, params, priority, indices, lora)

    def _open_tokenizer(self, other: str | None) -> str:
        """Open the tokenizer; return the reason if there is none, which is an error only for text.

        Raises TokenizerError for a tokenizer that does not fit the model.
        """
        folder = find_model(other, files=SMALL_FILES) if other else self.checkpoint.folder
        if not other and not has_tokenizer(folder):
            return f"{folder} has none"
        self.tokenizer, self.tokenizer_folder = Tokenizer.from_folder(folder), folder
        # Added tokens beyond the model's vocabulary (Gemma 3's image token) are an error only if a text has one.
        if self.tokenizer.base_vocab_size > self.loaded.spec.vocab_size:
            raise TokenizerError(
                f"the tokenizer has {self.tokenizer.base_vocab_size} tokens, the model {self.loaded.spec.vocab_size}: "
                "they do not belong together"
            )
        if (eos := self.tokenizer.eos_token_id) is not None:  # many configs name it only in the tokenizer
            self.loaded = replace(self.loaded, eos_token_ids=self.loaded.eos_token_ids | {eos})
        return ""
