"""A model on several devices: what each of them does in a step, and what they send to each other.

    replicas   whole copies; a request is at one of them: latency as of one, throughput times their number
    tp         tensor parallel: every matrix and the heads are cut; a ring all-reduce after each matrix that is cut
               along its inputs: 2 (p - 1) / p of its bytes and 2 (p - 1) messages from each device
    ep         expert parallel: each device has whole attention and its own sequences, and its share of the experts;
               a token is sent once to each other device that has an expert of its, and back: p - 1 messages, twice
    pp         pipeline: each device has its share of the layers, and the batch is cut into as many parts, which follow
               each other; a token passes all devices in turn

Collectives: bytes over the bandwidth and messages times the latency (Thakur et al. 2005). Nothing is hidden behind
computing. Keys and values of fewer heads than devices are held, and read, by several; so are latents.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from ridgeline.cost.operations import Forward, Operation, Slice
from ridgeline.errors import RequestError
from ridgeline.spec import ModelSpec, Weight


@dataclass(frozen=True, slots=True)
class Scheme:
    """How many devices, and how the model lies on them. Raises RequestError for what is below 1 or not counted."""

    replicas: int = 1
    tp: int = 1
    ep: int = 1
    pp: int = 1

    def __post_init__(self) -> None:
        for name in ("replicas", "tp", "ep", "pp"):
            if (value := getattr(self, name)) < 1:
                raise RequestError(f"{name} is {value}; it must be at least 1")
        if self.tp > 1 and self.ep > 1:
            raise RequestError(f"tp {self.tp} with ep {self.ep} is not counted yet; set one of the two to 1")

    @property
    def devices(self) -> int:
        """Of all replicas."""
        return self.replicas * self.tp * self.ep * self.pp

    def check(self, spec: ModelSpec) -> None:
        """Raises RequestError where a model cannot be divided so, with the nearest number that can be."""
        experts = [layer.mlp.num_experts for layer in spec.layers if layer.mlp and layer.mlp.num_experts]
        heads = [n for layer in spec.layers if layer.mixer and (n := layer.mixer.cut().heads)]
        for name, count, sizes, what in (
            ("tp", self.tp, heads, "heads"), ("ep", self.ep, experts, "experts"),
        ):  # fmt: skip
            if count > 1 and not sizes and name == "ep":
                raise RequestError(f"ep is {count}, but the model has no experts; set it to 1")
            if any(size % count for size in sizes):
                fits = max(n for n in range(1, count) if not any(size % n for size in sizes))
                raise RequestError(f"{name} {count} does not divide {min(sizes)} {what}; {name} {fits} does")
        if self.pp > len(spec.layers):
            raise RequestError(f"pp is {self.pp}, the model has {len(spec.layers)} layers; set it to that at most")


def device_operations(forward: Forward, batch: Sequence[Slice], scheme: Scheme) -> tuple[Operation, ...]:
    """What a token passes through in one step: on one device, or of a pipeline on one after the other."""
    parts = tuple(replace(s, count=-(-s.count // (scheme.pp * scheme.ep))) for s in batch)
    found = list(forward.operations(parts))
    if scheme.ep > 1:
        whole = forward.operations(tuple(replace(s, count=-(-s.count // scheme.pp)) for s in batch))
        found = list(_expert_parallel(forward, found, whole, parts, scheme.ep))
    if scheme.tp > 1:
        found = [one for op in found for one in _tensor_parallel(op, scheme.tp)]
    if scheme.pp > 1:
        tokens = sum(s.count * s.tokens for s in parts)
        sent = forward.precision.activation_bytes(tokens * forward.spec.hidden_size)
        found.append(_collective("send", scheme.pp - 1, sent, 1))
    return tuple(found)


def device_state_operations(forward: Forward, s: Slice, scheme: Scheme) -> tuple[Operation, ...]:
    """Of those, what reads the state of one slice, where matrices are cut at most: tp."""
    found = forward.state_operations((s,))
    return tuple(next(_tensor_parallel(op, scheme.tp)) for op in found) if scheme.tp > 1 else found


def device_weight_bytes(weight: Weight, stored: float, scheme: Scheme) -> float:
    """Of one weight that takes `stored` bytes in all, on the device with most of it, a pipeline's share aside."""
    if scheme.ep > 1:
        return stored / scheme.ep if ".experts." in weight.name else stored
    return stored / scheme.tp if weight.split else stored


def _tensor_parallel(op: Operation, devices: int) -> Iterator[Operation]:
    if op.split is None:
        yield op
        return
    yield replace(
        op,
        flops=op.flops / devices,
        weight_bytes=op.weight_bytes / devices,
        state_bytes=op.state_bytes / min(devices, op.state_shards),
        activation_bytes=op.whole_bytes + (op.activation_bytes - op.whole_bytes) / devices,
        passes=tuple((numbers / devices, rows) for numbers, rows in op.passes),
    )
    share = (devices - 1) / devices
    if op.reduced_bytes:
        yield _collective("all-reduce", op.layers, 2 * share * op.reduced_bytes, 2 * (devices - 1))
    if op.name == "head":
        yield _collective("all-gather", 1, share * (op.activation_bytes - op.whole_bytes), devices - 1)


def _expert_parallel(
    forward: Forward, own: Sequence[Operation], whole: Sequence[Operation], batch: Sequence[Slice], devices: int
) -> Iterator[Operation]:
    """own: operations on a device's sequences. whole: on all of them, of which the experts are divided."""
    tokens = sum(s.count * s.tokens for s in batch)
    sent = forward.precision.activation_bytes(tokens * forward.spec.hidden_size)
    chosen = max(layer.mlp.num_experts_per_tok for layer in forward.spec.layers if layer.mlp)
    others = (devices - 1) * (1 - (1 - 1 / devices) ** chosen)  # that a token is expected to visit, each once
    for op, of_all in zip(own, whole, strict=True):
        if not op.name.startswith("experts."):
            yield op
            continue
        divided = {
            name: getattr(of_all, name) / devices for name in ("flops", "weight_bytes", "activation_bytes")
        }  # fmt: skip
        yield replace(of_all, **divided)
        if op.name == "experts.down":
            yield _collective("all-to-all", 2 * op.layers, sent * others, devices - 1)


def _collective(name: str, layers: int, link_bytes: float, messages: int) -> Operation:
    return Operation(
        name, "other", layers, 0.0, 0.0, 0.0, 0.0, "float32", link_bytes=link_bytes, messages=messages
    )  # fmt: skip
