"""Measure what rounding a model's weights, activations, state or attention costs in accuracy, on a short sample text.

This runs once for each model and format; the result is kept in the user's cache folder. For quantized weights, the two
models are never in memory together: the original's logits are recorded first, layer by layer.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from hashlib import blake2b
from pathlib import Path
from typing import Any, TypeVar

from ridgeline.errors import RequestError, RidgelineError
from ridgeline.evals.divergence import Divergence, Recorded, measure_divergence
from ridgeline.evals.documents import Document, encode_text
from ridgeline.load.fingerprint import model_fingerprint
from ridgeline.load.hub import MODEL_FILES, SMALL_FILES, find_model
from ridgeline.load.tokenizer import Tokenizer
from ridgeline.ops import resolve_device
from ridgeline.runtime.load import LoadedModel, LoadOptions, pass_model
from ridgeline.runtime.rounded import round_attention
from ridgeline.spec.folders import cache_folder, write_whole
from ridgeline.spec.quant import as_fields, format_of
from ridgeline.spec.storage import EXACT

SAMPLE = Path(__file__).with_name("sample.txt")
MAX_TOKENS = 257  # tokens of the sample; all but the first are scored
T = TypeVar("T")
VERSION = 1  # version of the kept results: raise it if a format or its computation changes


@dataclass(frozen=True, slots=True)
class Price:
    """The accuracy cost on the sample: mean KL(stored || quantized) in nats per token, and the share of `num_tokens`
    tokens for which both models have the same most likely token.
    """

    kl: float
    top1_agreement: float
    num_tokens: int


def describe_price(price: Price) -> str:
    """Return a cost in words, after the name of what is compared."""
    return (
        f"{price.kl:.2g} nats per token; the most likely token is the same for {price.top1_agreement:.1%} of "
        f"{price.num_tokens} tokens of a sample text"
    )


class Appraisal:
    """The accuracy cost of a format, in two parts: one before the quantized model is loaded, and one after.

    If the cost is known, the first part does nothing. Otherwise it runs the original and calls `on_start` first.
    """

    def __init__(
        self, model: str, options: LoadOptions, tokenizer: str | None, on_start: Callable[[str], None]
    ) -> None:
        is_lossy = format_of(options.weights).is_lossy
        kind = options.weights if is_lossy else options.activations
        self._subject = f"{'weights' if is_lossy else 'activations'} in {kind}"
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
        self._known = read_price(self._path, Price)
        if self._known is None:
            on_start(f"{kind} on {model}: measuring the accuracy cost on a sample text, once")
            try:
                self._recorded = _record(model, options, with_tokenizer)
            except RidgelineError as e:
                self._why_not = str(e)

    def describe(self, loaded: LoadedModel) -> str:
        """Return a line about the cost of the format. loaded: the quantized model."""
        price = self._known or self._measure(loaded)
        if price is None:
            return f"{self._subject}: the accuracy cost is not known: {self._why_not}"
        return f"{self._subject}: KL to the stored model is {describe_price(price)}"

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
        write_price(self._path, price)
        return price


def describe_attention(
    model: str, options: LoadOptions, tokenizer: str | None, loaded: LoadedModel, on_start: Callable[[str], None]
) -> str:
    """Let a model round its attention to bfloat16, and return a line about the accuracy cost.

    The cost is that beside exact attention over the same state. Raises DeviceError where attention cannot be rounded.
    """
    driver = round_attention(loaded)

    def measure(document: Document) -> Divergence:
        driver.round_attention(rounds=False)
        try:
            exact = Recorded.of(loaded, [document])
        finally:
            driver.round_attention(rounds=True)
        return exact.measure(loaded)

    subject = "attention in bf16"
    try:
        price = _own_price(
            model, options, tokenizer, on_start, subject, measure, state=loaded.storage.dtype, attention="bf16"
        )
    except RidgelineError as e:
        return f"{subject}: the accuracy cost is not known: {e}"
    return f"{subject}: KL to exact attention is {describe_price(price)}"


def describe_state(
    model: str, options: LoadOptions, tokenizer: str | None, loaded: LoadedModel, on_start: Callable[[str], None]
) -> str:
    """Return a line about the accuracy cost of quantizing a model's state, compared with float32 state and equal
    weights.
    """
    name = loaded.storage.dtype
    subject = f"state in {name}"
    try:
        price = _own_price(
            model, options, tokenizer, on_start, subject,
            lambda document: measure_divergence(replace(loaded, storage=EXACT), loaded, [document]), state=name,
        )  # fmt: skip
    except RidgelineError as e:
        return f"{subject}: the accuracy cost is not known: {e}"
    return f"{subject}: KL to float32 state is {describe_price(price)}"


def _own_price(
    model: str, options: LoadOptions, tokenizer: str | None, on_start: Callable[[str], None], subject: str,
    measure: Callable[[Document], Divergence], **key: str,
) -> Price:  # fmt: skip
    """Measure or look up a cost for which the model that is loaded makes both passes.

    key: more settings that the cost depends on, besides the model and its options. Raises RidgelineError if nothing can
    be measured.
    """
    path, with_tokenizer = price_path(model, options, tokenizer, **key)
    if (known := read_price(path, Price)) is not None:
        return known
    on_start(f"{subject} on {model}: measuring the accuracy cost on a sample text, once")
    text = SAMPLE.read_text(encoding="utf-8")
    document = encode_text(text, Tokenizer.from_folder(with_tokenizer), MAX_TOKENS, "the sample text")
    found = measure(document)
    price = Price(found.kl.value, found.top1_agreement.value, found.original.num_tokens)
    write_price(path, price)
    return price


def price_path(model: str, options: LoadOptions, tokenizer: str | None, **key: str) -> tuple[Path, Path]:
    """Return where a cost is kept, and the folder of the tokenizer. Raises RidgelineError if none can be measured."""
    if options.load_format == "dummy":
        raise RequestError("the weights are random")
    folder = find_model(model, revision=options.revision, files=MODEL_FILES)
    with_tokenizer = find_model(tokenizer, files=SMALL_FILES) if tokenizer else folder
    if not any(with_tokenizer.glob("tokenizer*")):
        raise RequestError("there is no tokenizer for the sample text")
    return cache_folder() / "prices" / f"{_key(folder, with_tokenizer, options, **key)}.json", with_tokenizer


def _record(model: str, options: LoadOptions, with_tokenizer: Path) -> Recorded:
    original = pass_model(model, replace(options, weights="auto", dtype="auto", activations=None))
    text = SAMPLE.read_text(encoding="utf-8")
    document = encode_text(text, Tokenizer.from_folder(with_tokenizer), MAX_TOKENS, "the sample text")
    return Recorded.of(original, [document])


def _key(folder: Path, with_tokenizer: Path, options: LoadOptions, **more: str) -> str:
    """Return a key made of everything that the cost depends on."""
    sample = blake2b(SAMPLE.read_bytes(), digest_size=8).hexdigest()
    device = resolve_device(options.device)
    settings = {"dtype": options.dtype, "max_model_len": options.max_model_len, "device": device}
    other = "" if with_tokenizer == folder else model_fingerprint(with_tokenizer, SMALL_FILES, size=16)
    format = as_fields(format_of(options.weights, options.activations))
    return model_fingerprint(
        folder, MODEL_FILES, size=16, version=VERSION, sample=sample, tokenizer=other, format=format, **settings, **more
    )


def read_price(path: Path, kind: Callable[..., T]) -> T | None:
    """Return the kept cost, or None if there is none or the file is invalid."""
    try:
        return kind(**json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None


def write_price(path: Path, price: Any) -> None:
    """Write the file completely or not at all. If that fails, the cost is measured again next time."""
    with suppress(OSError):
        write_whole(path, json.dumps(asdict(price)))
