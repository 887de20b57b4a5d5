"""Train models on the modules that serve them: data in data/, the built-in pair in pocket/, the training loop here."""

from ridgeline.train.data.batches import NO_TARGET, Batch, Batches
from ridgeline.train.data.corpus import Corpus, Document
from ridgeline.train.data.held_out import Split, split
from ridgeline.train.data.manifest import Manifest
from ridgeline.train.data.shards import Shard, write_shard
from ridgeline.train.data.vocabulary import END_OF_TEXT, save_tokenizer, tokenizer_hash, train_bpe

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
