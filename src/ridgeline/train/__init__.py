"""Training. The data side: corpora and their manifests, vocabularies, token shards, batches."""

from ridgeline.train.batches import NO_TARGET, Batch, Batches
from ridgeline.train.corpus import Corpus, Document
from ridgeline.train.held_out import Split, split
from ridgeline.train.manifest import Manifest
from ridgeline.train.shards import Shard, write_shard
from ridgeline.train.vocabulary import END_OF_TEXT, save_tokenizer, tokenizer_hash, train_bpe

__all__ = [
    "END_OF_TEXT",
    "NO_TARGET",
    "Batch",
    "Batches",
    "Corpus",
    "Document",
    "Manifest",
    "Shard",
    "Split",
    "save_tokenizer",
    "split",
    "tokenizer_hash",
    "train_bpe",
    "write_shard",
]
