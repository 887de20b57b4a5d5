"""Apply techniques to a deployment, written as on the command line: kv=fp8, mla=512+64, speculate=0.8:4."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType

from ridgeline.catalog.machines import nearest
from ridgeline.catalog.models import find_writer
from ridgeline.cost.precision import products_type, storage_of, storage_type, wide_type
from ridgeline.errors import RequestError
from ridgeline.plan import rewrite
from ridgeline.plan.blocks import BlockPasses
from ridgeline.plan.planner import Deployment
from ridgeline.plan.speculation import (
    DRAFT_COST,
    NGRAM,
    Draft,
    Speculation,
    is_acceptance,
    parse_acceptance,
    parse_draft,
    speculation_of,
)
from ridgeline.spec import ModelSpec
from ridgeline.spec.schemes import scheme_of
from ridgeline.spec.storage import default_storage


@dataclass(frozen=True, slots=True)
class Changed:
    """A deployment after a change. gives_up: the trade-off that the figures do not show, and who measured it."""

    text: str
    deployment: Deployment
    gives_up: str


FindDraft = Callable[[str], Draft]


def published_draft(name: str) -> Draft:
    """Return a published model as a draft model. Raises RequestError for an unknown name."""
    found = find_writer(name)
    return Draft(found.name, found.spec)


def change(deployment: Deployment, text: str, find_draft: FindDraft = published_draft) -> Changed:
    """Apply one change, or several with commas between them. find_draft: finds a draft model or a head by its name.

    Raises RequestError for an unknown change (with the nearest names), for wrong syntax (with the right form), and for
    a change that the model cannot have (with the reason).
    """
    after, given_up = deployment, []
    for part in text.split(","):
        name, sign, value = part.strip().partition("=")
        if name not in CHANGES:
            raise RequestError(f"unknown change {part!r}; {nearest(name, CHANGES)}")
        form, apply = CHANGES[name]
        if not sign or not value:
            raise RequestError(f"change {part!r}: write {form}")
        try:
            after, cost = (partial(apply, find=find_draft) if apply is _speculate else apply)(after, value)
        except RequestError as e:
            raise RequestError(f"{part.strip()}: {e}") from None
        except ValueError as e:
            raise RequestError(f"change {part!r}: write {form} ({e})") from None
        if after.blocks is not None and after.speculation is not None:
            raise RequestError(
                f"{part.strip()}: a diffusion model predicts several tokens in a step; it takes no drafts"
            )
        given_up.append(cost)
    return Changed(text, after, "; ".join(dict.fromkeys(given_up)))


Applied = tuple[Deployment, str]


def _kv_heads(d: Deployment, value: str) -> Applied:
    count = _whole(value)
    least = min((m.num_kv_heads for m in d.spec.attentions(shared=False)), default=0)
    after = replace(d, spec=rewrite.with_kv_heads(d.spec, count))
    if count >= least:
        return after, "nothing that grouping does not give up already"
    return after, "quality without further training: T5-XXL from 64 heads to 8 lost 0.1 of 47.2 (2305.13245, table 1)"


def _latents(d: Deployment, value: str) -> Applied:
    latent, _, rope = value.partition("+")
    spec = rewrite.with_latents(d.spec, _whole(latent), _whole(rope or "64"))
    return replace(d, spec=spec), (
        "needs training or conversion: MHA2MLA lost 0.5 to 1 % on LongBench (2502.14837); 3.4 times the operations per "
        "key; no windows"
    )


def _windows(d: Deployment, value: str) -> Applied:
    window, _, local = value.partition(":")
    spec = rewrite.with_windows(d.spec, _whole(window), _whole(local) if local else None)
    return replace(d, spec=spec), f"long-range recall: windowed layers attend to {window} tokens; needs training"


def _shared(d: Deployment, value: str) -> Applied:
    spec = rewrite.with_shared_keys(d.spec, _whole(value, least=2))
    return replace(d, spec=spec), "needs training: +0.04 to 0.06 perplexity at 1B for half the cache (2405.12981)"


def _hybrid(d: Deployment, value: str) -> Applied:
    name, _, many = value.partition(":")
    kind = next((k for k in rewrite.RECURRENT if k == name), None)
    if kind is None:
        raise RequestError(f"{name!r} is not a recurrent mixer; use {', '.join(rewrite.RECURRENT)}")
    spec = rewrite.with_recurrent(d.spec, kind, _whole(many) if many else None)
    lost = "long-range recall: 1 attention layer in 8 keeps most of it (2403.19887)" if many else (
        "the recall and in-context learning of attention (2403.19887, section 6)"
    )  # fmt: skip
    return replace(d, spec=spec), f"{lost}; needs training"


def _linear(d: Deployment, value: str) -> Applied:
    kind, sizes = rewrite.linear_features(value)
    window, _, many = sizes.partition(":")
    spec = rewrite.with_recurrent(d.spec, kind, _whole(many))
    if spec.attentions(shared=False):
        spec = rewrite.with_windows(spec, _whole(window), None)
    return replace(d, spec=spec), "long-range recall, which grows with the state (2402.18668, figure 2); needs training"


def _weights(d: Deployment, value: str) -> Applied:
    kind = storage_type(value)
    products = products_type(d.hardware, kind, d.precision.activations)
    # Schemes leave the head as it is stored; rounding at load rounds it, too.
    scheme = scheme_of(value.lower())
    wide = wide_type(d.precision.weights, d.precision.wide)
    head = () if scheme is None else (("head.weight", wide),)
    precision = replace(d.precision, weights=kind, experts=None, products=products, wide=wide, matrices=head)
    if d.hardware.kind == "cpu" and not precision.is_state_chosen:
        precision = replace(precision, state=default_storage(kind).dtype)
    return replace(d, precision=precision), _weights_cost(kind) if scheme is None else _scheme_cost(value.lower(), kind)


def _scheme_cost(name: str, kind: str) -> str:
    cost = SCHEMES_COST.get(f"{name.partition('-')[0]} {kind}")
    return cost or f"accuracy: the report of `ridgeline quantize --scheme {name}` has the cost for a model"


def _weights_cost(kind: str) -> str:
    if kind in WEIGHTS_COST:
        return WEIGHTS_COST[kind]
    if storage_of(kind).bits >= 16:
        return "memory: these weights are not quantized"
    return "accuracy: `ridgeline generate --weights` prints the cost for a model"


def _state(d: Deployment, value: str) -> Applied:
    kind = storage_type(value)
    cost = "memory: the KV cache is not quantized" if storage_of(kind).bits >= 16 else (
        "accuracy of 4-bit keys and values: 2 bits lost at most 2 points, with keys by channel (2402.02750)"
        if storage_of(kind).bits <= 4 else "accuracy of 8-bit keys and values: measure it with `ridgeline evaluate`"
    )  # fmt: skip
    return replace(d, precision=replace(d.precision, state=kind, is_state_chosen=True)), cost


def _activations(d: Deployment, value: str) -> Applied:
    kind = storage_type(value)
    return replace(d, precision=replace(d.precision, activations=kind)), "accuracy, because of outliers (2208.07339)"


def _devices(name: str, what: str) -> Callable[[Deployment, str], Applied]:
    def apply(d: Deployment, value: str) -> Applied:
        return replace(d, scheme=replace(d.scheme, **{name: _whole(value)})), what

    return apply


def _speculate(d: Deployment, value: str, find: FindDraft = published_draft) -> Applied:
    first, _, rest = value.partition(":")
    if is_acceptance(first):
        depth, _, cost = rest.partition(":")
        drafts = Speculation(parse_acceptance(first), _whole(depth or "4"), float(cost or DRAFT_COST))
    else:
        name, most, acceptance = parse_draft(value)
        if name == "auto":
            raise RequestError("speculate is auto, which only an engine chooses; name ngram, a draft model or a head")
        drafts = speculation_of(Draft(NGRAM, None) if name == NGRAM else find(name), most, acceptance)
    return replace(d, speculation=drafts), "nothing in the output; rejected drafts are computed in vain"


def _diffusion(d: Deployment, value: str) -> Applied:
    size, _, kept = value.partition(":")
    passes = BlockPasses(_whole(size), float(kept or "1"))
    after = replace(d, spec=rewrite.with_blocks(d.spec, passes.size), diffusion=passes)
    return after, "needs training; more tokens a pass are less likely together (2505.22618)"


def _prune(d: Deployment, value: str) -> Applied:
    part, sign, share = value.partition(":")
    if not sign:
        part, share = "mlp", part
    if part not in rewrite.PRUNABLE:
        raise RequestError(f"{part!r} cannot be pruned; use {', '.join(rewrite.PRUNABLE)}")
    if not 0 < (portion := float(share)) < 1:
        raise ValueError("the share must be between 0 and 1")
    spec = rewrite.pruned(d.spec, part, portion)
    return replace(d, spec=spec), "quality, even after distillation: 15B to 8B lost 2.8 points of MMLU (2407.14679)"


def _chunk(d: Deployment, value: str) -> Applied:
    size = _whole(value)
    cost = "steadiness: longer gaps between tokens during a prefill" if size > d.chunk else "time to first token"
    return replace(d, chunk=size), cost


def _prefix(d: Deployment, value: str) -> Applied:
    return replace(d, prefix_hit=float(value)), "nothing; it needs prompts that share their beginning"


def _offload(d: Deployment, value: str) -> Applied:
    part, sign, share = value.partition(":")
    if not sign or part not in ("weights", "state"):
        raise ValueError("it has weights or state, and a share")
    kept = replace(d.offload, **{part: float(share)})
    return replace(d, offload=kept), "time: each step waits for this share from the host, over a slower link"


WEIGHTS_COST: Mapping[str, str] = MappingProxyType({
    "fp8": "accuracy: weights have a mantissa of 3 bits; measure it with `ridgeline evaluate`",
    "int8": "accuracy: 13B kept its perplexity of 12.45 with outliers in 16 bits, 19.08 without (2208.07339, table 1)",
    "int4": "accuracy: weights in groups of 32; `ridgeline generate --weights int4` prints the cost for a model",
    "int4-128": "perplexity: Llama-2-7B from 5.47 to 5.60 with AWQ, 5.73 rounded to nearest (2306.00978)",
    "int3": "accuracy: weights in groups of 32; `ridgeline generate --weights int3` prints the cost for a model",
    "int3-128": "perplexity: Llama-2-7B from 5.47 to 6.24 with AWQ, 6.66 rounded to nearest (2306.00978)",
    "mxfp4": "accuracy: weights have a mantissa of 1 bit; measure it with `ridgeline evaluate`",
})  # fmt: skip
# Method and format of a scheme -> its published cost.
SCHEMES_COST: Mapping[str, str] = MappingProxyType({
    "awq int4-128-asym-exact": "perplexity: Llama-2-7B from 5.47 to 5.60 (2306.00978, table 4)",
    "awq int3-128-asym-exact": "perplexity: Llama-2-7B from 5.47 to 6.24 (2306.00978, table 4)",
    "gptq int4-128-asym-exact": "perplexity: Llama-2-7B from 5.47 to 5.69 (2306.00978, table 4)",
    "gptq int3-128-asym-exact": "perplexity: Llama-2-7B from 5.47 to 6.43 (2306.00978, table 4)",
})  # fmt: skip
# Name -> its syntax, and the function that applies it.
CHANGES: Mapping[str, tuple[str, Callable[[Deployment, str], Applied]]] = MappingProxyType({
    "kv_heads": ("kv_heads=8: number of KV heads", _kv_heads),
    "mla": ("mla=512+64: size of the latent, and of its rotary part", _latents),
    "window": ("window=1024:5: tokens of the window, and windowed layers per layer with full attention", _windows),
    "cla": ("cla=2: number of layers that share keys and values", _shared),
    "hybrid": ("hybrid=mamba2:7: recurrent mixer, and recurrent layers per layer with attention", _hybrid),
    "linear": (
        "linear=hedgehog:64:1: features (taylor if none are named), tokens of the window of the layers that keep "
        "attention, and linear layers for each of them",
        _linear,
    ),
    "weights": ("weights=int4: a type, or a scheme such as gptq-int3", _weights),
    "kv": ("kv=fp8: a type", _state),
    "activations": ("activations=fp8: a type", _activations),
    "replicas": ("replicas=4: complete copies", _devices("replicas", "devices; no request is faster")),
    "tp": ("tp=2: devices that share every matrix", _devices("tp", "devices; two all-reduces in each layer")),
    "ep": ("ep=8: devices that share the experts", _devices("ep", "devices; the busiest expert sets the time")),
    "pp": ("pp=2: devices that share the layers", _devices("pp", "devices; no request is faster")),
    "speculate": (
        "speculate=0.8:4: acceptance and number of drafts (:0.05, the cost of one in steps); or speculate=MODEL:4:0.8, "
        "a draft model, the folder of a head or ngram, with the number of drafts and the acceptance", _speculate,
    ),
    "diffusion": (
        "diffusion=16:4: tokens of a block, and mean tokens that a pass over it keeps",
        _diffusion,
    ),
    "prune": ("prune=mlp:0.25: share to remove from mlp, layers or heads", _prune),
    "chunk": ("chunk=2048: prompt tokens in one step", _chunk),
    "offload": ("offload=weights:0.5: share of weights or state in the host's memory", _offload),
    "prefix": ("prefix=0.9: share of each prompt that is in the prefix cache", _prefix),
})  # fmt: skip


def query_heads(spec: ModelSpec) -> int | None:
    """Return the number of query heads if some layer groups them (GQA); None otherwise."""
    grouped = [m for m in spec.attentions(shared=False) if m.query_group > 1]
    return max(m.num_heads for m in grouped) if grouped else None


def _whole(text: str, least: int = 1) -> int:
    number = int(text)
    if number < least:
        raise ValueError(f"{number} is below {least}")
    return number
