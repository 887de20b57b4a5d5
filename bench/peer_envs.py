"""Make the environments of the peers, one for each, once, from the package registry with pinned versions."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
TORCH, TRANSFORMERS = "torch==2.13.0", "transformers==5.23.0"
NOTHING: Mapping[str, str] = MappingProxyType({})


class PeerError(Exception):
    """A peer is missing; the message says why in one line."""


class Env(NamedTuple):
    """An environment of a peer. requirements: pinned, for pip. source: packages that are built on this machine.
    unwanted: packages that are removed after the installation.
    """

    requirements: Sequence[str]
    source: str = ""
    unwanted: str = ""
    variables: Mapping[str, str] = NOTHING


ENVS = {
    "llama.cpp": Env(
        ("llama-cpp-python==0.3.36", "gguf==0.19.0"), source="llama-cpp-python",
        variables={"CMAKE_ARGS": "-DGGML_NATIVE=ON -DLLAVA_BUILD=OFF"},
    ),
    "openvino": Env(("openvino-genai==2026.4.1.0",)),
    # optimum requires a torchvision, which for another build of torch breaks transformers' imports.
    "openvino-convert": Env(
        ("optimum-intel==2.2.0", "nncf==3.4.0", "openvino==2026.4.1", TORCH), unwanted="torchvision"
    ),
    "ctranslate2": Env(("ctranslate2==4.8.5", TORCH, TRANSFORMERS)),
    "onnxruntime": Env(("onnxruntime-genai==0.18.0",)),
    "onnxruntime-convert": Env(("onnxruntime-genai==0.18.0", "onnx", "onnx_ir", TORCH, TRANSFORMERS)),
    "transformers": Env((TRANSFORMERS, TORCH)),
}  # fmt: skip


def ensure(work: Path, name: str) -> str:
    """Return the environment's python; install it if it is missing. Raises PeerError."""
    env, folder = ENVS[name], work / "env" / name
    python, marker = folder / "bin" / "python", folder / ".installed"
    wanted = " ".join(env.requirements)
    if not (marker.exists() and marker.read_text() == wanted):
        make_venv(folder)
        binary = ["--no-binary", env.source] if env.source else []
        run([str(python), "-m", "pip", "install", "-q", *binary, *env.requirements], f"pip for {name}", env.variables)
        if env.unwanted:
            run([str(python), "-m", "pip", "uninstall", "-q", "-y", env.unwanted], f"pip for {name}")
        marker.write_text(wanted)
    return str(python)


def ensure_ours(work: Path, commit: str) -> Path:
    """Make an environment with only `pip install .` of this tree, as a user has it. Raises PeerError."""
    folder = work / "env" / "ridgeline"
    marker = folder / ".installed"
    if not (marker.exists() and marker.read_text() == commit):
        shutil.rmtree(folder, ignore_errors=True)
        make_venv(folder)
        run([str(folder / "bin" / "python"), "-m", "pip", "install", "-q", str(ROOT)], "pip for ridgeline")
        marker.write_text(commit)
    return folder


def make_venv(folder: Path) -> None:
    if not (folder / "bin" / "pip").exists():
        run([sys.executable, "-m", "venv", str(folder)], "venv")


def installed_bytes(folder: Path) -> int:
    """Return the bytes of an environment's packages, without pip and setuptools."""
    site = folder / Path(sysconfig.get_path("purelib")).relative_to(sys.prefix)
    tools = ("pip", "setuptools", "_distutils_hack", "pkg_resources")
    files = (f for top in site.iterdir() if not top.name.startswith(tools) for f in [top, *top.rglob("*")])
    return sum(f.stat().st_blocks * 512 for f in files if f.is_file())


def convert(work: Path, shape: str, name: str, env: str, tool: str, form: str) -> Path:
    """Return the folder of the model in a peer's own format; convert it if it is missing. Raises PeerError."""
    source, out = work / "models" / shape / "hf", work / "models" / shape / name
    if not (out / ".done").exists():
        part = out.with_name(out.name + ".part")
        for folder in (part, out):
            shutil.rmtree(folder, ignore_errors=True)
        script = ROOT / "bench" / "peer_drivers" / f"convert_{tool}.py"
        run([ensure(work, env), str(script), str(source), str(part), form], f"converting to {name}")
        part.rename(out)
        (out / ".done").touch()
    return out


def run(command: Sequence[str], what: str, variables: Mapping[str, str] = NOTHING) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=os.environ | dict(variables))
    if done.returncode:
        lines = [line for line in (done.stderr or done.stdout).splitlines() if line.strip()]
        raise PeerError(f"{what}: {lines[-1][:300] if lines else f'exit status {done.returncode}'}")
