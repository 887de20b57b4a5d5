"""Say how the test runs each command of the docs. A `ridgeline` command without a matching rule runs unchanged."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum, auto

SERVER_URL = "http://localhost:8000"  # the address in the docs; the test replaces it by the address of its own server


class How(Enum):
    RUN = auto()  # run it in this process, with `more` after its own arguments
    PARSE = auto()  # only parse its arguments
    KEPT = auto()  # replace the measurement by an invented calibration
    SERVER = auto()  # use the server that all blocks share
    SERVE = auto()  # start it as a server, send it one request, stop it
    CURL = auto()  # run curl against the test's server
    RANKS = auto()  # PARSE for torchrun and for the command that it starts
    PIP = auto()  # check that pyproject.toml has the extras
    FETCH = auto()  # do not run it: it fetches or unpacks files of other projects
    TOOL = auto()  # check that the files and pytest markers that it names exist


@dataclass(frozen=True, slots=True)
class Rule:
    """How one kind of command runs.

    pattern: matches the beginning of the command. more: arguments that are added; the last of two equal options counts.
    why: reason why the test does not run the command unchanged. slow: whether the slow half runs it.
    """

    pattern: str
    how: How
    why: str
    more: tuple[str, ...] = ()
    slow: bool = False

    def matches(self, command: str) -> bool:
        return re.match(self.pattern, command) is not None


def words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


SIZES = "the docs' sizes take minutes"
TRAINING = words(
    "--batch-tokens 128 --context 64 --warmup-steps 1 --eval-every 4 --save-every 4 --held-out 0.5 --epochs 1"
)
DRAFTS = words(
    "--train-tokens 200 --continuation-tokens 64 --output-len 16 --batch-tokens 64 --warmup-steps 1 --save-every 4"
)
DISTILLATION = words(
    "--tokens 192 --context 32 --batch-tokens 64 --save-every 2 --eval-every 4 --held-out 0.4 --repeat 9"
)
RULES = (
    Rule(r"ridgeline .*--device cuda", How.PARSE, "it needs a GPU"),
    Rule(r"ridgeline lab all", How.PARSE, "it takes minutes, and tests/pure/test_lab.py runs the command"),
    Rule(r"ridgeline lab [a-z]+ --quick", How.PARSE, SIZES),
    Rule(r"ridgeline lab radix --trace", How.PARSE, "it needs a trace"),
    Rule(
        r"ridgeline lab (speculative|outliers|rounding|prune|heads|windows|repair|layers|drafts|intensity|recall)",
        How.PARSE,
        SIZES,
    ),
    Rule(r"ridgeline lab (orca|[0-9])", How.PARSE, SIZES),
    Rule(
        r"ridgeline --install-completion", How.FETCH, "it changes the shell's own files; tests/cpu/test_completion.py"
    ),
    Rule(r"ridgeline .*--attention bf16", How.PARSE, "it needs a CPU with AVX-512 BF16"),
    Rule(
        r"ridgeline quantize .*--scheme qat",
        How.RUN,
        SIZES,
        words("--train-tokens 256 --sequences 4 --sequence-length 32"),
    ),
    Rule(
        r"ridgeline prune ",
        How.RUN,
        SIZES,
        words("--calibrate-sequences 4 --sequence-length 32 --layer-sequences 1"),
    ),
    Rule(r"ridgeline convert ", How.RUN, SIZES, words("--sequence-length 32")),
    Rule(r"ridgeline serve$", How.SERVER, "port 8000 may be taken, and other blocks ask this one", slow=True),
    Rule(r"ridgeline serve .*--ray", How.PARSE, "it needs Ray, and tests/cpu/test_ray.py runs it"),
    Rule(r"ridgeline serve ", How.SERVE, "a server does not end by itself", words("--port 0"), slow=True),
    Rule(
        r"ridgeline bench serve .*--concurrency",
        How.RUN,
        SIZES,
        ("--base-url", SERVER_URL, *words("--model pocket --num-requests 6 --input-len 8 --output-len 4")),
        slow=True,
    ),
    Rule(
        r"ridgeline bench serve .*--arrivals",
        How.RUN,
        SIZES,
        ("--base-url", SERVER_URL, *words("--num-requests 6 --input-len 8 --output-len 4")),
        slow=True,
    ),
    Rule(
        r"ridgeline bench serve ",
        How.RUN,
        "the server of the test has another port",
        ("--base-url", SERVER_URL, *words("--num-requests 6")),
        slow=True,
    ),
    Rule(
        r"ridgeline bench latency ",
        How.RUN,
        SIZES,
        words("--batch-size 2 --input-len 8 --output-len 4 --num-iters 1 --num-iters-warmup 0"),
        slow=True,
    ),
    Rule(r"ridgeline bench throughput .*--dataset", How.RUN, SIZES, words("--output-len 4"), slow=True),
    Rule(
        r"ridgeline bench throughput ", How.RUN, SIZES, words("--num-prompts 4 --input-len 8 --output-len 4"), slow=True
    ),
    Rule(r"ridgeline bench replay ", How.RUN, "the traces of the test are short", words("--num-requests 6"), slow=True),
    Rule(r"ridgeline verify ", How.RUN, SIZES, words("--quick"), slow=True),
    Rule(r"ridgeline evaluate .*--recall", How.RUN, SIZES, slow=True),
    Rule(r"ridgeline calibrate$", How.KEPT, "half a minute; tests/cpu/test_calibrate.py measures"),
    Rule(
        r"ridgeline calibrate --(json|plot|device|out)", How.KEPT, "half a minute; tests/cpu/test_calibrate.py measures"
    ),
    Rule(r"ridgeline distill ", How.RUN, SIZES, DISTILLATION, slow=True),
    Rule(r"ridgeline cheaper ", How.PARSE, "minutes; tests/cpu/test_cheaper.py runs it"),
    Rule(r"ridgeline train --draft-for", How.RUN, SIZES, DRAFTS, slow=True),
    Rule(r"ridgeline train --recipe", How.PARSE, "hours; tests/cpu/test_train_pair.py makes a small pair"),
    Rule(r"ridgeline train .*--data stdlib", How.PARSE, "hours; 31 MB of text"),
    Rule(r"ridgeline train ", How.RUN, "the defaults are for megabytes of text", TRAINING, slow=True),
    Rule(r"ridgeline plan .*--users", How.RUN, SIZES, words("--users 5 --hardware h100"), slow=True),
    Rule(r"ridgeline simulate .*--arrivals", How.RUN, SIZES, words("--num-requests 20")),
    Rule(r"torchrun ", How.RANKS, "eight processes; tests/cpu/test_train_command.py starts two"),
    Rule(r"python bench/", How.PARSE, "minutes to hours each"),
    Rule(r"curl ", How.CURL, "the server of the test has another port", slow=True),
    Rule(r"pip install ", How.PIP, ".ci/run installs"),
    Rule(r"(docker|helm|systemctl|cp deploy/) ?", How.FETCH, "it needs a daemon; tests/pure/test_deploy.py checks it"),
    Rule(r"(pip download|tar) ", How.FETCH, "another project's sources, from the network"),
    Rule(r"python -m ridgeline.harness ", How.FETCH, "lm-eval fetches the questions; tests/cpu/test_tasks.py runs it"),
    Rule(r"serve deploy ", How.TOOL, "it needs a Ray cluster; tests/cpu/test_ray_serve.py runs the application"),
    Rule(r"python -m venv ", How.TOOL, ".ci/run makes one"),
    Rule(r"python tests/compiled/", How.TOOL, "it compiles for minutes"),
    Rule(r"(ruff|mypy|pytest|cmake|clang-format)( |$)", How.TOOL, ".ci/run and its wheel run them"),
)


def rule_of(command: str) -> Rule:
    """Return the rule of a command. Raises ValueError for a program without a rule."""
    for rule in RULES:
        if rule.matches(command):
            return rule
    if command.startswith("ridgeline "):
        return Rule("", How.RUN, "")
    raise ValueError(f"no rule in tests/cpu/doc_rules.py says how `{command}` runs")
