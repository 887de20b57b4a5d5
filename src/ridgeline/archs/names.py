"""How each of our weights is cut out of a checkpoint's tensors: one table per family, applied by the loader.

A table maps our module names to the checkpoint's. A value is the other module's name, or says how several of
our weights lie in one tensor there (`FusedRows`, `HeadPart`, `GroupPart`, `AllExperts`, `ExpertPart`) or one of ours in
several (`Each`), in other axes (`Flat`) or under a name that is not made as ours are (`Tensor`).
"""

from __future__ import annotations

import re
from collections.abc import Container, Mapping
from dataclasses import dataclass, field, replace

from ridgeline.spec import Attention, GatedDelta, ModelSpec


@dataclass(frozen=True, slots=True)
class FusedRows:
    """Rows of a fused matrix: `names` lie one below the other in `module`."""

    module: str
    names: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class HeadPart:
    """FusedRows `index` of `count` inside every head: rows are [head, part, head_dim] (GPT-NeoX)."""

    module: str
    index: int
    count: int


@dataclass(frozen=True, slots=True)
class GroupPart:
    """Rows of a fused matrix that lies group by group, a group for each key head with what belongs to it: in each,
    `names` lie one below the other (Qwen3-Next).
    """

    module: str
    names: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Each:
    """One tensor per expert, its number at {e}: stacked along a new first axis."""

    module: str


@dataclass(frozen=True, slots=True)
class Flat:
    """A matrix per head, [head, out, in] with us, lies there as one: [head * out, in]."""

    module: str


@dataclass(frozen=True, slots=True)
class Tensor:
    """The whole name of a tensor, where its last part is not ours. axes: of one, before and after ours."""

    name: str
    axes: tuple[int, int] = (0, 0)


@dataclass(frozen=True, slots=True)
class AllExperts:
    """All experts in one tensor: matrices [expert, in, out] under `module` itself, biases [expert, out] under
    `module`_bias. Of every `count` neighboring outputs the one at `index` is ours (GPT-OSS).
    """

    module: str
    index: int = 0
    count: int = 1


@dataclass(frozen=True, slots=True)
class ExpertPart:
    """All experts in one tensor [expert, out, in] under `module` itself: in each, `names` lie one below the other
    (Qwen3.5, Granite).
    """

    module: str
    names: tuple[str, ...]


Source = str | FusedRows | HeadPart | GroupPart | Each | Flat | Tensor | AllExperts | ExpertPart


@dataclass(frozen=True, slots=True)
class Read:
    """One weight of ours: read `keys` (several are stacked), transpose, then take `rows` or a part of each head.

    stacked: one key per entry of the first axis. transpose: of the last two axes. total_rows: rows that a fused tensor
    must have after the transpose. head_part: (index, count, head_dim). flat: our first two axes are one there. every:
    (index, count), of an expert's outputs. group_rows: (groups, first, last), of each group of rows. expert_rows:
    (first, last, all), of each expert. axes: of one, before and after ours.
    """

    keys: tuple[str, ...]
    stacked: bool = False
    transpose: bool = False
    total_rows: int | None = None
    rows: tuple[int, int] | None = None
    head_part: tuple[int, int, int] | None = None
    flat: bool = False
    every: tuple[int, int] | None = None
    group_rows: tuple[int, int, int] | None = None
    expert_rows: tuple[int, int, int] | None = None
    axes: tuple[int, int] = (0, 0)


@dataclass(frozen=True, slots=True)
class Names:
    """A family's checkpoint names.

    root: modules outside the layers. layer: the prefix of a layer, with {i}. parts: modules inside a layer, or weights.
    transposed: checkpoint modules whose matrices are stored [in, out]. ignore: regular expressions for tensors
    that are known to be derived (masks, frequencies), or no part of the model; {layers} is the number of layers.
    optional_prefix: some files put it before every name. others: other layouts of the same model's files.
    """

    root: Mapping[str, Source]
    layer: str
    parts: Mapping[str, Source]
    transposed: frozenset[str] = frozenset()
    ignore: tuple[str, ...] = (r"rotary_emb\.inv_freq$",)
    optional_prefix: str = ""
    others: tuple[Names, ...] = ()

    def with_parts(self, **changes: object) -> Names:
        """The same names but for `parts` (a dict of changes; None removes one), `root` or `layer`."""
        parts = {**self.parts, **(changes.pop("parts", {}) or {})}  # type: ignore[dict-item]
        return replace(self, parts={k: v for k, v in parts.items() if v is not None}, **changes)  # type: ignore[arg-type]

    def fitting(self, spec: ModelSpec, keys: Container[str]) -> Names:
        """This layout or one of `others`: of which the fewest tensors are missing among `keys`, without the prefix."""
        if not self.others:
            return self
        return min((self, *self.others), key=lambda names: names._count_missing(spec, keys))

    def _count_missing(self, spec: ModelSpec, keys: Container[str]) -> int:
        return sum(key not in keys for read in self.reads(spec).values() for key in read.keys)

    def reads(self, spec: ModelSpec) -> dict[str, Read]:
        """How to read every weight of `spec`, by our name."""
        shapes = {w.name: w.shape for w in spec.weights()}
        return {name: self._read(name, shapes, spec) for name in shapes}

    def is_ignored(self, key: str, spec: ModelSpec) -> bool:
        layers = str(len(spec.layers))
        return any(re.search(pattern.replace("{layers}", layers), key) for pattern in self.ignore)

    def _read(self, name: str, shapes: Mapping[str, tuple[int, ...]], spec: ModelSpec) -> Read:
        module, _, suffix = name.rpartition(".")
        prefix, ours, mixer, shape = "", "", None, shapes[name]
        source = self.root.get(module)
        if match := re.fullmatch(r"layers\.(\d+)\.(.+)", module):
            prefix, ours = self.layer.format(i=match[1]), f"layers.{match[1]}."
            source = self.parts.get(f"{match[2]}.{suffix}", self.parts.get(match[2]))
            mixer = spec.layers[int(match[1])].mixer
        if source is None:
            raise KeyError(f"no checkpoint name for {name}")
        if isinstance(source, Each):
            keys = tuple(f"{prefix}{source.module.format(e=e)}.{suffix}" for e in range(shape[0]))
            return Read(keys, stacked=True)
        if isinstance(source, Tensor):
            return Read((f"{prefix}{source.name}",), axes=source.axes)
        if isinstance(source, AllExperts):
            key = f"{prefix}{source.module}" + ("" if suffix == "weight" else f"_{suffix}")
            return Read((key,), transpose=suffix == "weight", every=(source.index, source.count))

        def among(names: tuple[str, ...], axis: int) -> tuple[int, int, int]:
            """Where ours begins and ends among those that share a tensor, and how long they are together."""
            sizes = [shapes[f"{ours}{n}.{suffix}"][axis] for n in names]
            start = sum(sizes[: names.index(module.removeprefix(ours))])
            return start, start + shape[axis], sum(sizes)

        if isinstance(source, ExpertPart):
            return Read((f"{prefix}{source.module}",), expert_rows=among(source.names, 1))
        other = source if isinstance(source, str) else source.module
        transpose = other in self.transposed and suffix == "weight"
        read = Read((f"{prefix}{other}.{suffix}",), transpose=transpose, flat=isinstance(source, Flat))
        if isinstance(source, FusedRows):
            start, stop, total = among(source.names, 0)
            return replace(read, total_rows=total, rows=(start, stop))
        if isinstance(source, GroupPart):
            assert isinstance(mixer, GatedDelta)
            groups, (start, stop, total) = mixer.num_key_heads, among(source.names, 0)
            return replace(read, total_rows=total, group_rows=(groups, start // groups, stop // groups))
        if isinstance(source, HeadPart):
            head_dim = mixer.head_dim if isinstance(mixer, Attention) else 0
            return replace(read, total_rows=source.count * shape[0], head_part=(source.index, source.count, head_dim))
        return read


LLAMA = Names(
    root={"embed": "model.embed_tokens", "norm": "model.norm", "head": "lm_head"},
    layer="model.layers.{i}.",
    parts={
        "mixer_norm": "input_layernorm",
        "mixer.q": "self_attn.q_proj",
        "mixer.k": "self_attn.k_proj",
        "mixer.v": "self_attn.v_proj",
        "mixer.o": "self_attn.o_proj",
        "mixer.q_norm": "self_attn.q_norm",
        "mixer.k_norm": "self_attn.k_norm",
        "mlp_norm": "post_attention_layernorm",
        "mlp.gate": "mlp.gate_proj",
        "mlp.up": "mlp.up_proj",
        "mlp.down": "mlp.down_proj",
    },
)

FUSED_QKV: Mapping[str, Source] = {
    f"mixer.{n}": FusedRows("self_attn.qkv_proj", ("mixer.q", "mixer.k", "mixer.v")) for n in "qkv"
}
FUSED_GATE_UP: Mapping[str, Source] = {
    n: FusedRows("mlp.gate_up_proj", ("mlp.gate", "mlp.up")) for n in ("mlp.gate", "mlp.up")
}


@dataclass(frozen=True, slots=True)
class _Identity(Names):
    """A checkpoint that uses our own names."""

    root: Mapping[str, Source] = field(default_factory=dict)
    layer: str = ""
    parts: Mapping[str, Source] = field(default_factory=dict)

    def reads(self, spec: ModelSpec) -> dict[str, Read]:
        return {w.name: Read((w.name,)) for w in spec.weights()}


OURS = _Identity()
