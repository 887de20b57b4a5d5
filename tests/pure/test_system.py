"""Features of Linux that other platforms lack are hidden here: Ridgeline must get the same facts in another way."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

import ridgeline
from ridgeline import system

SOURCE = Path(ridgeline.__file__).parent
MIB = 1 << 20
# Modules and names that only POSIX has, and the files that may use them because they check first.
MODULES = {"fcntl", "grp", "pwd", "resource", "termios", "tty"}
NAMES = {
    "add_signal_handler",
    "fork",
    "geteuid",
    "getuid",
    "killpg",
    "mkfifo",
    "pass_fds",
    "preexec_fn",
    "setsid",
    "sysconf",
}
GUARDED = {
    "system.py": {"resource"},
    "serve/http/accept.py": {"resource"},
    "serve/engine/channel.py": {"pass_fds"},
    "bounded/limits.py": {"resource", "sysconf", "/proc/self/statm"},
}

# Runs a command as on a system without those modules, without /proc, and without the functions that Linux adds to `os`.
ELSEWHERE = """
import os, pathlib, sys
import filelock, psutil  # they know each system by themselves
for name in ("fcntl", "resource", "termios"):
    sys.modules[name] = None
for name in ("sched_getaffinity", "sched_setaffinity", "sysconf", "fork"):
    if hasattr(os, name):
        delattr(os, name)
from ridgeline import system
system.CPUINFO = system.STATUS = pathlib.Path("nowhere")
from ridgeline.cli.main import main
main()
"""


def found_in(path: Path) -> set[str]:
    """Return the modules and names of POSIX that a file uses."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names} & MODULES
        elif isinstance(node, ast.ImportFrom):
            found |= {str(node.module)} & MODULES
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            found |= {node.attr} & NAMES if node.value.id in ("os", "loop") else set()
        elif isinstance(node, ast.keyword):
            found |= {str(node.arg)} & NAMES
        elif (
            isinstance(node, ast.Constant)
            and isinstance(node.value, str)
            and node.value.startswith(("/proc/", "/sys/"))
        ):
            found.add(node.value)
    return found


def test_only_files_that_check_first_use_names_of_one_system() -> None:
    allowed = {"/proc/cpuinfo", "/proc/self/status", "/proc/driver/nvidia", "/sys/devices/system/cpu/cpu0/cache"}
    found = {p.relative_to(SOURCE).as_posix(): found_in(p) for p in SOURCE.rglob("*.py")}
    assert allowed <= found["system.py"]
    rest = {name: names - GUARDED.get(name, set()) for name, names in found.items()}
    rest["system.py"] -= allowed
    assert not {name: names for name, names in rest.items() if names}


def test_a_planted_use_is_found(tmp_path: Path) -> None:
    path = tmp_path / "x.py"
    path.write_text("import fcntl\nimport os\nos.sysconf('x')\nf(pass_fds=[1])\np = '/proc/stat'\n")
    assert found_in(path) == {"fcntl", "sysconf", "pass_fds", "/proc/stat"}


@pytest.fixture(params=["as it is", "elsewhere"])
def machine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run a test on this system, and then on one without Linux's files."""
    if request.param == "elsewhere":
        monkeypatch.setattr(system, "CPUINFO", Path("nowhere"))
        monkeypatch.setattr(system, "STATUS", Path("nowhere"))
        monkeypatch.setattr(system, "CACHES", Path("nowhere"))


def test_the_last_cache_is_what_lscpu_says() -> None:
    run = subprocess.run(["lscpu", "-B", "-C=ONE-SIZE"], capture_output=True, text=True, check=False)
    sizes = [int(line) for line in run.stdout.split() if line.isdecimal()]
    assert system.last_cache_bytes() == max(sizes, default=system.last_cache_bytes())


@pytest.mark.usefixtures("machine")
def test_memory_agrees_with_psutil_and_this_process() -> None:
    assert system.total_bytes() == psutil.virtual_memory().total
    assert 0 < system.free_bytes() <= system.total_bytes()
    before = system.resident_bytes()
    held = b"x" * (64 * MIB)
    assert system.resident_bytes() - before > 60 * MIB
    assert system.resident_bytes(peak=True) >= len(held)
    del held
    assert system.resident_bytes(peak=True) >= before + 60 * MIB


@pytest.mark.usefixtures("machine")
def test_the_processor_has_a_name_and_cores() -> None:
    assert system.cpu_name().strip()
    assert 1 <= system.num_cores() <= (os.cpu_count() or 1)


def test_busy_seconds_count_what_this_process_computes() -> None:
    before, own = system.busy_seconds(), psutil.Process().cpu_times()
    while (now := psutil.Process().cpu_times()).user + now.system - own.user - own.system < 0.2:
        sum(range(10_000))
    assert system.busy_seconds() - before > 0.1


def test_commands_work_on_a_system_without_the_features_of_linux(tmp_path: Path) -> None:
    env = {**os.environ, "PYTHONPATH": str(SOURCE.parent)}
    out = tmp_path / "out.jsonl"
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("import os\ndef main():\n")
    for command in (["doctor"], ["generate", str(prompts), "-o", str(out), "--max-tokens", "4"]):
        run = subprocess.run(
            [sys.executable, "-c", ELSEWHERE, *command], env=env, capture_output=True, text=True, check=False
        )
        assert run.returncode == 0, run.stderr
    assert len(out.read_text().splitlines()) == 2
