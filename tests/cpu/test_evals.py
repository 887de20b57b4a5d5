"""Perplexity, bits per byte and divergence against transformers, torch and closed forms; the command `evaluate`."""

from __future__ import annotations

import dataclasses
import json
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import numpy as np
import pytest
import tokenizers
import torch
import transformers

from oracle.build import build, oracle_logits
from oracle.case import VOCAB
from oracle.data import shared_data
from oracle.families import CASES
from ridgeline import LLM
from ridgeline.cli.main import main
from ridgeline.errors import RequestError
from ridgeline.evals import (
    Document,
    Estimate,
    Proportion,
    SlidingContext,
    check_same_tokens,
    encode_texts,
    measure_divergence,
    measure_perplexity,
    read_texts,
)
from ridgeline.evals.documents import Text, encode_text
from ridgeline.evals.scores import logprob_blocks
from ridgeline.evals.windows import batches
from ridgeline.load.tokenizer import Tokenizer
from ridgeline.runtime.load import LoadedModel

TOLERANCE = 1e-4
LENGTHS = (150, 1, 2, 63, 64, 65, 300)  # tokens of documents; the longest exceeds the models' context
CONTEXT, STRIDE = 64, 24
WORDS = "Zoë ate naïve 日本語 🎈s — “once”, \tand\r\nthen"
Done = CompletedProcess[str]
Run = Callable[..., Done]


@dataclasses.dataclass(frozen=True)
class Pair:
    """One model, loaded by Ridgeline and by transformers."""

    folder: Path
    loaded: LoadedModel
    oracle: torch.nn.Module


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Pair]:
    """Return random models of two families with one vocabulary and a tokenizer of bytes, and one model whose head is
    zero.
    """
    pairs = {}
    for name in ("gpt2", "gemma2", "llama"):
        folder = tmp_path_factory.mktemp(name)
        oracle = build(CASES[name], folder)
        if name == "llama":
            oracle.lm_head.weight.data.zero_()
            oracle.save_pretrained(folder)
        if name != "gemma2":
            bytes_tokenizer("<s> $A", folder)
        pairs[name] = Pair(folder, LLM(str(folder), cache="off", skip_tokenizer_init=True).loaded, oracle)
    return pairs


@pytest.fixture(scope="module")
def stories() -> Pair:
    folder = shared_data() / "models" / "stories260K"
    oracle = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
    return Pair(folder, LLM(str(folder), cache="off").loaded, oracle)


def bytes_tokenizer(template: str | None, folder: Path | None = None, *, shift: int = 0) -> Tokenizer:
    """Return a tokenizer of 256 bytes and <s>. template: tokens around a text. shift: use other ids for the bytes."""
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    vocab = {character: 1 + i for i, character in enumerate(alphabet[shift:] + alphabet[:shift])}
    backend = tokenizers.Tokenizer(tokenizers.models.BPE({"<s>": 0} | vocab, []))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    backend.add_special_tokens(["<s>"])
    if template:
        backend.post_processor = tokenizers.processors.TemplateProcessing(template, special_tokens=[("<s>", 0)])
    if folder is not None:
        backend.save(str(folder / "tokenizer.json"))
        (folder / "tokenizer_config.json").write_text('{"bos_token": "<s>"}')
    return Tokenizer(backend, special_tokens={"bos_token": "<s>"})


def random_documents(vocab_size: int = VOCAB) -> list[Document]:
    rng = np.random.default_rng(3)
    return [Document(rng.integers(3, vocab_size, n).tolist(), num_bytes=2 * n) for n in LENGTHS]


def recipe(model: torch.nn.Module, ids: Sequence[int], max_length: int, stride: int) -> tuple[float, int]:
    """Return the loss of a document in nats, and its number of tokens.

    This is the recipe in transformers' documentation ("Perplexity of fixed-length models"), except that its count of
    tokens is one too low in all windows but the first.
    """
    input_ids = torch.tensor([list(ids)])
    seq_len, prev_end_loc, nll, count = input_ids.size(1), 0, 0.0, 0
    for begin_loc in range(0, seq_len, stride):
        end_loc = min(begin_loc + max_length, seq_len)
        trg_len = end_loc - prev_end_loc
        window = input_ids[:, begin_loc:end_loc]
        target_ids = window.clone()
        target_ids[:, :-trg_len] = -100
        valid = int((target_ids[:, 1:] != -100).sum())
        if valid:
            with torch.no_grad():
                nll += float(model(window, labels=target_ids).loss) * valid
            count += valid
        prev_end_loc = end_loc
        if end_loc == seq_len:
            break
    return nll, count


def recipe_of_all(model: torch.nn.Module, documents: Sequence[Sequence[int]], *window: int) -> tuple[float, int]:
    nll, count = zip(*(recipe(model, ids, *window) for ids in documents), strict=True)
    return sum(nll), sum(count)


# ---- against transformers -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["gpt2", "gemma2"])
@pytest.mark.parametrize(("context", "stride"), [(CONTEXT, STRIDE), (256, 255), (7, 1), (2, 1)])
def test_the_recipe_of_transformers(name: str, context: int, stride: int, tiny: dict[str, Pair]) -> None:
    documents = random_documents()
    if context < 10:
        documents = documents[1:4]
    nll, count = recipe_of_all(tiny[name].oracle, [d.token_ids for d in documents], context, stride)
    seen: list[int] = []
    found = measure_perplexity(tiny[name].loaded, documents, context=context, stride=stride, on_tokens=seen.append)
    assert found.num_tokens == count == sum(seen) == sum(len(d.token_ids) - 1 for d in documents)
    assert found.num_documents == len(documents) - 1  # a document of a single token has none to score
    assert abs(found.nll_per_token.value - nll / count) < TOLERANCE
    assert found.perplexity.value == pytest.approx(math.exp(nll / count), rel=TOLERANCE)
    num_bytes = 2 * sum(len(d.token_ids) for d in documents if len(d.token_ids) > 1)
    assert found.bits_per_byte is not None
    assert abs(found.bits_per_byte.value - nll / math.log(2) / num_bytes) < TOLERANCE
    assert (found.num_bytes, found.context, found.stride) == (num_bytes, context, stride)


def test_a_real_model_and_text(stories: Pair) -> None:
    """Compare tokens, windows and bytes, from a file to bits per byte, with transformers' own tokenizer."""
    texts = [
        (shared_data() / "text" / name).read_text(encoding="utf-8")[:n]
        for name, n in (("tinystories.txt", 3000), ("wikitext2_raw_test.txt", 1500))
    ]
    theirs = transformers.AutoTokenizer.from_pretrained(stories.folder)
    ids = [theirs(text)["input_ids"] for text in texts]
    documents = encode_texts([Text("", text) for text in texts], Tokenizer.from_folder(stories.folder))
    assert [list(d.token_ids) for d in documents] == ids
    assert {d.token_ids[0] for d in documents} == {1}  # a BOS, so the whole text is scored
    nll, count = recipe_of_all(stories.oracle, ids, 128, 50)
    found = measure_perplexity(stories.loaded, documents, context=128, stride=50)
    assert found.num_tokens == count
    assert found.num_bytes == sum(len(text.encode()) for text in texts)
    assert abs(found.nll_per_token.value - nll / count) < TOLERANCE
    assert abs(found.perplexity.value - math.exp(nll / count)) < TOLERANCE * math.exp(nll / count)
    assert found.bits_per_byte is not None
    assert abs(found.bits_per_byte.value - nll / found.num_bytes / math.log(2)) < TOLERANCE
    whole = measure_perplexity(stories.loaded, documents)  # the default: the model's context, and half of it as stride
    assert (whole.context, whole.stride) == (512, 256)
    nll, count = recipe_of_all(stories.oracle, ids, 512, 256)
    assert abs(whole.nll_per_token.value - nll / count) < TOLERANCE
    assert whole.num_computed_tokens < sum(2 * len(i) for i in ids)


def test_divergence_against_torch(tiny: dict[str, Pair]) -> None:
    documents = random_documents()
    rows: list[list[torch.Tensor]] = [[], []]  # logits of the predictions, and the tokens that followed
    targets: list[int] = []
    for ids in (d.token_ids for d in documents):
        for start, first, stop in SlidingContext(CONTEXT, STRIDE).windows(len(ids)):
            targets += ids[first:stop]
            for row, name in zip(rows, ("gpt2", "gemma2"), strict=True):
                (logits,) = oracle_logits(tiny[name].oracle, [ids[start:stop]])
                row.append(torch.from_numpy(logits)[first - start - 1 : stop - start - 1].double())
    p, q = (torch.cat(row).log_softmax(1) for row in rows)
    kl = torch.nn.functional.kl_div(q, p, reduction="none", log_target=True).sum(1)
    each = torch.arange(len(targets))
    difference = (p[each, targets] - q[each, targets]).mean()
    same = (p.argmax(1) == q.argmax(1)).sum()

    found = measure_divergence(
        tiny["gpt2"].loaded, tiny["gemma2"].loaded, documents, context=CONTEXT, stride=STRIDE, batch_tokens=200
    )
    assert abs(found.kl.value - float(kl.mean())) < TOLERANCE
    assert (
        abs(found.kl_median - float(kl.median(0).values)) < 10 * TOLERANCE
    )  # torch takes one of the two middle values
    assert abs(found.kl_p99 - float(kl.quantile(0.99))) < TOLERANCE
    assert found.top1_agreement == Proportion.of(int(same), len(targets))
    assert abs(found.nll_difference.value - float(difference)) < TOLERANCE
    for alone, name in ((found.original, "gpt2"), (found.other, "gemma2")):
        expected = measure_perplexity(tiny[name].loaded, documents, context=CONTEXT, stride=STRIDE)
        assert alone.nll_per_token.value == pytest.approx(expected.nll_per_token.value, abs=1e-6)
        assert alone.num_computed_tokens == expected.num_computed_tokens
    assert found.kl.value == pytest.approx(float(kl.mean()), abs=TOLERANCE)
    assert json.loads(json.dumps(found.to_json(), allow_nan=False))["top1_agreement_95"][0] < int(same) / len(targets)


# ---- closed forms ---------------------------------------------------------------------------------------------------


def test_a_model_that_knows_nothing(tiny: dict[str, Pair]) -> None:
    """Every token has the probability 1 / vocabulary; with the tokenizer of bytes, a token is a byte."""
    documents = encode_texts([Text("", WORDS * 5), Text("", "日")], bytes_tokenizer("<s> $A"))
    found = measure_perplexity(tiny["llama"].loaded, documents, context=CONTEXT)
    assert found.perplexity.value == pytest.approx(VOCAB, rel=1e-12)
    assert found.num_tokens == found.num_bytes == len((WORDS * 5 + "日").encode())
    assert found.bits_per_byte is not None
    assert found.bits_per_byte.value == pytest.approx(math.log2(VOCAB), rel=1e-12)
    assert found.perplexity.standard_error == pytest.approx(0, abs=1e-9)
    assert found.stride == CONTEXT // 2


def test_a_model_beside_itself(tiny: dict[str, Pair]) -> None:
    loaded = tiny["gpt2"].loaded
    found = measure_divergence(loaded, loaded, random_documents(), context=CONTEXT)
    assert (found.kl, found.nll_difference) == (Estimate(0, 0), Estimate(0, 0))
    assert (found.kl_median, found.kl_p99, found.top1_agreement.value, found.top1_agreement.high) == (0, 0, 1, 1)


def test_divergence_from_a_model_that_knows_nothing(tiny: dict[str, Pair]) -> None:
    """KL(uniform || q) is the mean of -log q minus log V, and KL(q || uniform) is log V minus the entropy of q."""
    ids = random_documents()[3].token_ids
    (logits,) = oracle_logits(tiny["gpt2"].oracle, [ids])
    logq = torch.from_numpy(logits[:-1]).double().log_softmax(1)
    from_uniform = float(-logq.mean() - math.log(VOCAB))
    to_uniform = float(math.log(VOCAB) + (logq.exp() * logq).sum(1).mean())
    models = tiny["llama"].loaded, tiny["gpt2"].loaded
    assert measure_divergence(*models, [Document(ids)]).kl.value == pytest.approx(from_uniform, abs=TOLERANCE)
    assert measure_divergence(*models[::-1], [Document(ids)]).kl.value == pytest.approx(to_uniform, abs=TOLERANCE)
    assert abs(from_uniform - to_uniform) > 0.1


# ---- batches, blocks ------------------------------------------------------------------------------------------------


def test_the_batch_changes_nothing(tiny: dict[str, Pair]) -> None:
    """A token's loss does not depend on the other windows of its batch."""
    documents, loaded = random_documents(), tiny["gemma2"].loaded
    alone, some, all_ = (
        measure_perplexity(loaded, documents, context=CONTEXT, stride=STRIDE, batch_tokens=n) for n in (1, 200, 10**6)
    )
    assert alone.nll_per_token.value == pytest.approx(some.nll_per_token.value, abs=1e-6)
    assert alone.nll_per_token.value == pytest.approx(all_.nll_per_token.value, abs=1e-6)


def test_blocks_change_nothing(tiny: dict[str, Pair]) -> None:
    loaded = tiny["gpt2"].loaded
    (batch,) = batches(random_documents()[:4], SlidingContext(CONTEXT, STRIDE))
    (whole,) = logprob_blocks(loaded, batch)
    assert whole.shape == (len(batch.rows), VOCAB)
    assert whole.dtype == np.float64
    np.testing.assert_allclose(np.exp(whole).sum(1), 1, rtol=1e-12)
    for head_block, block, rows in ((VOCAB * 10, VOCAB * 3, 3), (1, 1, 1), (VOCAB * 4, VOCAB * 50, 4)):
        blocks = list(logprob_blocks(loaded, batch, head_block, block))
        assert max(map(len, blocks)) == rows
        np.testing.assert_allclose(np.concatenate(blocks), whole, atol=1e-5)


# ---- documents ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("template", "text", "unscored", "scored", "num_bytes"),
    [
        ("<s> $A", "日本", 1, 6, 6),  # BOS: the whole text is scored
        ("<s> $A", "<s>ab", 1, 2, 5),  # the text contains it: still one BOS
        ("<s> <s> $A", "ab", 2, 2, 2),  # GLM has two leading tokens
        ("<s> $A <s>", "ab", 1, 3, 2),  # an end token is scored if the tokenizer adds one
        (None, "abc", 1, 2, 2),  # no BOS: nothing predicts the first token
        (None, "日本", 1, 5, 6),  # the scored tokens complete a character whose first byte is not scored
        (None, "a日", 1, 3, 3),
        (None, "a", 1, 0, 0),
    ],
)
def test_the_tokens_of_a_text_that_are_scored(
    template: str | None, text: str, unscored: int, scored: int, num_bytes: int
) -> None:
    found = encode_text(text, bytes_tokenizer(template))
    assert (found.num_unscored, found.num_scored, found.num_bytes) == (unscored, scored, num_bytes)


def test_a_limit_of_tokens() -> None:
    tokenizer = bytes_tokenizer("<s> $A")
    texts = [Text("", "abcd"), Text("", "日本語")]
    for limit, scored, num_bytes in ((100, [4, 9], [4, 9]), (10, [4, 4], [4, 3]), (6, [4], [4]), (3, [2], [2])):
        found = encode_texts(texts, tokenizer, limit)
        assert [d.num_scored for d in found] == scored
        assert [d.num_bytes for d in found] == num_bytes
        assert sum(len(d.token_ids) for d in found) <= limit
    assert [d.num_bytes for d in encode_texts(texts, bytes_tokenizer(None), 3)] == [2]

    def eleven() -> Iterator[Text]:
        yield from [Text("", "abc")] * 11
        raise AssertionError("more is read than is needed")

    assert len(encode_texts(eleven(), tokenizer, 41)) == 10  # only a BOS of the last text remains, which is not scored


def test_files_folders_and_rows(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    (tmp_path / ".git").mkdir()
    for name, data in {
        "z.txt": WORDS.encode(), "b/a.py": b"\xef\xbb\xbfx = 1\r\n", "b/empty.py": b"", "c.bin": b"\xff\xfe",
        ".h": b"h", ".git/x": b"x",
        "b/rows.jsonl": b'{"text": "one\xe2\x80\xa8", "id": 3}\n\n{"text": ""}\r\n{"text": "two"}',
    }.items():  # fmt: skip
        (tmp_path / name).write_bytes(data)
    skipped: list[str] = []
    found = list(read_texts([tmp_path, tmp_path / "z.txt"], skipped.append))
    assert [(Path(name).relative_to(tmp_path).as_posix(), text) for name, text in found] == [
        ("b/a.py", "x = 1\r\n"), ("b/rows.jsonl:1", "one\u2028"), ("b/rows.jsonl:4", "two"), ("z.txt", WORDS),
        ("z.txt", WORDS),
    ]  # fmt: skip
    assert [line.removeprefix(f"{tmp_path}/") for line in skipped] == [
        "b/empty.py is empty",
        "b/rows.jsonl:3 has an empty text",
        "c.bin is not a text: byte 0 is not UTF-8",
    ]


def test_measurements_that_are_refused(tiny: dict[str, Pair], tmp_path: Path) -> None:
    loaded = tiny["gpt2"].loaded
    for documents, match in (
        ([Document([5])], "nothing to score"),
        ([Document([5, VOCAB], name="x")], "x: token id 257"),
    ):
        with pytest.raises(RequestError, match=match):
            measure_perplexity(loaded, documents)
    with pytest.raises(ValueError, match="nothing predicts the first token"):
        Document([1, 2], num_unscored=0)
    with pytest.raises(RequestError, match="nothing to score"):
        encode_texts([Text("", "a")], bytes_tokenizer(None))
    with pytest.raises(RequestError, match=r"a\.jsonl:1: .*lone surrogate"):
        encode_texts([Text("a.jsonl:1", "\ud800")], bytes_tokenizer(None))
    documents = encode_texts([Text("", "abc")], bytes_tokenizer(None))
    check_same_tokens(documents, bytes_tokenizer(None), bytes_tokenizer("<s> $A"))
    with pytest.raises(RequestError, match=r"token \d+ is 'a' in one model's vocabulary and '.' in the other's"):
        check_same_tokens(documents, bytes_tokenizer(None), bytes_tokenizer(None, shift=1))

    model = build(CASES["gpt2"])
    model.transformer.ln_f.weight.data[3] = math.nan
    model.save_pretrained(tmp_path)
    broken = LLM(str(tmp_path), cache="off").loaded
    with pytest.raises(RequestError, match="NaN"):
        measure_perplexity(broken, [Document([5, 6])])
    without_text = measure_perplexity(loaded, [Document([5, 6])]).to_json()
    assert (without_text["bits_per_byte"], without_text["perplexity_standard_error"]) == (None, None)


# ---- the command ----------------------------------------------------------------------------------------------------


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    monkeypatch.delenv("COLUMNS", raising=False)

    def call(*args: object) -> Done:
        monkeypatch.setattr(sys, "argv", ["ridgeline", "evaluate", *map(str, args)])
        capsys.readouterr()
        with pytest.raises(SystemExit) as caught:
            main()
        captured = capsys.readouterr()
        return Done(args, int(caught.value.code or 0), captured.out, captured.err)

    return call


@pytest.fixture
def words(tmp_path: Path) -> Path:
    path = tmp_path / "words.txt"
    path.write_bytes((WORDS * 8).encode())
    return path


def test_the_command(run: Run, words: Path, tiny: dict[str, Pair]) -> None:
    (words.parent / "more").mkdir()
    (words.parent / "more" / "a.jsonl").write_text('{"text": "Once upon a time"}\n{"text": ""}\n')
    model = tiny["gpt2"]
    window = "--context", 40, "--stride", 30
    done = run(model.folder, "--text", words, "--text", words.parent / "more", *window, "--json")
    assert done.returncode == 0
    assert done.stderr == f"note: skipped: {words.parent}/more/a.jsonl:2 has an empty text\n"
    found: dict[str, Any] = json.loads(done.stdout)
    ids = [[0, *bytes_tokenizer(None).encode(text)] for text in (WORDS * 8, "Once upon a time")]
    nll, count = recipe_of_all(model.oracle, ids, 40, 30)
    num_bytes = len((WORDS * 8).encode()) + 16
    assert (found["num_documents"], found["num_tokens"], found["num_bytes"]) == (2, count, num_bytes)
    assert (found["context"], found["stride"], len(found["skipped"])) == (40, 30, 1)
    assert found["nll_per_token"] == pytest.approx(nll / count, abs=TOLERANCE)
    assert found["perplexity"] == pytest.approx(math.exp(nll / count), rel=TOLERANCE)
    assert found["bits_per_byte"] == pytest.approx(nll / num_bytes / math.log(2), abs=TOLERANCE)
    assert found["tokens_per_s"] == pytest.approx(count / found["seconds"])
    assert found["perplexity_standard_error"] > 0

    table = run(model.folder, "--text", words, "--limit-tokens", 50, "--speculative", "ngram")
    note = "note: --speculative ngram has no effect: evaluate scores given texts and generates none\n"
    assert (table.returncode, table.stderr) == (0, note)
    assert "49 tokens, " in table.stdout
    assert "windows of 256 tokens, 128 apart" in table.stdout
    for part in ("nll per token (nats)", "perplexity", "bits per byte", "tokens/s scored; 49 computed", "±"):
        assert part in table.stdout


def test_the_command_against_the_original(run: Run, words: Path, tiny: dict[str, Pair]) -> None:
    args = tiny["gpt2"].folder, "--text", words, "--dtype", "bfloat16", "--against"
    found = json.loads(run(*args, tiny["gpt2"].folder, "--json").stdout)
    assert 0 < found["kl"] < 0.01  # the original keeps its type
    assert found["kl_median"] <= found["kl_p99"]
    assert 0.9 < found["top1_agreement"] <= 1
    assert found["nll_difference"] == pytest.approx(found["nll_per_token"] - found["original"]["nll_per_token"])
    plain = json.loads(run(tiny["gpt2"].folder, "--text", words, "--json").stdout)
    assert found["original"]["nll_per_token"] == pytest.approx(plain["nll_per_token"], abs=1e-6)
    out = run(*args, tiny["gemma2"].folder).stdout  # it has no tokenizer of its own
    for part in ("original", "KL(original || model) (nats)", "median", "p99", "top-1 agreement", "95 %: ", "by both"):
        assert part in out


@pytest.mark.parametrize(
    ("name", "content", "options", "message"),
    [
        ("a.txt", b"", (), "a.txt is empty"),
        ("a.txt", b"ab\xff", (), "a.txt is not a text: byte 2 is not UTF-8"),
        ("b.txt", b"x", (), "cannot read {}/a.txt: No such file or directory"),
        ("a.txt", b"abc", ("--context", 20, "--stride", 30), "stride (--stride) is 30; it must be from 1 to 19"),
        ("a.txt", b"abc", ("--context", 20, "--stride", 20), "stride (--stride) is 20; it must be from 1 to 19"),
        ("a.txt", b"abc", ("--stride", 0), "stride (--stride) is 0; it must be from 1 to 255"),
        ("a.txt", b"abc", ("--context", 257), "context (--context) is 257; it must be from 2 to 256"),
        ("a.txt", b"abc", ("--context", 1), "context (--context) is 1; it must be from 2 to 256"),
        ("a.txt/x.jsonl", b'{"text": "a"}\n{"prompt": "a"}', (), 'x.jsonl:2 is not an object with a "text"'),
        ("a.txt/x.jsonl", b"{", (), "x.jsonl:1 is not valid JSON"),
        ("a.txt/.x", b"x", (), "a.txt contains no file"),
        ("a.txt/x", b"", (), "there is nothing to score"),
    ],
)
def test_bad_input_is_one_line(
    name: str, content: bytes, options: Sequence[object], message: str, run: Run, tmp_path: Path, tiny: dict[str, Pair]
) -> None:  # fmt: skip
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(content)
    done = run(tiny["gpt2"].folder, "--text", tmp_path / "a.txt", *options)
    assert (done.returncode, done.stdout) == (2, "")
    error = [line for line in done.stderr.splitlines() if not line.startswith("note: ")]
    assert len(error) == 1
    assert message.format(tmp_path) in error[0]


def test_models_that_do_not_fit(run: Run, words: Path, tiny: dict[str, Pair], stories: Pair) -> None:
    for args, message in (
        ((tiny["gemma2"].folder, "--text", words), f"{tiny['gemma2'].folder} has no tokenizer, and evaluate needs one"),
        ((stories.folder, "--text", words, "--against", tiny["gemma2"].folder), "a vocabulary of 257 tokens"),
        ((stories.folder, "--text", words, "--against", tiny["gpt2"].folder), "cannot be compared"),
    ):
        done = run(*args)
        assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
        assert message in done.stderr
