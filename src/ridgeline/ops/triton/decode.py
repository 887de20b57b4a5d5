"""Recurrent layers of steps that only decode: all between the products in one launch; see `one_token.py`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from ridgeline.ops.api import Weights
from ridgeline.ops.parts import Before, Primitives
from ridgeline.ops.recurrent import inner_norm
from ridgeline.ops.triton import one_token
from ridgeline.ops.triton.launch import Compiled, Counters, Launch
from ridgeline.ops.triton.paged import power_above
from ridgeline.ops.triton.products import Finish
from ridgeline.ops.triton.recurrent import CONV_CHANNELS, block_of, decays_of, flat, selective_scan
from ridgeline.ops.triton.state import StatesInPages
from ridgeline.ops.triton.tokens import MOST_INSIDE
from ridgeline.spec import GatedConvolution, GatedDelta, KimiDelta, LightningAttention, Mamba, Mamba2, ShortConvolution

WIDE_NORM = 2048  # numbers of a norm that need more threads, so that their registers suffice
States = Sequence[StatesInPages]


class OneToken(Protocol):
    """A mixer for one token of each sequence, its last product included.

    x: as `ops.parts.Parts.before` takes it. lengths: ones.
    """

    def __call__(self, x: Any, states: States, lengths: Tensor) -> Tensor: ...


class Bound(NamedTuple):
    """The weights of a mixer, its part before the recurrence, the primitives of its composition, and a launch."""

    weights: Weights
    before: Before
    table: Primitives
    launch: Launch


def where(states: States) -> dict[str, Tensor]:
    """Return the arguments of a kernel that find the pages of sequences."""
    return {"read": states[0].read, "fresh": states[0].fresh, "write": states[0].write}


def delta(case: GatedDelta | KimiDelta, bound: Bound) -> OneToken:
    """Return a gated delta rule for one token."""
    weights, before, _, launch = bound
    arrays, counters, block = weights.arrays, Counters(), block_of(case.head_dim, case.key_dim)
    filters: dict[str, Any] = {f"{name}_weight": arrays[f"{name}_conv.weight"] for name in "qkv"}
    keys = case.num_key_heads

    def run(x: Any, states: States, lengths: Tensor) -> Tensor:
        own, gate = before(x)
        inputs = {n: flat(r) for n, r in zip(("q", "k", "v", "decay", "beta", "z"), (*own, gate), strict=True)}
        v, pages = inputs["v"], [state.pages for state in states]
        names = "q_page", "k_page", "v_page", "page"
        y = v.new_empty((len(v), case.num_heads * case.head_dim))
        launch(
            one_token.delta_step, (-(-case.head_dim // block), case.num_heads, len(v)), Compiled(4),
            **inputs, **{f"{name}_stride": rows.stride(0) for name, rows in inputs.items()}, **filters,
            a_log=arrays["A_log"], dt_bias=arrays["dt_bias"], norm_weight=arrays["gate_norm.weight"], y=y,
            q_pages=pages[0], k_pages=pages[1], v_pages=pages[2], pages=pages[3], **where(states),
            **{name: x.stride(0) for name, x in zip(names, pages, strict=True)},
            arrived=counters(len(v) * keys, v.device), scale=case.key_dim**-0.5, reach=case.reach,
            offset=case.norm.offset, eps=case.norm.eps, KEPT=pages[0].shape[1], SHARED=case.num_heads // keys,
            HEADS=case.num_heads, KEYS=case.key_dim, WIDTH=case.head_dim, BY_CHANNEL=isinstance(case, KimiDelta),
            NAME=case.activation, GATE="sigmoid" if isinstance(case, KimiDelta) else "silu", BLOCK_P=block,
            BLOCK_K=power_above(case.key_dim), BLOCK_W=power_above(case.head_dim),
        )  # fmt: skip
        return weights.linears["out"].apply(y)

    return run


def ssd(case: Mamba2, bound: Bound) -> OneToken | None:
    """Return Mamba-2 for one token; None if it has no norm, or if that of a group needs too many registers."""
    if (norm := case.norm) is None:
        return None
    weights, before, _, launch = bound
    arrays, counters, bias = weights.arrays, Counters(), weights.vector("conv.bias")
    size = case.inner_size // case.num_groups
    is_wide = size > WIDE_NORM
    # With more threads, a program holds fewer rows of the state: their registers suffice on sm_80 and sm_90 alike.
    block = max(1, block_of(case.head_dim, case.state_size) // (2 if is_wide else 1))
    if size > MOST_INSIDE:
        return None

    def run(x: Any, states: States, lengths: Tensor) -> Tensor:
        own, gate = before(x)
        inputs = {n: flat(r) for n, r in zip(("x", "dt", "z"), (*own, gate), strict=True)}
        count, (kept, pages) = len(inputs["x"]), [state.pages for state in states]
        y = kept.new_empty((count, case.inner_size))
        launch(
            one_token.ssd_step, (-(-case.head_dim // block), case.num_heads, count),
            Compiled(8 if is_wide else 4),
            **inputs, **{f"{name}_stride": rows.stride(0) for name, rows in inputs.items()},
            weight=arrays["conv.weight"], bias=bias, dt_bias=arrays["dt_bias"], a_log=arrays["A_log"],
            skip=arrays["D"], norm_weight=arrays["gate_norm.weight"], y=y, kept=kept, pages=pages, **where(states),
            kept_page=kept.stride(0), page=pages.stride(0), arrived=counters(count * case.num_groups, y.device),
            least=case.dt_least, most=float("inf") if case.dt_most is None else case.dt_most, offset=norm.offset,
            eps=norm.eps, KEPT=kept.shape[1], SHARED=case.num_heads // case.num_groups, HEADS=case.num_heads,
            WIDTH=case.head_dim, STATES=case.state_size, HAS_BIAS=bias is not None, NAME=case.activation,
            BLOCK_P=block, BLOCK_S=power_above(case.state_size), BLOCK_G=power_above(size),
        )  # fmt: skip
        return weights.linears["out"].apply(y)

    return run


def convolution(case: ShortConvolution | GatedConvolution, bound: Bound) -> OneToken:
    """Return a gated convolution for one token. ShortConvolution also has a gate before it."""
    weights, _, _, launch = bound
    filters, is_short, channels = weights.arrays["conv.weight"], isinstance(case, ShortConvolution), case.channels

    def run(x: Any, states: States, lengths: Tensor) -> Tensor:
        parts = flat(weights.linears["in"].apply(x)).split(channels, -1)
        first, after, own = parts if is_short else (None, parts[1], parts[0])
        pages = states[0].pages
        y = own.new_empty((len(own), channels))
        launch(
            one_token.convolution_step, (-(-channels // CONV_CHANNELS), len(own)), Compiled(2),
            x=own, before=first, after=after, weight=filters, bias=weights.vector("conv.bias"), y=y, kept=pages,
            **where(states), x_stride=own.stride(0), kept_page=pages.stride(0), channels=channels,
            KEPT=pages.shape[1], HAS_BEFORE=is_short, HAS_BIAS=weights.vector("conv.bias") is not None,
            NAME="none" if is_short else case.activation, BLOCK=CONV_CHANNELS,
        )  # fmt: skip
        return weights.linears["out"].apply(y)

    return run


def lightning(case: LightningAttention, bound: Bound) -> OneToken | None:
    """Return lightning attention for one token; None if its norm needs too many registers."""
    weights, _, _, launch = bound
    arrays, counters, decays = weights.arrays, Counters(), decays_of(case)
    size, block = case.head_dim, block_of(case.head_dim, case.head_dim)
    if case.inner_size > MOST_INSIDE:
        return None

    def run(x: Any, states: States, lengths: Tensor) -> Tensor:
        qkv, gate = (flat(weights.linears[name].apply(x)) for name in ("qkv", "gate"))
        pages = states[0].pages
        y = qkv.new_empty((len(qkv), case.inner_size))
        launch(
            one_token.lightning_step, (-(-size // block), case.num_heads, len(qkv)),
            Compiled(8 if case.inner_size > WIDE_NORM else 4),
            qkv=qkv, z=gate, decays=decays(qkv.device), norm_weight=arrays["out_norm.weight"], y=y, pages=pages,
            **where(states), arrived=counters(len(qkv), qkv.device), qkv_stride=qkv.stride(0),
            z_stride=gate.stride(0), page=pages.stride(0), offset=case.norm.offset, eps=case.norm.eps,
            HEADS=case.num_heads, WIDTH=size, NAME=case.activation, BLOCK_P=block, BLOCK_S=power_above(size),
            BLOCK_N=power_above(case.inner_size),
        )  # fmt: skip
        return weights.linears["out"].apply(y)

    return run


def convolved(case: Mamba, weights: Weights) -> Callable[[States], Finish]:
    """Return the end of the input's product for one token: its first rows are filtered, in pages of inputs."""
    filters, bias = weights.arrays["conv.weight"], weights.vector("conv.bias")

    def finish(states: States) -> Finish:
        kept: Any = states[0]
        how = "convolved", case.inner_size, kept.pages.shape[1], bias is not None, case.activation
        return Finish(
            how, keys=kept.pages, pages=kept.read, slots=kept.write, fresh=kept.fresh,
            page_stride=kept.pages.stride(0), q_weight=filters, k_weight=bias,
        )  # fmt: skip

    return finish


def mamba(case: Mamba, bound: Bound) -> OneToken:
    """Return Mamba for one token, whose input `convolved` filtered; the recurrence also applies the gate."""
    weights, before, table, launch = bound
    linears, arrays, scan = weights.linears, weights.arrays, selective_scan(case, launch)
    sizes = {"dt": case.dt_rank, "b": case.state_size, "c": case.state_size}
    norms = [inner_norm(case, name, size, weights, table) for name, size in sizes.items()]

    def run(x: Any, states: States, lengths: Tensor) -> Tensor:
        (own,), gate = before(x)
        x = own[:, None]
        parts = linears["x"].apply(x).split([*sizes.values()], -1)
        dt, b, c = (norm(part) for norm, part in zip(norms, parts, strict=True))
        y, _ = scan(x, linears["dt"].apply(dt), arrays["A_log"], b, c, arrays["D"], states[1], lengths, gate[:, None])
        return linears["out"].apply(y.flatten(0, 1))

    return run


# By the kind of mixer: a function of the mixer and its parts.
ONE_TOKEN: Mapping[type[Any], Callable[[Any, Bound], OneToken | None]] = {
    GatedDelta: delta, KimiDelta: delta, Mamba: mamba, Mamba2: ssd, LightningAttention: lightning,
    ShortConvolution: convolution, GatedConvolution: convolution,
}  # fmt: skip
# The same: a function that returns the end of the input's product, which is then a part of the mixer for one token.
ENDING: Mapping[type[Any], Callable[[Any, Weights], Callable[[States], Finish]]] = {Mamba: convolved}
