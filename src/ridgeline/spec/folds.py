"""Say which scales of input channels can move into what comes before: a norm, or the rows of another matrix."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from ridgeline.spec.attention import Attention, SharedAttention
from ridgeline.spec.mlp import MLP, GatedMLP, MoE
from ridgeline.spec.model import AnyLayer, Layer, ParallelLayer, mlp_norm
from ridgeline.spec.norm import Norm
from ridgeline.spec.weight import Weight

Reader = tuple[str, int | None]  # the name of a weight, and the index of one expert of several


class Fold(NamedTuple):
    """Scales that can move: from the inputs of `readers` into `source`.

    source: the prefix of a norm's weights, or a matrix whose rows compute the inputs. norm: the norm, if it is one.
    readers: all matrices that read the inputs, those that are never rounded included. repeat: number of neighboring
    heads of `size` columns that read one head of the source; 1 if columns are rows of the source. expert: the index of
    the expert whose matrix the source is; None for a matrix that is no expert's.
    """

    source: str
    norm: Norm | None
    readers: tuple[Reader, ...]
    repeat: int = 1
    size: int = 1
    expert: int | None = None


def mixer_folds(layer: AnyLayer, prefix: str) -> Iterator[Fold]:
    """Yield the scales that can move in a mixer: those of softmax attention. prefix: the name of the layer."""
    mixer = layer.mixer
    if layer.pre_norm is None or not isinstance(mixer, Attention | SharedAttention):
        return
    attention = mixer.attention if isinstance(mixer, SharedAttention) else mixer
    names = ["q", "out_gate"] if attention.out_gate else ["q"]
    if isinstance(mixer, Attention):
        names += ["k"] if mixer.values_are_keys else ["k", "v"]
    readers = tuple((f"{prefix}.mixer.{name}.weight", None) for name in names)
    if not _shares_norm(layer):
        yield Fold(f"{prefix}.mixer_norm", layer.pre_norm, readers)
    if isinstance(mixer, Attention) and not mixer.values_are_keys and mixer.value_eps is None:
        out = ((f"{prefix}.mixer.o.weight", None),)
        yield Fold(f"{prefix}.mixer.v", None, out, attention.query_group, attention.head_dim)


def mlp_folds(layer: AnyLayer, prefix: str, weights: Sequence[Weight], hidden_size: int) -> Iterator[Fold]:
    """Yield the scales that can move in an MLP, that into its norm first. weights: all weights of the MLP."""
    mlp = layer.mlp
    norm = mlp_norm(layer)
    if norm is None or not isinstance(mlp, MLP | GatedMLP | MoE):
        return
    behind = ("mlp.latent_out.weight", "mlp.experts.") if isinstance(mlp, MoE) and mlp.latent_size else ("-",)
    readers = [
        reader
        for w in weights
        if w.is_matrix and w.shape[-1] == hidden_size and not w.name.endswith("down.weight")
        if not w.name.removeprefix(f"{prefix}.").startswith(behind)
        for reader in _readers(w)
    ]
    if not _has_one_norm(layer):
        yield Fold(f"{prefix}.mlp_norm", norm, tuple(readers))
    if isinstance(mlp, GatedMLP):
        yield Fold(f"{prefix}.mlp.up", None, ((f"{prefix}.mlp.down.weight", None),))
    if isinstance(mlp, MoE) and isinstance(mlp.shared, GatedMLP):
        yield Fold(f"{prefix}.mlp.shared.up", None, ((f"{prefix}.mlp.shared.down.weight", None),))
    if isinstance(mlp, MoE) and isinstance(mlp.activation, str):
        for e in range(mlp.num_experts):
            yield Fold(f"{prefix}.mlp.experts.up", None, ((f"{prefix}.mlp.experts.down.weight", e),), expert=e)


def _shares_norm(layer: AnyLayer) -> bool:
    """Return whether the norm before a layer's mixer is read by another branch too."""
    return _has_one_norm(layer) or (isinstance(layer, Layer) and layer.beside)


def _has_one_norm(layer: AnyLayer) -> bool:
    """Return whether both branches read one norm, whose scales would have to suit both."""
    return isinstance(layer, ParallelLayer) and layer.one_norm


def _readers(weight: Weight) -> Iterator[Reader]:
    """Yield the matrices of a weight: one, or one for each expert."""
    if len(weight.shape) == 2:
        yield weight.name, None
    else:
        yield from ((weight.name, e) for e in range(weight.shape[0]))
