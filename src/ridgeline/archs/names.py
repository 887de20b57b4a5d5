"""Map our weights to a checkpoint's tensors: one table per family, applied by the loader.

A table maps our module names to the checkpoint's. A value is either a module name, or it describes another layout:
several of our weights in one tensor (`FusedRows`, `HeadPart`, `GroupPart`, `Groups`, `AllExperts`, `ExpertPart`), one
of our weights in several tensors (`Each`), other axes (`Flat`, `ExpertRows`), a module of another layer (`Before`), or
a complete tensor name (`Tensor`).
"""

from __future__ import annotations

import re
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass, field, replace

from ridgeline.errors import ConfigError
from ridgeline.spec import Attention, GatedDelta, ModelSpec

MAX_EXPERTS = 1 << 16  # of one layer, so that a typing error does not fill the memory with names


@dataclass(frozen=True, slots=True)
class FusedRows:
    """Rows of a fused matrix: `names` are stacked in `module`."""

    module: str
    names: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class HeadPart:
    """Part `index` of `count` inside every head: rows are [head, part, head_dim] (GPT-NeoX)."""

    module: str
    index: int
    count: int


@dataclass(frozen=True, slots=True)
class GroupPart:
    """Rows of a fused matrix with one group per key head. In each group, `names` are stacked (Qwen3-Next)."""

    module: str
    names: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Groups:
    """Rows of a fused matrix in equal groups, each with an equal share of the rows of each of `names`, stacked.

    count: number of groups; None: one for each head of keys and values (Falcon 40B).
    """

    module: str
    names: tuple[str, ...]
    count: int | None = None


@dataclass(frozen=True, slots=True)
class Each:
    """One tensor per expert, with its number at {e}; they are stacked along a new first axis."""

    module: str


@dataclass(frozen=True, slots=True)
class Flat:
    """A matrix per head, [head, out, in] in our weights, that the checkpoint stores as [head * out, in]."""

    module: str


@dataclass(frozen=True, slots=True)
class Tensor:
    """A complete tensor name, if its last part differs from ours. axes: numbers of axes of size 1 that the
    checkpoint has before and after ours.
    """

    name: str
    axes: tuple[int, int] = (0, 0)


@dataclass(frozen=True, slots=True)
class Elsewhere:
    """A complete tensor name that does not begin with the prefix of layers, with the layer's number at {i}."""

    name: str


@dataclass(frozen=True, slots=True)
class Before:
    """A module of the layer before: in models with norms after their branches, the last norm of a layer begins the next
    one here. Outside the layers it is that of the last layer. first: the complete name for layer 0.
    """

    module: str
    first: str


@dataclass(frozen=True, slots=True)
class AllExperts:
    """All experts in one tensor: matrices [expert, in, out] under `module`, biases [expert, out] under `module`_bias.
    This weight has the output at `index` of every `count` neighboring ones (GPT-OSS).
    """

    module: str
    index: int = 0
    count: int = 1


@dataclass(frozen=True, slots=True)
class ExpertPart:
    """All experts in one tensor [expert, out, in] under `module`. For each expert, `names` are stacked (Qwen3.5,
    Granite). transposed: the tensor is [expert, in, out] (Llama 4).
    """

    module: str
    names: tuple[str, ...]
    transposed: bool = False


@dataclass(frozen=True, slots=True)
class ExpertRows:
    """The matrices [out, in] of all experts, one below the other, under a complete tensor name (DBRX). transposed: they
    are [in, out].
    """

    name: str
    transposed: bool = False


Source = (
    str
    | FusedRows
    | HeadPart
    | GroupPart
    | Groups
    | Each
    | Flat
    | Tensor
    | Elsewhere
    | Before
    | AllExperts
    | ExpertPart
    | ExpertRows
)


@dataclass(frozen=True, slots=True)
class Read:
    """How to read one of our weights: read `keys` (several are stacked), transpose, then take `rows` or a part of each
    head.

    stacked: whether there is one key per entry of the first axis. transpose: whether to swap the last two axes.
    total_rows: rows that a fused tensor must have after the transpose. head_part: (index, count, head_dim). flat:
    whether the checkpoint joins our first two axes. every: (index, count) of an expert's outputs. group_rows: (groups,
    first, last) of each group of rows. expert_rows: (first, last, all) of each expert. blocks: number of
    equal blocks of rows that are transposed one by one. axes: numbers of axes of size 1 that the checkpoint has before
    and after ours.
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
    blocks: int | None = None
    axes: tuple[int, int] = (0, 0)


@dataclass(frozen=True, slots=True)
class Names:
    """A family's checkpoint names.

    root: modules outside the layers. layer: prefix of a layer, with {i}. parts: modules or weights inside a layer.
    transposed: checkpoint modules whose matrices are stored [in, out]. ignore: regular expressions for tensors that are
    derived (masks, frequencies) or belong to another model; {layers} is the number of layers, {shared} matches those
    that share keys and values, {identity} experts without parameters. optional_prefix: prefix of every name in some
    files. others: other layouts of the same model's files. sublayers: layers of ours that are one of the checkpoint's;
    {s} in parts is their number in it.
    """

    root: Mapping[str, Source]
    layer: str
    parts: Mapping[str, Source]
    transposed: frozenset[str] = frozenset()
    ignore: tuple[str, ...] = (r"rotary_emb\.inv_freq$",)
    optional_prefix: str = ""
    others: tuple[Names, ...] = ()
    sublayers: int = 1

    @property
    def described(self) -> bool:
        """Return whether a user gave these names, who may correct them."""
        return False

    def with_parts(self, **changes: object) -> Names:
        """Return these names with changes in `parts` (a dict; None removes an entry), `root` or `layer`."""
        parts = {**self.parts, **(changes.pop("parts", {}) or {})}  # type: ignore[dict-item]
        return replace(self, parts={k: v for k, v in parts.items() if v is not None}, **changes)  # type: ignore[arg-type]

    def within_sight(self) -> Names:
        """Return the names of a checkpoint that also has an encoder of images, whose tensors are ignored.

        Files have the names of transformers 4, and those that transformers 5 writes on request its own.
        """
        own = self._under("language_model.model", "language_model.lm_head")
        return replace(own, others=(self._under("model.language_model", "lm_head"),))

    def _under(self, prefix: str, head: str) -> Names:
        """Return the names of a language model that is under `prefix`."""
        return self.with_parts(
            root={"embed": f"{prefix}.embed_tokens", "norm": f"{prefix}.norm", "head": head},
            layer=f"{prefix}.layers.{{i}}.",
            ignore=(*self.ignore, r"^(model\.)?(vision_tower|vision_model|multi_modal_projector)\."),
        )

    def fitting(self, spec: ModelSpec, keys: Container[str]) -> Names:
        """Return this layout, one of `others` or the one without the prefix "model.", which files of a model without
        its head have: the one that has the fewest tensors missing in `keys`. Prefixes are not compared.
        """
        if not self._count_missing(spec, keys):
            return self
        return min((self, *self.others, self.bare()), key=lambda names: names._count_missing(spec, keys))

    def bare(self) -> Names:
        """Return this layout without the prefix "model."."""
        root = {k: v.removeprefix("model.") if isinstance(v, str) else v for k, v in self.root.items()}
        return replace(self, root=root, layer=self.layer.removeprefix("model."))

    def _count_missing(self, spec: ModelSpec, keys: Container[str]) -> int:
        return sum(key not in keys for read in self.reads(spec).values() for key in read.keys)

    def reads(self, spec: ModelSpec) -> dict[str, Read]:
        """Return how to read every weight of `spec`, by our name."""
        shapes = {w.name: w.shape for w in spec.weights()}
        return {name: self._read(name, shapes, spec) for name in shapes}

    def is_ignored(self, key: str, spec: ModelSpec) -> bool:
        values = {
            "{layers}": str(len(spec.layers) // self.sublayers),
            "{shared}": _either(i for i in range(len(spec.layers)) if spec.state_layer(i) != i),
            "{identity}": _either(
                e for layer in spec.layers if (moe := layer.mlp) for e in range(moe.num_experts, moe.choices)
            ),
        }
        for pattern in self.ignore:
            for name in values:
                pattern = pattern.replace(name, values[name])
            if re.search(pattern, key):
                return True
        return False

    def _read(self, name: str, shapes: Mapping[str, tuple[int, ...]], spec: ModelSpec) -> Read:
        module, _, suffix = name.rpartition(".")
        prefix, ours, mixer, shape = "", "", None, shapes[name]
        source = self.root.get(module)
        if match := re.fullmatch(r"layers\.(\d+)\.(.+)", module):
            whole, sub = divmod(int(match[1]), self.sublayers)
            prefix, ours = self.layer.format(i=whole), f"layers.{match[1]}."
            source = _of_sublayer(self.parts.get(f"{match[2]}.{suffix}", self.parts.get(match[2])), sub)
            mixer = spec.layers[int(match[1])].mixer
        if source is None:
            raise KeyError(f"no checkpoint name for {name}")
        if isinstance(source, Each):
            if shape[0] > MAX_EXPERTS:
                raise ConfigError(f"{name} has {shape[0]} experts; a model has at most {MAX_EXPERTS}")
            keys = tuple(f"{prefix}{source.module.format(e=e)}.{suffix}" for e in range(shape[0]))
            return Read(keys, stacked=True)
        if isinstance(source, Elsewhere):
            return Read((source.name.format(i=match[1] if match else ""),))
        if isinstance(source, Before):
            index = int(match[1]) if match else len(spec.layers)
            own = f"{self.layer.format(i=index - 1)}{source.module}" if index else source.first
            return Read((f"{own}.{suffix}",))
        if isinstance(source, Tensor):
            return Read((f"{prefix}{source.name}",), axes=source.axes)
        if isinstance(source, ExpertRows):
            own = f"{prefix}{source.name}"
            return Read((own,), blocks=shape[0]) if source.transposed else Read((own,), flat=True)
        if isinstance(source, AllExperts):
            key = f"{prefix}{source.module}" + ("" if suffix == "weight" else f"_{suffix}")
            return Read((key,), transpose=suffix == "weight", every=(source.index, source.count))

        def among(names: tuple[str, ...], axis: int) -> tuple[int, int, int]:
            """Return the start, the end and the total size of this weight among those that share a tensor."""
            sizes = [shapes[f"{ours}{n}.{suffix}"][axis] for n in names]
            start = sum(sizes[: names.index(module.removeprefix(ours))])
            return start, start + shape[axis], sum(sizes)

        if isinstance(source, ExpertPart):
            rows = among(source.names, 1)
            return Read((f"{prefix}{source.module}",), transpose=source.transposed, expert_rows=rows)
        other = source if isinstance(source, str) else source.module
        transpose = other in self.transposed and suffix == "weight"
        read = Read((f"{prefix}{other}.{suffix}",), transpose=transpose, flat=isinstance(source, Flat))
        if isinstance(source, FusedRows):
            start, stop, total = among(source.names, 0)
            return replace(read, total_rows=total, rows=(start, stop))
        if isinstance(source, GroupPart | Groups):
            groups, (start, stop, total) = _groups_of(source, mixer), among(source.names, 0)
            return replace(read, total_rows=total, group_rows=(groups, start // groups, stop // groups))
        if isinstance(source, HeadPart):
            head_dim = mixer.head_dim if isinstance(mixer, Attention) else 0
            return replace(read, total_rows=source.count * shape[0], head_part=(source.index, source.count, head_dim))
        return read


def _of_sublayer(source: Source | None, sub: int) -> Source | None:
    """Return a source with the number of its sublayer in place of {s}."""
    if isinstance(source, str):
        return source.replace("{s}", str(sub))
    return replace(source, module=source.module.replace("{s}", str(sub))) if isinstance(source, Flat) else source


def _either(numbers: Iterable[int]) -> str:
    """Return a regular expression that matches one of these numbers; one that matches none for an empty set."""
    return f"({'|'.join(map(str, sorted(set(numbers)))) or 'none'})"


def _groups_of(source: GroupPart | Groups, mixer: object) -> int:
    """Return the number of groups of rows of a fused matrix."""
    if isinstance(source, Groups) and source.count is not None:
        return source.count
    assert isinstance(mixer, GatedDelta | Attention)
    return mixer.num_key_heads if isinstance(mixer, GatedDelta) else mixer.num_kv_heads


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
