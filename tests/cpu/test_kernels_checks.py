"""Compile csrc/checks for this machine and for ARM, and compare instruction sets to the bit, ARM's in an emulator."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from itertools import chain
from pathlib import Path

import pytest
from filelock import FileLock

ROOT = Path(__file__).parents[2]
CROSS, EMULATOR = "aarch64-linux-gnu-g++", "qemu-aarch64"
LACKING = "this CPU has no such instructions"
# Emulated processors, best first, and the instruction sets that later ones lack, best first. Each set is compared on
# the least processor that has it, where every instruction of a better set is illegal.
PROCESSORS = {"max": ["i8mm"], "neoverse-n1": ["dotprod"], "cortex-a53": ["neon", "portable"]}
# Without optimization. Results do not depend on it, and the compiler takes a third of the time.
QUICK = ["-DCMAKE_BUILD_TYPE=Debug", "-DCMAKE_CXX_FLAGS_DEBUG="]
# The build of a wheel has these programs, too: .ci/environment. Without a compiler it has none.
BUILT = Path(os.environ.get("RIDGELINE_CHECKS_BUILT", ""))
ARE_BUILT = (BUILT / "kernel_checks").is_file()
pytestmark = pytest.mark.slow


def need(*programs: str) -> None:
    for name in programs:
        if not shutil.which(name):
            pytest.skip(f"needs {name}")


def need_compiler() -> None:
    if not ARE_BUILT:
        need("cmake", "ninja", "g++")


def build(factory: pytest.TempPathFactory, name: str, *options: str, program: str = "kernel_checks") -> Path:
    """Return a program for this machine or ARM, compiled once for all processes of a test run."""
    if ARE_BUILT and not name.startswith("arm"):
        return BUILT / program
    base = factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / f"checks-{name}"
    configure = ["cmake", "-S", str(ROOT), "-B", str(folder), "-G", "Ninja", "-DRIDGELINE_CHECKS=ON", *options]
    with FileLock(f"{folder}.lock"):
        for command in (configure, ["cmake", "--build", str(folder), "-j2", "--target", program]):
            run = subprocess.run(command, capture_output=True, text=True, check=False)
            assert run.returncode == 0, run.stdout[-3000:] + run.stderr[-3000:]
    return folder / program


def check(command: list[str], isa: str, job: str, file: Path) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "RIDGELINE_ISA": isa} if isa else {k: v for k, v in os.environ.items() if k != "RIDGELINE_ISA"}
    return subprocess.run([*command, job, str(file)], env=env, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Path:
    need_compiler()
    return build(tmp_path_factory, "here", *QUICK)


@pytest.fixture(
    scope="module", params=[pytest.param(name, marks=pytest.mark.nightly) for name in ("quick", "optimized")]
)
def arm(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    need("cmake", "ninja", CROSS, EMULATOR)
    system = ["-DCMAKE_SYSTEM_NAME=Linux", "-DCMAKE_SYSTEM_PROCESSOR=aarch64", f"-DCMAKE_CXX_COMPILER={CROSS}"]
    options = [*system, "-DCMAKE_EXE_LINKER_FLAGS=-static", *(QUICK if request.param == "quick" else [])]
    return build(tmp_path_factory, f"arm-{request.param}", *options)


@pytest.fixture(scope="module")
def reference(here: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the results of x86's avx2, which has a fused multiply-add as ARM has."""
    file = tmp_path_factory.mktemp("results") / "reference"
    run = check([str(here)], "avx2", "write", file) if platform.machine() == "x86_64" else None
    if run is None or LACKING in run.stderr:
        pytest.skip("needs an x86 CPU with avx2")
    assert run.returncode == 0, run.stderr
    return file


@pytest.mark.parametrize("isa", ["avx512", "avx512bw", "portable"])
def test_instruction_sets_of_this_machine_agree(here: Path, reference: Path, isa: str) -> None:
    run = check([str(here)], isa, "whole" if isa == "portable" else "compare", reference)
    if LACKING in run.stderr:
        pytest.skip(f"this CPU has no {isa}")
    assert run.returncode == 0, run.stderr


def test_a_difference_is_found(here: Path, reference: Path) -> None:
    changed = bytearray(reference.read_bytes())
    changed[-1] ^= 1
    other = reference.with_name("changed")
    other.write_bytes(changed)
    run = check([str(here)], "avx2", "compare", other)
    assert run.returncode == 1
    assert "number" in run.stderr


@pytest.fixture(scope="module")
def unit(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the program that uses AMX. Where the CPU lacks it, a handler of SIGILL executes its instructions."""
    need_compiler()
    if platform.machine() != "x86_64" or "avx2" not in Path("/proc/cpuinfo").read_text():
        pytest.skip("needs an x86 CPU with avx2, and Linux")
    return build(tmp_path_factory, "unit", *QUICK, program="unit_checks")


def check_unit(program: Path, kind: str, job: str, file: Path, fault: str = "") -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "RIDGELINE_MATRIX_UNIT": kind, "RIDGELINE_TRAP_FAULT": fault}
    return subprocess.run([str(program), job, str(file)], env=env, capture_output=True, text=True, check=False)


def test_the_instructions_of_amx_have_the_bits_of_plain_cpp(unit: Path, tmp_path: Path) -> None:
    """All formats that a matrix unit serves: AMX against an emulated unit, and each of them against vectors.

    A unit whose arithmetic with bf16 is not that of Intel's manual is refused for bf16, with the first difference.
    """
    file = tmp_path / "results"
    for kind, job in (("emulated", "write"), ("amx", "compare")):
        run = check_unit(unit, kind, job, file)
        assert run.returncode == 0, run.stdout + run.stderr
    if " amx_int8" not in Path("/proc/cpuinfo").read_text():
        assert int(run.stdout.split()[0]) > 50_000  # instructions that the handler executed
        for fault in ("denormals", "one_chain"):
            run = check_unit(unit, "amx", "compare", file, fault)
            assert run.returncode == 1 and "its bf16 sum is" in run.stderr


@pytest.mark.parametrize("processor", PROCESSORS)
def test_arm_agrees_with_x86(arm: Path, reference: Path, processor: str) -> None:
    """The best set is chosen where none is named, and better ones are refused."""
    command, (best, *others) = [EMULATOR, "-cpu", processor, str(arm)], PROCESSORS[processor]
    for named, isa in (("", best), *zip(others, others, strict=True)):
        run = check(command, named, "compare", reference)
        assert run.returncode == 0, f"{isa}: {run.stderr}"
        assert run.stdout.startswith(f"{isa}: ")
    known = list(chain.from_iterable(PROCESSORS.values()))
    for isa in known[: known.index(best)]:
        assert LACKING in check(command, isa, "compare", reference).stderr
    assert f"known are {', '.join(known)}" in check(command, "sse", "compare", reference).stderr
