"""Prepare texts for embeddings and scores: prompts by name, truncation, pairs, and how a pair is scored."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np

from ridgeline.errors import RequestError
from ridgeline.runtime.request import Frontend
from ridgeline.runtime.vectors import Floats, Reading, Text, check_reading
from ridgeline.spec import ModelSpec
from ridgeline.spec.encoder import Vectors
from ridgeline.spec.prompt import PromptOptions, Side

QUERY, DOCUMENT = "{query}", "{document}"  # what a template has in place of the two texts
Input = str | Sequence[int]  # a text, or its token ids


@dataclass(frozen=True, slots=True)
class Cut:
    """How texts that are too long are cut. tokens: as truncate_prompt_tokens; None: they are refused."""

    tokens: int | None = None
    side: Side = "right"
    add_special_tokens: bool = True

    def options(self) -> dict[str, Any]:
        """Return the fields of PromptOptions."""
        given = {"truncation_side": self.side, "add_special_tokens": self.add_special_tokens}
        return given if self.tokens is None else {**given, "truncate_prompt_tokens": self.tokens}


class Template(NamedTuple):
    """How a model that writes text scores a pair: a text with {query} and {document}, and two tokens that may follow.

    The score is the probability of `yes` where only `no` and `yes` can come next (Qwen3-Reranker, arXiv:2506.05176).
    """

    text: str
    no: str
    yes: str


def named_prompt(vectors: Vectors | None, prompt: str | None, name: str | None) -> str:
    """Return the text that is put before each input: `prompt`, or the one that the model's folder has by a name.

    Raises RequestError for an unknown name, and for both.
    """
    if prompt is not None and name is not None:
        raise RequestError("prompt and prompt_name exclude each other; give one")
    if name is None:
        return prompt or ""
    known = dict(vectors.prompts) if vectors else {}
    if name not in known:
        has = f"has {', '.join(map(repr, known))}" if known else "has none"
        raise RequestError(f"prompt_name is {name!r:.100}, but the model's folder {has:.200}; give prompt instead")
    return known[name]


def text_of(frontend: Frontend, given: Input, before: str, cut: Cut, most: int) -> Text:
    """Return the tokens of an input after the text `before`. most: longest text in tokens.

    Raises RequestError for an input that is empty, too long, or not understood.
    """
    if isinstance(given, str):
        if not given:
            raise RequestError("an input is empty; give at least one character")
        ids = frontend.encode({"prompt": before + given, **cut.options()}, 0)
    elif before:
        raise RequestError("a prompt is put before a text, but an input is token ids; leave one of them out")
    else:
        if cut.tokens is None:
            _fits(len(given), most)  # before each id is checked
        ids = frontend.encode({"prompt_token_ids": list(given), **cut.options()}, 0)
    _fits(len(ids), most)
    return Text(ids)


def pair_of(frontend: Frontend, query: str, document: str, cut: Cut, most: int) -> Text:
    """Return the tokens of a query and a document as one text, whose types say which is which.

    Tokens of the document are dropped at its end if the pair is to be cut. Raises RequestError for a text that is
    empty, and for a pair that is too long.
    """
    kept = PromptOptions.of(cut.options()).kept(most)
    for name, text in (("query", query), ("document", document)):
        if not text:
            raise RequestError(f"a {name} is empty; give at least one character")
        frontend.check_size(text) if kept is not None else frontend.check_text(text)
    ids, types = frontend.tokenizer().encode_pair(query, document, kept)
    _fits(len(ids), most)
    return Text(frontend.check_ids(ids), types)


def _fits(tokens: int, most: int) -> None:
    if tokens > most:
        raise RequestError(
            f"an input has {tokens} tokens, but the context length is {most}; shorten it or set truncate_prompt_tokens"
        )


class Scoring(NamedTuple):
    """How pairs are scored: the texts to compute, what is read from each, and how scores follow from it."""

    texts: list[Text]
    reading: Reading
    scores: Callable[[Floats], list[float]]


def scoring(
    spec: ModelSpec, vectors: Vectors | None, frontend: Frontend, pairs: Sequence[tuple[str, str]], cut: Cut, most: int,
    template: Template | None = None,
) -> Scoring:  # fmt: skip
    """Return how pairs of a query and a document are scored by this model.

    With a head of one label, its score. With a template, the probability of one of two tokens. Otherwise the similarity
    of the two embeddings. Raises RequestError if the model can do none of these, and for bad texts.
    """
    if template is not None:
        return _by_tokens(spec, frontend, pairs, cut, most, template)
    if spec.encoder is not None and (head := spec.encoder.head) is not None:
        if head.labels != 1:
            raise RequestError(f"the model scores {head.labels} labels; a score of a pair needs a model with one label")
        texts = [pair_of(frontend, query, document, cut, most) for query, document in pairs]
        return Scoring(texts, Reading("labels"), lambda found: found[:, 0].tolist())
    reading = Reading()
    if spec.encoder is None and (vectors is None or vectors.pool is None):
        raise RequestError(
            f"{spec.family} writes text, and its folder does not say how it scores: give score_template, score_no and "
            "score_yes (in Python and /v1/score), or a model with a head for one label"
        )
    check_reading(spec, vectors, reading)
    return _by_similarity(frontend, pairs, cut, most, reading, "cosine" if vectors is None else vectors.similarity)


def _by_tokens(
    spec: ModelSpec, frontend: Frontend, pairs: Sequence[tuple[str, str]], cut: Cut, most: int, template: Template
) -> Scoring:
    if template.text.count(QUERY) != 1 or template.text.count(DOCUMENT) != 1:
        raise RequestError(f"score_template must have {QUERY} and {DOCUMENT} once each")
    tokenizer, tokens = frontend.tokenizer(), []
    for name, text in (("score_no", template.no), ("score_yes", template.yes)):
        ids = tokenizer.encode(text, add_special_tokens=False)
        if len(ids) != 1:
            raise RequestError(f"{name} is {text!r:.100}, which is {len(ids)} tokens; it must be one")
        tokens.append(ids[0])
    reading = Reading("tokens", tokens=(tokens[0], tokens[1]))
    check_reading(spec, None, reading)
    if cut.tokens is not None:
        raise RequestError("truncate_prompt_tokens would cut the end of score_template; shorten the documents instead")
    before, _, rest = template.text.partition(QUERY)
    between, swapped, after = rest.partition(DOCUMENT)
    if not swapped:
        raise RequestError(f"score_template must have {QUERY} before {DOCUMENT}")
    texts = [text_of(frontend, f"{before}{q}{between}{d}{after}", "", cut, most) for q, d in pairs]
    return Scoring(texts, reading, lambda found: found[:, 0].tolist())


def _by_similarity(
    frontend: Frontend, pairs: Sequence[tuple[str, str]], cut: Cut, most: int, reading: Reading,
    similarity: Literal["cosine", "dot"],
) -> Scoring:  # fmt: skip
    """Embed each different text once."""
    index: dict[str, int] = {}
    for pair in pairs:
        for text in pair:
            index.setdefault(text, len(index))
    texts = [text_of(frontend, text, "", cut, most) for text in index]

    def scores(found: Floats) -> list[float]:
        if similarity == "cosine":
            found = found / np.sqrt((found * found).sum(1, keepdims=True))
        return [float(found[index[a]] @ found[index[b]]) for a, b in pairs]

    return Scoring(texts, reading, scores)
