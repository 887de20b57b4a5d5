"""What rounding a model's weights or its state costs, on a short text of ours: measured when a model is first loaded in
a format, and kept in the user's cache folder.

Of weights, the two models are never in memory together: the original's answers come first, layer by layer.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from hashlib import blake2b
from pathlib import Path

from ridgeline.errors import RequestError, RidgelineError
from ridgeline.evals.divergence import Recorded, measure_divergence
from ridgeline.evals.documents import encode_text
from ridgeline.load.fingerprint import model_fingerprint
from ridgeline.load.hub import MODEL_FILES, SMALL_FILES, find_model
from ridgeline.load.tokenizer import Tokenizer
from ridgeline.ops import resolve_device
from ridgeline.runtime.load import LoadedModel, LoadOptions, pass_model
from ridgeline.spec.quant import format_of
from ridgeline.spec.storage import EXACT

SAMPLE = Path(__file__).with_name("sample.txt")
MAX_TOKENS = 257  # of the sample; one less is scored
VERSION = 1  # of what is kept: raise it when a format, or how it is computed, changes


@dataclass(frozen=True, slots=True)
class Price:
    """On the sample: mean KL(as stored || rounded) in nats a token, and how often both find the same token most likely,
    of so many tokens.
    """

    kl: float
    top1_agreement: float
    num_tokens: int


class Appraisal:
    """The price of a format, in two halves: before its model is loaded, and after.

    The first half takes nothing where the price is known, and otherwise runs the original: `on_start` is told.
    """

    def __init__(
        self, model: str, options: LoadOptions, tokenizer: str | None, on_start: Callable[[str], None]
    ) -> None:
        self._options = options
        self._known: Price | None = None
        self._recorded: Recorded | None = None
        self._why_not = ""
        if options.load_format == "dummy":
            self._why_not = "the weights are random"
            return
        folder = find_model(model, revision=options.revision, files=MODEL_FILES)
        with_tokenizer = find_model(tokenizer, files=SMALL_FILES) if tokenizer else folder
        if not any(with_tokenizer.glob("tokenizer*")):
            self._why_not = "there is no tokenizer for the sample text"
            return
        self._path = cache_folder() / "prices" / f"{_key(folder, with_tokenizer, options)}.json"
        self._known = _read(self._path)
        if self._known is None:
            on_start(f"{options.weights} on {model}: measuring its price on a sample text, once")
            try:
                self._recorded = _record(model, options, with_tokenizer)
            except RidgelineError as e:
                self._why_not = str(e)

    def describe(self, loaded: LoadedModel) -> str:
        """A line on what the format costs. loaded: the rounded model."""
        price = self._known or self._measure(loaded)
        name = self._options.weights
        if price is None:
            return f"weights in {name}: their price is not known: {self._why_not}"
        return (
            f"weights in {name}: KL to the model as stored {price.kl:.2g} nats a token, the same likeliest token for "
            f"{price.top1_agreement:.1%} of {price.num_tokens} tokens of a sample text"
        )

    def _measure(self, loaded: LoadedModel) -> Price | None:
        recorded, self._recorded = self._recorded, None
        if recorded is None:
            return None
        try:
            found = recorded.measure(loaded)
        except RidgelineError as e:
            self._why_not = str(e)
            return None
        price = Price(found.kl.value, found.top1_agreement.value, found.original.num_tokens)
        _write(self._path, price)
        return price


def describe_state(
    model: str, options: LoadOptions, tokenizer: str | None, loaded: LoadedModel, on_start: Callable[[str], None]
) -> str:
    """A line on what rounding a model's state costs, beside float32 over the same weights, however they are stored."""
    name = loaded.storage.dtype
    try:
        price = _state_price(model, options, tokenizer, loaded, on_start)
    except RidgelineError as e:
        return f"state in {name}: its price is not known: {e}"
    return (
        f"state in {name}: KL to float32 {price.kl:.2g} nats a token, the same likeliest token for "
        f"{price.top1_agreement:.1%} of {price.num_tokens} tokens of a sample text"
    )


def _state_price(
    model: str, options: LoadOptions, tokenizer: str | None, loaded: LoadedModel, on_start: Callable[[str], None]
) -> Price:
    """Both passes are over the model that is there. Raises RidgelineError where there is nothing to measure."""
    if options.load_format == "dummy":
        raise RequestError("the weights are random")
    folder = find_model(model, revision=options.revision, files=MODEL_FILES)
    with_tokenizer = find_model(tokenizer, files=SMALL_FILES) if tokenizer else folder
    if not any(with_tokenizer.glob("tokenizer*")):
        raise RequestError("there is no tokenizer for the sample text")
    name = loaded.storage.dtype
    path = cache_folder() / "prices" / f"{_key(folder, with_tokenizer, options, state=name)}.json"
    if (known := _read(path)) is not None:
        return known
    on_start(f"state in {name} on {model}: measuring its price on a sample text, once")
    text = SAMPLE.read_text(encoding="utf-8")
    document = encode_text(text, Tokenizer.from_folder(with_tokenizer), MAX_TOKENS, "the sample text")
    found = measure_divergence(replace(loaded, storage=EXACT), loaded, [document])
    price = Price(found.kl.value, found.top1_agreement.value, found.original.num_tokens)
    _write(path, price)
    return price


def cache_folder() -> Path:
    """Where this program may keep what it can work out again, by the platform's convention."""
    home = Path.home()
    if given := os.environ.get("XDG_CACHE_HOME"):
        base = Path(given)
    elif sys.platform == "darwin":
        base = home / "Library" / "Caches"
    elif sys.platform == "win32":
        base = Path(os.environ.get("LOCALAPPDATA", home / "AppData" / "Local"))
    else:
        base = home / ".cache"
    return base / "ridgeline"


def _record(model: str, options: LoadOptions, with_tokenizer: Path) -> Recorded:
    original = pass_model(model, replace(options, weights="auto", dtype="auto"))
    text = SAMPLE.read_text(encoding="utf-8")
    document = encode_text(text, Tokenizer.from_folder(with_tokenizer), MAX_TOKENS, "the sample text")
    return Recorded.of(original, [document])


def _key(folder: Path, with_tokenizer: Path, options: LoadOptions, **more: str) -> str:
    """What the price depends on."""
    sample = blake2b(SAMPLE.read_bytes(), digest_size=8).hexdigest()
    device = resolve_device(options.device)
    bearing = {"dtype": options.dtype, "max_model_len": options.max_model_len, "device": device}
    other = "" if with_tokenizer == folder else model_fingerprint(with_tokenizer, SMALL_FILES, size=16)
    format = asdict(format_of(options.weights))
    return model_fingerprint(
        folder, MODEL_FILES, size=16, version=VERSION, sample=sample, tokenizer=other, format=format, **bearing, **more
    )


def _read(path: Path) -> Price | None:
    """What was kept; None for nothing, and for what is not a price."""
    try:
        return Price(**json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None


def _write(path: Path, price: Price) -> None:
    """Whole or not at all. Where it cannot be kept it is measured again."""
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        file, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        with os.fdopen(file, "w", encoding="utf-8") as out:
            json.dump(asdict(price), out)
        Path(name).replace(path)
