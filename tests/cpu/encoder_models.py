"""Write tiny encoders with a WordPiece tokenizer and the files of sentence-transformers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

from oracle.encoders import CASES, VOCAB, build

SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
WORDS = "the cat dog sat on mat a runs fast . , ' s t do n ##s ##ing ##ed is blue red green sky sea".split()


def save_wordpiece(folder: Path) -> tokenizers.Tokenizer:
    """Write a BERT tokenizer of VOCAB tokens, and return it."""
    letters = [chr(c) for c in range(ord("a"), ord("z") + 1)]
    known = dict.fromkeys([*SPECIAL, *WORDS, *letters, *(f"##{c}" for c in letters)])
    vocab = {token: i for i, token in enumerate(known)} | {f"[unused{i}]": i for i in range(len(known), VOCAB)}
    tokenizer = tokenizers.Tokenizer(models.WordPiece(vocab, unk_token="[UNK]"))
    tokenizer.add_special_tokens(list(SPECIAL))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", vocab["[SEP]"]), ("[CLS]", vocab["[CLS]"]))
    tokenizer.save(str(folder / "tokenizer.json"))
    names = {"cls_token": "[CLS]", "sep_token": "[SEP]", "pad_token": "[PAD]", "unk_token": "[UNK]"}
    (folder / "tokenizer_config.json").write_text(json.dumps(names))
    return tokenizer


def write(path: Path, value: Any) -> None:
    path.parent.mkdir(exist_ok=True, parents=True)
    path.write_text(json.dumps(value))


def add_modules(folder: Path, *kinds: str, pooling: Mapping[str, Any] | None = None, width: int = 64) -> None:
    """Write modules.json with these modules after the model, and the config of the pooling."""
    names = ["Transformer", *kinds]
    paths = ["", *(f"{i}_{kind}" for i, kind in enumerate(kinds, 1))]
    entries = [
        {"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.models.{name}"}
        for i, (name, path) in enumerate(zip(names, paths, strict=True))
    ]
    write(folder / "modules.json", entries)
    write(folder / "1_Pooling/config.json", {"word_embedding_dimension": width, **(pooling or MEAN)})


MEAN = {"pooling_mode_cls_token": False, "pooling_mode_mean_tokens": True}
CLS = {"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False}


def tiny_embedder(folder: Path) -> Path:
    """Write a tiny BERT that embeds texts by the mean of their hidden states, with prompts."""
    build(CASES["bert"], folder)
    save_wordpiece(folder)
    add_modules(folder, "Pooling", "Normalize")
    write(folder / "config_sentence_transformers.json", {"prompts": {"query": "the cat "}, "similarity_fn_name": None})
    write(folder / "sentence_bert_config.json", {"max_seq_length": 128, "do_lower_case": False})
    return folder


def tiny_ranker(folder: Path) -> Path:
    """Write a tiny BERT that scores pairs of texts."""
    build(CASES["bert"], folder, labels=1)
    save_wordpiece(folder)
    return folder
