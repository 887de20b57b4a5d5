"""Choose every setting of an engine from the model, the memory and the user's options, each with its reason."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any, get_args

from ridgeline.cost.memory import BOOKKEEPING_BYTES
from ridgeline.errors import RequestError
from ridgeline.settings.advice import Advice
from ridgeline.settings.attention import choose_attention
from ridgeline.settings.blocks import NO_DRAFTS, check_options, check_tokens
from ridgeline.settings.config import DraftDepth, EngineConfig, EngineOptions
from ridgeline.settings.fit import PAGE_TOKENS, Problem, Settings
from ridgeline.settings.speculative import AUTO, NGRAM, OFF, Choice, afforded, choose_speculative
from ridgeline.spec import ModelSpec
from ridgeline.spec.acceptance import ACCEPTANCES
from ridgeline.spec.heads import HeadSpec
from ridgeline.spec.storage import STORAGES, Storage, default_storage, has_rows
from ridgeline.spec.text import num_bytes
from ridgeline.spec.trees import MOST_DRAFTS, MOST_WIDTH

NO_ROWS = "without effect: no layer has keys and values, and recurrent state is always float32"
SWAP_SHARE, MAX_SWAP_BYTES = 10, 4 << 30  # divisor of the host's free memory; vLLM's default
NARROWER = {"float32": "float16", "float16": "int8", "bfloat16": "int8"}  # types to take if memory is short
# vLLM's other spellings of a type, and its types that are refused, each with a reason.
SPELLINGS = {"fp8_e4m3": "fp8"}
REFUSED = {
    "fp8_e5m2": "has 2 bits of mantissa instead of 3, and so it loses 3 to 5 times more than fp8 in equal memory; use "
    "fp8, or int8, which loses less than both",
}
# Reasons for the sequences and the tokens of a step on a machine that is not calibrated.
UNCALIBRATED = (
    "vLLM's default, at most max_num_batched_tokens; a sequence takes pages only when it needs them",
    "room for a chunk of a prompt beside the sequences that decode",
)
# Option -> the least and the largest value.
RANGES: dict[str, tuple[int, int | None]] = {
    "max_num_seqs": (1, None), "max_num_batched_tokens": (1, None), "block_size": (1, None),
    "state_snapshot_tokens": (1, None),
    "kv_cache_memory_bytes": (1, None), "steps_in_flight": (1, 2), "swap_space_bytes": (0, None),
    "num_speculative_tokens": (0, None), "draft_tree": (1, MOST_WIDTH),
}  # fmt: skip
DRAFTS = 4  # draft tokens of a sequence in a step, unless the user chooses


def resolve(
    spec: ModelSpec, max_model_len: int, options: EngineOptions, *, free_bytes: int, fixed_len: bool,
    fraction: float = 0.9, device_is_host: bool = True, host_free_bytes: int | None = None,
    kv_cache_dtype: str = "auto", attention: str = "exact", weights: str = "float32", float_bytes: int = 4,
    advice: Advice | None = None, draft: ModelSpec | HeadSpec | None = None, undrafted: str | None = None,
) -> EngineConfig:  # fmt: skip
    """Choose the settings that the user has not set. Raises RequestError if even the smallest do not fit.

    free_bytes: device memory after weights are loaded. fraction: share of it to use, unless kv_cache_memory_bytes is
    set. fixed_len: the user set max_model_len, so it is not reduced. device_is_host: the device is a CPU; swap space is
    in free_bytes. host_free_bytes: free memory of another host, None if unknown. attention: exact or bf16. weights:
    type or format of most matrices. float_bytes: bytes of a computed number. advice: choices of the cost model. draft:
    the draft model or head, whose state shares the pages. undrafted: why no drafts may be chosen where the user leaves
    it open, or None.
    """
    given, chosen = _given(options), _drafting(spec, options, advice, undrafted, draft)
    storage, why_storage = choose_storage(kv_cache_dtype, weights)
    arithmetic, why_attention = choose_attention(attention, storage.dtype, spec)
    _check_snapshots(spec, options)
    swap, why_swap = _swap_space(options.swap_space_bytes, device_is_host, host_free_bytes)
    problem = Problem(
        spec, storage, max_model_len, fixed_len, chosen.options, free_bytes, fraction, swap, device_is_host,
        float_bytes, draft=draft, **_advised(advice),
    )  # fmt: skip
    problem, why_drafts = afforded(problem, options, chosen.reason)
    problem, found, why_swap = _solved(problem, why_swap)
    if found is None:
        raise RequestError(_failure(problem, {n: value for n, value in given.items() if n != "steps_in_flight"}))
    pages, host_pages = found.pages(), found.host_pages()
    if problem.swap and not any(host_pages):
        why_swap = f"none: {num_bytes(problem.swap)} are too few for a page of each group of layers"
    return EngineConfig(
        max_model_len=found.length,
        max_num_seqs=found.seqs,
        max_num_batched_tokens=found.tokens,
        block_size=found.page_tokens,
        state_snapshot_tokens=found.state_snapshot_tokens,
        kv_cache_dtype=storage.dtype,
        steps_in_flight=options.steps_in_flight or (1 if device_is_host or spec.diffusion else 2),
        groups=found.groups,
        num_pages=pages,
        num_host_pages=host_pages,
        workspace_bytes=found.workspace() + BOOKKEEPING_BYTES * (sum(pages) + sum(host_pages) * device_is_host),
        free_bytes=free_bytes,
        reasons=_reasons(problem, found, advice)
        | dict.fromkeys(given, "as given")
        | {"speculative": why_drafts, "swap_space_bytes": why_swap}
        | {"kv_cache_dtype": why_storage if has_rows(spec) else NO_ROWS, "attention": why_attention},
        attention=arithmetic,
        preempt=advice.preempt if advice else None,
        **_speculation(problem.options),
    )


def _drafting(
    spec: ModelSpec, options: EngineOptions, advice: Advice | None, undrafted: str | None,
    draft: ModelSpec | HeadSpec | None,
) -> Choice:  # fmt: skip
    """Choose what proposes drafts, and how many. Raises RequestError for drafts that cannot work."""
    check_options(spec, options)
    chosen = choose_speculative(options, advice, NO_DRAFTS if spec.diffusion else undrafted)
    chosen = chosen._replace(options=with_drafts(chosen.options))
    check_tree(chosen.options, draft)
    return chosen


def _solved(problem: Problem, why_swap: str) -> tuple[Problem, Settings | None, str]:
    """Return the settings of a problem, without swap space if that helps; the problem and the reason for swap space."""
    found = problem.solve()
    if found is None and problem.options.swap_space_bytes is None:  # its bookkeeping may take too much
        problem, why_swap = replace(problem, swap=0), "none: the device has no memory for the workspace of swaps"
        found = problem.solve()
    if found is not None:
        check_tokens(problem.spec, found.tokens, found.length)
    return problem, found, why_swap


def _speculation(options: EngineOptions) -> dict[str, Any]:
    """Return the settings of drafts, from options that `with_drafts` has completed."""
    return {
        "num_speculative_tokens": options.num_speculative_tokens or 0,
        "speculative": options.speculative or "off",
        "draft_depth": options.draft_depth or "fixed",
        "draft_acceptance": options.draft_acceptance or "same",
        "draft_tree": options.draft_tree or 1,
    }


def _advised(advice: Advice | None) -> dict[str, int]:
    """Return the limits of a Problem that the cost model advises."""
    return {"most_seqs": advice.max_num_seqs, "most_tokens": advice.max_num_batched_tokens} if advice else {}


def choose_storage(kv_cache_dtype: str, weights: str) -> tuple[Storage, str]:
    """Return how keys and values are stored, and why. Raises RequestError for an unknown name.

    weights: the type or the format of most matrices. It alone decides what `auto` is, so that the batch, the device and
    the cache that a checkpoint asks for do not.
    """
    name = storage_name(kv_cache_dtype)
    if name != AUTO:
        return STORAGES[name], "as given"
    found = default_storage(weights)
    if found.is_exact:
        return (
            found,
            "stored as computed, like float32 weights; 16 and 8 bits take less memory, and their loss is printed",
        )
    why = f"weights are in {weights}: half the bytes of float32 at a small loss; float32 stores state as computed"
    return found, why


def storage_name(kv_cache_dtype: str) -> str:
    """Return "auto" or the name of a Storage for any spelling of a type. Raises RequestError for an unknown name."""
    if kv_cache_dtype in REFUSED:
        raise RequestError(f"kv_cache_dtype (--kv-cache-dtype) {kv_cache_dtype!r} {REFUSED[kv_cache_dtype]}")
    name = SPELLINGS.get(kv_cache_dtype, kv_cache_dtype)
    if name not in (AUTO, *STORAGES):
        known = ", ".join((AUTO, *STORAGES))
        raise RequestError(f"kv_cache_dtype (--kv-cache-dtype) {kv_cache_dtype!r} is not known; known are {known}")
    return name


def _given(options: EngineOptions) -> dict[str, Any]:
    """Return the options that the user set, "auto" left out. Raises RequestError for a number out of range."""
    given = {name: value for name, value in asdict(options).items() if value not in (None, AUTO)}
    for name, value in given.items():
        if name in RANGES:
            _check(name, value, *RANGES[name])
    return given


def with_drafts(options: EngineOptions) -> EngineOptions:
    """Return the options with the number of drafts that suits `speculative`. Raises RequestError for a bad value."""
    chosen, most = options.speculative, options.num_speculative_tokens
    if options.draft_acceptance not in (None, *ACCEPTANCES):
        raise RequestError(
            f"draft_acceptance (--draft-acceptance) is {options.draft_acceptance!r}; "
            f"it must be {' or '.join(ACCEPTANCES)}"
        )
    if options.draft_depth not in (None, *get_args(DraftDepth)):
        raise RequestError(
            f"draft_depth (--draft-depth) is {options.draft_depth!r}; it must be {' or '.join(get_args(DraftDepth))}"
        )
    if chosen in (None, AUTO, OFF):
        return options
    options = replace(options, draft_depth=options.draft_depth or "chosen")
    if most == 0:
        raise RequestError(
            f"speculative (--speculative) is {chosen}, but num_speculative_tokens (--num-speculative-tokens) is 0, so "
            "that no draft may run; set it to 1 or more, or leave it out"
        )
    return replace(options, num_speculative_tokens=DRAFTS) if most is None else options


def check_tree(options: EngineOptions, draft: ModelSpec | HeadSpec | None = None) -> None:
    """Raise RequestError for trees that nothing proposes. draft: the draft model or head, if it is known."""
    width, chosen = options.draft_tree or 1, options.speculative or "off"
    _check("draft_tree", width, *RANGES["draft_tree"])
    if width == 1:
        return
    if isinstance(draft, ModelSpec) or (draft is None and chosen in (OFF, AUTO, NGRAM)):
        name = f"the draft model {chosen}" if isinstance(draft, ModelSpec) else f"--speculative {chosen}"
        raise RequestError(
            f"draft_tree (--draft-tree) is {width}, but {name} proposes no trees; set --speculative to a Medusa or "
            "EAGLE head, or leave --draft-tree out"
        )
    if (options.num_speculative_tokens or 0) > MOST_DRAFTS:
        raise RequestError(
            f"num_speculative_tokens (--num-speculative-tokens) is {options.num_speculative_tokens}, but a tree "
            f"(--draft-tree) has at most {MOST_DRAFTS} drafts; lower it"
        )


def _check(name: str, value: Any, least: int, most: int | None) -> None:
    if type(value) is not int or value < least or (most is not None and value > most):
        limits = f"of at least {least}" if most is None else f"from {least} to {most}"
        raise RequestError(f"{name} is {value!r}; it must be a whole number {limits}")


def _check_snapshots(spec: ModelSpec, options: EngineOptions) -> None:
    """Raise RequestError for snapshots that no request could begin from."""
    given, page = options.state_snapshot_tokens, options.block_size or PAGE_TOKENS
    states = [layer.mixer.state() for layer in spec.layers if layer.mixer]
    both = any(s.snapshot for s in states) and any(s.elements and not s.snapshot for s in states)
    if given and given % page and both:
        raise RequestError(
            f"state_snapshot_tokens is {given}, not a multiple of block_size {page}: attention continues at whole "
            f"pages; set --state-snapshot-tokens to {-(-given // page) * page}"
        )


def _swap_space(given: int | None, device_is_host: bool, host_free: int | None) -> tuple[int, str]:
    """Return the bytes of swap space, and the reason. Raises RequestError for more than the host has free."""
    if given is not None:
        if not device_is_host and host_free is not None and given > host_free:
            raise RequestError(
                f"swap_space_bytes is {given}, but the host has {host_free} bytes free; lower --swap-space-bytes to "
                "that"
            )
        return given, "as given"
    if device_is_host:
        return 0, "none: pages are in host memory already, so more pages are better than swap space"
    if host_free is None:
        return 0, "none: the free memory of the host is not known"
    chosen = min(MAX_SWAP_BYTES, host_free // SWAP_SHARE)
    return chosen, f"1/{SWAP_SHARE} of the host's free {num_bytes(host_free)}, at most {num_bytes(MAX_SWAP_BYTES)}"


def _reasons(problem: Problem, found: Settings, advice: Advice | None) -> dict[str, str]:
    """Return the reason for every setting except the swap space."""
    limit, workspace = num_bytes(problem.limit), num_bytes(found.workspace())
    tokens, seqs = problem.most()
    lowered = f"lowered from {{}}, so that a step fits: its workspace takes {workspace} of {limit}"
    length = "as given" if problem.fixed_len else "the model's longest context"
    if found.length < problem.max_model_len:
        length = f"lowered from the model's {problem.max_model_len} to {found.length}: {limit} hold no longer sequence"
    seqs_why, tokens_why = UNCALIBRATED
    drafts_why = "none: draft tokens need --speculative, or LLM(proposer=...) in Python"
    depth_why = "without effect: nothing proposes drafts"
    if problem.options.num_speculative_tokens:
        depth_why = "each step takes as many drafts as pay, by measured times and acceptance"
        drafts_why = "enough for most repetitions; each one more makes a step dearer"
    if advice:
        drafts_why += f"; {advice.reasons['num_speculative_tokens']}"
        seqs_why, tokens_why = advice.reasons["max_num_seqs"], advice.reasons["max_num_batched_tokens"]
    return {
        **({"preemption": advice.reasons["preemption"]} if advice else {}),
        "max_model_len": length,
        "max_num_seqs": seqs_why
        if found.seqs == seqs else lowered.format(seqs),
        "max_num_batched_tokens": tokens_why
        if found.tokens == tokens else lowered.format(tokens),
        "block_size": "without effect: no layer has keys and values"
        if all(g.snapshot for g in found.groups) else "vLLM's default; on average half a page per sequence stays empty"
        if found.page_tokens == PAGE_TOKENS else f"lowered from {PAGE_TOKENS}: larger pages do not fit",
        "state_snapshot_tokens": _why_snapshots(found),
        "kv_cache_memory_bytes": f"{problem.fraction:.0%} of the free {num_bytes(problem.free)} less {workspace} of "
        f"workspace, but no more than {found.seqs} sequences of {found.length} tokens need",
        "steps_in_flight": "with 2 the host's work overlaps the device's, but it is short on this device"
        if problem.on_host else "the host's work overlaps the device's, and tokens arrive one step late",
        "num_speculative_tokens": drafts_why,
        "draft_depth": depth_why,
        "draft_acceptance": "the answers are those without drafts, token by token",
        "draft_tree": "a chain: a head's tree pays where verifying several times as many drafts costs little",
    }  # fmt: skip


def _why_snapshots(found: Settings) -> str:
    if not found.state_bytes:
        return "without effect: no layer is recurrent"
    share = found.snapshot_share(1) * found.prefix / found.state_snapshot_tokens
    between = max(found.state_snapshot_tokens, found.tokens)  # a step leaves one at most
    again = min(between, found.prefix) / 2 / found.prefix
    return (
        f"a snapshot takes {num_bytes(found.state_bytes)}; those of {found.seqs} prefixes of {found.prefix} tokens "
        f"take at most {share:.1%} of the pages, and up to {again:.1%} of a prefix is recomputed"
    )


def _failure(problem: Problem, given: dict[str, Any]) -> str:
    """Return why nothing fits: the least that is needed, the memory, and which change of the user's options helps."""
    least = problem.least(problem.options.block_size or PAGE_TOKENS, problem.least_length)
    asked = "".join(f", {name} is {value}" for name, value in given.items())
    text = (
        f"one sequence of {least.length} tokens needs {num_bytes(least.sequence())} of state, and a step needs "
        f"{num_bytes(least.workspace())} of workspace; {num_bytes(max(problem.limit, 0))} are available{asked}; "
    )
    remedies = []
    if problem.fixed_len and (found := replace(problem, fixed_len=False).solve()):
        remedies.append(f"lower --max-model-len to {found.length}")
    for name in given:
        swap = 0 if name == "swap_space_bytes" else problem.swap
        if found := replace(problem, options=replace(problem.options, **{name: None}), swap=swap).solve():
            remedies.append(f"set {_flag(name)} to {_chosen(found, name)}")
    narrower = NARROWER.get(problem.storage.dtype)
    if narrower and replace(problem, storage=STORAGES[narrower]).solve():
        remedies.append(f"set --kv-cache-dtype to {narrower}")
    if not remedies and replace(problem, fixed_len=False, options=EngineOptions(), swap=0).solve():
        names = [*given, "max_model_len"] if problem.fixed_len else list(given)
        remedies.append(f"leave out {' and '.join(map(_flag, names))}")
    return text + (" or ".join(remedies) or "use a smaller model or a smaller dtype, or free some memory")


def _flag(option: str) -> str:
    return f"--{option.replace('_', '-')}"


def _chosen(found: Settings, option: str) -> int:
    """Return the value that was chosen for an option."""
    if option == "kv_cache_memory_bytes":
        return sum(n * g.page_bytes for n, g in zip(found.pages(), found.groups, strict=True))
    of_step = {"max_num_seqs": found.seqs, "max_num_batched_tokens": found.tokens}
    of_pages = {"block_size": found.page_tokens, "state_snapshot_tokens": found.state_snapshot_tokens}
    return {**of_step, **of_pages}.get(option, 0)  # no swap space
