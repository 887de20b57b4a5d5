"""Techniques as changes of a deployment, as a user writes them: kv=fp8, mla=512+64, speculate=0.8:4."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from ridgeline.catalog.machines import nearest
from ridgeline.cost.precision import STORAGE, products_type, storage_type
from ridgeline.errors import RequestError
from ridgeline.plan import rewrite
from ridgeline.plan.planner import Deployment, Speculation
from ridgeline.spec import ModelSpec


@dataclass(frozen=True, slots=True)
class Changed:
    """A deployment after a change. gives_up: what that costs, beside what the figures show; who measured it."""

    text: str
    deployment: Deployment
    gives_up: str


def change(deployment: Deployment, text: str) -> Changed:
    """One change, or several at once with commas between them.

    Raises RequestError for one that is not known, with the nearest; that is written wrongly, with its form; or that the
    model cannot have, with the reason.
    """
    after, given_up = deployment, []
    for part in text.split(","):
        name, sign, value = part.strip().partition("=")
        if name not in CHANGES:
            raise RequestError(f"change {part!r} is not known; {nearest(name, CHANGES)}")
        form, apply = CHANGES[name]
        if not sign or not value:
            raise RequestError(f"change {part!r}: write {form}")
        try:
            after, cost = apply(after, value)
        except RequestError as e:
            raise RequestError(f"{part.strip()}: {e}") from None
        except ValueError as e:
            raise RequestError(f"change {part!r}: write {form} ({e})") from None
        given_up.append(cost)
    return Changed(text, after, "; ".join(dict.fromkeys(given_up)))


Applied = tuple[Deployment, str]


def _kv_heads(d: Deployment, value: str) -> Applied:
    count = _whole(value)
    least = min((m.num_kv_heads for m in d.spec.attentions(shared=False)), default=0)
    after = replace(d, spec=rewrite.with_kv_heads(d.spec, count))
    if count >= least:
        return after, "what grouped heads save"
    return after, "quality unless trained on: T5-XXL from 64 heads to 8 lost 0.1 of 47.2 (2305.13245, table 1)"


def _latents(d: Deployment, value: str) -> Applied:
    latent, _, rope = value.partition("+")
    spec = rewrite.with_latents(d.spec, _whole(latent), _whole(rope or "64"))
    return replace(d, spec=spec), (
        "training or conversion: MHA2MLA lost 0.5 to 1 % on LongBench (2502.14837); 3.4 times the operations per key; "
        "windows"
    )


def _windows(d: Deployment, value: str) -> Applied:
    window, _, local = value.partition(":")
    spec = rewrite.with_windows(d.spec, _whole(window), _whole(local) if local else None)
    return replace(d, spec=spec), f"recall: windowed layers see nothing older than {window} tokens; needs training"


def _shared(d: Deployment, value: str) -> Applied:
    spec = rewrite.with_shared_keys(d.spec, _whole(value, least=2))
    return replace(d, spec=spec), "training: +0.04 to 0.06 perplexity at 1B for half the cache (2405.12981)"


def _hybrid(d: Deployment, value: str) -> Applied:
    name, _, many = value.partition(":")
    kind = next((k for k in rewrite.RECURRENT if k == name), None)
    if kind is None:
        raise RequestError(f"{name!r} is no recurrent mixer here; known are {', '.join(rewrite.RECURRENT)}")
    spec = rewrite.with_recurrent(d.spec, kind, _whole(many) if many else None)
    lost = "recall from far back: 1 attention layer in 8 keeps most of it (2403.19887)" if many else (
        "recall and in-context learning of attention (2403.19887, section 6)"
    )  # fmt: skip
    return replace(d, spec=spec), f"{lost}; needs training"


def _weights(d: Deployment, value: str) -> Applied:
    kind = storage_type(value)
    products = products_type(d.hardware, kind, d.precision.activations)
    precision = replace(d.precision, weights=kind, experts=None, products=products)
    return replace(d, precision=precision), WEIGHTS_COST.get(kind, "memory: nothing is rounded further")


def _state(d: Deployment, value: str) -> Applied:
    kind = storage_type(value)
    cost = "memory: nothing is rounded further" if STORAGE[kind].bits >= 16 else (
        "keys and values rounded to 4 bits: 2 bits lost at most 2 points, with keys by channel (2402.02750)"
        if STORAGE[kind].bits <= 4 else "keys and values rounded to 8 bits: measure with `ridgeline evaluate`"
    )  # fmt: skip
    return replace(d, precision=replace(d.precision, state=kind)), cost


def _activations(d: Deployment, value: str) -> Applied:
    kind = storage_type(value)
    return replace(d, precision=replace(d.precision, activations=kind)), "rounded activations: outliers (2208.07339)"


def _devices(name: str, what: str) -> Callable[[Deployment, str], Applied]:
    def apply(d: Deployment, value: str) -> Applied:
        return replace(d, scheme=replace(d.scheme, **{name: _whole(value)})), what

    return apply


def _speculate(d: Deployment, value: str) -> Applied:
    acceptance, _, rest = value.partition(":")
    depth, _, cost = rest.partition(":")
    drafts = Speculation(float(acceptance), _whole(depth or "4"), *([float(cost)] if cost else []))
    return replace(d, speculation=drafts), "nothing of the output; operations of drafts that are not taken"


def _prune(d: Deployment, value: str) -> Applied:
    part, sign, share = value.partition(":")
    if not sign:
        part, share = "mlp", part
    if part not in rewrite.PRUNABLE:
        raise RequestError(f"{part!r} cannot be pruned; known are {', '.join(rewrite.PRUNABLE)}")
    if not 0 < (portion := float(share)) < 1:
        raise ValueError("a share between 0 and 1")
    spec = rewrite.pruned(d.spec, part, portion)
    return replace(d, spec=spec), "quality, distillation after it: 15B to 8B lost 2.8 points of MMLU (2407.14679)"


def _chunk(d: Deployment, value: str) -> Applied:
    size = _whole(value)
    cost = "longer gaps between tokens while prompts are read" if size > d.chunk else "time to the first token"
    return replace(d, chunk=size), cost


def _prefix(d: Deployment, value: str) -> Applied:
    return replace(d, prefix_hit=float(value)), "nothing; only where prompts begin alike"


WEIGHTS_COST: Mapping[str, str] = MappingProxyType({
    "fp8": "weights rounded to 3 bits of mantissa: measure with `ridgeline evaluate`",
    "int8": "outliers: 13B kept its perplexity of 12.45 with them in 16 bits, 19.08 without (2208.07339, table 1)",
    "int4": "weights rounded in groups of 32: `ridgeline generate --weights int4` says what that costs a model",
    "int4-128": "perplexity: Llama-2-7B 5.47 to 5.60 with AWQ, 5.73 rounded (2306.00978)",
    "int3": "perplexity: Llama-2-7B 5.47 to 6.24 with AWQ, 6.66 rounded (2306.00978)",
    "mxfp4": "weights rounded to 1 bit of mantissa: measure with `ridgeline evaluate`",
})  # fmt: skip
# Name -> how it is written, and what it does.
CHANGES: Mapping[str, tuple[str, Callable[[Deployment, str], Applied]]] = MappingProxyType({
    "kv_heads": ("kv_heads=8: heads of keys and values", _kv_heads),
    "mla": ("mla=512+64: numbers of a latent, and rotated ones", _latents),
    "window": ("window=1024:5: tokens that layers see, and how many such layers to each that sees all", _windows),
    "cla": ("cla=2: layers that share keys and values", _shared),
    "hybrid": ("hybrid=mamba2:7: recurrent layers, and how many to each with attention", _hybrid),
    "weights": ("weights=int4: a type", _weights),
    "kv": ("kv=fp8: a type", _state),
    "activations": ("activations=fp8: a type", _activations),
    "replicas": ("replicas=4: whole copies", _devices("replicas", "devices; no request is faster")),
    "tp": ("tp=2: devices that share every matrix", _devices("tp", "devices; two all-reduces in each layer")),
    "ep": ("ep=8: devices that share the experts", _devices("ep", "devices; evenness: the busiest expert decides")),
    "pp": ("pp=2: devices that share the layers", _devices("pp", "devices; no request is faster")),
    "speculate": ("speculate=0.8:4: acceptance and number of drafts (:0.05, the cost of one in steps)", _speculate),
    "prune": ("prune=mlp:0.25: the share that goes, of mlp, layers or heads", _prune),
    "chunk": ("chunk=2048: tokens of a prompt in one step", _chunk),
    "prefix": ("prefix=0.9: the share of prompts that is cached", _prefix),
})  # fmt: skip


def query_heads(spec: ModelSpec) -> int | None:
    """Heads of queries, if some layer groups them: as many keys and values is the figure before grouping."""
    grouped = [m for m in spec.attentions(shared=False) if m.query_group > 1]
    return max(m.num_heads for m in grouped) if grouped else None


def _whole(text: str, least: int = 1) -> int:
    number = int(text)
    if number < least:
        raise ValueError(f"{number} is below {least}")
    return number
