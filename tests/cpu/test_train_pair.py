"""A recipe from start to end: both models, their stages, and a repetition with the existing files."""

from __future__ import annotations

import ast
import platform
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ridgeline import LLM
from ridgeline.compress.prune.given import prune_to
from ridgeline.errors import DataError
from ridgeline.train import Corpus, Document, split
from ridgeline.train.data.folder import prepare
from ridgeline.train.data.manifest import Manifest
from ridgeline.train.loop import TrainOptions
from ridgeline.train.pocket.continuations import ContinuationOptions, draw_prompts
from ridgeline.train.pocket.functions import FunctionOptions, code_lines, draw_functions, write_functions
from ridgeline.train.pocket.pair import produce_pair
from ridgeline.train.pocket.recipe import KeptParts, ModelRecipe, Recipe, Stage
from ridgeline.train.ranks import Ranks

CONFIG = {
    "model_type": "qwen3", "vocab_size": 300, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1,
    "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16, "max_position_embeddings": 64,
    "tie_word_embeddings": True,
}  # fmt: skip
LARGER = CONFIG | {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
OPTIONS = TrainOptions(
    steps=3, batch_tokens=128, micro_tokens=128, context=64, warmup_steps=1, decay_share=0.0, eval_every=3, save_every=3
)
SOURCE = '''"""A module."""


@decorated
def first(a, b=(1, 2)):
    """Says
  something that is not indented as the rest."""
    return a + b


class Thing:
    def method(self):
        if self:

            return 1
        return "é"

    async def other(self, number_{n}):
        yield number_{n}
'''


class Quiet:
    def __init__(self) -> None:
        self.lines: list[str] = []

    def say(self, line: str) -> None:
        self.lines.append(line)

    def run(self, name: str, run: Any) -> Any:
        self.lines.append(name)
        return lambda progress: None

    def tokens(self, name: str, total: int) -> Any:
        return lambda tokens: None


@pytest.fixture
def corpus() -> Corpus:
    documents = (Document(f"m{n:02}.py", SOURCE.replace("{n}", str(n))) for n in range(30))
    return Corpus("modules", "MIT", tuple(documents))


@pytest.fixture
def recipe(corpus: Corpus) -> Recipe:
    manifest = Manifest.build(corpus, split(corpus.documents, 0.3, 0))
    last = replace(OPTIONS, decay_share=1.0, seed=1)
    return Recipe(
        "tiny", platform.python_version(), manifest.hash, 0.3, 0, 300, FunctionOptions(20, 120),
        ContinuationOptions(8, 2, 6, 12),
        ModelRecipe(LARGER, {"temperature": 0.5}, (Stage("corpus", OPTIONS), Stage("functions", last))),
        ModelRecipe(
            CONFIG | {"hidden_size": 16}, {},
            (Stage("headers", OPTIONS), Stage("continuations", last)), KeptParts((1,), (1,), tokens=128),
        ),
    )  # fmt: skip


def test_a_pair_from_nothing_and_from_existing_files(
    tmp_path: Path, recipe: Recipe, corpus: Corpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Corpus, "stdlib", classmethod(lambda cls: corpus))
    watch = Quiet()
    produce_pair(recipe, tmp_path, Ranks("reference"), watch, prune_to)
    assert [line for line in watch.lines if line.startswith("tiny")] == [
        "tiny, stage 1 of 2", "tiny, stage 2 of 2", "tiny-draft, stage 1 of 2", "tiny-draft, stage 2 of 2",
    ]  # fmt: skip
    written = {}
    for name in ("tiny", "tiny-draft"):
        assert LLM(str(tmp_path / name)).checkpoint.sampling_defaults == (
            {"temperature": 0.5} if name == "tiny" else {}
        )
        card = (tmp_path / name / "README.md").read_text()
        assert "| Stage 1 |" in card and "| Stage 2 |" in card and "| License of the texts | MIT |" in card
        written[name] = (tmp_path / name / "model.safetensors").read_bytes()
        (tmp_path / name / "model.safetensors").unlink()
    assert "8 greedy continuations by the target" in card
    assert "| Start | pruned from tiny: layers 1 (from 0), in each the KV heads 1 with" in card
    produce_pair(recipe, tmp_path, Ranks("reference"), Quiet(), prune_to)
    assert written == {name: (tmp_path / name / "model.safetensors").read_bytes() for name in written}
    draft = replace(recipe.draft, prune=KeptParts((0,), (1,), tokens=128))
    with pytest.raises(DataError, match="start"):
        produce_pair(replace(recipe, draft=draft), tmp_path, Ranks("reference"), Quiet(), prune_to)
    with pytest.raises(DataError, match="remove its folder"):
        produce_pair(
            replace(recipe, functions=FunctionOptions(21, 120)), tmp_path, Ranks("reference"), Quiet(), prune_to
        )


def test_another_python_or_corpus_is_refused(
    tmp_path: Path, recipe: Recipe, corpus: Corpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Corpus, "stdlib", classmethod(lambda cls: corpus))
    with pytest.raises(DataError, match=r"the standard library of Python 3\.9\.1"):
        produce_pair(replace(recipe, python="3.9.1"), tmp_path, Ranks("reference"), Quiet(), prune_to)
    with pytest.raises(DataError, match="not the pinned"):
        produce_pair(replace(recipe, corpus_hash="0" * 64), tmp_path, Ranks("reference"), Quiet(), prune_to)


def test_the_shipped_recipe_can_be_read() -> None:
    recipe = Recipe.read("pocket")
    for model in (recipe.target, recipe.draft):
        assert model.config["vocab_size"] == recipe.vocab_size and model.config["tie_word_embeddings"]
    with pytest.raises(DataError, match="use pocket"):
        Recipe.read("bread")


def test_functions_begin_at_the_left_edge_and_end_with_their_surroundings(corpus: Corpus) -> None:
    documents = corpus.documents[:2]
    texts = {t.document.name: t for t in draw_functions(documents, FunctionOptions(6, 10_000))}
    assert sorted(texts) == [f"m0{n}.py:{line}" for n in (0, 1) for line in (12, 18, 5)]
    method = texts["m01.py:12"].document.text
    assert method.startswith("def method(self):\n    if self:\n\n        return 1\n    return ")
    assert method.endswith("async def other(self, number_1):\n    yield number_1\n")
    whole = texts["m00.py:5"].document.text
    assert whole.startswith("def first(a, b=(1, 2)):\n") and "\n  something that" in whole and "class Thing:" in whole
    for text in texts.values():
        assert text.is_whole
        first, *_ = ast.parse(text.document.text).body
        assert isinstance(first, ast.FunctionDef | ast.AsyncFunctionDef)
    (cut,) = draw_functions(documents[:1], FunctionOptions(3, 40, seed=2))[:1]
    assert not cut.is_whole and cut.document.text.endswith("\n") and len(cut.document.text) <= 40
    with pytest.raises(DataError, match="the documents have only 6"):
        draw_functions(documents, FunctionOptions(7, 100))


def test_code_has_neither_comments_nor_docstrings() -> None:
    text = '''"""Module."""
# a comment
def f(a):  # why
    """Doc
    string."""
    # alone
    b = "# no comment"  # but this
    return b


def g():
    """All there is."""

class A:
    "one line"; x = 1
'''
    code = "".join(code_lines(text))
    assert (
        code
        == '''def f(a):
    b = "# no comment"
    return b


def g():
    """All there is."""

class A:
    "one line"; x = 1
'''
    )
    (found,) = draw_functions([Document("a.py", text)], FunctionOptions(2, 60, seed=1), code_only=True)[:1]
    assert found.document.text.startswith("def f(a):\n    b = ")


def test_functions_of_other_line_ends_and_of_files_that_do_not_parse() -> None:
    crlf = Document("a.py", "class A:\r\n    def f(self):\r\n        '''\x0c\x1c'''\r\n        return 1\r\n")
    broken = Document("b.py", "def f(:\n    pass\n")
    (text,) = draw_functions([crlf, broken], FunctionOptions(1, 1000))
    assert text.document.text == "def f(self):\r\n    '''\x0c\x1c'''\r\n    return 1\r\n"


def test_half_of_the_headers_are_encoded_as_prompts_are(tmp_path: Path, corpus: Corpus) -> None:
    tokens = 400  # enough for the colon and the line end to become one token
    data = prepare(corpus, tmp_path / "data", tokens, ranks=Ranks("reference"), held_out_share=0.3)
    options = FunctionOptions(20, 120)
    shards = [write_functions(tmp_path / form, data, options, form) for form in ("functions", "headers")]
    plain, split = ([s.document(i).tolist() for i in range(s.info.num_documents)] for s in shards)
    assert len(plain) == len(split) == data.train.info.num_documents + 20
    texts = [data.tokenizer.decode(ids) for ids in plain]
    assert texts == [data.tokenizer.decode(ids) for ids in split]
    differ = [i for i, (a, b) in enumerate(zip(plain, split, strict=True)) if a != b]
    assert differ and all((i - data.train.info.num_documents) % 2 == 0 for i in differ)
    for i in differ:
        prompt = data.tokenizer.encode(texts[i].partition(":\n")[0] + ":").ids
        assert split[i][: len(prompt)] == prompt != plain[i][: len(prompt)]
        assert (split[i][-1] == 0) == (plain[i][-1] == 0)


def test_prompts_are_pieces_of_documents(tmp_path: Path, corpus: Corpus) -> None:
    from ridgeline.train import train_bpe, write_shard

    tokenizer = train_bpe([d.text for d in corpus.documents], 300)
    shard = write_shard(tmp_path / "shard", corpus.documents, tokenizer, "x")
    prompts = list(draw_prompts(shard, ContinuationOptions(20, 2, 6, 12)))
    assert prompts == list(draw_prompts(shard, ContinuationOptions(20, 2, 6, 12)))
    text = "".join(d.text for d in corpus.documents)
    for ids in prompts:
        assert ids[0] == 0 and 3 <= len(ids) <= 7
        assert tokenizer.decode(ids[1:]).strip("\ufffd") in text
