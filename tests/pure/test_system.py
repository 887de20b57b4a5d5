"""Features of Linux that other platforms lack are hidden here: Ridgeline must get the same facts in another way."""

from __future__ import annotations

import ast
import mmap
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
    "runtime/ranks.py": {"pass_fds"},
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
    allowed = {
        "/proc/cpuinfo", "/proc/self/status", "/proc/driver/nvidia", "/sys/devices/system/cpu/cpu0/cache",
        "/sys/devices/system/cpu/cpu0/topology/thread_siblings_list",
        "/sys/kernel/mm/transparent_hugepage",
    }  # fmt: skip
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
        monkeypatch.setattr(system, "HUGE_PAGES", Path("nowhere"))


def test_the_last_cache_is_what_lscpu_says() -> None:
    run = subprocess.run(["lscpu", "-B", "-C=ONE-SIZE"], capture_output=True, text=True, check=False)
    sizes = [int(line) for line in run.stdout.split() if line.isdecimal()]
    assert system.last_cache_bytes() == max(sizes, default=system.last_cache_bytes())


@pytest.mark.usefixtures("machine")
def test_memory_agrees_with_psutil_and_this_process() -> None:
    assert system.total_bytes() == psutil.virtual_memory().total
    assert 0 < system.free_bytes() <= system.total_bytes()
    before = system.resident_bytes()
    held = mmap.mmap(-1, 64 * MIB)  # malloc may return memory that is resident already
    held.write(b"x" * len(held))
    assert system.resident_bytes() - before > 60 * MIB
    assert system.resident_bytes(peak=True) >= len(held)
    del held
    assert system.resident_bytes(peak=True) >= before + 60 * MIB


@pytest.mark.parametrize(
    ("files", "status", "size", "reason"),
    [
        ({}, "", 0, "this kernel has no transparent huge pages"),
        ({"enabled": "always [madvise] never"}, "", 2 * MIB, "{folder}/enabled is madvise"),
        ({"enabled": "[always] madvise never"}, "THP_enabled:\t1\n", 2 * MIB, "{folder}/enabled is always"),
        ({"enabled": "[always] madvise never"}, "THP_enabled:\t0\n", 0, "turned them off"),
        ({"enabled": "always madvise [never]"}, "", 0, "{folder}/enabled is never; an administrator can write madvise"),
        ({"enabled": "always [madvise] never", "hugepages-2048kB/enabled": "always inherit madvise [never]"}, "", 0,
         "{folder}/hugepages-2048kB/enabled is never"),
        ({"enabled": "always madvise [never]", "hugepages-2048kB/enabled": "always inherit [madvise] never"}, "",
         2 * MIB, "{folder}/hugepages-2048kB/enabled is madvise"),
        ({"enabled": "always madvise [never]", "hugepages-2048kB/enabled": "always [inherit] madvise never"}, "", 0,
         "{folder}/enabled is never"),
        ({"enabled": "[always] madvise never", "hpage_pmd_size": f"{512 * MIB}"}, "", 0, "one has 512 MiB here"),
    ],
)  # fmt: skip
def test_huge_pages_and_why(
    files: dict[str, str], status: str, size: int, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rules are those of Linux' Documentation/admin-guide/mm/transhuge.rst."""
    folder, told = tmp_path / "huge", tmp_path / "status"
    for name, text in {"hpage_pmd_size": f"{2 * MIB}", **files}.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(f"{text}\n")
    told.write_text(f"Name:\tpython\n{status}")
    for name, path in (("HUGE_PAGES", folder), ("STATUS", told)):
        monkeypatch.setattr(system, name, path)
    monkeypatch.setattr(sys, "platform", "linux")
    found = system.huge_pages()
    assert found.size == size and reason.format(folder=folder) in found.reason


def test_systems_without_huge_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    assert system.huge_pages() == (0, "macOS gives none to a program without special rights")


def test_freed_memory_goes_back() -> None:
    before = system.resident_bytes()
    held = [b"%d" % i * 20_000 for i in range(1000)]  # small enough for the heap, whose middle is freed
    edge = b"x" * 20_000
    del held
    system.return_freed_memory()
    assert edge and system.resident_bytes() < before + 20 * MIB


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
