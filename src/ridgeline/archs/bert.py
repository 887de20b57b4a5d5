"""BERT, RoBERTa, XLM-RoBERTa and CamemBERT: encoders with learned positions, and a norm after each branch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from ridgeline.archs.config import Config
from ridgeline.archs.family import Family, Heads, attention
from ridgeline.archs.names import Before, Names, Source
from ridgeline.spec import MLP, DeepNormLayer, Encoder, LabelHead, LayerNorm, ModelSpec, WholeSequence

LABELED = "ForSequenceClassification"


def bert(c: Config) -> ModelSpec:
    """BERT (arXiv:1810.04805), and the encoders of texts that were made from it: MiniLM, bge, e5, gte."""
    return _model(c, 0)


def roberta(c: Config) -> ModelSpec:
    """RoBERTa and XLM-RoBERTa (arXiv:1907.11692, 1911.02116): the first position is the one after the padding id."""
    return _model(c, c.get_int("pad_token_id", 1) + 1)


def _model(c: Config, offset: int) -> ModelSpec:
    """Return the model. offset: row of the first position in the table.

    A layer here is x = norm(x + branch(x)), twice. A DeepNormLayer is the same one norm earlier: the norm after the
    embeddings begins the first layer, the norm that ends a layer begins the next one, and the last one is the model's.
    """
    hidden, count, norm = c.get_size("hidden_size"), c.get_size("num_attention_heads"), _norm(c)
    c.divide("hidden_size", hidden, "num_attention_heads", count)
    for name in ("is_decoder", "add_cross_attention"):
        c.expect(name, False)
    c.expect("position_embedding_type", "absolute")
    heads, rows = Heads(count, count, hidden // count), c.get_size("max_position_embeddings")
    if rows <= offset:
        raise c.error("max_position_embeddings", f"is {rows}, and the first position is row {offset} of the table")
    mixer = attention(heads, None, qkv_bias=True, out_bias=True, sight=WholeSequence())
    mlp = MLP(c.get_size("intermediate_size"), c.get_activation("hidden_act", "gelu"), bias=True)
    return ModelSpec(
        family=c.model_type,
        vocab_size=c.get_size("vocab_size"),
        hidden_size=hidden,
        max_position_embeddings=rows - offset,
        layers=(DeepNormLayer(mixer, mlp, norm),) * c.get_layer_count(),
        norm=norm,
        tie_word_embeddings=True,
        num_position_embeddings=rows,
        position_offset=offset,
        encoder=Encoder(c.get_size("type_vocab_size", 2), label_head(c)),
    )


def _norm(c: Config) -> LayerNorm:
    return LayerNorm(c.get_eps("layer_norm_eps", 1e-12))


def label_head(c: Config) -> LabelHead | None:
    """Return the head that scores labels, if the config names a class that has one."""
    if not is_labeled(c):
        return None
    return LabelHead(count_labels(c), scores=score_function(c))


def is_labeled(c: Config) -> bool:
    """Return whether the checkpoint's class scores labels of texts."""
    names = c.raw("architectures")
    return isinstance(names, list) and any(isinstance(name, str) and name.endswith(LABELED) for name in names)


def count_labels(c: Config) -> int:
    """Return the number of labels: that of their names, or `num_labels`, or the class's 2."""
    names = c.raw("id2label")
    if isinstance(names, Mapping) and names:
        return len(names)
    return c.get_size("num_labels", 2, 2)


def score_function(c: Config) -> Literal["sigmoid", "logits"]:
    """Return how the score of a single label follows from its logit, as sentence-transformers' field says.

    Raises ConfigError for another function than the sigmoid and the identity.
    """
    field, own = "sbert_ce_default_activation_function", c.raw("sentence_transformers")
    name = own.get("activation_fn") if isinstance(own, Mapping) else None
    name = c.raw(field) if name is None else name
    kind = "Sigmoid" if name is None else str(name).rpartition(".")[2]
    if kind not in ("Sigmoid", "Identity"):
        raise c.error(field, f"is {name!r:.100}, which is not supported; it must be Sigmoid or Identity")
    return "sigmoid" if kind == "Sigmoid" else "logits"


_LAYER: Mapping[str, Source] = {
    "mixer_norm": Before("output.LayerNorm", "embeddings.LayerNorm"),
    "mixer.q": "attention.self.query",
    "mixer.k": "attention.self.key",
    "mixer.v": "attention.self.value",
    "mixer.o": "attention.output.dense",
    "mlp_norm": "attention.output.LayerNorm",
    "mlp.up": "intermediate.dense",
    "mlp.down": "output.dense",
}
_ROOT: Mapping[str, Source] = {
    "embed": "embeddings.word_embeddings",
    "position_embed": "embeddings.position_embeddings",
    "type_embed": "embeddings.token_type_embeddings",
    "norm": Before("output.LayerNorm", "embeddings.LayerNorm"),
}
# Positions are counted; a pooler or a head for masked tokens gives no embeddings.
_UNUSED = (r"^embeddings\.position_ids$", r"^cls\.", r"^lm_head\.")
BERT_NAMES = Names(
    root={**_ROOT, "labels.dense": "pooler.dense", "labels.out": "classifier"},
    layer="encoder.layer.{i}.",
    parts=_LAYER,
    ignore=(*_UNUSED, r"^pooler\."),
    optional_prefix="bert.",
)
ROBERTA_NAMES = Names(
    root={**_ROOT, "labels.dense": "classifier.dense", "labels.out": "classifier.out_proj"},
    layer="encoder.layer.{i}.",
    parts=_LAYER,
    ignore=(*_UNUSED, r"^pooler\."),
    optional_prefix="roberta.",
)
# position_embedding_type is read. The others are of training, of export, or of heads for masked tokens.
_HARMLESS = (
    "attention_probs_dropout_prob", "hidden_dropout_prob", "directionality", "pooler_fc_size",
    "pooler_num_attention_heads", "pooler_num_fc_layers", "pooler_size_per_head", "pooler_type",
    "tie_word_embeddings", "output_past",
)  # fmt: skip
FAMILIES = tuple(
    Family(name, spec, names, _HARMLESS)
    for name, spec, names in (
        ("bert", bert, BERT_NAMES),
        ("roberta", roberta, ROBERTA_NAMES),
        ("xlm-roberta", roberta, ROBERTA_NAMES),
        ("camembert", roberta, ROBERTA_NAMES),
    )
)
