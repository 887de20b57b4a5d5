"""Vocabularies, token shards and batches: exact text, no incomplete files, every token of every epoch once."""

from __future__ import annotations

import functools
import json
import math
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import models, pre_tokenizers

from ridgeline.errors import DataError, RequestError
from ridgeline.train.data.batches import NO_TARGET, Batch, Batches, _mix
from ridgeline.train.data.corpus import Document
from ridgeline.train.data.shards import Shard, ShardInfo, write_shard
from ridgeline.train.data.vocabulary import END_OF_TEXT, tokenizer_hash, train_bpe

TEXTS = [
    "def area(radius, height=1.0):\n        return 3.14159 * radius ** 2\n\n\nprint(area(2024))\n",
    "class Area:\n    def area(self):\n        return self.radius  # größe\n",
    "It's one of the texts that return to the radius, the height and the area.\r\n",
]


@functools.cache
def small() -> tokenizers.Tokenizer:
    return train_bpe(TEXTS * 4, 340)


# ---- vocabularies


@settings(max_examples=60, deadline=None)
@given(st.text(st.characters(exclude_categories=["Cs"]), max_size=60) | st.sampled_from(TEXTS))
def test_every_text_survives_a_round_trip(text: str) -> None:
    ids = small().encode(text, add_special_tokens=False).ids
    if END_OF_TEXT not in text:
        assert small().decode(ids) == text
    assert small().encode(text).ids == [0, *ids]


def test_pieces_of_code() -> None:
    def pieces(text: str) -> list[str]:
        pre: Any = small().pre_tokenizer
        return [text[a:b] for _, (a, b) in pre.pre_tokenize_str(text)]

    assert pieces("x2024 = f(1.5)\n") == ["x", "2", "0", "2", "4", " =", " f", "(", "1", ".", "5", ")\n"]
    assert pieces("  if a_b:\n\n\t\t        return  1") == [
        *[" ", " if", " a", "_b", ":\n\n", "\t\t       ", " return", " ", " ", "1"]
    ]
    assert small().encode("        return", add_special_tokens=False).tokens == ["ĠĠĠĠĠĠĠ", "Ġreturn"]


def test_the_same_texts_give_the_same_vocabulary() -> None:
    again = train_bpe(iter(TEXTS * 4), 340)
    assert tokenizer_hash(again) == tokenizer_hash(small()) != tokenizer_hash(train_bpe(TEXTS * 4, 339))
    assert small().get_vocab_size() == 340
    assert small().token_to_id(END_OF_TEXT) == 0


def test_sizes_of_vocabularies() -> None:
    with pytest.raises(RequestError, match="256 tokens has no room for 256 bytes and 1 special tokens; use 257"):
        train_bpe(TEXTS, 256)
    assert train_bpe(TEXTS, 257).get_vocab_size() == 257
    assert train_bpe(["seen once"], 1000).get_vocab_size() == 257
    two = train_bpe(TEXTS, 258, ["<s>", "<pad>"])
    assert two.encode("a").tokens == ["<s>", "a"]
    for nothing in ([], ["", ""]):
        with pytest.raises(DataError, match="no text"):
            train_bpe(nothing, 300)


# ---- shards


def documents() -> list[Document]:
    return [Document(str(i), text) for i, text in enumerate([*TEXTS, f"a{END_OF_TEXT}b", "x"])]


def test_a_shard_holds_the_documents_ids(tmp_path: Path) -> None:
    told: list[tuple[int, int]] = []
    shard = write_shard(tmp_path / "new" / "shard", documents(), small(), "c0", lambda *done: told.append(done))
    assert told == [(5, 5)]
    assert shard.tokens.dtype == np.uint16
    assert not shard.tokens.flags.writeable
    for index, document in enumerate(documents()):
        ids = shard.document(index).tolist()
        assert ids[0] == ids[-1] == 0
        assert 0 not in ids[1:-1]
        assert small().decode(ids[1:-1]) == document.text
        if index < len(TEXTS):
            assert ids[:-1] == small().encode(document.text).ids
    info = json.loads((tmp_path / "new" / "shard" / "shard.json").read_text())
    assert info == {
        "num_documents": 5,
        "num_tokens": len(shard.tokens),
        "num_bytes": sum(len(d.text.encode()) for d in documents()),
        "vocab_size": 340,
        "dtype": "uint16",
        "end_of_text_id": 0,
        "tokenizer_hash": tokenizer_hash(small()),
        "corpus_hash": "c0",
    }
    assert [p.name for p in (tmp_path / "new").iterdir()] == ["shard"]
    shard.check_tokenizer(small())
    with pytest.raises(DataError, match="another tokenizer"):
        shard.check_tokenizer(train_bpe(TEXTS, 300))


def words(size: int) -> tokenizers.Tokenizer:
    backend = tokenizers.Tokenizer(models.WordLevel({**{str(i): i for i in range(size - 1)}, END_OF_TEXT: size - 1}))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.add_special_tokens([END_OF_TEXT])
    return backend


@pytest.mark.parametrize(("size", "dtype"), [(65_536, np.uint16), (65_537, np.uint32)])
def test_ids_are_as_wide_as_the_vocabulary_needs(tmp_path: Path, size: int, dtype: type) -> None:
    backend = words(size)
    backend.enable_truncation(2)
    backend.enable_padding(length=9)
    shard = write_shard(tmp_path / "shard", [Document("a", f"1 2 {size - 2}")], backend, "")
    assert shard.tokens.dtype == dtype
    assert shard.tokens.tolist() == [size - 1, 1, 2, size - 2, size - 1]


def test_long_corpora_are_encoded_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = write_shard(tmp_path / "whole", documents(), small(), "")
    monkeypatch.setattr("ridgeline.train.data.shards._ENCODED_TOGETHER", 80)
    told: list[tuple[int, int]] = []
    parts = write_shard(tmp_path / "parts", documents(), small(), "", lambda *done: told.append(done))
    assert told == [(1, 5), (3, 5), (5, 5)]
    assert np.array_equal(parts.tokens, whole.tokens)
    assert np.array_equal(parts.offsets, whole.offsets)


def test_no_incomplete_file_stays(tmp_path: Path) -> None:
    def fail(done: int, total: int) -> None:
        assert len(list(tmp_path.iterdir())) == 1  # there is a file to remove
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_shard(tmp_path / "shard", documents(), small(), "", fail)
    assert not list(tmp_path.iterdir())
    write_shard(tmp_path / "shard", documents(), small(), "")
    for wanted, given_documents, backend in (
        ("exists", documents(), small()),
        ("no document", [], small()),
        (r"no <\|endoftext\|>", documents(), train_bpe(TEXTS, 300, ["<s>"])),
    ):
        with pytest.raises(DataError, match=wanted):
            write_shard(tmp_path / ("shard" if wanted == "exists" else "other"), given_documents, backend, "")
    assert [p.name for p in tmp_path.iterdir()] == ["shard"]


def shorten(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-2])


def edit_json(**changes: Any) -> Callable[[Path], None]:
    return lambda path: path.write_text(json.dumps({**json.loads(path.read_text()), **changes})) and None


def offsets_of(change: Callable[[Any], Any]) -> Callable[[Path], None]:
    return lambda path: np.save(path, change(np.load(path)))


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        *[(name, Path.unlink) for name in ("tokens.bin", "offsets.npy", "shard.json")],
        *[(name, shorten) for name in ("tokens.bin", "offsets.npy", "shard.json")],
        ("tokens.bin", lambda path: path.write_bytes(b"")),
        ("offsets.npy", lambda path: path.write_bytes(b"")),
        ("offsets.npy", offsets_of(lambda x: x[0])),
        ("offsets.npy", offsets_of(lambda x: x[None])),
        ("offsets.npy", offsets_of(lambda x: x[::-1])),
        ("offsets.npy", offsets_of(lambda x: x + 1)),
        ("offsets.npy", offsets_of(lambda x: x.astype(np.float64))),
        ("shard.json", edit_json(num_tokens=3)),
        ("shard.json", edit_json(num_documents=3)),
        ("shard.json", edit_json(dtype="uint32")),
        ("shard.json", edit_json(dtype="int8")),
        ("shard.json", edit_json(extra=1)),
        ("shard.json", lambda path: path.write_text("[]")),
    ],
)
def test_a_damaged_shard_is_refused(tmp_path: Path, name: str, damage: Callable[[Path], Any]) -> None:
    write_shard(tmp_path / "shard", documents(), small(), "")
    damage(tmp_path / "shard" / name)
    with pytest.raises(DataError, match="write it again"):
        Shard.open(tmp_path / "shard")


# ---- batches


def numbered(lengths: list[int]) -> Shard:
    """Return a shard in which every token is its own index."""
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    tokens = np.arange(offsets[-1], dtype=np.uint32)
    info = ShardInfo(len(lengths), len(tokens), 0, len(tokens), "uint32", 0, "", "")
    return Shard(tokens, offsets, info)


def check_segments(batch: Batch, shard: Shard, context: int) -> None:
    """Check that every segment is a run of one document that begins where the document or the row begins."""
    starts, ends = set(shard.offsets[:-1].tolist()), set((shard.offsets[1:] - 1).tolist())
    assert sum(batch.lengths) == len(batch.token_ids) == len(batch.targets)
    assert len(batch.token_ids) % context == 0
    at = 0
    for length in batch.lengths:
        ids = batch.token_ids[at : at + length].tolist()
        assert at % context == 0 or ids[0] in starts
        assert at // context == (at + length - 1) // context
        assert ids == list(range(ids[0], ids[0] + length))
        assert not ends & set(ids[:-1])
        assert batch.positions[at : at + length].tolist() == list(range(length))
        assert batch.targets[at : at + length].tolist() == [NO_TARGET if i in ends else i + 1 for i in ids]
        at += length


@settings(max_examples=80, deadline=None)
@given(
    lengths=st.lists(st.integers(2, 30), min_size=1, max_size=12),
    context=st.integers(1, 40),
    rows=st.integers(1, 3),
    world_size=st.integers(1, 3),
    seed=st.integers(0, 2**64 - 1),
)
def test_every_token_of_every_epoch_once(
    lengths: list[int], context: int, rows: int, world_size: int, seed: int
) -> None:
    shard = numbered(lengths)
    num_tokens, batch_tokens = sum(lengths), context * rows * world_size
    whole = Batches(shard, context, batch_tokens, seed)
    num_steps = num_tokens // math.gcd(num_tokens, batch_tokens)  # the steps end where an epoch ends
    used = np.zeros(num_tokens, int)
    in_rows = []
    for step in range(min(num_steps, 40)):
        batch = whole.batch(step)
        check_segments(batch, shard, context)
        used += np.bincount(batch.token_ids, minlength=num_tokens)
        in_rows.append(batch.token_ids)
        ranks = [Batches(shard, context, batch_tokens, seed, rank=r, world_size=world_size) for r in range(world_size)]
        parts = [rank.batch(step) for rank in ranks]
        assert np.array_equal(np.concatenate([p.token_ids for p in parts]), batch.token_ids)
        assert sum((p.lengths for p in parts), ()) == batch.lengths
    if num_steps <= 40:
        assert set(used) == {num_steps * batch_tokens // num_tokens}
    first_epoch = np.concatenate(in_rows)[: -(-num_tokens // context) * context]
    if len(first_epoch) >= num_tokens:  # tokens beyond the epoch are the beginning of the next one
        assert set(first_epoch.tolist()) == set(range(num_tokens))
    if num_tokens % context == 0 and len(first_epoch) == num_tokens:
        assert len(set(first_epoch.tolist())) == num_tokens


@settings(max_examples=30, deadline=None)
@given(
    lengths=st.lists(st.integers(2, 30), min_size=1, max_size=12),
    steps=st.lists(st.integers(0, 60), min_size=1, max_size=6),
    seed=st.integers(0, 99),
)
def test_a_step_does_not_depend_on_the_time_of_the_call(lengths: list[int], steps: list[int], seed: int) -> None:
    shard = numbered(lengths)
    going_on = Batches(shard, 8, 16, seed)
    expected = [going_on.batch(step) for step in range(61)]
    resumed = Batches(shard, 8, 16, seed)
    for step in steps:
        one, other = expected[step], resumed.batch(step)
        for name in ("token_ids", "targets", "positions"):
            assert np.array_equal(getattr(one, name), getattr(other, name))
        assert one.lengths == other.lengths
        parts = resumed.micro_batches(step, 8)
        assert len(parts) == 2
        assert np.array_equal(np.concatenate([p.token_ids for p in parts]), one.token_ids)
        assert np.array_equal(np.concatenate([p.targets for p in parts]), one.targets)
        assert sum((p.lengths for p in parts), ()) == one.lengths


def test_the_order_is_random_and_the_same_with_every_numpy() -> None:
    shard = numbered([7] * 100 + [1300])
    batches = Batches(shard, 20, 100, seed=1)
    epochs = [np.concatenate([batches.batch(s).token_ids for s in range(20 * e, 20 * e + 20)]) for e in range(3)]
    other = np.concatenate([Batches(shard, 20, 100, seed=2).batch(s).token_ids for s in range(20)])
    assert sorted(epochs[0]) == sorted(epochs[1]) == sorted(epochs[2]) == sorted(other) == list(range(2000))
    orders = [*epochs, other]
    assert all((orders[a] == orders[b]).mean() < 0.05 for a in range(4) for b in range(a))
    long = np.flatnonzero(epochs[0][::20] >= 700)  # rows of the long document: two thirds of all
    assert len(long) > 60
    following = epochs[0][19:-1:20] + 1 == epochs[0][20::20]
    assert following.mean() < 0.1  # rows of one document rarely follow each other
    assert _mix(np.array([0, 1234567], np.uint64)).tolist() == [
        0xE220A8397B1DCDAF,
        6457827717110365317,
    ]  # published values
    pinned = Batches(numbered([3, 5, 2, 7, 4, 6, 9, 2, 8, 2]), 12, 12, seed=2024)
    assert [pinned.batch(s).token_ids[0] for s in range(8)] == [27, 43, 5, 24, 4, 21, 32, 39]
    assert [len(pinned.batch(s).lengths) for s in range(8)] == [2, 5, 3, 3, 3, 4, 4, 2]


def test_memory_does_not_grow_with_the_tokens() -> None:
    lengths = [40_000] * 100
    shard = numbered(lengths)  # 4 million tokens
    tracemalloc.start()
    try:
        Batches(shard, 1024, 4096).batch(50)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 1_000_000


def test_batches_that_cannot_be() -> None:
    shard = numbered([5, 5])
    for context, batch_tokens, world_size in ((0, 4, 1), (4, 0, 1), (4, 6, 1), (4, 4, 2)):
        with pytest.raises(RequestError, match="multiple of" if batch_tokens % 4 or world_size > 1 else "at least 1"):
            Batches(shard, context, batch_tokens, world_size=world_size)
    for seed in (-1, 2**64):
        with pytest.raises(RequestError, match="seed"):
            Batches(shard, 4, 4, seed)
    with pytest.raises(ValueError, match="rank is 2"):
        Batches(shard, 4, 8, rank=2, world_size=2)
    with pytest.raises(ValueError, match="step is -1"):
        Batches(shard, 4, 8).batch(-1)
    for micro_tokens in (0, 2, 16, 12):
        with pytest.raises(RequestError, match="micro-batches"):
            Batches(shard, 4, 8).micro_batches(0, micro_tokens)
