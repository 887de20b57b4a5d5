"""Test the completion of shells, and the manual page."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from ridgeline.cli.main import app
from ridgeline.cli.man import commands

BASH = """
eval "$(ridgeline --show-completion bash)"
COMP_WORDS=(TYPED); COMP_CWORD=LAST
_ridgeline_completion ridgeline
echo "${COMPREPLY[@]}"
"""
ZSH = """
autoload -U compinit && compinit -D
eval "$(ridgeline --show-completion zsh)"
echo "$_comps[ridgeline]"
eval $(_RIDGELINE_COMPLETE=complete_zsh _TYPER_COMPLETE_ARGS="TYPED" ridgeline | sed 's/^_arguments/echo/')
"""


@pytest.mark.slow
@pytest.mark.parametrize("shell", ["bash", "zsh"])
def test_a_shell_completes(shell: str, tmp_path: Path) -> None:
    """The script that `--show-completion` prints completes the names of commands and of options."""
    if not shutil.which(shell):
        pytest.skip(f"needs {shell}")
    program = tmp_path / "ridgeline"
    program.write_text(f"#!{sys.executable}\nfrom ridgeline.cli.main import main\nmain()\n")
    program.chmod(0o755)
    env = {
        **os.environ,
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1",
    }
    for typed, wanted in (("ridgeline ge", "generate"), ("ridgeline serve --weigh", "--weights")):
        script = (BASH if shell == "bash" else ZSH).replace("TYPED", typed).replace("LAST", str(typed.count(" ")))
        run = subprocess.run([shell, "-c", script], env=env, capture_output=True, text=True, check=False)
        assert wanted in run.stdout, run.stdout + run.stderr


def test_the_manual_page_has_each_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """troff reads the page without a warning, and shows each command and option."""
    import typer.main

    with pytest.raises(SystemExit, match="0"):
        app(["man"])
    page = tmp_path / "ridgeline.1"
    page.write_text(capsys.readouterr().out)
    found = dict(commands(typer.main.get_command(app), "ridgeline"))
    assert len(found) > 20
    for path, command in found.items():
        assert f".SS {path}" in page.read_text().replace("\\-", "-")
        assert command.help
    if not shutil.which("groff"):
        pytest.skip("needs groff")
    run = subprocess.run(["groff", "-man", "-Tutf8", "-ww", "-k", page], capture_output=True, text=True, check=False)
    assert run.stderr == ""
    assert "--show-completion" in re.sub(".\b", "", run.stdout)  # bold letters are written twice
