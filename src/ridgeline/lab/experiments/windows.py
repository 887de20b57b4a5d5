"""Local attention: state and time that do not grow, what it loses, and what some global layers mend."""

from __future__ import annotations

from statistics import median

from ridgeline.catalog.models import find_model
from ridgeline.errors import RequestError
from ridgeline.evals.recall import measure_recall, recall_tokens
from ridgeline.lab.changed import Changer
from ridgeline.lab.experiment import Experiment, Facts, Setup
from ridgeline.lab.judgement import Judgement, at_least, only_if
from ridgeline.lab.mixing import attention, decode_s, model, page_bytes
from ridgeline.lab.scratch import losses, more, told
from ridgeline.load.tokenizer import Tokenizer

WINDOW, SHORT, LONG = 512, 2048, 8192  # tokens of the timed models
OWN_WINDOW, PAIRS, DISTANCES = 16, (4, 8), (32, 96)  # of the measured model; pairs are further back than the window
# Most times that a token may take at a longer context: the middle, of logarithms, between constant and proportional.
FLAT = (LONG / SHORT) ** 0.5
FORMS = ("4 key heads", "windows", "windows, 1 global")  # of small models that are trained
MENDED = 1.5  # times that the loss with windows everywhere has to be that with some global layers


def predict(setup: Setup) -> Facts:
    """Count the numbers of state by formula at two contexts: only global layers grow."""
    local, whole = model([attention(8, WINDOW)]), model([attention(8)])
    return {
        "growth_of_windows": local.state_elements(LONG) / local.state_elements(SHORT),
        "growth_of_attention": whole.state_elements(LONG) / whole.state_elements(SHORT),
    }


def measure(setup: Setup) -> Facts:
    """Count pages, time tokens, and give the measured model windows in all layers, and in every second one."""
    if not any(own.window is None for own in find_model(setup.model).spec.attentions(shared=False)):
        raise RequestError(
            f"{setup.model} has no layer with attention to the whole context, which a window could limit"
        )
    specs = {"windows": model([attention(8, WINDOW)]), "attention": model([attention(8)])}
    setup.on_part("windows: time of a token")
    rounds = 3 if setup.quick else 5
    times = {str(n): decode_s(specs, n, rounds) for n in (SHORT, LONG)}
    pages = {str(n): {name: page_bytes(spec, n) for name, spec in specs.items()} for n in (SHORT, LONG)}
    setup.on_part("windows: the model with windows")
    changer = Changer.open(setup, sequences=8 if setup.quick else 32, length=256)
    made = {"all": changer.with_windows(OWN_WINDOW, None), "half": changer.with_windows(OWN_WINDOW, 1)}
    setup.on_part("windows: recall")
    tokens = recall_tokens(Tokenizer.from_folder(changer.original.checkpoint.folder), changer.original.spec.vocab_size)
    recall = {
        name: measure_recall(one, tokens, pairs=PAIRS, distances=DISTANCES, seed=setup.seed).mean
        for name, one in {"none": changer.original, **made}.items()
    }
    return {
        "seconds": times, "pages": pages, "losses": changer.losses(made), "recall": recall,
        "trained": losses(setup, FORMS),
    }  # fmt: skip


def judge(predicted: Facts, measured: Facts) -> tuple[Judgement, ...]:
    """Judge what global layers mend, where pages and times with windows do not grow."""
    pages, seconds = ([measured[name][str(n)] for n in (SHORT, LONG)] for name in ("pages", "seconds"))
    growth = {name: median(seconds[1][name]) / median(seconds[0][name]) for name in seconds[0]}
    (loss, spread), (half, half_spread) = (measured["losses"][name] for name in ("all", "half"))
    recall, trained = measured["recall"], measured["trained"]
    whole, local, mixed = FORMS
    is_mended = all(x > 0 for x in more(trained, local, whole) + more(trained, local, mixed))
    is_flat = pages[0]["windows"] == pages[1]["windows"] and growth["windows"] <= FLAT
    return (
        only_if(
            at_least(
                16, loss / half, MENDED,
                f"with windows of {WINDOW} the pages at {LONG:,} tokens are "
                f"{pages[1]['windows'] / pages[0]['windows']:g} times those at {SHORT:,}, and a token takes "
                f"{growth['windows']:.2f} times as long, with full "
                f"attention {growth['attention']:.2f} times; windows of {OWN_WINDOW} in all layers of the model "
                f"lose {loss:.2f} (KL, nats a token), in every second layer {half:.2f}; recall falls from "
                f"{recall['none']:.0%} to {recall['all']:.0%} and {recall['half']:.0%}; {told(trained)}",
                ((loss - spread) / (half + half_spread), (loss + spread) / max(half - half_spread, 1e-9)),
            ),
            is_flat and is_mended and recall["all"] < recall["none"] and recall["all"] < recall["half"],
        ),
    )  # fmt: skip


EXPERIMENT = Experiment(
    "windows",
    "Local attention, and some global layers",
    (16,),
    predict,
    measure,
    judge,
    "The number is the loss with windows in all layers over that with windows in every second one. The model was "
    "trained without windows and is not repaired, so only the order of its losses counts. Recall asks "
    "for values further back than a window. Small models that are trained with windows must lose more than with "
    "full attention, and than with one global layer, with each seed. A minute of training teaches what is near first, "
    "so that windows may lose less.",
)
