"""Quantize a model with calibration data, measure what was lost, and write it as a checkpoint."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass, replace
from errno import EDQUOT, ENOSPC
from hashlib import blake2b
from pathlib import Path

import numpy as np

from ridgeline.compress import gguf
from ridgeline.compress.awq import num_kept
from ridgeline.compress.calibrate import Quantizer
from ridgeline.compress.choose import Chosen
from ridgeline.compress.compare import Comparison, compare
from ridgeline.compress.data import NAMED, Samples, read_samples
from ridgeline.compress.layers import Calibration, parts
from ridgeline.compress.partial import Partial
from ridgeline.compress.report import FILE, Report
from ridgeline.compress.result import Quantized
from ridgeline.compress.scheme import BITS, Scheme, parse_scheme
from ridgeline.compress.sensitivity import mixed_formats
from ridgeline.compress.speed import Speeds, measure_speeds
from ridgeline.compress.trained import train_codes
from ridgeline.compress.write import GGUF, WRITERS, Writer, can_permute, write_json, writer_of_scheme
from ridgeline.errors import RequestError, RidgelineError
from ridgeline.evals.scores import logit_blocks
from ridgeline.evals.windows import Batch
from ridgeline.load.fingerprint import model_fingerprint
from ridgeline.load.gguf.write import choose_types
from ridgeline.load.hub import MODEL_FILES
from ridgeline.load.tokenizer import Tokenizer
from ridgeline.load.weights import StoredWeights
from ridgeline.nn import PassingModel
from ridgeline.ops.devices import require_torch
from ridgeline.runtime.load import LoadedModel, LoadOptions, pass_model
from ridgeline.spec.dtype import DTYPE_BYTES
from ridgeline.spec.folders import read_json
from ridgeline.spec.quant import PLAIN, Format, FormatTable

HELD_OUT_TOKENS = 32_768
READ_BACK = 1e-3  # largest difference of logits of what was quantized and what was read, as a share of the largest one
TRAIN_TOKENS = 1_000_000  # tokens on which codes are trained, repetitions included

OnProgress = Callable[[str, int, int], None]  # called with the part, the finished amount and the whole amount


@dataclass(frozen=True, slots=True)
class Options:
    """Options of `quantize` besides the scheme.

    Attributes:
        sequences: number of calibration sequences. length: tokens of a sequence; None: 512, or the model's longest
            context. seed: seed of the draw of sequences. bits: bits of a weight on average, where matrices get
            different ones. threads: threads of the kernels. speed: whether the decode speeds of both models are
            measured for the report. train_tokens: tokens on which codes are trained, repetitions included, for the
            schemes that train; None: TRAIN_TOKENS.
    """

    sequences: int = 128
    length: int | None = None
    seed: int = 0
    bits: float | None = None
    threads: int | None = None
    speed: bool = True
    train_tokens: int | None = None


def quantize(
    model: str, scheme: str, *, out: str | Path, data: Sequence[str | Path] = (), group: int | None = None,
    symmetric: bool | None = None, activations: str | None = None, keep: float | None = None, format: str | None = None,
    options: Options = Options(), on_progress: OnProgress = lambda what, done, total: None,
) -> Report:  # fmt: skip
    """Quantize a model and write it to a new folder.

    A run that was interrupted continues with the parts that are finished if it is called again.

    Args:
        model: a folder or a hub id, which is not quantized.
        scheme: such as `awq-int4`; see `parse_scheme`, which also explains group, symmetric, activations and keep.
        out: the folder to write, which must not exist.
        data: text files or folders to calibrate with and to measure on. Rounding to nearest needs none.
        format: format of the checkpoint, one of `WRITERS`; None: the first one that can hold the matrices.

    Raises:
        RidgelineError: with one line, for each input that cannot be used. Nothing is left on disk then; if the disk is
            full, finished parts stay, as after an interruption.
    """
    chosen = parse_scheme(scheme, group=group, symmetric=symmetric, activations=activations, keep=keep)
    target = Path(out)
    with _disk_errors(target):
        if target.is_symlink() or target.exists():
            raise RequestError(f"{target} exists; name another folder with --out, or remove it")
    if options.bits is not None:
        _check_bits(chosen)
    if not data and (chosen.needs_data or options.bits is not None):
        raise RequestError(f"{scheme} chooses codes with data; name texts with --calibrate")
    _check_training(chosen, options)
    original = _open(model, options)
    writer = _writer(original, chosen, format, options)
    if not chosen.gguf:
        chosen = replace(chosen, static=chosen.static or not can_permute(writer, chosen.format))
    train_tokens = (options.train_tokens or TRAIN_TOKENS) if chosen.is_trained else 0
    samples = _samples(original, data, options, train_tokens) if data else None
    settings = _settings(original, chosen, samples, format, options)
    with _disk_errors(target), closing(Partial(target, settings)) as partial:
        try:
            quantized, facts = _run(original, chosen.start, samples, partial, options, writer, on_progress)
            others: dict[str, LoadedModel] = {}
            if samples is not None and chosen.is_trained:
                others[chosen.start.name] = quantized.model()
                quantized, facts = _trained(quantized, facts, samples, partial, train_tokens, options, on_progress)
            source = _source(samples, data, train_tokens)
            report = _report(model, quantized, others, chosen, samples, source, facts, on_progress)
            folder, notes = _written(quantized, writer, partial, samples)
            report = replace(report, notes=(*report.notes, *notes))
            if options.speed:
                report = replace(report, speeds=_speeds(model, chosen, folder, options, on_progress))
            write_json(folder / FILE, report.to_json())
            folder.rename(target)
        except RidgelineError:
            partial.remove()
            raise
        partial.remove()
    return report


def _trained(
    quantized: Quantized, facts: Chosen, samples: Samples, partial: Partial, tokens: int, options: Options,
    on_progress: OnProgress,
) -> tuple[Quantized, Chosen]:  # fmt: skip
    """Train the codes of a model; return the model with the new codes, and what is known about its matrices."""
    return train_codes(
        quantized, facts, samples.training, partial, tokens=tokens, seed=options.seed, threads=options.threads,
        on_progress=on_progress,
    )  # fmt: skip


def _speeds(model: str, scheme: Scheme, folder: Path, options: Options, on_progress: OnProgress) -> Speeds:
    """Measure how fast the original and the quantized model decode."""
    on_progress("measuring the speed", 0, 1)
    return measure_speeds({"as stored": model, scheme.name: str(folder)}, options.threads)


def _check_bits(scheme: Scheme) -> None:
    """Raise RequestError for a scheme whose matrices cannot have different bits."""
    is_whole = scheme.format.numbers in BITS and scheme.format.activations != "outliers"
    if not is_whole and not scheme.gguf:
        raise RequestError(
            f"bits (--bits) chooses among whole numbers of 2 to 8 bits, not {scheme.name}; take a scheme such as "
            "gptq-int4, or leave it out"
        )


@contextmanager
def _disk_errors(target: Path) -> Iterator[None]:
    """Turn an error of the operating system into a RequestError that names the folder."""
    try:
        yield
    except BrokenPipeError:  # of the progress
        raise
    except OSError as e:
        remedy = "name another folder with --out"
        if e.errno in (ENOSPC, EDQUOT):
            remedy = "free some space and repeat the command, which continues with the parts that are finished"
        raise RequestError(f"cannot write {target}: {e.strerror or e}; {remedy}") from None


def _open(model: str, options: Options) -> LoadedModel:
    original = pass_model(model, LoadOptions(device="cpu", threads=options.threads))
    weights = original.model.weights
    is_coded = isinstance(weights, StoredWeights) and (weights.formats.by_name or weights.dequantized)
    if original.checkpoint.config.get("quantization_config") or is_coded:
        raise RequestError(f"{model} is quantized already; name the checkpoint from which it was made")
    return original


def _check_training(scheme: Scheme, options: Options) -> None:
    """Raise RidgelineError for a scheme that trains without torch, or a number of tokens that cannot be trained on."""
    if scheme.is_trained:
        require_torch(f"scheme (--scheme) {scheme.name}")
    elif options.train_tokens is not None:
        raise RequestError(
            f"train_tokens (--train-tokens) is for schemes that train; {scheme.name} does not: leave it out"
        )
    if options.train_tokens is not None and options.train_tokens < 1:
        raise RequestError(f"train_tokens (--train-tokens) is {options.train_tokens}; it must be at least 1")


def _source(samples: Samples | None, data: Sequence[str | Path], train_tokens: int) -> str:
    """Return on what codes were chosen; an empty text if they were chosen without data."""
    if samples is None:
        return ""
    trained = f", trained on {train_tokens:,} tokens" if train_tokens else ""
    named = ", ".join(map(str, data[:NAMED]))
    if len(data) > NAMED:
        named = f"{len(data)} texts: {named} and {len(data) - NAMED} more"
    return f"{len(samples.calibration)} sequences of {named}{trained}"


def _writer(original: LoadedModel, scheme: Scheme, name: str | None, options: Options) -> Writer:
    """Return the writer of a format of checkpoints. Raises RequestError for one that cannot hold the scheme."""
    if scheme.gguf and options.bits is not None:
        raise RequestError(f"scheme (--scheme) {scheme.name} is a type of GGUF files; leave out --bits")
    is_gguf = bool(scheme.gguf or original.checkpoint.gguf)
    if is_gguf and name not in (None, GGUF):
        what = f"{scheme.name} is a type of GGUF files" if scheme.gguf else "the model is a GGUF file"
        raise RequestError(f"format (--format) {name}: {what}, and is written as {GGUF} only")
    if scheme.gguf:
        return WRITERS[GGUF]
    shapes = {w.name: w.shape for part in parts(original.spec) for w in part.matrices}
    _check_group(scheme, max(shape[-1] for shape in shapes.values()))
    return writer_of_scheme(GGUF if is_gguf else name, shapes, scheme)


def _check_group(scheme: Scheme, widest: int) -> None:
    """Raise RequestError for groups of more columns than any matrix has. widest: columns of the widest matrix.

    Blocks of rows and columns have the size that their format says, and the last ones may be short.
    """
    group = scheme.format.group
    if scheme.format.rows == 1 and group > widest:
        raise RequestError(
            f"group (--group) is {group}, but no matrix has more than {widest} columns; take 0 for a scale for each row"
        )


def _samples(original: LoadedModel, data: Sequence[str | Path], options: Options, train_tokens: int) -> Samples:
    longest = original.max_model_len
    length = options.length if options.length is not None else min(512, longest)
    if not 2 <= length <= longest:
        raise RequestError(f"length (--sequence-length) is {length}; it must be from 2 to {longest} tokens")
    if options.sequences < 1:
        raise RequestError(f"sequences (--sequences) is {options.sequences}; it must be at least 1")
    if options.seed < 0:
        raise RequestError(f"seed (--seed) is {options.seed}; it must be at least 0")
    return read_samples(
        data, Tokenizer.from_folder(original.checkpoint.folder), length=length, count=options.sequences,
        held_out_tokens=HELD_OUT_TOKENS, seed=options.seed, train_tokens=train_tokens,
    )  # fmt: skip


def _settings(
    original: LoadedModel, scheme: Scheme, samples: Samples | None, format: str | None, options: Options
) -> Mapping[str, object]:
    """Return everything that the codes depend on."""
    tokens = None if samples is None else np.asarray(samples.calibration, np.int64).tobytes()
    digest = None if tokens is None else blake2b(tokens, digest_size=16).hexdigest()
    fingerprint = model_fingerprint(original.checkpoint.folder, MODEL_FILES, size=16)
    kept = {**asdict(options), "threads": None, "speed": None}
    return {"model": fingerprint, "scheme": asdict(scheme), "tokens": digest, "format": format, "options": kept}


def _run(
    original: LoadedModel, scheme: Scheme, samples: Samples | None, partial: Partial, options: Options,
    writer: Writer, on_progress: OnProgress,
) -> tuple[Quantized, Chosen]:  # fmt: skip
    """Quantize all parts that are not finished. Return the model, and what is known about its matrices."""
    weights, every = original.model.weights, list(parts(original.spec))
    formats, types, notes = _formats(original, scheme, samples, options, writer, on_progress)
    calibration = Calibration(original, samples.calibration) if samples and scheme.reads_data else None
    quantizer = Quantizer(calibration, original.table, scheme, original.dtype, formats.get)
    facts = Chosen(notes=notes)
    for i, part in enumerate(every):
        on_progress(f"quantizing {part.name}", i, len(every))
        stored = {w.name: weights[w.name] for w in part.weights}
        if partial.has(part):
            chosen = partial.load(part)
            quantizer.advance(part, stored, chosen)
        else:
            chosen = quantizer.quantize(part, stored)
            partial.save(part, chosen)
        facts.tell(chosen)
    return Quantized(original, every, partial, formats, types), facts


def _formats(
    original: LoadedModel, scheme: Scheme, samples: Samples | None, options: Options, writer: Writer,
    on_progress: OnProgress,
) -> tuple[Mapping[str, Format], Mapping[str, str], tuple[str, ...]]:  # fmt: skip
    """Return the format of each matrix that is rounded, the types of all matrices of a GGUF file, and notes."""
    matrices, config = [w.name for part in parts(original.spec) for w in part.matrices], original.checkpoint.config
    if scheme.gguf:
        types, notes = choose_types(config, scheme.gguf)
        typed = gguf.formats_of_types(types)
        return {name: typed[name] for name in matrices if name in typed}, types, notes
    formats = dict.fromkeys(matrices, scheme.format)
    if options.bits is not None:
        assert samples is not None
        formats = mixed_formats(original, scheme, samples, options.bits, writer, on_progress)
    is_gguf = writer is WRITERS[GGUF]
    return formats, gguf.types_of_formats(config, original.dtype, formats) if is_gguf else {}, ()


def _report(
    model: str, quantized: Quantized, others: Mapping[str, LoadedModel], scheme: Scheme, samples: Samples | None,
    source: str, facts: Chosen, on_progress: OnProgress,
) -> Report:  # fmt: skip
    """Measure the model on the held-out part, beside rounding to nearest and `others`."""
    original, formats = quantized.original, quantized.formats
    comparison: Comparison | None = None
    if samples is not None:
        others = {**others, scheme.name: quantized.model()}
        if scheme.needs_data or scheme.format.activations != "exact":
            others = {"rtn": _rounded_to_nearest(original, _baseline(formats)), **others}
        total = sum(d.num_scored for d in samples.held_out)
        done = 0

        def on_tokens(scored: int) -> None:
            nonlocal done
            done += scored
            on_progress("measuring on the held-out part", done, total)

        comparison = compare(original, others, samples.held_out, on_tokens)
    size = {scheme.name: _bytes(original, formats, quantized.types, scheme)}
    bits = {scheme.name: _bits(original, formats, quantized.types, scheme)}
    return Report(
        scheme.name, f"GGUF {scheme.gguf}" if scheme.gguf else _name_of(formats), model, source,
        comparison, {"as stored": _bytes(original, {}, {}, scheme), **size},
        {"as stored": 8.0 * DTYPE_BYTES[original.dtype], **bits},
        facts.lost, facts.unseen, facts.outliers, (*(() if samples is None else samples.notes), *facts.notes),
        scheme.format.group,
    )  # fmt: skip


def _name_of(formats: Mapping[str, Format]) -> str:
    return FormatTable(PLAIN, formats).main.name


def _baseline(formats: Mapping[str, Format]) -> dict[str, Format]:
    """Return the formats of rounding to nearest: the same ones, with outliers of activations rounded as all others."""
    return {name: replace(f, activations="int8") if f.activations == "outliers" else f for name, f in formats.items()}


def _rounded_to_nearest(original: LoadedModel, formats: Mapping[str, Format]) -> LoadedModel:
    model = original.model
    table = FormatTable(PLAIN, formats)
    built = PassingModel(original.spec, model.weights, original.table, original.max_model_len, table)
    return replace(original, model=built)


def _bytes(original: LoadedModel, formats: Mapping[str, Format], types: Mapping[str, str], scheme: Scheme) -> int:
    """Return the bytes of all weights: codes, scales and zero points, and the rest as stored or as types say."""
    if types:
        return gguf.num_bytes({w.name: w.shape for w in original.spec.weights()}, types)
    total = 0.0
    for w in original.spec.weights():
        if w.name in formats:
            total += _stored_bytes(formats[w.name], w.shape, scheme)
        else:
            total += w.num_params * DTYPE_BYTES[original.dtype]
    return round(total)


def _stored_bytes(format: Format, shape: tuple[int, ...], scheme: Scheme) -> float:
    """Return the bytes of codes, scales and zero points, and of columns in 16 bits, which have codes too."""
    *stack, rows, columns = shape
    blocks = -(-rows // (format.rows or rows))
    of_groups = blocks * format.num_groups(columns) * format.group_bits
    kept = num_kept(scheme.keep, columns) if scheme.method == "keep" else 0
    return int(np.prod(stack)) * (rows * (columns * format.bits + 16 * kept) + of_groups) / 8


def _bits(original: LoadedModel, formats: Mapping[str, Format], types: Mapping[str, str], scheme: Scheme) -> float:
    """Return the bits of a number of the matrices that are rounded."""
    rounded = [w for w in original.spec.weights() if w.name in (formats or types)]
    if types:
        total: float = gguf.num_bytes({w.name: w.shape for w in rounded}, types)
    else:
        total = sum(_stored_bytes(formats[w.name], w.shape, scheme) for w in rounded)
    return 8 * total / sum(w.num_params for w in rounded)


def _written(
    quantized: Quantized, writer: Writer, partial: Partial, samples: Samples | None
) -> tuple[Path, tuple[str, ...]]:
    """Write the folder under a hidden name, read it back, and compare logits. Return its path, and notes."""
    folder = partial.folder / "model"
    shutil.rmtree(folder, ignore_errors=True)
    try:
        notes = writer.write(folder, quantized)
        _read_back(quantized, folder, samples)
    except OSError:  # a full disk, on which half of a checkpoint would take space for nothing
        shutil.rmtree(folder, ignore_errors=True)
        raise
    return folder, notes


def _read_back(quantized: Quantized, folder: Path, samples: Samples | None) -> None:
    """Raise RequestError unless the folder, as our reader opens it, computes the logits of the quantized model."""
    vocab = quantized.original.spec.vocab_size
    ids = samples.held_out[0].token_ids if samples else np.random.default_rng(0).integers(0, vocab, 64).tolist()
    ids = list(ids)[:256]
    batch = Batch([ids], np.arange(len(ids)), np.zeros(len(ids), np.int64))
    threads = quantized.original.table.driver.threads if quantized.original.table.driver else None
    # Matrices are compared: where activations are rounded, the last bit of a scale may move a tie, and with it a logit.
    config = folder / "config.json"  # a GGUF file has its own
    has_codes = config.exists() and "quantization_config" in read_json(config)
    taken = "exact" if has_codes else None
    read = pass_model(str(folder), LoadOptions(device="cpu", threads=threads, activations=taken))
    models = quantized.model(exact=True), read
    own, back = (np.concatenate(list(logit_blocks(model, batch))) for model in models)
    off = float(np.abs(own - back).max() / np.abs(own).max())
    if not off <= READ_BACK:
        raise RequestError(
            f"what was written does not compute what was quantized: logits differ by {off:.2g} of the largest one; "
            "report this, and take another --format"
        )
