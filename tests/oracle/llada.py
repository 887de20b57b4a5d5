"""LLaDA and Dream from their published descriptions, in float64: the forward pass, and the loops of their `generate`.

No class of transformers has them. The definitions read tensors by their names in the published files; they share no
code with the engine, and import nothing of it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from oracle.llada2 import Tensors, norm, rotate

Rows = dict[int, tuple[Tensor, Tensor]]  # keys and values of each layer
Pass = Callable[[list[int]], Tensor]  # logits [T, vocabulary] of all tokens of a sequence


class Shape(NamedTuple):
    """The sizes of a model, and the names of its tensors; {i} is the number of a layer."""

    width: int
    inner: int
    layers: int
    heads: int
    kv: int
    vocab: int
    theta: float
    eps: float
    biased: bool
    root: tuple[str, str, str]  # embedding, last norm, head
    layer: str
    parts: tuple[str, str, str, str, str, str, str, str, str]  # norm, q, k, v, o, norm, gate, up, down


def shape_of(config: Mapping[str, Any]) -> Shape:
    c = config
    if c["model_type"] == "llada":
        at = "model.transformer."
        return Shape(
            c["d_model"], c["mlp_hidden_size"], c["n_layers"], c["n_heads"], c["n_kv_heads"], c["embedding_size"],
            c["rope_theta"], c["rms_norm_eps"], False, (at + "wte", at + "ln_f", at + "ff_out"), at + "blocks.{i}.",
            ("attn_norm", "q_proj", "k_proj", "v_proj", "attn_out", "ff_norm", "ff_proj", "up_proj", "ff_out"),
        )  # fmt: skip
    attn = [f"self_attn.{n}_proj" for n in "qkvo"]
    mlp = [f"mlp.{n}_proj" for n in ("gate", "up", "down")]
    return Shape(
        c["hidden_size"], c["intermediate_size"], c["num_hidden_layers"], c["num_attention_heads"],
        c["num_key_value_heads"], c["vocab_size"], c["rope_theta"], c["rms_norm_eps"], True,
        ("model.embed_tokens", "model.norm", "lm_head"), "model.layers.{i}.",
        ("input_layernorm", attn[0], attn[1], attn[2], attn[3], "post_attention_layernorm", mlp[0], mlp[1], mlp[2]),
    )  # fmt: skip


def draw(config: Mapping[str, Any], seed: int) -> dict[str, np.ndarray]:
    """Return random tensors in float32, by their published names, whose parts all matter."""
    s, rng = shape_of(config), np.random.default_rng(seed)
    head = s.width // s.heads
    rows = [s.width, s.heads * head, s.kv * head, s.kv * head, s.width, s.width, s.inner, s.inner, s.width]
    columns = [0, s.width, s.width, s.width, s.heads * head, 0, s.width, s.width, s.inner]
    found = {f"{s.root[0]}.weight": rng.normal(0, 1, (s.vocab, s.width))}
    found[f"{s.root[1]}.weight"] = rng.uniform(0.5, 1.5, s.width)
    found[f"{s.root[2]}.weight"] = rng.normal(0, 1.5 * s.width**-0.5, (s.vocab, s.width))
    for i in range(s.layers):
        for name, out, into in zip(s.parts, rows, columns, strict=True):
            at = s.layer.format(i=i) + name
            size = (out, into) if into else (out,)
            found[f"{at}.weight"] = rng.normal(0, 1.5 * into**-0.5, size) if into else rng.uniform(0.5, 1.5, size)
            if s.biased and name[-6:] in ("q_proj", "k_proj", "v_proj"):
                found[f"{at}.bias"] = rng.normal(0, 0.5, out)
    return {name: x.astype(np.float32) for name, x in found.items()}


def define(
    config: Mapping[str, Any], w: Tensors, tokens: list[int], kept: range | None = None, left: Rows | None = None
) -> Tensor:
    """Return the logits [T, vocabulary] of one sequence, all of whose tokens see each other. w: tensors in float64.

    left: where the pass leaves keys and values by layer; if `kept` is given, the positions outside of it take theirs
    from there instead.
    """
    s = shape_of(config)
    x, head = w[f"{s.root[0]}.weight"][tokens], s.width // s.heads
    for i in range(s.layers):
        at = [s.layer.format(i=i) + name for name in s.parts]

        def of(n: int, at: list[str] = at) -> Tensor:
            return w[f"{at[n]}.weight"]

        h = norm(x, of(0), s.eps)
        q, k, v = (
            (h @ of(n).T + w.get(f"{at[n]}.bias", torch.zeros(1))).view(len(h), -1, head) for n in (1, 2, 3)
        )  # fmt: skip
        q, k = (torch.stack([torch.stack([rotate(y, p, s.theta, 1.0) for y in row]) for p, row in enumerate(z)])
                for z in (q, k))  # fmt: skip
        if left is not None and kept is not None:
            inside = torch.tensor([p in kept for p in range(len(h))])[:, None, None]
            k, v = torch.where(inside, k, left[i][0]), torch.where(inside, v, left[i][1])
        elif left is not None:
            left[i] = (k, v)
        rows = [
            torch.cat([
                torch.softmax(k[:, n * s.kv // s.heads] @ q[p, n] * head**-0.5, 0) @ v[:, n * s.kv // s.heads]
                for n in range(s.heads)
            ])
            for p in range(len(h))
        ]  # fmt: skip
        x = x + torch.stack(rows) @ of(4).T
        h = norm(x, of(5), s.eps)
        gate = h @ of(6).T
        x = x + (gate * torch.sigmoid(gate) * (h @ of(7).T)) @ of(8).T
    return norm(x, w[f"{s.root[1]}.weight"], s.eps) @ w[f"{s.root[2]}.weight"].T


def llada_generate(look: Pass, prompt: list[int], count: int, block: int, steps: int, cfg: float, mask: int
    ) -> list[int]:  # fmt: skip
    """Return LLaDA's greedy answer with low-confidence remasking: `steps` in all, over blocks of `block` tokens."""
    x = torch.tensor([*prompt, *[mask] * count])
    given, each = x != mask, steps // (count // block)
    for b in range(count // block):
        first, end = len(prompt) + b * block, len(prompt) + (b + 1) * block
        base, more = divmod(int((x[first:end] == mask).sum()), each)
        for i in range(each):
            open_ones = x == mask
            logits = look(x.tolist())
            if cfg:
                hidden = x.clone()
                hidden[given] = mask
                without = look(hidden.tolist())
                logits = without + (cfg + 1) * (logits - without)
            logits[:, mask] = -torch.inf
            found = logits.argmax(-1)
            sure = torch.softmax(logits, -1).gather(1, found[:, None])[:, 0]
            sure[end:] = -torch.inf
            sure[~open_ones] = -torch.inf
            kept = sure.topk(base + (i < more)).indices
            x[kept] = found[kept]
    return x[len(prompt) :].tolist()


def dream_generate(
    look: Pass, prompt: list[int], count: int, steps: int, alg: str, mask: int,
    draw: Callable[[int, int], float] = lambda step, position: 0.0,
) -> list[int]:  # fmt: skip
    """Return Dream's greedy answer: logits of a position are for the next one, and time runs from 1 to 0.001.

    draw: the random number in [0, 1) of a step and a position, for `origin`.
    """
    x, times = torch.tensor([*prompt, *[mask] * count]), torch.linspace(1, 1e-3, steps + 1)
    for i in range(steps):
        logits = look(x.tolist())
        logits = torch.cat([logits[:1], logits[:-1]])
        logits[:, mask] = -torch.inf
        at = (x == mask).nonzero()[:, 0]
        p = torch.softmax(logits[at], -1)
        sure, found = p.max(-1)
        if alg == "topk_margin":
            best = p.topk(2, -1).values
            sure = best[:, 0] - best[:, 1]
        elif alg == "entropy":
            sure = (p * torch.log(p + 1e-10)).sum(-1)
        if alg == "origin":
            p_transfer = float(1 - times[i + 1] / times[i]) if i < steps - 1 else 1.0
            taken = torch.tensor([draw(i, p) < p_transfer for p in at.tolist()], dtype=torch.bool)
            x[at[taken]] = found[taken]
            continue
        share = 1 - times[i + 1] / times[i]
        number = int(torch.tensor(float(len(at))) * share) if i < steps - 1 else len(at)
        kept = sure.topk(number).indices
        x[at[kept]] = found[kept]
    return x[len(prompt) :].tolist()


def cached_generate(
    config: Mapping[str, Any], w: Tensors, prompt: list[int], count: int, block: int, cache: str, *, shift: int,
    each: int = 1, threshold: float | None = None, suffix: tuple[int, ...] = (), mask: int = 3,
) -> list[int]:  # fmt: skip
    """Return the greedy answer with the caches of Fast-dLLM (arXiv:2505.22618, section 3.1), without any cache.

    Keys and values of positions outside of a block are those of the block's first pass, in all of its later passes.
    `prefix`: only of positions before the block. shift: 1 if logits are for the next position; then the position before
    a block belongs to what its passes compute. each: tokens that a pass keeps; threshold: all that are as likely.
    """
    x = [*prompt, *[mask] * count, *suffix]
    for first in range(len(prompt), len(prompt) + count, block):
        end, rows, begun = min(first + block, len(prompt) + count), Rows(), False
        now = range(first - shift, end if cache == "dual" else len(x))
        while mask in x[first:end]:
            logits = define(config, w, x, now if begun else None, rows)
            logits[:, mask], begun = -torch.inf, True
            p = torch.softmax(logits, -1)
            at = [i for i in range(first, end) if x[i] == mask]
            at.sort(key=lambda i: -float(p[i - shift].max()))
            likely = sum(float(p[i - shift].max()) >= (threshold or 0) for i in at)
            for i in at[: each if threshold is None else max(1, likely)]:
                x[i] = int(p[i - shift].argmax())
    return x[len(prompt) : len(prompt) + count]
