"""Make a model cheaper until it keeps latency limits: plan, change, repair, measure, verify, quantize.

Each command of the chain is one that users have, too, and writes a complete checkpoint. So every intermediate model can
be served, and a run that was stopped goes on with what is there.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from ridgeline.compress import quantize
from ridgeline.compress.cheaper.candidates import Candidate, find_candidates, said, said_of
from ridgeline.compress.cheaper.measure import Measure
from ridgeline.compress.cheaper.options import CheaperOptions
from ridgeline.compress.cheaper.report import (
    CHANGED,
    ORIGINAL,
    RANDOM,
    REPAIRED,
    CheaperReport,
    losses,
    recovery_of,
)
from ridgeline.compress.cheaper.steps import SHORT, Steps
from ridgeline.compress.cheaper.texts import Texts, divide, key_of
from ridgeline.compress.convert import ConvertOptions, convert
from ridgeline.compress.deliver import OnProgress
from ridgeline.compress.folder import open_original, whole_folder
from ridgeline.compress.price import FILE
from ridgeline.compress.prune import PruneOptions, parse_keep, prune
from ridgeline.compress.quantize import Options as QuantizeOptions
from ridgeline.compress.scheme import parse_scheme
from ridgeline.compress.write import write_json
from ridgeline.errors import RequestError, RidgelineError
from ridgeline.load.checkpoint import open_checkpoint
from ridgeline.load.fingerprint import model_fingerprint
from ridgeline.load.hub import MODEL_FILES, find_model
from ridgeline.load.tokenizer import Tokenizer
from ridgeline.measure.rate import Rate, rate_notes
from ridgeline.plan.changes import change
from ridgeline.plan.limits import Slo
from ridgeline.plan.planner import Deployment, Load
from ridgeline.runtime.load import LoadOptions, load_model
from ridgeline.spec.dtype import config_dtype
from ridgeline.train.data.batches import whole_rows
from ridgeline.train.data.corpus import Corpus
from ridgeline.train.distill import DistillOptions, distill, parse_stages
from ridgeline.train.distill.data import Encoder, prepare_data
from ridgeline.train.output import write_random
from ridgeline.train.ranks import Ranks
from ridgeline.train.run import Watch
from ridgeline.verify import verify

MOST_MICRO = 8192  # tokens of a forward pass in training
SHORT_HELD_OUT = 4096  # tokens on which `prune` and `convert` measure what they made
FREE = ("threads", "quantize", "baseline", "candidates")  # options that change no intermediate model
DONE = {"prune": "pruned", "convert": "converted"}
RANDOM_RATE = 3e-3  # peak learning rate from random weights: the default of `ridgeline train`


class Show(Protocol):
    """Shows the progress of a chain."""

    def say(self, line: str) -> None:
        """Print a line."""

    def steps(self) -> AbstractContextManager[OnProgress]:
        """Show what is done, the finished amount and the whole amount."""

    def training(self, ranks: Ranks) -> AbstractContextManager[Watch]:
        """Show a training run."""


@dataclass(frozen=True, slots=True)
class Aim:
    """The limits to keep. deployment: the original on its machine. machine: how far its times can be trusted."""

    deployment: Deployment
    load: Load
    slo: Slo
    machine: str


def cheaper(
    model: str, aim: Aim, corpus: Corpus, out: Path, options: CheaperOptions, show: Show, ranks: Ranks
) -> CheaperReport:  # fmt: skip
    """Make a model cheaper until it keeps latency limits by predicted cost, and write it to a new folder.

    A run that was stopped goes on if it is called again with the same arguments. Intermediate models stay in a folder
    beside the new one.

    Raises:
        RidgelineError: with one line, for each input that cannot be used, for a model that keeps the limits already,
            and if no candidate keeps them. `out` is absent then.
    """
    if out.is_symlink() or out.exists():
        raise RequestError(f"{out} exists; name another folder with --out, or remove it")
    folder = find_model(model)
    if options.quantize is not None:
        parse_scheme(options.quantize)
    open_original(model, options.threads)  # quantized models are refused before anything is written
    with show.steps() as on_progress:
        found = find_candidates(
            aim.deployment, aim.load, aim.slo, lambda done, total: on_progress("planning candidates", done, total)
        )
    facts = {
        "model": model_fingerprint(folder, MODEL_FILES, size=8), "texts": key_of(corpus), "limits": said(aim.slo),
        "load": asdict(aim.load), "hardware": aim.deployment.hardware.name,
        **{name: value for name, value in asdict(options).items() if name not in FREE},
    }  # fmt: skip
    steps = Steps(out, facts)
    try:
        return _Chain(model, folder, aim, corpus, out, options, show, ranks, steps).run(found)
    except RidgelineError:
        steps.remove_unless_useful()
        raise
    finally:
        steps.close()


class _Chain:
    """A run with its folder of steps."""

    def __init__(
        self, model: str, folder: Path, aim: Aim, corpus: Corpus, out: Path, options: CheaperOptions, show: Show,
        ranks: Ranks, steps: Steps,
    ) -> None:  # fmt: skip
        self._model, self._folder, self._aim, self._out = model, folder, aim, out
        self._options, self._show, self._ranks, self._steps = options, show, ranks, steps
        self._source = corpus.source
        self._texts = self._divided(corpus)
        self._measure = Measure(folder, self._texts.held_out, aim.load, options.threads)

    def _divided(self, corpus: Corpus) -> Texts:
        """Divide the texts. Raises DataError if they are too short for the whole repair."""
        o, encoder = self._options, Encoder.of(open_checkpoint(self._folder))
        texts = divide(
            corpus, self._steps.folder / "texts", Tokenizer.from_folder(self._folder), held_out=o.held_out,
            length=o.sequence_length, seed=o.seed,
        )  # fmt: skip
        prepare_data(
            Corpus.from_paths([texts.training]), self._steps.folder / "texts", encoder, self._ranks, tokens=o.tokens,
            held_out=o.held_out, repeat=o.repeat, seed=o.seed,
        )  # fmt: skip
        return texts

    def run(self, found: Sequence[Candidate]) -> CheaperReport:
        original = self._figures(ORIGINAL, self._folder, self._aim.deployment, with_recall=True)
        tried = self._race(found)
        best, made, _ = tried[0]
        own = self._steps.candidate(str(best))
        self._show.say(f"the best of {len(tried)} candidates is {best}; it is repaired in full")
        after = replace(self._aim.deployment, spec=best.spec)
        repaired = self._repaired(made, own / REPAIRED, best.stages, self._options.tokens)
        models = {ORIGINAL: original}
        for name, folder in ((CHANGED, made), (REPAIRED, repaired)):
            models[name] = self._figures(f"{best}-{name}", folder, after, with_recall=True)
        if self._options.baseline:
            trained = self._from_random(made, own)
            models[RANDOM] = self._figures(f"{best}-{RANDOM}", trained, after, with_recall=True)
        result, last = repaired, REPAIRED
        if (scheme := self._options.quantize) is not None:
            result, last = self._quantized(repaired, own, scheme), scheme
            known = _with_weights(after, scheme)
            models[scheme] = self._figures(f"{best}-{scheme}", result, known or after, with_recall=True)
            if known is None:
                models[scheme]["predicted_tokens_per_s"] = None
        report = self._report(best, tried, models, last, self._verified(f"{best}-{last}", result))
        self._deliver(result, report)
        return report

    def _race(self, found: Sequence[Candidate]) -> list[tuple[Candidate, Path, dict[str, Any]]]:
        """Make candidates and repair them for a short while. Return them with their quality, the best one first.

        A candidate that cannot be made is left out. Raises RequestError if none can.
        """
        o, done = self._options, list[tuple[Candidate, Path, dict[str, Any]]]()
        refused = ""
        for one in found:
            if len(done) == o.candidates:
                break
            predicted = said_of(self._aim.slo, one.figures)
            self._show.say(f"candidate {len(done) + 1} of {o.candidates}: {one} ({predicted} predicted)")
            folder = self._steps.candidate(str(one))
            try:
                made = self._made(one, folder)
            except RequestError as e:
                if isinstance(e.__context__, OSError):  # the disk is full
                    raise
                refused = f"{one}: {e}"
                self._show.say(f"left out: {refused}")
                continue
            short = self._repaired(made, folder / SHORT, one.stages, o.updates * o.batch_tokens)
            deployment = replace(self._aim.deployment, spec=one.spec)
            quality = self._figures(f"{one}-short", short, deployment, with_recall=False)
            self._show.say(f"{one}: KL {quality['kl']:.3g} after {o.updates} updates")
            done.append((one, made, quality))
        if not done:
            raise RequestError(f"no candidate can be made, so raise the limit; the last one was refused: {refused}")
        return sorted(done, key=lambda each: float(each[2]["kl"]))

    def _made(self, one: Candidate, folder: Path) -> Path:
        """Return the folder of a changed model."""
        o, source = self._options, self._model
        for number, (command, words) in enumerate(one.commands, 1):
            target = folder / f"{number}-{DONE[command]}"
            if not target.exists():
                common: dict[str, Any] = {
                    "sequences": o.calibrate_sequences, "length": o.sequence_length, "seed": o.seed,
                    "threads": o.threads, "held_out_tokens": SHORT_HELD_OUT,
                }  # fmt: skip
                data = [self._texts.training]
                with self._show.steps() as on_progress:
                    if command == "prune":
                        aims, given = parse_keep(words), PruneOptions(**common)
                        prune(source, aims, out=target, data=data, options=given, on_progress=on_progress)
                    else:
                        changes = ConvertOptions(**common)
                        convert(source, words, out=target, data=data, options=changes, on_progress=on_progress)
            source = str(target)
        return Path(source)

    def _repaired(self, student: Path, target: Path, stages: str, tokens: int, rate: float | None = None) -> Path:
        """Train a model with the original as its teacher, and return the folder."""
        o = self._options
        if target.exists():
            return target
        given = DistillOptions(
            tokens=tokens, stages=parse_stages(stages), held_out=o.held_out, repeat=o.repeat,
            context=o.sequence_length, batch_tokens=o.batch_tokens, learning_rate=rate or o.learning_rate, seed=o.seed,
            micro_tokens=whole_rows(o.batch_tokens, o.sequence_length, MOST_MICRO),
            precision="float32" if self._ranks.on_host else "bfloat16",
        )  # fmt: skip
        corpus, dtype = Corpus.from_paths([self._texts.training]), config_dtype(open_checkpoint(self._folder).config)
        with self._show.training(self._ranks) as watch:
            distill(
                str(student), self._model, corpus, target, given, watch, self._ranks,
                dtype="float32" if dtype == "float32" else "bfloat16",
            )  # fmt: skip
        return target

    def _from_random(self, made: Path, own: Path) -> Path:
        """Return a model of the same shape that was trained from random weights with the same tokens."""
        start = own / f"{RANDOM}-start"
        if not start.exists():
            with whole_folder(start) as folder:
                write_random(folder, made, self._options.seed)
        return self._repaired(start, own / RANDOM, "tokens", self._options.tokens, RANDOM_RATE)

    def _quantized(self, repaired: Path, own: Path, scheme: str) -> Path:
        o, target = self._options, own / f"quantized-{scheme}"
        if not target.exists():
            given = QuantizeOptions(o.calibrate_sequences, o.sequence_length, o.seed, threads=o.threads, speed=False)
            with self._show.steps() as on_progress:
                quantize(
                    str(repaired), scheme, out=target, data=[self._texts.training], options=given,
                    on_progress=on_progress,
                )  # fmt: skip
        return target

    def _figures(
        self, name: str, folder: Path, deployment: Deployment, *, with_recall: bool
    ) -> dict[str, Any]:  # fmt: skip
        with self._show.steps() as on_progress:
            return self._steps.measured(
                name, lambda: self._measure.figures(name, folder, deployment, with_recall, on_progress)
            )

    def _verified(self, name: str, folder: Path) -> str:
        def check() -> Mapping[str, Any]:
            loaded = load_model(str(folder), LoadOptions(device="cpu", threads=1))
            with self._show.steps() as on_progress:
                on_progress("verifying", 0, 1)
                cases = verify(loaded, Tokenizer.from_folder(self._folder), quick=True, seed=self._options.seed)
            return {"equal": cases.equal, "cases": len(cases.results)}

        found = self._steps.measured(f"{name}-verify", check)
        if found["equal"]:
            return f"verify: all tokens are equal in {found['cases']} cases"
        return f"verify: tokens DIFFER in some of {found['cases']} cases; `ridgeline verify` lists them"

    def _report(
        self, best: Candidate, tried: Sequence[tuple[Candidate, Path, Mapping[str, Any]]],
        models: Mapping[str, Mapping[str, Any]], last: str, verified: str,
    ) -> CheaperReport:  # fmt: skip
        o, aim, recovery = self._options, self._aim, recovery_of(models)
        results = [f"limits: {said(aim.slo)}; {said_of(aim.slo, best.figures)} predicted"]
        if "tpot" in aim.slo.limits and (rate := models[last].get("measured_tokens_per_s")):
            results.append(f"measured on this machine: tpot {1e3 / rate:.4g} ms")
        if recovery is not None:
            results.append(f"recovery: {recovery:.2f} of the distance between random and original, in held-out nats")
        results += [losses(models, last), verified]
        for one, _, quality in tried:
            figures, updates = said_of(aim.slo, one.figures), f"{o.updates} updates"
            results.append(f"tried: {one}: {figures} predicted, KL {quality['kl']:.3g} after {updates}")
        short = [
            {"words": str(one), "predicted_tpot_s": one.figures.tpot_s, **quality} for one, _, quality in tried
        ]  # fmt: skip
        rates = {name: Rate(**values["timing"]) if values["timing"] else None for name, values in models.items()}
        title = f"{self._model} -> {best}, repaired on {o.tokens:,} tokens"
        held_out = sum(document.num_scored for document in self._texts.held_out)
        return CheaperReport(
            title, models, short, results, self._source, aim.machine, held_out, recovery,
            rate_notes(rates, aim.load.context),
        )  # fmt: skip

    def _deliver(self, result: Path, report: CheaperReport) -> None:
        """Copy the result to its folder, with the report."""
        with whole_folder(self._out) as folder:
            shutil.copytree(result, folder)
            write_json(folder / FILE, report.to_json())


def _with_weights(deployment: Deployment, scheme: str) -> Deployment | None:
    """Return the deployment with quantized weights; None for a scheme that the planner does not know."""
    try:
        return change(deployment, f"weights={scheme}").deployment
    except RequestError:
        return None
