"""Prune a large model to a small one that is then trained further: fewer layers, heads and MLP neurons, smaller hidden
size.

The residual stream is rotated to its principal components, and only the first ones are kept (SliceGPT, Ashkboos et al.,
arXiv:2401.15024). Layers and heads are chosen by the caller. Neurons are kept by the product of their weights' norms
(Minitron, Muralidharan et al., arXiv:2407.14679, ranks them by their activations). The pruned model is worse than the
large one, but it keeps structures that a small model needs long to learn, above all heads that copy. Training then
repairs it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor

from ridgeline.errors import DataError
from ridgeline.nn import Model
from ridgeline.nn.step import Stream
from ridgeline.ops import OpsTable
from ridgeline.runtime.step import DenseStep
from ridgeline.spec import Attention, ModelSpec, RMSNorm
from ridgeline.train.data.batches import Batch

Weights = Mapping[str, Tensor]
_NEEDED = "mixer_norm mixer.q mixer.k mixer.v mixer.o mlp_norm mlp.gate mlp.up mlp.down".split()
_KNOWN = frozenset((*_NEEDED, "mixer.q_norm", "mixer.k_norm"))


@dataclass(frozen=True, slots=True)
class PruneOptions:
    """The parts to keep. layers: indices of layers. kv_heads: indices of the kept KV heads of every layer, with their
    query heads. tokens: number of tokens for computing the stream's components.
    """

    layers: tuple[int, ...]
    kv_heads: tuple[int, ...]
    tokens: int = 16_384


def prune(
    large: ModelSpec, weights: Weights, small: ModelSpec, options: PruneOptions, batch: Batch, table: OpsTable
) -> dict[str, Tensor]:  # fmt: skip
    """Return the weights of `small`, in float32 by the spec's names, computed from those of `large`. batch: some text.

    Raises DataError unless the model consists of attention and gated MLPs after RMS norms with a tied embedding, and if
    the sizes of `small` do not match what is kept.
    """
    kept = _of_layers(large, weights, options)
    spec = replace(large, layers=tuple(large.layers[i] for i in options.layers))
    basis, scale = _components(_second_moment(spec, kept, batch, table), small.hidden_size)
    found = {"embed.weight": kept["embed.weight"] @ basis}
    found["norm.weight"] = basis.T.square() @ kept["norm.weight"] * scale  # the closest diagonal matrix
    for i, (_, new) in enumerate(zip(spec.layers, small.layers, strict=False)):
        layer = _Layer(f"layers.{i}", kept, basis, scale)
        own = spec.attention(i)
        assert own is not None  # _of_layers has checked it
        found |= layer.attention(own, options.kv_heads) | layer.mlp(getattr(new.mlp, "intermediate_size", 0))
    wanted = {w.name: tuple(w.shape) for w in small.weights()}
    if differ := dict(wanted.items() ^ {k: tuple(v.shape) for k, v in found.items()}.items()):
        name = min(differ)
        given = tuple(found[name].shape) if name in found else "missing"
        raise DataError(
            f"what is kept does not fit: {name} is {given}, but {wanted.get(name, 'missing')} in the small model"
        )
    return {name: x.contiguous() for name, x in found.items()}


def _of_layers(spec: ModelSpec, weights: Weights, options: PruneOptions) -> dict[str, Tensor]:
    """Return the weights of the kept layers, renumbered, and those outside of layers."""
    norms = [
        spec.norm,
        *(norm for layer in spec.layers for norm in (layer.pre_norm, getattr(layer, "post_norm", None))),
    ]
    plain = all(norm is None or (isinstance(norm, RMSNorm) and not norm.offset) for norm in norms)
    attentions = spec.attentions(shared=False)
    if not (plain and spec.tie_word_embeddings and len(attentions) == len(spec.layers)):
        raise DataError(
            f"models of the family {spec.family} cannot be pruned: attention, RMS norms without an offset and a tied "
            "embedding are needed"
        )
    _check("layers", options.layers, len(spec.layers))
    for own in attentions:
        _check("KV heads", options.kv_heads, own.num_kv_heads)
    found = {}
    for name, x in weights.items():
        if not name.startswith("layers."):
            found[name] = x.float()
            continue
        _, number, part = name.split(".", 2)
        if part.removesuffix(".weight") not in _KNOWN:
            raise DataError(f"a model with {name} cannot be pruned")
        found |= {f"layers.{new}.{part}": x.float() for new, old in enumerate(options.layers) if old == int(number)}
    needed = (f"layers.{i}.{part}.weight" for i in range(len(options.layers)) for part in _NEEDED)
    if missing := [name for name in needed if name not in found]:
        raise DataError(f"a model without {missing[0]} cannot be pruned")
    return found


def _check(what: str, kept: Sequence[int], count: int) -> None:
    if not all(0 <= i < count for i in kept):
        raise DataError(f"the {what} {', '.join(map(str, kept))} cannot be kept; the model has {count} {what}")


class _Watched(Model):
    """A model that records the input of each layer."""

    def __init__(self, spec: ModelSpec, weights: Weights, table: OpsTable, max_len: int) -> None:
        super().__init__(spec, weights, table, max_len)
        self.seen: list[Tensor] = []

    def run_block(self, block: Callable[..., Stream], stream: Stream, step: Any, rotaries: Any) -> Stream:
        self.seen.append(_sum(stream))
        return super().run_block(block, stream, step, rotaries)


def _sum(stream: Stream) -> Tensor:
    residual, delta = cast("tuple[Tensor, Tensor | None]", (stream.residual, stream.delta))
    return residual if delta is None else residual + delta


@torch.no_grad()
def _second_moment(spec: ModelSpec, weights: Weights, batch: Batch, table: OpsTable) -> Tensor:
    """Return [D, D]: the second moment of the stream before each layer and after the last, with every token scaled to
    norm 1.
    """
    model = _Watched(spec, weights, table, max(batch.lengths))
    ids, positions = (table.memory.integers(x) for x in (batch.token_ids, batch.positions))
    model.seen.append(_sum(model.forward(DenseStep(ids, positions, batch.lengths, table.memory))))
    units = torch.cat([torch.nn.functional.normalize(x.float(), dim=-1) for x in model.seen])
    return units.T @ units / len(units)


def _components(moment: Tensor, size: int) -> tuple[Tensor, float]:
    """Return the first `size` principal directions [D, size], and the factor for the weights of RMS norms in them.

    A token of whose squared norm the share s is kept has sqrt(s x D / size) times its former root mean square.
    """
    values, vectors = torch.linalg.eigh(moment.double().cpu())
    share = float(values[-size:].sum() / values.sum())
    return vectors[:, -size:].flip(1).to(moment), math.sqrt(share * len(moment) / size)


@dataclass(frozen=True, slots=True)
class _Layer:
    """A layer in the basis [D, size]. A norm's weights, divided by their mean, are merged into the matrices
    after it.
    """

    name: str
    weights: Weights
    basis: Tensor
    scale: float

    def attention(self, old: Attention, kv_heads: Sequence[int]) -> dict[str, Tensor]:
        groups, size = old.num_heads // old.num_kv_heads, old.head_dim
        heads = [k * groups + i for k in kv_heads for i in range(groups)]
        rows = {"q": _rows(heads, size), "k": _rows(kv_heads, size), "v": _rows(kv_heads, size)}
        found = dict(self._norm("mixer_norm"))
        for part, chosen in rows.items():
            found[f"{self.name}.mixer.{part}.weight"] = self._reads("mixer_norm", f"mixer.{part}")[chosen]
        found[f"{self.name}.mixer.o.weight"] = self._writes("mixer.o")[:, rows["q"]]
        norms = (f"{self.name}.mixer.{part}_norm.weight" for part in "qk")
        return found | {name: self.weights[name].clone() for name in norms if name in self.weights}

    def mlp(self, size: int) -> dict[str, Tensor]:
        gate, up = (self._reads("mlp_norm", f"mlp.{part}") for part in ("gate", "up"))
        down = self._writes("mlp.down")
        strength = gate.norm(dim=1) * up.norm(dim=1) * down.norm(dim=0)
        kept = strength.topk(min(size, len(strength))).indices.sort().values
        parts = {"gate": gate[kept], "up": up[kept], "down": down[:, kept]}
        return {f"{self.name}.mlp.{part}.weight": x for part, x in parts.items()} | dict(self._norm("mlp_norm"))

    def _norm(self, name: str) -> Iterator[tuple[str, Tensor]]:
        full = f"{self.name}.{name}.weight"
        yield full, self.basis.new_full((self.basis.shape[1],), float(self.weights[full].mean()) * self.scale)

    def _reads(self, norm: str, part: str) -> Tensor:
        gain = self.weights[f"{self.name}.{norm}.weight"]
        return self.weights[f"{self.name}.{part}.weight"] * (gain / gain.mean()) @ self.basis

    def _writes(self, part: str) -> Tensor:
        return self.basis.T @ self.weights[f"{self.name}.{part}.weight"]


def _rows(heads: Sequence[int], size: int) -> list[int]:
    return [head * size + i for head in heads for i in range(size)]
