"""Make the environments of the peers, one for each, once, from the package registry with pinned versions."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
TORCH, TRANSFORMERS = "torch==2.13.0", "transformers==5.23.0"
LLAMA = "llama-cpp-python==0.3.36"
NOTHING: Mapping[str, str] = MappingProxyType({})


# Packages whose versions a table names.
NAMED = frozenset(("transformers", "compressed-tensors", "bitsandbytes", "llmcompressor", "gptqmodel", "torchao"))


class PeerError(Exception):
    """A peer is missing; the message says why in one line."""


class Env(NamedTuple):
    """An environment of a peer. requirements: pinned, for pip. source: packages that are built on this machine.
    unwanted: packages that are removed after the installation. alone: packages that are installed without their own
    requirements, which would ask for another torch or transformers; what they need is in requirements. unpacked: a
    package whose source release is unpacked to the folder `source` too, because tools in it are not installed.
    """

    requirements: Sequence[str]
    source: str = ""
    unwanted: str = ""
    variables: Mapping[str, str] = NOTHING
    alone: Sequence[str] = ()
    unpacked: str = ""


ACCELERATE, COMPRESSED = "accelerate==1.15.0", "compressed-tensors==0.20.0"
DATASETS = "datasets==5.2.0"
ENVS = {
    # Unless two passes are off, g++ 12 removes stores to the configuration of AMX tiles, and programs crash.
    "llama.cpp": Env(
        (LLAMA, "gguf==0.19.0", TORCH, TRANSFORMERS, "sentencepiece==0.2.3"), source="llama-cpp-python", unpacked=LLAMA,
        variables={"CMAKE_ARGS": "-DGGML_NATIVE=ON -DLLAVA_BUILD=OFF", "CXXFLAGS": "-fno-tree-dse -fno-dse"},
    ),
    "openvino": Env(("openvino-genai==2026.4.1.0",)),
    # optimum requires a torchvision, which for another build of torch breaks transformers' imports.
    "openvino-convert": Env(
        ("optimum-intel==2.2.0", "nncf==3.4.0", "openvino==2026.4.1", "openvino-tokenizers==2026.4.1.0", TORCH),
        unwanted="torchvision",
    ),
    "ctranslate2": Env(("ctranslate2==4.8.5", TORCH, TRANSFORMERS)),
    "onnxruntime": Env(("onnxruntime-genai==0.18.0",)),
    "onnxruntime-convert": Env(("onnxruntime-genai==0.18.0", "onnx", "onnx_ir", TORCH, TRANSFORMERS)),
    "transformers": Env((TRANSFORMERS, TORCH)),
    # The tools of bench/formats.py.
    "compressed-tensors": Env((TRANSFORMERS, TORCH, ACCELERATE, COMPRESSED)),
    "bitsandbytes": Env((TRANSFORMERS, TORCH, ACCELERATE, "bitsandbytes==0.50.2")),
    "torchao": Env((TRANSFORMERS, TORCH, ACCELERATE, "torchao==0.18.0")),
    # It asks for transformers 5.17 and compressed-tensors 0.19, and writes its files with these too.
    "llm-compressor": Env(
        (TRANSFORMERS, TORCH, ACCELERATE, COMPRESSED, DATASETS, "loguru==0.7.3"), alone=("llmcompressor==0.14.0.1",)
    ),
    # It asks for torch 2.14, and runs with this one.
    "gptqmodel": Env(
        (TRANSFORMERS, TORCH, ACCELERATE, DATASETS, "torchao==0.18.0", "threadpoolctl==3.8.0", "device-smi==0.5.7",
         "logbar==0.4.15", "pypcre==0.6.4", "pillow==13.0.0", "protobuf==7.36.2"),
        alone=("gptqmodel==7.7.0", "tokenicer==0.0.14", "defuser==0.0.28"),
    ),
}  # fmt: skip


def ensure(work: Path, name: str) -> str:
    """Return the environment's python; install it if it is missing. Raises PeerError."""
    env, folder = ENVS[name], work / "env" / name
    python, marker = folder / "bin" / "python", folder / ".installed"
    wanted = " ".join((*env.requirements, *env.alone))
    if not (marker.exists() and marker.read_text() == wanted):
        make_venv(folder)
        binary = ["--no-binary", env.source] if env.source else []
        run([str(python), "-m", "pip", "install", "-q", *binary, *env.requirements], f"pip for {name}", env.variables)
        if env.alone:
            run([str(python), "-m", "pip", "install", "-q", "--no-deps", *env.alone], f"pip for {name}", env.variables)
        if env.unwanted:
            run([str(python), "-m", "pip", "uninstall", "-q", "-y", env.unwanted], f"pip for {name}")
        if env.unpacked:
            unpack(python, env.unpacked, folder / "source")
        marker.write_text(wanted)
    return str(python)


def unpack(python: Path, package: str, folder: Path) -> None:
    """Unpack a package's source release into a folder. Raises PeerError."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    download = ["download", "-q", "--no-deps", "--no-binary", ":all:", "-d", str(folder), package]
    run([str(python), "-m", "pip", *download], f"the source of {package}")
    archive = next(folder.glob("*.tar.gz"))
    with tarfile.open(archive) as files:
        files.extractall(folder, filter="data")
    archive.unlink()


def versions_of(names: Sequence[str]) -> str:
    """Return the pinned versions of environments' main packages, for a table."""
    wanted = {p for name in names for p in (*ENVS[name].requirements, *ENVS[name].alone) if p.split("==")[0] in NAMED}
    return ", ".join(sorted(p.replace("==", " ") for p in wanted))


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
