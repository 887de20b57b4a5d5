"""Every block of shell and Python in README.md, CONTRIBUTING.md and docs/ runs as it stands, on small models."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from calibrated import kept_with

from cpu.doc_blocks import BASH, SHELL, Block, blocks, commands
from cpu.doc_folder import make_folder
from cpu.doc_rules import RULES, SERVER_URL, rule_of
from cpu.doc_runs import ROOT, Reader
from cpu.serving import Server
from ridgeline.cost.calibration import save
from ridgeline.measure import Roof
from shares import daily

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCKS = [block for page in PAGES for block in blocks(str(page.relative_to(ROOT)), page.read_text(encoding="utf-8"))]
LINES = {block: block.script().splitlines() for block in BLOCKS if block.language in SHELL}
pytestmark = pytest.mark.skipif(BASH is None, reason="the blocks of the docs need bash, version 4 or later")


def has_slow(block: Block) -> bool:
    if block.language == "python":
        return SERVER_URL in block.text
    rules = (next((rule for rule in RULES if rule.matches(line)), None) for line in LINES.get(block, ()))
    return any(rule is not None and rule.slow for rule in rules)


EACH_DAY = ("README.md", "docs/getting-started.md")
SLOW = [block for block in BLOCKS if has_slow(block)]


@pytest.fixture(scope="module")
def started() -> Iterator[list[Server]]:
    """Yield a list that holds the shared server once a block has started it."""
    found: list[Server] = []
    yield found
    for server in found:
        server.stop()


@pytest.fixture
def reader(started: list[Server], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Reader:
    """Return a reader in a new folder, so that no block finds the files of another."""
    folder, programs = tmp_path / "reader", tmp_path / "programs"
    folder.mkdir()
    programs.mkdir()
    hub = make_folder(folder)
    monkeypatch.chdir(folder)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HUB_CACHE", str(hub))  # for processes that the blocks start
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(hub))
    # Measuring the roofline would take seconds for each bench.
    monkeypatch.setattr("ridgeline.measure.measure_roof", lambda table: Roof(2e10, 1e11))
    save(kept_with(1))

    def server() -> Server:
        if not started:
            started.append(Server())
        return started[0]

    return Reader(folder, programs, server)


@pytest.mark.parametrize("block", BLOCKS, ids=lambda block: block.name)
def test_a_block_runs(block: Block, reader: Reader) -> None:
    reader.run(block, slow=False)


@pytest.mark.parametrize("block", daily(SLOW, [b for b in SLOW if b.page in EACH_DAY]), ids=lambda block: block.name)
def test_a_block_of_long_commands_runs(block: Block, reader: Reader) -> None:
    assert reader.run(block, slow=True)


def test_no_command_is_left_out(reader: Reader) -> None:
    """Each command is run by one of the two tests above, and each rule is used."""
    found = [(block, str(one)) for block in LINES for one in commands(block, reader.folder, reader.programs)]
    assert {block for block, command in found if rule_of(command).slow} <= set(SLOW)
    idle = [rule.pattern for rule in RULES if not any(rule.matches(command) for _, command in found)]
    assert not idle, f"no command of the docs needs these rules: {idle}"


@pytest.mark.parametrize(
    ("language", "text", "words"),
    [
        ("", "ridgeline nosuch\n", "exits with 2"),
        ("", "ridgeline plan pocket --nosuch\n", "No such option"),
        ("", "import os\n", "no rule .* says how `import os` runs"),
        ("", "ridgeline generate 'one\n", "bash exits with"),
        ("", "measured  12 ms\n", "no rule"),
        ("", "# nothing\n", "has no command"),
        ("console", "ridgeline doctor\n", "has no command"),
        ("", "python bench/nosuch.py\n", "nosuch"),
        ("", "python bench/host.py --nosuch\n", "nosuch"),
        ("", "pip install '.[nosuch]'\n", "no extra {'nosuch'}"),
        ("", "pytest -m nosuch\n", "nosuch"),
        ("python", "print(json)\n", "json"),
        ("rust", "fn main() {}\n", "is in `rust`"),
        ("json", "{...}\n", "Expecting"),
        ("text", "ridgeline nosuch\n", "has a command"),
    ],
)  # fmt: skip
def test_a_block_that_does_not_run_fails(
    language: str, text: str, words: str, reader: Reader, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises((Exception, SystemExit)) as caught:
        reader.run(Block("page.md", 1, language, text), slow=False)
    assert re.search(words, str(caught.value) + capsys.readouterr().err)


def test_a_fence_in_a_list_and_one_that_is_never_closed() -> None:
    text = "1. one\n   ```sh\n   ridgeline doctor\n   ```\n\n````text\n```\n````\n~~~\nls\n~~~\n"
    assert [(b.line, b.language, b.text) for b in blocks("p", text)] == [
        (2, "sh", "   ridgeline doctor\n"), (6, "text", "```\n"), (9, "", "ls\n"),
    ]  # fmt: skip
    with pytest.raises(ValueError, match="p:3: the block is never closed"):
        list(blocks("p", "a\n\n```\nls\n"))
