"""Count a model on several devices: the work of each device in a step, and the data that devices send to each other.

    replicas   whole copies; each request runs on one copy. Latency is that of one copy, throughput that of all.
    tp         tensor parallel: every matrix and the heads are cut. After each matrix that is cut along its inputs there
               is an all-reduce: each device sends 2 (p - 1) / p of the bytes, or all of them once where the switch
               sums. No message waits for more than one other, since small data is sent to all devices at once.
    ep         expert parallel: each device has whole attention, its own sequences and its share of the experts. A token
               is sent once to each other device that has one of its experts, and back.
    pp         pipeline: each device has its share of the layers. The batch is cut into p parts, which follow each
               other; a token passes all devices in turn.

The least time of a collective is its bytes divided by the bandwidth (Thakur et al. 2005), plus the latency of the
messages that follow each other. cost/collectives.py has measured times. It does not overlap with computing. If there
are fewer KV heads than devices, several devices hold and read the same heads; latents are held by all devices. A mixer
says how far it can be cut (`cut` in spec/mixer.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from ridgeline.cost.operations import Forward, Operation, Slice
from ridgeline.errors import RequestError
from ridgeline.spec import ModelSpec, Weight


@dataclass(frozen=True, slots=True)
class Scheme:
    """Number of devices, and how the model is divided over them.

    Raises RequestError for a number below 1, and for tp together with ep.
    """

    replicas: int = 1
    tp: int = 1
    ep: int = 1
    pp: int = 1

    def __post_init__(self) -> None:
        for name in ("replicas", "tp", "ep", "pp"):
            if (value := getattr(self, name)) < 1:
                raise RequestError(f"{name} is {value}; it must be at least 1")
        if self.tp > 1 and self.ep > 1:
            raise RequestError(f"tp {self.tp} together with ep {self.ep} is not supported; set one of them to 1")

    @property
    def devices(self) -> int:
        """Return the number of devices of all replicas."""
        return self.replicas * self.tp * self.ep * self.pp

    def check(self, spec: ModelSpec) -> None:
        """Raise RequestError if a model cannot be divided like this.

        The message names the nearest number that works.
        """
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
            raise RequestError(
                f"pp is {self.pp}, but the model has {len(spec.layers)} layers; set it to {len(spec.layers)} at most"
            )


def device_operations(forward: Forward, batch: Sequence[Slice], scheme: Scheme) -> tuple[Operation, ...]:
    """Return the operations that a token passes in one step: on one device, or in a pipeline on all of them in turn."""
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
        found.append(_collective("send", scheme.pp - 1, sent, 1, 2))
    return tuple(found)


def device_state_operations(forward: Forward, s: Slice, scheme: Scheme) -> tuple[Operation, ...]:
    """Return the operations that read the state of one slice; only tp cuts them."""
    found = forward.state_operations((s,))
    return tuple(next(_tensor_parallel(op, scheme.tp)) for op in found) if scheme.tp > 1 else found


def device_weight_bytes(weight: Weight, stored: float, scheme: Scheme) -> float:
    """Return the bytes of a weight on the device that holds most of it, before pp divides the layers.

    stored: bytes of the whole weight.
    """
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
        sent = 2 * share * op.reduced_bytes
        yield replace(_collective("all-reduce", op.layers, sent, 1, devices), reduced_bytes=op.reduced_bytes)
    if op.name == "head":
        yield _collective("all-gather", 1, share * (op.activation_bytes - op.whole_bytes), 1, devices)


def _expert_parallel(
    forward: Forward, own: Sequence[Operation], whole: Sequence[Operation], batch: Sequence[Slice], devices: int
) -> Iterator[Operation]:
    """Yield the operations of one device.

    own: operations on the device's sequences. whole: operations on all sequences; devices divide those of the experts.
    """
    tokens = sum(s.count * s.tokens for s in batch)
    sent = forward.precision.activation_bytes(tokens * forward.spec.hidden_size)
    chosen = max(layer.mlp.visits for layer in forward.spec.layers if layer.mlp)
    others = (devices - 1) * (
        1 - (1 - 1 / devices) ** chosen
    )  # other devices that a token is expected to visit, each once
    for op, of_all in zip(own, whole, strict=True):
        if not op.name.startswith("experts."):
            yield op
            continue
        divided = {
            name: getattr(of_all, name) / devices for name in ("flops", "weight_bytes", "activation_bytes")
        }  # fmt: skip
        yield replace(of_all, **divided)
        if op.name == "experts.down":
            yield _collective("all-to-all", 2 * op.layers, sent * others, 1, devices)


def _collective(name: str, layers: int, link_bytes: float, messages: int, devices: int) -> Operation:
    return Operation(
        name, "other", layers, 0.0, 0.0, 0.0, 0.0, "float32", link_bytes=link_bytes, messages=messages, devices=devices
    )  # fmt: skip
