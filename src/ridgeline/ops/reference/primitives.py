"""The definition of each primitive in a few lines of torch. Kernels are tested against these, so clarity is first."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from ridgeline.ops.api import DenseKeyValues, Expert, Rotary, SlotTerms
from ridgeline.ops.draws import accept as accepted
from ridgeline.ops.draws import draw as drawn
from ridgeline.ops.reference.stored import as_floats
from ridgeline.spec import (
    XIELU,
    Attention,
    Chunked,
    ClampedSwiGLU,
    Dilated,
    ExpertGroups,
    FirstTokens,
    GatedMLP,
    LayerNorm,
    MoE,
    QueryGrowth,
    RMSNorm,
    Rope,
    SparseMixer,
    Strided,
    Ungated,
)
from ridgeline.spec.sight import CAUSAL

QUERY_BLOCK = 512  # rows of scores that are computed at once; this bounds memory and changes no result

WIDEN_BLOCK = 2**18  # elements of a matrix that are converted to float32 at once: they stay in the cache

ACTIVATIONS = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
    "relu2": lambda x: F.relu(x).square(),
}


def embedding(dtype: torch.dtype):
    return lambda table, ids: table[ids].to(dtype)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    if weight.dtype == x.dtype:
        return F.linear(x, weight, bias)
    # Converted block by block: a whole head in float32 would be allocated for every token.
    blocks = weight.split(max(1, WIDEN_BLOCK // weight.shape[1]))
    out = torch.cat([F.linear(x, block.to(x.dtype)) for block in blocks], -1)
    return out if bias is None else out + bias


def norm(case: RMSNorm | LayerNorm):
    if isinstance(case, LayerNorm):
        return lambda x, weight, bias: F.layer_norm(
            x, x.shape[-1:], case.offset + weight.to(x.dtype), None if bias is None else bias.to(x.dtype), case.eps
        )

    def rms_norm(x: Tensor, weight: Tensor, bias: None) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + case.eps) * (case.offset + weight)

    return rms_norm


def rotary(dtype: torch.dtype):
    def tables(positions: Tensor, inverse_frequencies: Tensor, attention_factor: float) -> Rotary:
        angles = positions[:, None].to(dtype) * inverse_frequencies.to(dtype)
        return Rotary(angles.cos() * attention_factor, angles.sin() * attention_factor)

    return tables


def rope(case: Rope):
    def rotate(x: Tensor, table: Rotary) -> Tensor:
        cos, sin = table.cos[:, None], table.sin[:, None]  # [T, 1, dim / 2]
        rotated, kept = x[..., : case.dim], x[..., case.dim :]
        if case.interleaved:
            a, b = rotated[..., 0::2], rotated[..., 1::2]
            rotated = torch.stack((a * cos - b * sin, b * cos + a * sin), -1).flatten(-2)
        else:
            a, b = rotated.chunk(2, -1)
            rotated = torch.cat((a * cos - b * sin, b * cos + a * sin), -1)
        return torch.cat((rotated, kept), -1)

    return rotate


def grow_queries(case: QueryGrowth):
    def grow(q: Tensor, positions: Tensor) -> Tensor:
        if case.by == "power":
            exact = (positions + case.ahead).to(q.dtype) / case.every
            return q * torch.exp(case.beta * torch.log1p(exact))[:, None, None]
        steps = torch.div(positions + case.ahead, case.every, rounding_mode="floor").to(q.dtype)
        return q * (1.0 + case.beta * torch.log1p(steps))[:, None, None]

    return grow


def split_heads(x: Tensor, num_heads: int) -> Tensor:
    return x.unflatten(-1, (num_heads, -1))


def attention(case: Attention):
    def attend(q: Tensor, kv: DenseKeyValues, sinks: Tensor | None = None) -> Tensor:
        rows = q, *(as_floats(x, q.dtype, scale) for x, scale in zip(kv[:2], kv.scales, strict=True))
        sequences = zip(*(x.split(list(kv.lengths)) for x in rows), strict=True)
        return torch.cat([_attend_sequence(case, *sequence, sinks) for sequence in sequences]).flatten(1)

    return attend


def _attend_sequence(case: Attention, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None) -> Tensor:
    """Attend within one sequence: q [n, H, D], k and v [n, K, D] -> [n, H, D]."""
    groups = case.num_heads // case.num_kv_heads
    k, v = (x.repeat_interleave(groups, 1).transpose(0, 1) for x in (k, v))  # [H, n, D]
    blocks = []
    for start in range(0, q.shape[0], QUERY_BLOCK):
        rows = q[start : start + QUERY_BLOCK].transpose(0, 1)
        end = start + rows.shape[1] if case.sight == CAUSAL else q.shape[0]
        scores = rows @ k[:, :end].transpose(1, 2) * case.scale
        if case.softcap:
            scores = case.softcap * torch.tanh(scores / case.softcap)
        if case.alibi is not None:
            scores = scores - fall(case, q)[:, None, None] * distances(start, rows.shape[1], end, q.device)
        seen = visible(start, rows.shape[1], end, case, q.device)
        weights = softmax(scores.masked_fill(~seen, -torch.inf), None if sinks is None else sinks[:, None])
        blocks.append((weights @ v[:, :end]).transpose(0, 1))
    return torch.cat(blocks)


def softmax(scores: Tensor, sinks: Tensor | None) -> Tensor:
    """Return the softmax over the last axis of scores [..., n, S].

    sinks: a logit for each row, [..., n], that counts in the denominator alone.
    """
    if sinks is None:
        return scores.softmax(-1)
    sinks = sinks.to(scores.dtype).expand(scores.shape[:-1])[..., None]
    return torch.cat((scores, sinks), -1).softmax(-1)[..., :-1]


def fall(case: Attention, like: Tensor) -> Tensor:
    """Return what the score of each head loses for each token of distance [H], in the type of `like`."""
    return torch.tensor(case.slopes, dtype=like.dtype, device=like.device)


def distances(start: int, count: int, end: int, device: torch.device) -> Tensor:
    """Return how far each of the keys [0, end) is before each of `count` queries from `start` on: [count, end]."""
    return torch.arange(start, start + count, device=device)[:, None] - torch.arange(end, device=device)


def visible(start: int, count: int, end: int, case: Attention, device: torch.device) -> Tensor:
    """Return which of the keys [0, end) each of `count` queries from `start` on attends to: [count, end]."""
    return sees(case, torch.arange(start, start + count, device=device)[:, None], torch.arange(end, device=device))


def sees(case: Attention, query: Tensor, key: Tensor) -> Tensor:
    """Return whether the token at position `query` attends to the one at `key`; both broadcast. A window includes the
    query itself."""
    seen = key <= case.sight.last(query)
    if case.window is None:
        return seen
    near = key > query - case.window  # a matrix of distances, eight times as large as a mask, is avoided where possible
    match case.pattern:
        case FirstTokens(count):
            near |= key < count
        case Dilated(step):
            near = (key > query - case.window * step) & ((query - key) % step == 0)
        case Strided(stride):
            near |= (query - key) % stride == 0
        case Chunked():
            near = key >= query - query % case.window
    return seen & near


def activation(case):
    if isinstance(case.activation, ClampedSwiGLU):
        return clamped_swiglu(case.activation)
    if isinstance(case.activation, Ungated):
        return ACTIVATIONS[case.activation.activation]
    act = ACTIVATIONS[case.activation]
    return (lambda gate, up: act(gate) * up) if isinstance(case, GatedMLP | MoE) else act


def clamped_swiglu(case: ClampedSwiGLU):
    def act(gate: Tensor, up: Tensor) -> Tensor:
        gate, up = gate.clamp(max=case.limit), up.clamp(-case.limit, case.limit)
        return gate * torch.sigmoid(case.alpha * gate) * (up + 1)

    return act


def xielu(case: XIELU):
    def act(x: Tensor, alpha_p: Tensor, alpha_n: Tensor) -> Tensor:
        right, left = F.softplus(alpha_p.to(x.dtype)), case.beta + F.softplus(alpha_n.to(x.dtype))
        bent = torch.expm1(x.clamp(max=case.eps)) - x
        return torch.where(x > 0, right * x * x, left * bent) + case.beta * x

    return act


def clamp(x: Tensor, limit: float) -> Tensor:
    return x.clamp(-limit, limit)


def mix(weights: Tensor, rows: Tensor) -> Tensor:
    return weights.to(rows.dtype) @ rows


def add(a: Tensor, b: Tensor, scale: float) -> Tensor:
    return a + scale * b if scale != 1.0 else a + b


def add_terms(y: Tensor, x: Tensor, slots: Tensor, terms: SlotTerms) -> Tensor:
    down, up, gain, add, ranks = terms
    rows = []
    for i, slot in enumerate(slots.tolist()):  # row by row, so that no row's bits depend on others
        if slot < 0:
            rows.append(y[i])
            continue
        rank = int(ranks[slot])
        rows.append(gain[slot] * y[i] + add[slot] + (down[slot, :rank] @ x[i]) @ up[slot, :rank])
    return torch.stack(rows) if rows else y


def scale(x: Tensor, factor: float) -> Tensor:
    return x * factor


def softcap(x: Tensor, cap: float) -> Tensor:
    return cap * torch.tanh(x / cap)


def decode_layout(
    page_table: Tensor, rows: Tensor, positions: Tensor, last: Tensor, page_tokens: int
) -> tuple[Tensor, Tensor, Tensor]:
    return page_table[rows, positions // page_tokens], positions % page_tokens, page_table[rows[last]]


def known_tokens(tokens: Tensor, sampled: Tensor, rows: Tensor) -> Tensor:
    return torch.where(tokens < 0, sampled[rows], tokens)


def keep_tokens(sampled: Tensor, rows: Tensor, ids: Tensor) -> None:
    sampled[rows] = ids


def best(logits: Tensor) -> tuple[Tensor, Tensor]:
    values, ids = logits.float().max(dim=1)  # as the sampler sees them
    return ids, values


def draw(logits: Tensor, draws: Tensor, token_ids: Tensor | None) -> tuple[Tensor, Tensor]:
    ids = None if token_ids is None else token_ids.cpu().numpy()
    found = drawn(logits.float().cpu().numpy(), draws.cpu().numpy(), ids)
    return tuple(torch.from_numpy(x).to(logits.device) for x in found)


def accept(logits: Tensor, draws: Tensor, trials: Tensor) -> tuple[Tensor, Tensor]:
    found = accepted(logits.float().cpu().numpy(), draws.cpu().numpy(), trials.cpu().numpy())
    return tuple(torch.from_numpy(x).to(logits.device) for x in found)


def take(x: Tensor, rows: Tensor) -> Tensor:
    return x[rows]


def cut(x: Tensor, start: int, stop: int) -> Tensor:
    return x[..., start:stop]


def join(a: Tensor, b: Tensor) -> Tensor:
    return torch.cat((a, b), -1)


def route(case: MoE):
    # Where only the order matters, experts are chosen by logits: a softmax rounds some unequal logits to equal scores.
    plain = case.scores == "softmax" and not case.choice_bias and case.groups is None

    def choose(
        logits: Tensor, choice_bias: Tensor | None = None, factors: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        if isinstance(case.scores, SparseMixer):
            ids, chosen = _mix_sparsely(case.scores, logits, case.num_experts_per_tok)
            if case.normalize:
                chosen = chosen / chosen.sum(-1, keepdim=True)
        elif plain:
            ids = _best(logits, case.num_experts_per_tok)
            chosen = logits.gather(-1, ids).softmax(-1) if case.normalize else logits.softmax(-1).gather(-1, ids)
        else:
            scores = logits.softmax(-1) if case.scores == "softmax" else logits.sigmoid()
            rated = logits if case.rates_logits else scores
            rated = rated if choice_bias is None else rated + choice_bias
            if case.groups:
                rated = rated.masked_fill(~_in_best_groups(case.groups, rated), -torch.inf)
            ids = _best(rated, case.num_experts_per_tok)
            chosen = scores.gather(-1, ids)
            if case.normalize:
                chosen = chosen / chosen.sum(-1, keepdim=True)
        chosen = chosen * case.scale if case.scale != 1.0 else chosen
        return ids, chosen if factors is None else chosen * factors[ids]

    return choose


def _mix_sparsely(case: SparseMixer, logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return the ids of the chosen experts and their weights, both [T, count]."""
    rest, ids, weights = logits, [], []
    for _ in range(count):
        best = rest.max(-1, keepdim=True).values
        far = (best - logits) / torch.maximum(logits.abs(), best) > 2 * case.tolerance
        ids.append(_best(rest, 1))
        weights.append(rest.masked_fill(far, -torch.inf).softmax(-1).gather(-1, ids[-1]))
        rest = rest.scatter(-1, ids[-1], -torch.inf)
    return torch.cat(ids, -1), torch.cat(weights, -1)


def _best(scores: Tensor, count: int) -> Tensor:
    """Return the indices of the largest scores, by a stable sort: torch.topk leaves the order of equal ones open."""
    return scores.sort(dim=-1, descending=True, stable=True).indices[..., :count]


def _in_best_groups(groups: ExpertGroups, rated: Tensor) -> Tensor:
    """Return which experts belong to a group that may be chosen from, [T, experts]."""
    by_group = rated.unflatten(-1, (groups.count, -1))
    score = by_group.topk(1 if groups.score == "best" else 2, dim=-1).values.sum(-1)
    open_groups = torch.zeros_like(score, dtype=torch.bool).scatter(-1, _best(score, groups.chosen), True)
    return open_groups[..., None].expand_as(by_group).flatten(-2)


def experts(case: MoE):
    share = case.identity.share if case.identity else 1.0

    def run(x: Tensor, ids: Tensor, scores: Tensor, expert: Expert) -> Tensor:
        pairs = ids.flatten()  # one row per (token, choice), grouped by expert below
        order = pairs.argsort(stable=True)
        counts = pairs.bincount(minlength=case.choices).tolist()
        read = x[order // case.num_experts_per_tok]
        if case.weighs_inputs:
            read = read * scores.flatten()[order, None]
        outputs = [
            expert(e, rows) if e < case.num_experts else rows * share
            for e, rows in enumerate(read.split(counts))
            if len(rows)
        ]
        # In token order again: each token's sum runs over its own choices, whatever the batch contains.
        by_token = torch.cat(outputs)[order.argsort()].unflatten(0, ids.shape)
        return (by_token if case.weighs_inputs else by_token * scores[..., None]).sum(1)

    return run
