"""Check docstrings, comments, help, metrics and headings against the glossary of CONTRIBUTING.md.

Machines judge no style. These rules catch the habits that made the old texts hard to read, and no more.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import click
import pytest
import typer.main
from words import BANNED, FIRST_WORDS, comments, docstrings, faults, headings

import ridgeline
from ridgeline.cli.main import app

SOURCE = Path(ridgeline.__file__).parent
ROOT = Path(__file__).parents[2]
# Files and folders with Python. src/ is divided by package, tests/ by folder.
PACKAGES, TESTS, BENCH = (
    sorted(p for p in folder.iterdir() if p.suffix == ".py" or (p.is_dir() and any(p.rglob("*.py"))))
    for folder in (SOURCE, ROOT / "tests", ROOT / "bench")
)
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("**/*.md")])
# Each of these methods writes a metric to Prometheus' page: the argument after the name is its help text.
METRIC_CALLS = ("value", "values", "histogram")


def commands(command: click.Command, path: str = "ridgeline") -> Iterator[tuple[str, click.Command]]:
    """Yield the path of each command of a click group, and the command; groups are not commands."""
    if isinstance(command, click.Group):
        for name, inner in command.commands.items():
            yield from commands(inner, f"{path} {name}")
    else:
        yield path, command


COMMANDS = dict(commands(typer.main.get_command(app)))


def metric_help(source: str) -> Iterator[tuple[int, str]]:
    """Yield (line, text) of the help of each metric: the text after the name in a call that writes one."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in METRIC_CALLS:
            texts = [a.value for a in node.args if isinstance(a, ast.Constant) and isinstance(a.value, str)]
            names = [i for i, text in enumerate(texts) if re.fullmatch(r"[a-z_]+:[a-z_]+|[a-z_]+_total", text)]
            if names and names[0] + 1 < len(texts):
                yield node.lineno, texts[names[0] + 1]


def option_faults(option: click.Parameter) -> Iterator[str]:
    """Yield what is wrong with the help of an option or an argument."""
    text = getattr(option, "help", None) or ""
    yield from faults(text)
    if not isinstance(option, click.Option) or option.is_flag or option.required or option.hidden:
        return
    shown = option.show_default or getattr(option, "show_default", False)
    named = re.search(r"\bdefaults?\b|\bwithout (it|this|the flag)\b|several times", text, re.IGNORECASE)
    if not named and not (shown and option.default not in (None, ())):
        yield f"{option.opts[0]} takes a value, is not required, and its help names no default"


def faults_in(folder: Path, read: Callable[[str], Iterator[tuple[int, str]]]) -> Iterator[str]:
    """Yield the faults of the texts that `read` finds in a file, or in all files of a folder."""
    for path in [folder] if folder.is_file() else sorted(folder.rglob("*.py")):
        for line, text in read(path.read_text(encoding="utf-8")):
            yield from (f"{path}:{line}: {fault}" for fault in faults(text))


def capitalized(source: str) -> Iterator[tuple[int, str]]:
    """Yield comments with a capital first letter: the rules on first words hold for short comments too."""
    yield from ((line, text[:1].upper() + text[1:]) for line, text in comments(source))


@pytest.mark.parametrize("folder", [*PACKAGES, *TESTS, *BENCH], ids=lambda p: p.name)
def test_docstrings_are_sentences(folder: Path) -> None:
    found = list(faults_in(folder, docstrings))
    assert not found, "\n".join(found)


@pytest.mark.parametrize("folder", [*TESTS, *BENCH], ids=lambda p: p.name)
def test_comments_of_tests_and_benchmarks_are_plain(folder: Path) -> None:
    found = list(faults_in(folder, capitalized))
    assert not found, "\n".join(found)


@pytest.mark.parametrize("path", COMMANDS)
def test_help_is_sentences_and_names_defaults(path: str) -> None:
    command = COMMANDS[path]
    found = list(faults(command.help or ""))
    for option in command.params:
        found += [f"{option.opts[0]}: {fault}" for fault in option_faults(option)]
    assert not found, "\n".join(found)


def test_metrics_are_sentences() -> None:
    path = SOURCE / "serve" / "api" / "metrics.py"
    texts = list(metric_help(path.read_text(encoding="utf-8")))
    assert len(texts) > 40
    found = [f"{path.name}:{line}: {fault}" for line, text in texts for fault in faults(text)]
    found += [
        f"{path.name}:{line}: {text!r} does not end as a sentence does" for line, text in texts if text[-1] != "."
    ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_headings_are_plain(page: Path) -> None:
    found = [f"{page.name}:{line}: {fault}" for line, text in headings(page) for fault in faults(text)]
    assert not found, "\n".join(found)


def test_the_glossary_names_the_banned_words() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    glossary = text[text.index("## Glossary") :].split("\n## ")[0]
    missing = [word for word in BANNED if word not in glossary]
    missing += [word for word in FIRST_WORDS if f'"{word}"' not in glossary]
    assert not missing, f"CONTRIBUTING's glossary does not name {missing}"


@pytest.mark.parametrize("text", [
    "Of the noise.", "Return it. Of each group.", "What a layer keeps.", "Who goes first.", "The same for pages.",
    "That memory gives at most.", "Steps of a run.\n\nsteps: of the run.", "Is there a place for it?", "q is turned.",
    "The layer remembers it.", "Check the pools' books.", "A sequence cruises.", "Soiled pages.", "recall the state",
    "Quantise a matrix.",
])  # fmt: skip
def test_a_planted_fault_is_caught(text: str) -> None:
    assert list(faults(text))


@pytest.mark.parametrize("text", [
    "Return the pages that hold tokens [start, end).", "Write in place.", "The cache is turned off.",
    "Measure recall at 4.", "steps: number of steps.", "`place: of x`", "It takes place once.", "Recall of needles.",
])  # fmt: skip
def test_what_is_allowed_passes(text: str) -> None:
    assert not list(faults(text))


def test_planted_options_and_metrics_are_caught() -> None:
    silent = click.Option(["--seed"], type=int, help="Random seed.")
    assert [f for f in option_faults(silent) if "names no default" in f]
    assert [f for f in option_faults(click.Option(["--seed"], help="Of the noise. Default: 0.")) if "'Of'" in f]
    assert not list(option_faults(click.Option(["--seed"], type=int, help="Random seed. Default: 0.")))
    assert not list(option_faults(click.Option(["--quiet"], is_flag=True, help="Print nothing.")))
    planted = 'page.value("counter", "vllm:x_total", "Of a request.", 1)'
    assert [text for _, text in metric_help(planted)] == ["Of a request."]


def test_planted_docstrings_comments_and_headings_are_caught(tmp_path: Path) -> None:
    source = 'def f():\n    """Of a run."""\nclass A:\n    """Hold it."""\n'
    assert [list(faults(text)) != [] for _, text in docstrings(source)] == [True, False]
    source = "x = 1  # of a run\n# Plain text that\n# Of course continues.\ny = '# not a comment'\n    # it is turned\n"
    assert [(line, bool(list(faults(text)))) for line, text in capitalized(source)] == [
        (1, True),
        (2, False),
        (5, True),
    ]
    page = tmp_path / "page.md"
    page.write_text("# What\n```\n# Who: code\n```\n## Plain\n")
    assert [bool(list(faults(text))) for _, text in headings(page)] == [True, False]
