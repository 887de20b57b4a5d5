"""Run the matrix on one model: an engine for each case over the same weights, compared with the baseline."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

from ridgeline.engine import Engine
from ridgeline.load.tokenizer import Tokenizer
from ridgeline.propose import NgramProposer
from ridgeline.runtime.load import LoadedModel
from ridgeline.settings import EngineConfig, EngineOptions, resolve
from ridgeline.spec import CanvasDiffusion, ModelSpec
from ridgeline.spec.groups import state_groups
from ridgeline.spec.heads import HeadSpec
from ridgeline.spec.state import ALL
from ridgeline.verify.baseline import Baseline
from ridgeline.verify.canvases import UNKNOWN_FREE_BYTES
from ridgeline.verify.heads import HEADS, head_spec, random_head
from ridgeline.verify.matrix import Case, Scale, cases, lengths
from ridgeline.verify.poison import poisoned
from ridgeline.verify.report import CaseResult, Observed, Report
from ridgeline.verify.requests import TEXTS, Prompts, rounds
from ridgeline.verify.serving import Proposer, Serving

NEW_TOKENS, QUICK_NEW_TOKENS = 16, 8
# Limit of parameters times tokens of a forward pass: about one second on two cores, a few seconds on a GPU.
CPU_WORK, GPU_WORK = 25 * 10**9, 40 * 10**12
HOST_SEQUENCES = 8  # sequences of full length that the swap space holds
LEAST_LONGEST = 128  # tokens of a prompt and its answer, for the slowest model, if its context allows

OnCase = Callable[[CaseResult, int], None]  # called after each case, with its result and the number of cases


def verify(
    loaded: LoadedModel,
    tokenizer: Tokenizer | None = None,
    *,
    quick: bool = False,
    seed: int = 0,
    new_tokens: int | None = None,
    on_case: OnCase = lambda result, total: None,
    whole: LoadedModel | None = None,
) -> Report:
    """Run the exactness matrix: compare every token with naive sampling alone, however requests are served.

    tokenizer: adds prompts of real text. quick: use few values of each axis, few combinations and short answers. seed:
    for prompts, noise, arrivals and combinations. new_tokens: tokens of each answer. An exception in a case becomes the
    result of the case. whole: the model whose first part `loaded` is, if that is cut. Raises RequestError for a model
    that the engine does not serve.
    """
    start = time.perf_counter()
    scale = scale_of(loaded, tokenizer, quick, new_tokens)
    prompts = _prompts(loaded, tokenizer, seed)
    baseline = Baseline(whole or loaded)
    todo = cases(scale, seed)
    results = []
    for case in todo:
        results.append(run_case(loaded, case, scale, prompts, baseline))
        on_case(results[-1], len(todo))
    seconds = time.perf_counter() - start
    return Report(seed, quick, scale.longest, scale.new_tokens, tuple(results), baseline.smallest_lead(), seconds)


def scale_of(loaded: LoadedModel, tokenizer: Tokenizer | None, quick: bool, new_tokens: int | None) -> Scale:
    """Return the limits of the matrix: they follow from the model's context, and its size for its device."""
    groups = state_groups(loaded.spec, page_tokens=1)
    windows = sorted({g.lookback + 1 for g in groups if g.lookback != ALL and not g.snapshot})
    work = CPU_WORK if loaded.table.memory.on_host else GPU_WORK
    canvas = loaded.spec.canvas
    least = LEAST_LONGEST + 2 * canvas
    longest = min(loaded.max_model_len, max(least, work // loaded.spec.num_active_params()))
    tokens = new_tokens or (QUICK_NEW_TOKENS if quick else NEW_TOKENS)
    tokens = min(tokens, max(1, longest // 4))
    if canvas and not new_tokens and longest >= least:
        tokens = canvas + max(1, canvas // 4)  # a whole canvas, and a second one that is cut
    states = [g.snapshot for g in groups]
    return Scale(
        longest, tokens, tuple(windows), tokenizer is not None, quick, any(states),
        all(states), None if loaded.spec.diffusion is None else loaded.spec.block, loaded.spec.ranks, canvas,
    )  # fmt: skip


def run_case(loaded: LoadedModel, case: Case, scale: Scale, prompts: Prompts, baseline: Baseline) -> CaseResult:
    """Run one case. An exception becomes its error."""
    if case.impossible:
        return CaseResult(case)
    start, run = time.perf_counter(), None
    try:
        proposer = Proposer(baseline, loaded.spec.vocab_size, case, prompts.seed)
        engine = _engine(poisoned(loaded), engine_config(loaded, case, scale), case)
        run = Serving(engine, case, proposer, scale.block, _canvas(loaded.spec))
        for each in rounds(case, scale, prompts):
            run.serve(each)
        scores, differences = run.compare(baseline)
    except Exception as e:
        observed = run.observed() if run else Observed()
        error = f"{type(e).__name__}: {e}"
        return CaseResult(case, observed=observed, error=error, seconds=time.perf_counter() - start)
    seconds = time.perf_counter() - start
    return CaseResult(case, scores[True], scores[False], tuple(differences), run.observed(), seconds=seconds)


def _canvas(spec: ModelSpec) -> CanvasDiffusion | None:
    """Return how a model with a canvas fills it; None for all other models."""
    return spec.diffusion if isinstance(spec.diffusion, CanvasDiffusion) else None


def _engine(loaded: LoadedModel, config: EngineConfig, case: Case) -> Engine:
    own, draft = NgramProposer() if case.source == "ngram" else None, None
    if case.source in HEADS:
        draft = random_head(case.source, loaded, case.heads, case.number)
    return Engine(loaded, config, proposer=own, draft=loaded if case.source == "model" else draft)


def _draft_spec(spec: ModelSpec, case: Case) -> ModelSpec | HeadSpec | None:
    """Return the draft model or head of a case; None if there is none."""
    if case.source in HEADS:
        return head_spec(case.source, spec, case.heads)
    return spec if case.source == "model" else None


def engine_config(loaded: LoadedModel, case: Case, scale: Scale) -> EngineConfig:
    """Return the engine's settings for a case; a case of preemption has few pages."""
    longest = max(lengths(case, scale).prompts) + scale.positions
    seqs = case.n * (case.others + 1) + 1
    free = loaded.table.memory.free_bytes()
    config = resolve(
        loaded.spec,
        min(longest, loaded.max_model_len),
        EngineOptions(
            max_num_seqs=seqs,
            max_num_batched_tokens=case.chunk or _step_tokens(case, scale, longest),
            block_size=case.page,
            state_snapshot_tokens=_state_snapshot_tokens(loaded.spec, case),
            steps_in_flight=case.steps_in_flight,
            num_speculative_tokens=case.drafts,
            draft_tree=case.tree,
        ),
        free_bytes=(UNKNOWN_FREE_BYTES if free is None else free) - loaded.mapped_bytes,
        fixed_len=True,
        kv_cache_dtype=loaded.storage.dtype,
        float_bytes=loaded.table.memory.float_bytes,
        draft=_draft_spec(loaded.spec, case),
    )
    if not case.preempt:
        return config
    host = [1 + HOST_SEQUENCES * g.most_pages(longest) if case.preempt == "swap" else 0 for g in config.groups]
    return replace(config, num_pages=_few_pages(loaded.spec, config, case, scale), num_host_pages=tuple(host))


def _step_tokens(case: Case, scale: Scale, longest: int) -> int:
    """Return the tokens of a step in which all requests of a case can run."""
    if scale.is_whole:  # no answer shares its prompt with another one
        return (case.others + 1) * case.n * longest
    return (case.others + 1) * (longest + (scale.canvas * case.n or scale.block or 0))


def _state_snapshot_tokens(spec: ModelSpec, case: Case) -> int:
    """Return the tokens between state snapshots: one page, so that short prompts reach a snapshot.

    A recurrent layer needs no more pages at the end of an answer than at its beginning. So in a case of preemption, for
    a model of recurrent layers only, each sequence takes a new page for every token.
    """
    states = [layer.mixer.state() for layer in spec.layers if layer.mixer]
    return 1 if case.preempt and all(s.snapshot for s in states if s.elements) else case.page


def _few_pages(spec: ModelSpec, config: EngineConfig, case: Case, scale: Scale) -> tuple[int, ...]:
    """Return pages per group: enough for the longest sequence alone and for two prompts, but not for their answers.

    For recurrent states there are four: three sequences that begin in one step take one each, then two need another.
    Prompts with other rotary frequencies share no pages.
    """
    found, new, first = lengths(case, scale), scale.positions, scale.canvas or 1
    short, long = min(found.prompts), max(found.prompts)
    regimes = spec.regimes(config.max_model_len)
    share = regimes.floor(short, short + 1) == regimes.floor(long, long + 1)
    shared = [0 if g.snapshot or not share else len(g.reads(found.shared)) for g in config.groups]
    return tuple(
        1 + max(g.most_pages(long + new), g.most_pages(short + first) + g.most_pages(long + first) - pages)
        for g, pages in zip(config.groups, shared, strict=True)
    )


def _prompts(loaded: LoadedModel, tokenizer: Tokenizer | None, seed: int) -> Prompts:
    special = set(loaded.eos_token_ids)
    if loaded.spec.diffusion is not None:
        special.add(loaded.spec.diffusion.mask_token)
    texts = []
    if tokenizer is not None:
        special |= {i for i in tokenizer.special_ids if i < loaded.spec.vocab_size}
        texts = [tokenizer.encode(text) for text in TEXTS]
    return Prompts(loaded.spec.vocab_size, special, seed, texts)
