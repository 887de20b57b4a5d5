"""Make a block diffusion model of an autoregressive one: read it, train it on texts, measure it, write its folder.

The folder holds the model's own files, and in `training/` the data, log.jsonl and checkpoints.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch

from ridgeline.archs import OUR_MODEL_TYPE
from ridgeline.diffusion import as_blocks
from ridgeline.errors import DataError, RequestError
from ridgeline.evals.estimates import Estimate
from ridgeline.evals.perplexity import estimate_json
from ridgeline.load.checkpoint import Checkpoint
from ridgeline.load.fingerprint import model_fingerprint
from ridgeline.load.hub import MODEL_FILES, find_model
from ridgeline.ops import open_table
from ridgeline.runtime.load import LoadedModel, LoadOptions, load_model
from ridgeline.spec import ModelSpec, to_json
from ridgeline.train.blocks.data import BlocksData, prepare_blocks, unused_token
from ridgeline.train.bound import measure_bound, measure_model
from ridgeline.train.data.batches import Batch
from ridgeline.train.data.corpus import Corpus
from ridgeline.train.data.folder import check_room
from ridgeline.train.distill.data import Encoder
from ridgeline.train.distill.produce import check_student
from ridgeline.train.loop import TrainOptions
from ridgeline.train.masked import BlockDenoising, check_trains
from ridgeline.train.module import LanguageModel
from ridgeline.train.output import StoredType, write_with_weights
from ridgeline.train.ranks import Ranks
from ridgeline.train.run import SILENT, Aim, Job, Watch, bytes_per_target, held_out_batches, train

TRAINING, DATA, REPORT = "training", "data", "blocks.json"
SAMPLE_TOKENS = 100  # tokens on which the written folder is compared with the trained model
MEASURED_TOKENS = 32_768  # held-out tokens that measure the bounds
BLOCK_LENGTHS = (1, 2, 4, 8, 16)  # that training draws by default
MOST_BLOCK = 1024
Weights = Mapping[str, torch.Tensor]


@dataclass(frozen=True, slots=True)
class BlocksReport:
    """Bits per byte on held-out text: of the original model, and by block length the bounds before and after training.

    tokens, seconds: number of tokens in the updates, and their time. differences: largest difference of a logit of the
    written folder, by the program that read it.
    """

    mask_token: int
    original: Estimate
    before: Mapping[int, Estimate]
    after: Mapping[int, Estimate]
    tokens: int
    seconds: float
    differences: Mapping[str, float]

    def to_json(self) -> dict[str, Any]:
        """Return plain numbers."""
        return {
            "mask_token": self.mask_token, "tokens": self.tokens, "seconds": self.seconds,
            "differences": dict(self.differences), "original": estimate_json("bits_per_byte", self.original),
            "blocks": [
                {"block": n, **estimate_json("before", self.before[n]), **estimate_json("after", self.after[n])}
                for n in self.after
            ],
        }  # fmt: skip

    def lines(self) -> list[str]:
        """Return a line for the original, and one for each block length."""
        return [
            f"bits per byte on held-out text: {self.original.value:.4f} of the original; at most, by block length:",
            *(
                f"  {n}: {after.value:.4f}, {after.value / self.original.value:.3f} times the original's (before "
                f"training {self.before[n].value:.4f})"
                for n, after in self.after.items()
            ),
        ]


def train_blocks(
    model: str, corpus: Corpus, out: Path, options_of: Callable[[ModelSpec, int], TrainOptions], watch: Watch = SILENT,
    ranks: Ranks | None = None, *, lengths: tuple[int, ...] = BLOCK_LENGTHS, mask_token: int | None = None,
    held_out: float = 0.05, dtype: StoredType = "bfloat16",
) -> BlocksReport:  # fmt: skip
    """Train an autoregressive model to fill blocks, and write a model whose blocks have the largest of `lengths`.

    A run that was interrupted continues; on a CPU, its result is that of one run, to the bit.

    Args:
        model: A folder or a hub id with weights to begin from, or a built-in model.
        corpus: Texts to train on, and to measure with.
        out: Folder to write.
        options_of: Returns how to train, from the spec and the number of training tokens.
        lengths: Lengths of blocks; one is drawn for each forward pass.
        mask_token: Id that becomes the mask; None: the largest one that no text has.
        held_out: Share of the texts that measures the model and does not train it.
        dtype: Type of the stored weights.

    Raises:
        RequestError, DataError, CheckpointError, DeviceError: each with one line.
    """
    together = ranks or Ranks("reference")
    _check_folder(out)
    loaded = load_model(model, LoadOptions(device=together.device, dtype="float32"))
    check_student(model, loaded)
    loaded.spec.require_autoregressive("diffusion-from (--diffusion-from)")
    check_lengths(lengths, loaded.spec)
    encoder = Encoder.of(loaded.checkpoint)
    watch.say("reading the texts, and looking for functions that occur in several of them")
    data = prepare_blocks(corpus, out / TRAINING / DATA, encoder, together, held_out)
    mask = _mask_token(mask_token, data, loaded, encoder)
    options = options_of(loaded.spec, data.train.info.num_tokens)
    check_trains(as_blocks(loaded.spec, max(lengths), mask), options.context)
    check_room(data.train, options.batch_tokens)
    watch.say(f"token {mask} becomes the mask; blocks have {', '.join(map(str, lengths))} tokens")
    return _Run(model, loaded, data, mask, lengths, options, out, dtype, watch, together).make()


def check_lengths(lengths: tuple[int, ...], spec: ModelSpec) -> None:
    """Raise RequestError for lengths of blocks that cannot be trained."""
    most = min(MOST_BLOCK, spec.max_position_embeddings)
    for n in lengths:
        if not 1 <= n <= most:
            raise RequestError(f"block_lengths (--block-lengths) has {n}; each must be from 1 to {most}")
    if not lengths or len(set(lengths)) < len(lengths):
        raise RequestError(
            f"block_lengths (--block-lengths) is {','.join(map(str, lengths)) or 'empty'}; give different lengths, "
            "such as 1,2,4,8,16"
        )


def _check_folder(out: Path) -> None:
    """Raise DataError for a folder with files that no earlier run has made."""
    if out.exists() and not out.is_dir():
        raise DataError(f"{out} is a file; give a folder to write")
    if out.exists() and any(out.iterdir()) and not (out / TRAINING).exists():
        raise DataError(f"{out} exists already, and has no run to continue; give another folder")


def _mask_token(given: int | None, data: BlocksData, loaded: LoadedModel, encoder: Encoder) -> int:
    """Return the id of the mask token."""
    special = {*encoder.tokenizer.special_ids, *loaded.eos_token_ids}
    if given is None:
        return unused_token(data, loaded.spec.vocab_size, sorted(i for i in special if i < loaded.spec.vocab_size))
    if not 0 <= given < loaded.spec.vocab_size or given in loaded.eos_token_ids:
        raise RequestError(
            f"mask_token (--mask-token) is {given}; it must be below the vocabulary's {loaded.spec.vocab_size} tokens, "
            "and no end token"
        )
    if any((shard.tokens == given).any() for shard in (data.train, data.held_out)):
        raise RequestError(f"mask_token (--mask-token) is {given}, which the texts have; name a token that none has")
    return given


@dataclass(frozen=True, slots=True)
class _Run:
    """A run whose model is in memory, in float32."""

    name: str
    loaded: LoadedModel
    data: BlocksData
    mask: int
    lengths: tuple[int, ...]
    options: TrainOptions
    out: Path
    dtype: StoredType
    watch: Watch
    ranks: Ranks

    def make(self) -> BlocksReport:
        trained_spec = as_blocks(self.loaded.spec, max(self.lengths), self.mask, self.lengths)
        config = _config(self.loaded.checkpoint, trained_spec)
        weights = cast("Weights", self.loaded.model.weights)
        initial = {w.name: weights[w.name] for w in trained_spec.weights()}
        facts = {
            "model": model_fingerprint(find_model(self.name), MODEL_FILES, size=8), "texts": self.data.key,
            "lengths": list(self.lengths), "mask_token": self.mask,
        }  # fmt: skip
        trained = train(
            Job(config, self.options, facts), self.data.train, self.data.held_out, self.out / TRAINING, self.ranks,
            lambda run: self.watch.run("blocks", run), Aim(initial=initial),
        )  # fmt: skip
        differences: Mapping[str, float] = {}
        if self.ranks.is_first:
            sample = self.data.held_out.document(0)[:SAMPLE_TOKENS].tolist()
            differences = write_with_weights(
                self.out, self.loaded.checkpoint.folder, config, trained.weights, self.dtype, sample
            )
        self.ranks.wait()
        original, before, after = self._measured(trained_spec, initial, trained.weights)
        found = BlocksReport(self.mask, original, before, after, trained.cost.tokens, trained.cost.seconds, differences)
        if self.ranks.is_first:
            (self.out / REPORT).write_text(json.dumps(found.to_json(), indent=2) + "\n", encoding="utf-8")
        return found

    def _measured(
        self, spec: ModelSpec, initial: Weights, final: Weights
    ) -> tuple[Estimate, dict[int, Estimate], dict[int, Estimate]]:
        """Return the bits per byte of the original, and the bounds before and after, with weights as stored."""
        rows: list[Batch] = held_out_batches(self.data.held_out, self.options)
        rows = rows[: max(1, MEASURED_TOKENS // self.options.context)]
        per_token = bytes_per_target(self.data.held_out)
        table, longest = open_table(self.ranks.device), self.options.context + 1
        done = self.watch.tokens("measuring", len(rows) * self.options.context * (2 * len(self.lengths) + 1))
        original = LanguageModel(self.loaded.spec, table, longest).eval()
        original.load(initial)
        found = []
        for weights in (initial, _rounded(final, self.dtype)):
            model = LanguageModel(spec, table, longest).eval()
            model.load(weights)
            bound = BlockDenoising(model)
            found.append({n: measure_bound(bound, n, rows, per_token, done) for n in self.lengths})
        return measure_model(original, rows, per_token, done), found[0], found[1]


def _rounded(weights: Weights, dtype: StoredType) -> Weights:
    """Return weights as they are stored."""
    return {name: w.to(getattr(torch, dtype)).float() for name, w in weights.items()}


def _config(checkpoint: Checkpoint, spec: ModelSpec) -> dict[str, Any]:
    """Return the config of our own format, with the special tokens of the original."""
    kept = {name: checkpoint.config[name] for name in ("bos_token_id", "eos_token_id") if name in checkpoint.config}
    return {"model_type": OUR_MODEL_TYPE, "spec": to_json(spec), **kept}
