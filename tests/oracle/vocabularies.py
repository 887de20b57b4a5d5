"""Tokenizers for tests: those of the public data, and small ones that are made here like those of each family."""

from __future__ import annotations

import functools
import json
import tempfile
from pathlib import Path

import tokenizers
from hypothesis import settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, trainers

from oracle.data import gguf_vocab, shared_data
from ridgeline.load.tokenizer import Tokenizer

FOLDERS = {
    "stories260K": "models/stories260K",
    "babyllama105": "models/babyllama105",
    "qwen2.5": "tokenizers/qwen2.5",
    "gpt2": "tokenizers/gpt2",
}
GGUFS = ["gpt-2", "deepseek-coder", "llama-spm"]
TRAINED = ["byte-level", "llama", "gemma", "metaspace", "words"]
REAL = [*FOLDERS, *GGUFS]
CORPUS = ["Once upon a time, there was a café. It's 12345 o'clock!", "héllo wörld  and   spaces\n\tnew lines"] * 8
TEXTS = [
    "",
    " ",
    "Hello world",
    "  two leading spaces",
    "tab\tand\r\nnewline\n\n",
    "naïve café — “quotes”",
    "👨‍👩‍👧‍👦 🏳️‍🌈 🦙 e\u0301 \u200d",
    "我想在apple工作1314151天～ かな カナ 한국어",
    "កាន់តែពិសេស нещо عربى",
    "\x00\x7f\ufffd\U0010ffff",
]
text_strategy = st.text(st.characters(exclude_categories=["Cs"]), max_size=40) | st.sampled_from(TEXTS)
quick = settings(max_examples=40, deadline=None)


def trained(name: str) -> tokenizers.Tokenizer:
    """Return a small trained tokenizer whose parts are combined as in the family's tokenizer.json."""
    special = ["<unk>", "<s>", "</s>"]
    if name == "words":
        backend = tokenizers.Tokenizer(models.WordLevel(unk_token="<unk>"))
        backend.pre_tokenizer = pre_tokenizers.Whitespace()
        backend.train_from_iterator(CORPUS, trainers.WordLevelTrainer(special_tokens=special, show_progress=False))
        return backend
    if name == "byte-level":
        backend = tokenizers.Tokenizer(models.BPE())
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        backend.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        trainer = bpe_trainer(400, special, alphabet)
        backend.train_from_iterator(CORPUS, trainer)
        backend.add_tokens([AddedToken("<think 🦙>", normalized=False)])
        return backend
    backend = tokenizers.Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=name != "metaspace"))
    pieces = [] if name == "metaspace" else [f"<0x{byte:02X}>" for byte in range(256)]
    if name == "metaspace":
        backend.pre_tokenizer = pre_tokenizers.Metaspace()
        backend.decoder = decoders.Metaspace()
    else:
        replace = normalizers.Replace(" ", "▁")
        steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
        llama = name == "llama"
        backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), replace]) if llama else replace
        backend.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if llama else steps)
    backend.train_from_iterator(CORPUS, bpe_trainer(500, special + pieces, []))
    state = json.loads(backend.to_str())
    state["added_tokens"] = [token for token in state["added_tokens"] if token["content"] in special]
    return tokenizers.Tokenizer.from_str(json.dumps(state))


def bpe_trainer(size: int, special: list[str], alphabet: list[str]) -> trainers.BpeTrainer:
    return trainers.BpeTrainer(vocab_size=size, special_tokens=special, initial_alphabet=alphabet, show_progress=False)


@functools.cache
def load(name: str) -> Tokenizer:
    if name in FOLDERS:
        return Tokenizer.from_folder(shared_data() / FOLDERS[name])
    if name in TRAINED:
        return Tokenizer(trained(name), special_tokens={"bos_token": "<s>", "eos_token": "</s>"})
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "vocab.gguf"
        path.write_bytes(gguf_vocab(name))
        return Tokenizer.from_gguf(path)
