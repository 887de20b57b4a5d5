"""Encoders: hidden states and scores equal transformers', in any batch; embeddings follow the model's folder."""

from __future__ import annotations

import json
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
import torch
from safetensors.numpy import save_file

from cpu.encoder_models import CLS, add_modules, save_wordpiece, tiny_embedder, tiny_ranker, write
from oracle import encoders as oracle
from oracle.encoders import CASES, LENGTHS, texts
from ridgeline import LLM
from ridgeline.cost.memory import pass_bytes
from ridgeline.errors import CheckpointError, ConfigError, RequestError
from ridgeline.load.checkpoint import open_checkpoint
from ridgeline.load.tokenizer import Tokenizer
from ridgeline.runtime.load import LoadedModel, LoadOptions, load_model
from ridgeline.runtime.texts import Template
from ridgeline.runtime.vectors import Reader, Reading, Text
from ridgeline.settings import EngineOptions

BOUND = 1e-4
TYPES = [[i % 3 == 0 for i in range(n)] for n in LENGTHS]


def hidden(loaded: LoadedModel, ids: Any, types: Any = None) -> np.ndarray:
    step = loaded.dense_step(ids, types=types)
    return np.asarray(loaded.table.memory.get(loaded.model.hidden(loaded.model.forward(step))))


@pytest.mark.parametrize("device", ["cpu", "reference"])
@pytest.mark.parametrize("name", CASES)
def test_hidden_states_are_those_of_transformers(name: str, device: str, tmp_path: Path) -> None:
    model = oracle.build(CASES[name], tmp_path)
    loaded, ids = load_model(str(tmp_path), LoadOptions(device=device)), texts()
    found = hidden(loaded, ids)
    assert np.abs(found - np.concatenate(oracle.hidden(model, ids))).max() < BOUND
    alone = np.concatenate([hidden(loaded, [one]) for one in ids])
    assert np.array_equal(found, alone) if device == "cpu" else np.abs(found - alone).max() < 1e-6
    if CASES[name].kwargs.get("type_vocab_size", 1) > 1:
        kinds = [[int(x) for x in own] for own in TYPES]
        want = np.concatenate(oracle.hidden(model, ids, kinds))
        assert np.abs(hidden(loaded, ids, kinds) - want).max() < BOUND
        assert np.abs(found - want).max() > 0.1


@pytest.mark.parametrize(("name", "i"), [(name, i) for name, case in CASES.items() for i in range(len(case.toggles))])
def test_each_field_of_a_config_changes_hidden_states(name: str, i: int, tmp_path: Path) -> None:
    oracle.build(CASES[name], tmp_path)
    before = hidden(load_model(str(tmp_path), LoadOptions()), texts()[:2])
    config = json.loads((tmp_path / "config.json").read_text())
    write(tmp_path / "config.json", {**config, **CASES[name].toggles[i]})
    assert np.abs(hidden(load_model(str(tmp_path), LoadOptions()), texts()[:2]) - before).max() > 1e-3


@pytest.mark.parametrize("labels", [1, 3])
@pytest.mark.parametrize("name", CASES)
def test_scores_of_labels_are_those_of_transformers(name: str, labels: int, tmp_path: Path) -> None:
    model = oracle.build(CASES[name], tmp_path, labels=labels)
    loaded, ids = load_model(str(tmp_path), LoadOptions()), texts()
    found = Reader(loaded).read([Text(one) for one in ids], Reading("labels"))
    want = oracle.scores(model, ids)
    assert np.abs(found - (1 / (1 + np.exp(-want)) if labels == 1 else want)).max() < BOUND
    if labels == 1:
        config = json.loads((tmp_path / "config.json").read_text())
        write(tmp_path / "config.json", {**config, "sentence_transformers": {"activation_fn": "torch.nn.Identity"}})
        plain = Reader(load_model(str(tmp_path), LoadOptions())).read([Text(one) for one in ids], Reading("labels"))
        assert np.abs(plain - want).max() < BOUND


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_embedder(tmp_path_factory.mktemp("embedder"))


@pytest.fixture(scope="module")
def llm(folder: Path) -> LLM:
    return LLM(str(folder))


def test_embeddings_follow_the_folder(llm: LLM, folder: Path) -> None:
    model = oracle.build(CASES["bert"], folder)
    given = ["the cat sat", "dogs running fast, is the sky blue?", "a"]
    ids = [llm.encode(one) for one in given]
    want = np.stack([one.mean(0) for one in oracle.hidden(model, ids)])
    found = llm.embed(given)
    assert found.dtype == np.float32 and np.abs(found - want / np.linalg.norm(want, axis=1)[:, None]).max() < BOUND
    assert np.abs(llm.embed(given, normalize=False) - want).max() < BOUND
    assert np.array_equal(llm.embed(ids), found)
    assert np.array_equal(llm.embed(given[0], prompt_name="query"), llm.embed("the cat " + given[0]))
    first = np.stack([one[0] for one in oracle.hidden(model, ids)])
    assert np.abs(llm.embed(given, pooling="cls", normalize=False) - first).max() < BOUND
    last = np.stack([one[-1] for one in oracle.hidden(model, ids)])
    assert np.abs(llm.embed(given, pooling="last", normalize=False) - last).max() < BOUND
    scores = llm.score(given[0], given)
    assert np.allclose(scores, found @ found[0], atol=1e-5) and abs(scores[0] - 1) < 1e-6
    assert llm.embed([]).shape[0] == 0 and llm.score("x", []) == []


def test_many_texts_share_passes(folder: Path) -> None:
    small = LLM(str(folder), engine=EngineOptions(max_num_batched_tokens=128))
    given = ["cat " * n for n in (1, 100, 3, 60, 60, 2, 126, 1)]
    assert np.array_equal(small.embed(given), np.concatenate([small.embed(one) for one in given]))


def test_rounded_weights_say_how_far_vectors_turn(folder: Path, llm: LLM) -> None:
    given = ["the cat sat", "a dog runs fast"]
    rounded = LLM(str(folder), weights="int8")
    (note,) = rounded.loaded.notes
    least = float(note.split(" is ")[1].split(",")[0])
    assert "the least cosine similarity" in note and 0.9 < least < 1
    assert (rounded.embed(given) * llm.embed(given)).sum(1).min() > 0.9


def test_long_texts_are_cut_only_if_that_is_asked(llm: LLM) -> None:
    assert llm.max_model_len == 128  # the folder's limit
    with pytest.raises(RequestError, match="402 tokens, but the context length is 128"):
        llm.embed("cat " * 400)
    whole = llm.embed("cat " * 126)
    assert np.array_equal(llm.embed("cat " * 400, truncate_prompt_tokens=-1), whole)
    assert np.array_equal(llm.embed("cat " * 400, truncate_prompt_tokens=10), llm.embed("cat " * 8))


@pytest.mark.parametrize(("options", "message"), [
    ({"texts": ""}, "an input is empty"), ({"texts": [[]]}, "the prompt is empty"), ({"texts": [3.5]}, "be a text"),
    ({"texts": [[1, 999]]}, "token id 999 is not in"), ({"prompt": "a", "prompt_name": "query"}, "exclude each other"),
    ({"prompt_name": "doc"}, "the model's folder has 'query'"), ({"dimensions": 32}, "vectors have 64 numbers"),
    ({"texts": [[1]], "prompt": "x"}, "token ids"), ({"truncate_prompt_tokens": 1000}, "only 128 tokens"),
])  # fmt: skip
def test_bad_inputs_are_refused(llm: LLM, options: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        llm.embed(options.pop("texts", "x"), **options)


def test_an_encoder_writes_no_text(llm: LLM, tmp_path: Path) -> None:
    for call in (lambda: llm.generate("x"), lambda: llm.logits([[1]])):
        with pytest.raises(RequestError, match="bert is an encoder"):
            call()
    with pytest.raises(RequestError, match="block_size is 32, but bert is an encoder"):
        LLM(str(llm.checkpoint.folder), engine=EngineOptions(block_size=32))


def test_a_model_that_writes_text_embeds_as_the_user_says() -> None:
    pocket = LLM("pocket")
    with pytest.raises(RequestError, match="does not say how hidden states become a vector"):
        pocket.embed("x")
    ids = pocket.encode("def f():")
    want = hidden(pocket.loaded, [ids])[-1]
    assert np.allclose(pocket.embed(ids, pooling="last")[0], want / np.linalg.norm(want), atol=1e-6)
    with pytest.raises(RequestError, match="give score_template"):
        pocket.score("x", "y")
    no, yes = "a", "b"
    template = Template("{query} {document} =", no, yes)
    logits = pocket.logits([pocket.encode("x y =")])[0][-1].astype(np.float64)
    a, b = (pocket.frontend.tokenizer().encode(one, add_special_tokens=False)[0] for one in (no, yes))
    (found,) = pocket.score("x", "y", template=template)
    assert abs(found - np.exp(logits[b]) / (np.exp(logits[a]) + np.exp(logits[b]))) < 1e-6
    with pytest.raises(RequestError, match="once each"):
        pocket.score("x", "y", template=Template("{query}", no, yes))


def test_a_decoder_embeds_by_its_last_token(tmp_path: Path) -> None:
    """The layout of Qwen3-Embedding: a causal decoder whose file has no prefix, with the pooling of the last token."""
    import transformers

    from oracle.build import redraw

    config = transformers.Qwen3Config(
        vocab_size=257, hidden_size=64, intermediate_size=88, num_hidden_layers=2, num_attention_heads=4, head_dim=16,
        num_key_value_heads=2, tie_word_embeddings=True, architectures=["Qwen3ForCausalLM"],
    )  # fmt: skip
    model = transformers.AutoModel.from_config(config).to(torch.float32).eval()
    redraw(model, 1)
    model.save_pretrained(tmp_path)
    add_modules(tmp_path, "Pooling", "Normalize", pooling={"pooling_mode_lasttoken": True})
    own = json.loads((tmp_path / "config.json").read_text())
    write(tmp_path / "config.json", {**own, "architectures": ["Qwen3ForCausalLM"], "matryoshka_dimensions": [16, 32]})
    llm, ids = LLM(str(tmp_path), skip_tokenizer_init=True), texts()
    want = np.stack([one[-1] for one in oracle.hidden(model, ids)])
    assert np.abs(llm.embed(ids) - want / np.linalg.norm(want, axis=1)[:, None]).max() < BOUND
    short = want[:, :32] / np.linalg.norm(want[:, :32], axis=1)[:, None]
    assert np.abs(llm.embed(ids, dimensions=32) - short).max() < BOUND
    with pytest.raises(RequestError, match="16 or 32 or 64"):
        llm.embed(ids, dimensions=33)


def test_matrices_after_the_pooling(tmp_path: Path) -> None:
    model = oracle.build(CASES["bert"], tmp_path)
    add_modules(tmp_path, "Pooling", "Dense", pooling=CLS)
    rng = np.random.default_rng(1)
    weight, bias = rng.normal(size=(24, 64)).astype(np.float32) / 8, rng.normal(size=24).astype(np.float32)
    dense = {"in_features": 64, "out_features": 24, "bias": True}
    write(tmp_path / "2_Dense/config.json", {**dense, "activation_function": "torch.nn.modules.activation.Tanh"})
    save_file({"linear.weight": weight, "linear.bias": bias}, tmp_path / "2_Dense/model.safetensors")
    ids = texts()
    found = LLM(str(tmp_path), skip_tokenizer_init=True).embed(ids)
    want = np.tanh(np.stack([one[0] for one in oracle.hidden(model, ids)]) @ weight.T + bias)
    assert np.abs(found - want).max() < BOUND
    save_file({"linear.weight": weight}, tmp_path / "2_Dense/model.safetensors")
    with pytest.raises(CheckpointError, match=r"it needs linear\.weight, linear\.bias"):
        LLM(str(tmp_path), skip_tokenizer_init=True).embed(ids)


@pytest.mark.parametrize(("file", "value", "message"), [
    ("modules.json", {}, "no JSON list"), ("modules.json", [{"type": "x.CNN", "path": ""}], "not supported"),
    ("modules.json", [{"type": "x.Transformer", "path": ""}, {"type": "x.Pooling", "path": "../y"}], "of its own"),
    ("1_Pooling/config.json", {"pooling_mode_max_tokens": True}, "max_tokens; supported"),
    ("1_Pooling/config.json", {"word_embedding_dimension": 3, "pooling_mode": "mean"}, "hidden size is 64"),
    ("1_Pooling/config.json", {"pooling_mode": "mean", "include_prompt": False}, "include_prompt"),
    ("sentence_bert_config.json", {"max_seq_length": 0}, "at least 1"),
    ("sentence_bert_config.json", {"do_lower_case": True}, "do_lower_case"),
    ("config_sentence_transformers.json", {"prompts": [1]}, "map names to texts"),
    ("config_sentence_transformers.json", {"similarity_fn_name": "euclidean"}, "use cosine or dot"),
])  # fmt: skip
def test_bad_files_are_refused(file: str, value: Any, message: str, tmp_path: Path) -> None:
    oracle.build(CASES["bert"], tmp_path)
    add_modules(tmp_path, "Pooling", "Normalize")
    write(tmp_path / file, value)
    with pytest.raises(ConfigError, match=message):
        open_checkpoint(tmp_path)


def test_pairs_are_joined_and_cut_as_the_tokenizer_does(tmp_path: Path) -> None:
    backend, ours = save_wordpiece(tmp_path), Tokenizer.from_folder(tmp_path)
    query, document = "the cat", "dogs running on the mat"
    pair = backend.encode(query, document)
    assert ours.encode_pair(query, document) == (pair.ids, pair.type_ids)
    fast = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    for most in range(6, len(pair.ids) + 1):
        fast.enable_truncation(most, strategy="only_second")
        cut = fast.encode(query, document)
        assert ours.encode_pair(query, document, most) == (cut.ids, cut.type_ids)
    with pytest.raises(RequestError, match="leaves no room for a document"):
        ours.encode_pair(query, document, 5)
    with pytest.raises(RequestError, match="lone surrogate"):
        ours.encode_pair(query, "\ud800")


def test_the_decoder_of_wordpiece_is_streamed(tmp_path: Path) -> None:
    backend, ours = save_wordpiece(tmp_path), Tokenizer.from_folder(tmp_path)
    rng = np.random.default_rng(1)
    for text in ("the cats running, don't . do not 's", "a", "sea ' s blue ."):
        assert ours.decode(backend.encode(text).ids) == backend.decode(backend.encode(text).ids)
    for n in (1, 7, 63):
        ids = rng.integers(0, 100, n).tolist()
        assert ours.decode(ids) == backend.decode(ids)


def test_rankers_score_pairs(tmp_path: Path) -> None:
    folder = tiny_ranker(tmp_path)
    model, llm = oracle.build(CASES["bert"], folder, labels=1), LLM(str(folder))
    pairs = [llm.frontend.tokenizer().encode_pair("the cat", one) for one in ("a dog", "the sky is blue")]
    want = 1 / (1 + np.exp(-oracle.scores(model, [ids for ids, _ in pairs], [types for _, types in pairs])[:, 0]))
    assert np.abs(np.array(llm.score("the cat", ["a dog", "the sky is blue"])) - want).max() < BOUND
    with pytest.raises(RequestError, match="scores labels and gives no embeddings"):
        llm.embed("x")
    with pytest.raises(RequestError, match="a document is empty"):
        llm.score("x", [""])


@pytest.mark.parametrize("device", ["cpu", "reference"])
def test_the_memory_of_a_pass_is_bounded(device: str, tmp_path: Path) -> None:
    oracle.build(CASES["bert"], tmp_path, hidden_size=256, intermediate_size=1024)
    loaded = load_model(str(tmp_path), LoadOptions(device=device))
    reader, memory = Reader(loaded), loaded.table.memory
    given = [Text([5 + i % 200 for i in range(257)])] * 4
    reader.read(given, Reading(pool="mean"))
    tracemalloc.start()
    reader.read(given, Reading(pool="mean"))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < pass_bytes(loaded.spec, 4 * 257, 257, on_cpu=True, float_bytes=memory.float_bytes)
