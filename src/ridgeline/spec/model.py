"""Define a model as a tuple of layers: all that the engine and the planner use of an architecture."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

from ridgeline.errors import RequestError
from ridgeline.spec.attention import Attention, SharedAttention
from ridgeline.spec.diffusion import CanvasDiffusion, Diffusion, MaskedDiffusion
from ridgeline.spec.encoder import Encoder
from ridgeline.spec.latent import LatentAttention
from ridgeline.spec.mixers import ChannelMixer, TokenMixer
from ridgeline.spec.norm import Norm
from ridgeline.spec.per_layer import EmbeddingBranch, LayerEmbeddings
from ridgeline.spec.regimes import Regimes, regimes_of
from ridgeline.spec.rope import Rope
from ridgeline.spec.s4 import S4, S4D
from ridgeline.spec.shortcut import ShortcutMLP
from ridgeline.spec.sight import BEYOND, CAUSAL, Sight
from ridgeline.spec.transform import HeadTransform
from ridgeline.spec.weight import SINUSOIDS, Weight, linear


@dataclass(frozen=True, slots=True)
class Layer:
    """x += scale * post(mixer(pre(x))), then the same with the channel mixer. One may be missing (Mamba, Nemotron-H).

    pre_norm only: Llama. Both: Gemma 2, GLM-4-0414. post_norm only: OLMo 2. residual_scale: Granite. embedded: a third
    branch, x += post(embedded(x)), which reads the layer's own embeddings of the tokens. out_scale: the stream after
    the layer is multiplied by a learned number (both Gemma 4). canvas_scale: a pass over a canvas has another number
    (DiffusionGemma). mlp_post_norm: the norm after the channel mixer, in place of post_norm (A.X K1). mlp_scale: the
    factor of the channel mixer, in place of residual_scale. beside: the mixer runs in parallel with that of the layer
    before: it reads the same stream, with the same norm, and both results are added to it (Falcon-H1). mlp_pre_norm:
    the norm before the channel mixer, in place of pre_norm (Beam).
    """

    mixer: TokenMixer | None
    mlp: ChannelMixer | None
    pre_norm: Norm | None
    post_norm: Norm | None = None
    residual_scale: float = 1.0
    embedded: EmbeddingBranch | None = None
    out_scale: bool = False
    canvas_scale: bool = False
    mlp_post_norm: Norm | None = None
    mlp_scale: float | None = None
    beside: bool = False
    mlp_pre_norm: Norm | None = None

    def __post_init__(self) -> None:
        if self.mixer is None and self.mlp is None:
            raise ValueError("a layer needs a mixer or an mlp")
        if self.beside and self.mixer is None:
            raise ValueError("a layer beside another needs a mixer, which reads the stream of the layer before")
        if self.mlp_scale is not None and self.mlp is None:
            raise ValueError("mlp_scale is the factor of an mlp, and the layer has none")
        if self.canvas_scale and not self.out_scale:
            raise ValueError("canvas_scale is another number in place of that of out_scale, which is off")

    @property
    def post_norms(self) -> tuple[Norm | None, Norm | None]:
        """Return the norms after the mixer and after the channel mixer."""
        return self.post_norm, self.mlp_post_norm or self.post_norm

    def weights(self, width: int) -> Iterator[Weight]:
        post, last = self.post_norms
        if self.mixer:
            yield from _branch_weights("mixer", self.mixer, None if self.beside else self.pre_norm, post, width)
        if self.mlp:
            yield from _branch_weights("mlp", self.mlp, mlp_norm(self), last, width)
        if self.embedded:
            yield from _branch_weights("embedded", self.embedded, None, self.post_norm, width)
        if self.out_scale:
            yield Weight("scale.weight", (1,))
        if self.canvas_scale:
            yield Weight("canvas_scale.weight", (1,))


@dataclass(frozen=True, slots=True)
class ParallelLayer:
    """x += mixer(norm1(x)) + mlp(norm2(x)): both branches read the same input (GPT-NeoX).

    one_norm: both read the result of one norm, that of the mixer (GPT-J, Phi, Cohere).
    """

    mixer: TokenMixer
    mlp: ChannelMixer
    pre_norm: Norm
    one_norm: bool = False

    def weights(self, width: int) -> Iterator[Weight]:
        yield from _branch_weights("mixer", self.mixer, self.pre_norm, None, width)
        yield from _branch_weights("mlp", self.mlp, None if self.one_norm else self.pre_norm, None, width)


@dataclass(frozen=True, slots=True)
class DeepNormLayer:
    """x = norm(x); x = alpha x + beta mixer(x), then the same with the channel mixer.

    A branch is added to its own input, the normalized stream (DeepNorm, arXiv:2203.00555; MiniMax-01, 2501.08313).
    """

    mixer: TokenMixer
    mlp: ChannelMixer
    pre_norm: Norm
    mixer_alpha: float = 1.0
    mixer_beta: float = 1.0
    mlp_alpha: float = 1.0
    mlp_beta: float = 1.0

    def weights(self, width: int) -> Iterator[Weight]:
        yield from _branch_weights("mixer", self.mixer, self.pre_norm, None, width)
        yield from _branch_weights("mlp", self.mlp, self.pre_norm, None, width)


AnyLayer = Layer | ParallelLayer | DeepNormLayer


def mlp_norm(layer: AnyLayer) -> Norm | None:
    """Return the norm before the channel mixer of a layer."""
    return (layer.mlp_pre_norm if isinstance(layer, Layer) else None) or layer.pre_norm


def _branch_weights(
    name: str, part: TokenMixer | ChannelMixer | EmbeddingBranch, pre: Norm | None, post: Norm | None, width: int
) -> Iterator[Weight]:
    if pre:
        yield from pre.weights(f"{name}_norm", width)
    yield from (replace(w, name=f"{name}.{w.name}") for w in part.weights(width))
    if post:
        yield from post.weights(f"{name}_post_norm", width)


def _cut(layer: AnyLayer, size: int) -> AnyLayer:
    """Return the layer of one of `size` ranks. Raises ValueError if it cannot be cut."""
    if layer.mixer:
        layer = replace(layer, mixer=layer.mixer.part(size))
    return replace(layer, mlp=layer.mlp.part(size)) if layer.mlp else layer


def _sharing_problem(layers: tuple[AnyLayer, ...], index: int, mixer: SharedAttention) -> str | None:
    """Return why a layer cannot share the keys and values of its source layer; None if it can."""
    if mixer.source >= index:
        return f"it shares the keys and values of layer {mixer.source}, which does not come before it"
    owner: object = layers[mixer.source].mixer
    where = f"it shares the keys and values of layer {mixer.source}"
    if isinstance(owner, SharedAttention):
        return f"{where}, which has none of its own: it shares those of layer {owner.source}"
    if not isinstance(owner, Attention):
        return f"{where}, which has none: it is {type(owner).__name__ if owner else 'no token mixer'}"
    misfit = mixer.misfit(owner)
    return misfit and f"{where}, which do not fit: {misfit}"


def _beside_problem(layer: Layer, before: AnyLayer | None) -> str | None:
    """Return why the mixer of a layer cannot run in parallel with that of the layer before; None if it can."""
    if not isinstance(before, Layer) or before.mixer is None or not before.mixer.is_recurrent:
        return "it runs beside the layer before, which must have a recurrent mixer"
    if before.mlp or before.embedded or before.out_scale or before.beside:
        return "it runs beside the layer before, which must have a mixer alone"
    return None if layer.pre_norm == before.pre_norm else "it and the layer before, beside which it runs, share a norm"


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """Everything that a forward pass needs to know, and the only list of parameters.

    family: the name of the architecture in messages. max_position_embeddings: the longest context that it can
    serve, in tokens, stretched rotations included. num_position_embeddings: rows of a learned position
    table, 0 for none (GPT-2). position_offset: row of the first position (OPT). sinusoids: the rows of that table are
    sines and cosines, which no checkpoint holds (XGLM, `nn.held.sinusoids`). embedding_scale and logit_scale
    multiply the embeddings and the logits (Gemma, Granite); logit_softcap bounds the logits (Gemma 2). head_bias:
    whether a number is added to each logit (Phi). diffusion: how a diffusion language model fills an answer; None for
    autoregressive models. layer_embeddings: embeddings of the tokens for each layer (Gemma 4). encoder: the
    parts that an encoder has instead of an output head; None for models that write text. rank, ranks: the model is the
    part of one of several ranks (`part`); vocab_size is that of the whole model. embed_norm: a norm of the embeddings
    before the first layer (BLOOM). num_unwritten: rows of the embedding after those of the vocabulary, for tokens of
    images and sound, which the head cannot write and no request contains (Apertus 1.5). head_transform: a
    transform of the result of the last norm, which the head then reads (the decoders of ModernBERT).
    """

    family: str
    vocab_size: int
    hidden_size: int
    max_position_embeddings: int
    layers: tuple[AnyLayer, ...]
    norm: Norm
    tie_word_embeddings: bool = False
    num_position_embeddings: int = 0
    embedding_scale: float = 1.0
    logit_scale: float = 1.0
    logit_softcap: float | None = None
    diffusion: Diffusion | None = None
    layer_embeddings: LayerEmbeddings | None = None
    head_bias: bool = False
    position_offset: int = 0
    encoder: Encoder | None = None
    rank: int = 0
    ranks: int = 1
    embed_norm: Norm | None = None
    sinusoids: bool = False
    num_unwritten: int = 0
    head_transform: HeadTransform | None = None

    def __post_init__(self) -> None:
        for name in ("vocab_size", "hidden_size", "max_position_embeddings"):
            if (value := getattr(self, name)) < 1:
                raise ValueError(f"{name} must be positive, not {value}")
        if not 0 <= self.rank < self.ranks:
            raise ValueError(f"rank {self.rank} is not in 0..{self.ranks - 1}")
        if self.num_unwritten < 0 or (self.num_unwritten and self.tie_word_embeddings):
            raise ValueError(f"num_unwritten {self.num_unwritten}: a tied head has exactly the rows of the embedding")
        if not self.layers:
            raise ValueError("a model needs at least one layer")
        if not any(layer.mixer for layer in self.layers):
            raise ValueError("a model needs at least one layer with a token mixer: without, no token sees another")
        for i, layer in enumerate(self.layers):
            if isinstance(layer.mixer, SharedAttention) and (problem := _sharing_problem(self.layers, i, layer.mixer)):
                raise ValueError(f"layers[{i}].mixer: {problem}")
            if isinstance(m := layer.mixer, S4 | S4D) and m.channels != self.hidden_size:
                rule = f"channels {m.channels} is not hidden_size {self.hidden_size}"
                raise ValueError(f"layers[{i}].mixer: {rule}, and {type(m).__name__} has no projection before it")
        for i, layer in enumerate(self.layers):
            before = self.layers[i - 1] if i else None
            if isinstance(layer, Layer) and layer.beside and (problem := _beside_problem(layer, before)):
                raise ValueError(f"layers[{i}]: {problem}")
        self._check_sight()
        self._check_embeddings()
        self._check_shortcuts()

    def _check_shortcuts(self) -> None:
        """Raise ValueError unless the next layer adds the result of each shortcut to a plain delta."""
        for i, layer in enumerate(self.layers):
            if not isinstance(layer.mlp, ShortcutMLP):
                continue
            pair = self.layers[i : i + 2]
            plain = (isinstance(x, Layer) and x.mlp and x.residual_scale == 1.0 and x.mlp_scale is None for x in pair)
            if len(pair) < 2 or not all(plain):
                raise ValueError(f"layers[{i}].mlp: a shortcut needs a plain layer with a channel mixer behind its own")

    def _check_embeddings(self) -> None:
        """Raise ValueError unless the layers read embeddings of the size that the model has for each layer."""
        own, branches = self.layer_embeddings, [self.embedded(i) for i in range(len(self.layers))]
        read = {branch.size for branch in branches if branch}
        if read != ({own.size} if own else set()):
            have = f"size {own.size}" if own else "none"
            raise ValueError(f"layers read embeddings of their own of sizes {sorted(read)}, and the model has {have}")
        if own and own.vocab_size < self.vocab_size:
            raise ValueError(
                f"the table of the layers' embeddings has {own.vocab_size} rows, and there are {self.vocab_size} tokens"
            )

    def embedded(self, index: int) -> EmbeddingBranch | None:
        """Return the branch of layer `index` that reads the layer's own embeddings; None without it."""
        layer = self.layers[index]
        return layer.embedded if isinstance(layer, Layer) else None

    def is_beside(self, index: int) -> bool:
        """Return whether the mixer of layer `index` runs in parallel with that of the layer before."""
        layer = self.layers[index] if index < len(self.layers) else None
        return isinstance(layer, Layer) and layer.beside

    def _check_sight(self) -> None:
        """Raise ValueError unless all layers see equally far ahead, and only a diffusion model sees ahead at all."""
        sights = {self._sight_of(i) for i, layer in enumerate(self.layers) if layer.mixer}
        if len(sights) > 1:
            raise ValueError("all layers must see equally far ahead: one `sight`, and no other mixer beside it")
        of_head = self.head_bias or self.head_transform
        if self.encoder and (self.diffusion or of_head or not self.tie_word_embeddings):
            raise ValueError(
                "an encoder has no `diffusion`, and no output head: tie_word_embeddings without head_bias or "
                "head_transform"
            )
        if self.sight != CAUSAL and not isinstance(self.diffusion, MaskedDiffusion) and not self.encoder:
            raise ValueError(
                "a model whose tokens see those after them needs `diffusion`, which fills masked tokens, or `encoder`"
            )
        if self.diffusion is None:
            return
        if self.diffusion.mask_token >= self.vocab_size:
            raise ValueError(f"mask_token {self.diffusion.mask_token} is not below vocab_size {self.vocab_size}")
        if any(layer.mixer and layer.mixer.is_recurrent for layer in self.layers):
            raise ValueError("a diffusion model has no recurrent layers: their state cannot take a token back")
        if any(rope.follows_length for rope in self.ropes()):
            raise ValueError("a diffusion model has no rotations that depend on the length of a sequence")
        if self.canvas and not self._has_canvas_layers():
            raise ValueError("a model with a canvas has softmax attention of its own in each layer, without a pattern")
        if self.sight.block < BEYOND and self.max_position_embeddings < self.sight.block:
            size = self.max_position_embeddings
            raise ValueError(f"max_position_embeddings {size} is shorter than a block of {self.sight.block}")
        if self.canvas >= self.max_position_embeddings:
            size = self.max_position_embeddings
            raise ValueError(
                f"max_position_embeddings {size} leaves no room for a prompt before a canvas of {self.canvas}"
            )

    def _has_canvas_layers(self) -> bool:
        """Return whether a pass over a canvas can run through the layers."""
        mixers = [layer.mixer for layer in self.layers if layer.mixer]
        return all(isinstance(m, Attention) and m.pattern is None and not m.sinks for m in mixers)

    def _sight_of(self, index: int) -> Sight:
        own = self.attention(index)
        return own.sight if own else CAUSAL

    def weights(self) -> Iterator[Weight]:
        """Yield every parameter, which a checkpoint must have."""
        return (w for w in self._vectors_and_matrices() if w.constant is None)

    def constants(self) -> Iterator[Weight]:
        """Yield what modules take like weights and no checkpoint has: vectors of norms without weights, sinusoids."""
        return (w for w in self._vectors_and_matrices() if w.constant is not None)

    def _vectors_and_matrices(self) -> Iterator[Weight]:
        yield Weight("embed.weight", (self.vocab_rows + self.num_unwritten, self.hidden_size), "out")
        if self.num_position_embeddings:
            constant: Literal["sinusoids"] | None = SINUSOIDS if self.sinusoids else None
            yield Weight("position_embed.weight", (self.num_position_embeddings, self.hidden_size), constant=constant)
        if self.encoder:
            yield from self.encoder.weights(self.hidden_size)
        if self.embed_norm:
            yield from self.embed_norm.weights("embed_norm", self.hidden_size)
        if self.layer_embeddings:
            yield from self.layer_embeddings.weights(self.hidden_size, len(self.layers))
        for i, layer in enumerate(self.layers):
            for w in layer.weights(self.hidden_size):
                yield replace(w, name=f"layers.{i}.{w.name}")
        if isinstance(self.diffusion, CanvasDiffusion):
            yield from self.diffusion.weights(self.hidden_size)
        yield from self.norm.weights("norm", self.hidden_size)
        if self.head_transform:
            yield from self.head_transform.weights(self.hidden_size)
        if not self.tie_word_embeddings:
            yield from linear("head", self.hidden_size, self.vocab_rows)
        if self.head_bias:
            yield Weight("head.bias", (self.vocab_rows,), "out")

    @property
    def vocab_rows(self) -> int:
        """Return the rows of the embedding and of the head that a rank holds. The last ranks have rows of padding."""
        return -(-self.vocab_size // self.ranks)

    def part(self, rank: int, size: int) -> ModelSpec:
        """Return the part of the model that one of `size` ranks computes.

        Raises RequestError, with the largest number of ranks that works, for a model that cannot be cut like this.
        """
        if size == 1:
            return self
        if size < 1 or self.ranks > 1:
            raise RequestError(f"a model is cut once, for 1 rank or more, not for {size}")
        problem = self._uncut(size)
        if problem is not None:
            fits = max(n for n in range(1, size) if self._uncut(n) is None)
            raise RequestError(
                f"{self.family} cannot be cut for {size} ranks (--tensor-parallel-size): {problem}; take {fits}"
            )
        return replace(self, layers=tuple(_cut(layer, size) for layer in self.layers), rank=rank, ranks=size)

    def _uncut(self, size: int) -> str | None:
        """Return why the model cannot be cut for `size` ranks; None if it can."""
        if size == 1:
            return None
        if self.canvas:
            return "a canvas reads mean embeddings of all tokens"
        if self.num_unwritten:
            return "the embedding has more rows than the head"
        if self.encoder:
            return "the vectors of an encoder are not computed in steps"
        for i, layer in enumerate(self.layers):
            try:
                _cut(layer, size)
            except ValueError as e:
                return f"layer {i}: {e}"
        return None

    @property
    def sight(self) -> Sight:
        """Return how far ahead a token sees, in all layers."""
        return self._sight_of(next(i for i, layer in enumerate(self.layers) if layer.mixer))

    @property
    def block(self) -> int:
        """Return how many neighboring tokens see each other: 1 in autoregressive models."""
        return self.sight.block

    @property
    def canvas(self) -> int:
        """Return the tokens of the canvas of a diffusion model that has one; 0 for all other models."""
        return self.diffusion.canvas if isinstance(self.diffusion, CanvasDiffusion) else 0

    @property
    def open_tokens(self) -> int:
        """Return how many tokens a pass of a diffusion model predicts together: those of a canvas or of a block."""
        return self.canvas or self.block

    def seeing(self, sight: Sight, diffusion: Diffusion | None) -> ModelSpec:
        """Return the model whose tokens see so far ahead. Raises ValueError if they cannot."""
        layers = tuple(
            replace(layer, mixer=layer.mixer.seeing(sight)) if layer.mixer else layer for layer in self.layers
        )
        return replace(self, layers=layers, diffusion=diffusion)

    def require_autoregressive(self, purpose: str) -> None:
        """Raise RequestError for another model. purpose: a task that needs logits of earlier tokens alone."""
        self.require_logits(purpose)
        if self.diffusion is not None:
            raise RequestError(
                f"{purpose} needs an autoregressive model; {self.family} is a diffusion model, whose tokens are "
                "predicted together"
            )

    def require_logits(self, purpose: str) -> None:
        """Raise RequestError for an encoder. purpose: a task that needs probabilities of tokens."""
        if self.encoder is not None:
            raise RequestError(
                f"{purpose} needs a model that writes text; {self.family} is an encoder, which gives embeddings or "
                "scores: use ridgeline embed, /v1/embeddings or /v1/rerank"
            )

    def state_layer(self, index: int) -> int:
        """Return the index of the layer whose state layer `index` reads: its own, unless it shares another's."""
        mixer = self.layers[index].mixer
        return mixer.state_layer(index) if mixer else index

    def attention(self, index: int) -> Attention | None:
        """Return the softmax attention of layer `index`, over its own or shared keys and values; None without it."""
        mixer = self.layers[index].mixer
        own = mixer.attention if isinstance(mixer, SharedAttention) else mixer
        return own if isinstance(own, Attention) else None

    def latents(self, index: int) -> LatentAttention | None:
        """Return the attention over latents (MLA) of layer `index`; None for a layer with any other mixer."""
        mixer = self.layers[index].mixer
        return mixer if isinstance(mixer, LatentAttention) else None

    def attentions(self, *, shared: bool) -> list[Attention]:
        """Return the softmax attention of each layer that has one.

        shared: whether layers that share the keys and values of another layer are included.
        """
        indices = [i for i in range(len(self.layers)) if shared or self.state_layer(i) == i]
        return [own for i in indices if (own := self.attention(i))]

    def num_params(self) -> int:
        """Return the number of parameters; a tied head counts once."""
        return sum(w.num_params for w in self.weights())

    def num_active_params(self) -> int:
        """Return the number of parameters that one token is multiplied with: all but the experts that it skips."""
        idle = sum(
            sum(w.num_params for w in layer.mlp.weights(self.hidden_size)) - layer.mlp.active_params(self.hidden_size)
            for layer in self.layers
            if layer.mlp
        )
        return self.num_params() - idle

    def state_elements(self, num_tokens: int) -> int:
        """Return the numbers that all layers keep for one sequence of `num_tokens` tokens."""
        return sum(layer.mixer.state().elements_at(num_tokens) for layer in self.layers if layer.mixer)

    def resolve_max_model_len(self, wanted: int | None) -> int:
        """Return the longest context to serve, in tokens. Raises RequestError for one that the model cannot serve."""
        limit = self.max_position_embeddings
        if self.block < BEYOND:
            limit = limit // self.block * self.block  # the last block is computed whole
        if wanted is None:
            return limit
        if type(wanted) is not int or not 1 <= wanted <= limit:
            raise RequestError(
                f"max_model_len {wanted} (--max-model-len) is not in 1..{limit}, what {self.family}'s positions allow"
            )
        return wanted

    def regimes(self, max_model_len: int) -> Regimes:
        """Return how rotations depend on the lengths of sequences of at most `max_model_len` tokens."""
        return regimes_of((rope.scaling for rope in self.ropes()), max_model_len)

    def frequency_bytes(self, max_model_len: int) -> int:
        """Return the bytes of tables for rotations that depend on the length: the regimes, and their frequencies."""
        breaks = len(self.regimes(max_model_len).breaks)
        if not breaks:
            return 0
        return 8 * breaks + 4 * (breaks + 1) * sum(rope.dim // 2 for rope in self.ropes() if rope.follows_length)

    def ropes(self) -> tuple[Rope, ...]:
        """Return the distinct rotations in use, in order of first use."""
        return tuple(dict.fromkeys(layer.mixer.rope for layer in self.layers if layer.mixer and layer.mixer.rope))
