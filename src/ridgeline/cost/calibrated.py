"""Compute the time of a step on a calibrated machine: passes over numbers at measured rates, and terms for the rest.

    passes    each matrix, and the keys and values of each layer: numbers x rows x seconds of one number and row. The
              seconds depend on the type, on the rows, and on the share of bytes that come from memory.
    terms     counts of everything that reads little: steps, sequences, kernel calls, bytes of activations, logits,
              layers with experts, recurrent layers of each kind

Calibration measures the passes alone, and fits the seconds of the terms to steps of the engine (measure/). A step is
"replayed" if the engine runs it from a recording: few sequences only decode, or verify drafts of a model without
recurrent layers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ridgeline.cost.memory import RECORDED_SEQS, RECORDED_TOKENS
from ridgeline.cost.operations import Operation, Slice, num_logits
from ridgeline.cost.precision import wider_storage
from ridgeline.cost.roofline import StepTime, Timed, held_bytes, link_seconds
from ridgeline.spec import ModelSpec
from ridgeline.spec.hardware import HardwareSpec
from ridgeline.spec.heads import HeadSpec
from ridgeline.spec.rates import Passes, Rates


@dataclass(frozen=True, slots=True)
class Facts:
    """Counts of a model that the terms use.

    recurrent: number of layers, and numbers of state, for each kind of recurrent mixer. expert_layers: layers with
    experts. choices: experts that one token visits, over all layers. drafts: it proposes drafts, so that its steps are
    recorded although only the last tokens of its sequences give logits.
    """

    vocab_size: int
    latent_layers: int
    recurrent: Mapping[str, tuple[int, int]]
    expert_layers: int
    choices: int
    drafts: bool = False


def facts_of(spec: ModelSpec | HeadSpec, *, drafts: bool = False) -> Facts:
    """Count the layers of a model, or of a head for speculative decoding, by what the terms need."""
    kinds: dict[str, tuple[int, int]] = {}
    for layer in spec.layers:
        if layer.mixer and layer.mixer.is_recurrent:
            layers, numbers = kinds.get(layer.mixer.kind, (0, 0))
            kinds[layer.mixer.kind] = layers + 1, numbers + layer.mixer.state().elements
    moes = [layer.mlp for layer in spec.layers if layer.mlp and layer.mlp.num_experts]
    latents = sum(layer.mixer.keeps_latents for layer in spec.layers if layer.mixer)
    choices = sum(moe.num_experts_per_tok for moe in moes)
    return Facts(num_logits(spec), latents, kinds, len(moes), choices, drafts)


@dataclass(frozen=True, slots=True)
class Counts:
    """Counts of one step that the terms are multiplied with; for several steps at once, `moved_bytes` is an array.

    sampled: rows of logits. calls: calls of kernels. attending: calls of attention kernels. moved_bytes: bytes of
    activations that are read and written.
    """

    tokens: int
    sequences: int
    sampled: int
    calls: int
    attending: int
    moved_bytes: Any

    @classmethod
    def of(cls, operations: Sequence[Operation], batch: Sequence[Slice]) -> Counts:
        """Count one step."""
        return cls(
            tokens=sum(s.count * s.tokens for s in batch),
            sequences=sum(s.count for s in batch),
            sampled=sum(s.count * s.sampled for s in batch),
            calls=sum(op.layers for op in operations if op.passes),
            attending=sum(op.layers for op in operations if op.kind == "state" and op.passes),
            moved_bytes=sum(op.layers * op.activation_bytes for op in operations),
        )


def terms_of(facts: Facts, counts: Counts, far: Any) -> dict[str, Any]:
    """Return the amount of each term in a step. far: share of the bytes read that come from memory; may be an array."""
    sequences, tokens, sampled = counts.sequences, counts.tokens, counts.sampled
    decodes = facts.drafts or tokens == sampled  # a step that verifies drafts has logits for all of its tokens
    recorded = not (facts.drafts and facts.recurrent)
    replayed = recorded and decodes and sequences <= RECORDED_SEQS and tokens <= RECORDED_TOKENS
    way = "replayed" if replayed else "plain"
    found = {
        f"{way} step": 1.0,
        f"{way} sequence": float(sequences),
        f"{way} call": float(counts.calls),
        f"{way} logit": float(sampled * facts.vocab_size),
        f"{way} byte": counts.moved_bytes,
        "attention of a sequence": float(counts.attending * sequences),
    }
    if facts.latent_layers:
        found["latent layer"] = float(facts.latent_layers)
        found["latent token"] = float(facts.latent_layers * tokens)
    if facts.expert_layers:
        found["expert layer"] = float(facts.expert_layers)
        found["expert choice"] = float(facts.choices * tokens)
    if facts.recurrent:
        found["state from memory"] = float(sum(n for _, n in facts.recurrent.values()) * sequences) * far
    for name, (layers, numbers) in facts.recurrent.items():
        found[f"{name} layer"] = float(layers)
        found[f"{name} state"] = float(numbers * sequences)
        found[f"{name} token"] = float(numbers * tokens)
    return found


def passes_s(op: Operation, rates: Rates, far: float) -> float:
    """Return the seconds of the passes of all layers of an operation."""
    found = rates_of(op, rates)
    return op.layers * sum(found.seconds(numbers, rows, far) for numbers, rows in op.passes)


def rates_of(op: Operation, rates: Rates) -> Passes:
    """Return the rates of the type that its numbers are stored in, or of the next wider type that was measured."""
    table, kind = (rates.attention if op.kind == "state" else rates.products), op.stored
    while kind not in table and (wider := wider_storage(kind)) is not None:
        kind = wider
    return table[kind] if kind in table else next(iter(table.values()))


def far_share(operations: Sequence[Operation], rates: Rates) -> float:
    """Return the share of the bytes read in a step that come from memory; it is small if all of them fit in caches."""
    return far_at(sum(op.layers * held_bytes(op) for op in operations), rates)


def far_at(held_bytes: float, rates: Rates) -> float:
    """Return the share that comes from memory in a step that reads `held_bytes` of weights and state."""
    return min(rates.far.at(max(held_bytes, 1.0)), 1.0)


def calibrated_step(
    operations: Sequence[Operation], facts: Facts, batch: Sequence[Slice], hardware: HardwareSpec
) -> StepTime:
    """Return the time of a step on a calibrated machine by operation. Raises RequestError as `time_step` does."""
    rates = hardware.rates
    assert rates is not None
    far = far_share(operations, rates)
    counts = Counts.of(operations, batch)
    amounts = terms_of(facts, counts, far)
    terms = {name: amount * rates.terms.get(name, 0.0) for name, amount in amounts.items()}
    a_call = (terms.pop("replayed call", 0.0) + terms.pop("plain call", 0.0)) / max(counts.calls, 1)
    a_byte = (terms.pop("replayed byte", 0.0) + terms.pop("plain byte", 0.0)) / max(counts.moved_bytes, 1.0)
    a_layer = terms.pop("attention of a sequence") / max(counts.attending, 1)
    timed = []
    for op in operations:
        extra = op.layers * (a_call if op.passes else 0.0)
        if op.kind == "state":
            extra += op.layers * a_layer if op.passes else _own(op, terms)
        one = _timed(op, rates, far, op.layers * op.activation_bytes * a_byte, extra)
        timed.append(replace(one, link_s=link_seconds(op, hardware)))
    return StepTime(tuple(timed), sum(terms.values()))


def _own(op: Operation, terms: dict[str, float]) -> float:
    """Remove the terms of one kind of recurrent mixer from `terms`, and return their sum."""
    return sum(terms.pop(f"{op.name} {what}", 0.0) for what in ("layer", "state", "token"))


def _timed(op: Operation, rates: Rates, far: float, moving_s: float, overhead_s: float) -> Timed:
    """Time one operation. If memory makes its passes slower, memory_s has their time and compute_s that in caches."""
    if not op.passes:
        return Timed(op, 0.0, moving_s, overhead_s)
    near, real = passes_s(op, rates, 0.0) + moving_s, passes_s(op, rates, far) + moving_s
    return Timed(op, real, near, overhead_s) if real <= 1.25 * near else Timed(op, near, real, overhead_s)
