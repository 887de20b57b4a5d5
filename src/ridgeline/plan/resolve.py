"""Every setting of an engine, chosen once from the model, the memory and what the user fixed, each with its reason."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ridgeline.errors import RequestError
from ridgeline.spec import ModelSpec
from ridgeline.spec.groups import StateGroup, state_groups
from ridgeline.spec.text import num_bytes

STATE_ELEMENT_BYTES = 4  # float32, as computed
SCORE_BYTES = 3 * 4 * 2**24  # a block of attention scores, its masked copy and its softmax (ops/reference/paged.py)


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """What a user may fix; None is chosen. Names as in vLLM.

    max_num_seqs: sequences that run at once. max_num_batched_tokens: tokens of one step. block_size: tokens of a page.
    kv_cache_memory_bytes: for the pages of all groups. steps_in_flight: 1 or 2.
    """

    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    block_size: int | None = None
    kv_cache_memory_bytes: int | None = None
    steps_in_flight: int | None = None


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """The settings of an engine, frozen. reasons: one line for each setting that was chosen or cut."""

    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    steps_in_flight: int
    groups: tuple[StateGroup, ...]
    num_pages: tuple[int, ...]  # per group, the null page included
    reasons: Mapping[str, str]

    @property
    def state_bytes(self) -> int:
        """Bytes of all pages."""
        return sum(n * g.page_bytes for n, g in zip(self.num_pages, self.groups, strict=True))


def resolve(
    spec: ModelSpec,
    max_model_len: int,
    options: EngineOptions,
    *,
    free_bytes: int,
    fixed_len: bool,
    fraction: float = 0.9,
) -> EngineConfig:
    """Choose what is open. free_bytes: memory of the device once the weights are there.

    fixed_len: the user asked for max_model_len, so it is not cut. fraction: of what is free that may be used, workspace
    included: the rest is for the allocator and for other programs. Raises RequestError where even one sequence of the
    length asked for, or of one page, does not fit, with the numbers.
    """
    reasons: dict[str, str] = {}
    seqs = _positive("max_num_seqs", options.max_num_seqs) or 256
    tokens = _positive("max_num_batched_tokens", options.max_num_batched_tokens) or max(512, seqs)
    page_tokens = _positive("block_size", options.block_size) or 16
    steps = _positive("steps_in_flight", options.steps_in_flight) or 1
    if steps > 2:
        raise RequestError(f"steps_in_flight is {steps}; it must be 1 or 2")
    groups = state_groups(spec, page_tokens=page_tokens, element_bytes=STATE_ELEMENT_BYTES)
    workspace = workspace_bytes(spec, tokens, seqs)
    budget = options.kv_cache_memory_bytes or int(free_bytes * fraction) - workspace
    length = _longest(groups, max_model_len, budget)
    if length < (max_model_len if fixed_len else 1):
        need = sum((g.most_pages(max_model_len) + 1) * g.page_bytes for g in groups)
        raise RequestError(
            f"one sequence of {max_model_len} tokens needs {num_bytes(need)} of state, {num_bytes(max(budget, 0))} are "
            f"there; lower --max-model-len{f' to {length}' if length else ''} or --max-num-batched-tokens"
        )
    if length < max_model_len:
        reasons["max_model_len"] = f"{length} instead of the model's {max_model_len}: what {num_bytes(budget)} hold"
    pages = _pages(groups, length, seqs, budget)
    reasons["num_pages"] = (
        f"{num_bytes(sum(n * g.page_bytes for n, g in zip(pages, groups, strict=True)))} of state: "
        + ("as fixed" if options.kv_cache_memory_bytes else f"{fraction:.0%} of {num_bytes(free_bytes)} free")
        + f", {num_bytes(workspace)} of workspace taken off; at most {seqs} sequences of {length} tokens"
    )
    for name, given, text in (
        ("max_num_seqs", options.max_num_seqs, f"{seqs}: vLLM's default; pages are taken only when they are needed"),
        ("max_num_batched_tokens", options.max_num_batched_tokens, f"{tokens}: a chunk of prefill beside the decodes"),
        ("block_size", options.block_size, f"{page_tokens} tokens per page: half a page of waste per sequence"),
        ("steps_in_flight", options.steps_in_flight, f"{steps}: the host's part of a step is small on this device"),
    ):
        reasons[name] = text if given is None else "as given"
    return EngineConfig(length, seqs, tokens, steps, groups, pages, reasons)


def workspace_bytes(spec: ModelSpec, max_tokens: int, max_seqs: int) -> int:
    """What a step holds besides weights and state: activations of its tokens, logits and what sampling makes of them.

    Counted as the reference ops allocate: the residual stream and a layer's intermediates per token, the largest
    matrix once more in float32 (it is widened where it is used), and for each sampled row the logits in float32 and
    three times in float64. Attention holds its block of scores a few times; the keys and values that a layer gathers
    from its pages are not counted here, they are a share of the pages themselves.
    """
    inner = max(w.shape[-2] for layer in spec.layers for w in layer.weights(spec.hidden_size) if w.is_matrix)
    activations = max_tokens * (8 * spec.hidden_size + 4 * inner) * 4
    largest = max(w.num_params for w in spec.weights()) * 4
    logits = min(max_seqs, max_tokens) * spec.vocab_size * (4 + 3 * 8)
    return activations + largest + logits + SCORE_BYTES


def _longest(groups: Sequence[StateGroup], wanted: int, budget: int) -> int:
    """The longest sequence, up to `wanted` tokens, whose pages fit the budget; by bisection."""

    def fits(length: int) -> bool:
        return sum((g.most_pages(length) + 1) * g.page_bytes for g in groups) <= budget

    low, high = 0, wanted
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low


def _pages(groups: Sequence[StateGroup], length: int, seqs: int, budget: int) -> tuple[int, ...]:
    """Pages per group: for `seqs` sequences of full length, or all groups cut by one factor until they fit."""
    full = sum(g.most_pages(length) * g.page_bytes for g in groups)
    spare = budget - sum(g.page_bytes for g in groups)  # the null pages
    share = min(float(seqs), spare / full)
    return tuple(max(int(g.most_pages(length) * share), g.most_pages(length)) + 1 for g in groups)


def _positive(name: str, value: int | None) -> int | None:
    if value is not None and (type(value) is not int or value < 1):
        raise RequestError(f"{name} is {value!r}; it must be a whole number of at least 1")
    return value
