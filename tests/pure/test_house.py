"""Test the rules of the code: allowed imports, the size of files and functions, and the cost of importing."""

from __future__ import annotations

import ast
import graphlib
import importlib
import inspect
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import ridgeline

SOURCE = Path(ridgeline.__file__).parent
ROOT = Path(__file__).parents[2]
FILES = sorted(SOURCE.rglob("*.py"))

# Maps a package to the packages of ours that it may import; None: any. All may import those of EVERYWHERE.
EVERYWHERE = frozenset({"errors", "system", "bounded"})
MAY_IMPORT: dict[str, frozenset[str] | None] = {
    "errors": frozenset(),
    "system": frozenset(),
    "bounded": frozenset(),
    "spec": frozenset(),
    "archs": frozenset({"spec"}),
    "ops": frozenset({"spec", "_kernels"}),
    "quant": frozenset({"spec", "ops"}),
    "nn": frozenset({"spec", "ops", "quant"}),
    "load": frozenset({"spec", "archs", "quant", "ops"}),
    "sched": frozenset({"spec"}),
    "catalog": frozenset({"spec", "archs"}),
    "cost": frozenset({"spec", "catalog"}),
    "plan": frozenset({"spec", "archs", "catalog", "cost"}),
    "settings": frozenset({"spec", "cost", "plan"}),
    "sim": frozenset({"spec", "sched", "cost", "plan", "settings"}),
    "sample": frozenset({"spec", "ops", "load", "_kernels"}),
    # The runtime may use only the plain data of the scheduler.
    "diffusion": frozenset({"spec", "ops", "sched", "sample"}),
    "runtime": frozenset({"spec", "ops", "quant", "nn", "load", "sched", "sample", "diffusion"}),
    "propose": frozenset({"spec", "sched", "sample", "_kernels"}),
    "engine": frozenset({"spec", "load", "sched", "settings", "sample", "diffusion", "runtime", "propose"}),
    "verify": frozenset({"spec", "ops", "sched", "settings", "sample", "runtime", "propose", "engine", "load"}),
    "evals": frozenset({"spec", "ops", "nn", "load", "sample", "diffusion", "runtime"}),
    "compress": frozenset(
        {
            "spec",
            "archs",
            "ops",
            "quant",
            "nn",
            "load",
            "cost",
            "plan",
            "runtime",
            "evals",
            "sample",
            "settings",
            "measure",
            "llm",
            "train",
            "verify",
        }
    ),
    "train": frozenset(
        {"spec", "archs", "ops", "nn", "quant", "load", "runtime", "diffusion", "evals", "measure", "llm"}
    ),
    "llm": None,
    "measure": frozenset(
        {
            "spec",
            "ops",
            "_kernels",
            "quant",
            "sched",
            "cost",
            "plan",
            "settings",
            "sample",
            "runtime",
            "engine",
            "llm",
            "sim",
        }
    ),
    "lab": None,  # runs everything below it
    "async_llm": None,
    "harness": None,
    "notebook": None,
    "serve": frozenset(
        {"spec", "load", "sched", "cost", "plan", "settings", "sample", "runtime", "llm", "measure", "__init__"}
    ),
    "dist": frozenset({"spec", "ops", "sched", "runtime", "serve", "__init__"}),
    "cli": None,
    "__init__": None,  # the top level, which re-exports
    "__main__": None,
}
# Maps a package to packages of others, besides the standard library. torch has its own rule.
THIRD_PARTY: dict[str, frozenset[str]] = {
    "ops": frozenset({"numpy", "ml_dtypes"}),
    "nn": frozenset({"numpy"}),
    "quant": frozenset({"numpy"}),
    "load": frozenset({"numpy", "safetensors", "tokenizers", "jinja2", "huggingface_hub"}),
    "runtime": frozenset({"numpy"}),
    "sample": frozenset({"numpy", "llguidance"}),
    "diffusion": frozenset({"numpy"}),
    "propose": frozenset({"numpy"}),
    "engine": frozenset({"numpy"}),
    "verify": frozenset({"numpy"}),
    "evals": frozenset({"numpy"}),
    "compress": frozenset({"filelock", "numpy"}),
    "plan": frozenset({"matplotlib"}),
    "train": frozenset({"numpy", "tokenizers", "matplotlib", "transformers"}),
    "llm": frozenset({"numpy"}),
    "harness": frozenset({"lm_eval"}),
    "notebook": frozenset({"IPython", "matplotlib"}),
    "measure": frozenset({"numpy", "httpx", "matplotlib"}),
    "lab": frozenset({"numpy", "matplotlib"}),
    "serve": frozenset({"numpy", "fastapi", "starlette", "pydantic", "uvicorn", "opentelemetry"}),
    "sim": frozenset({"numpy", "matplotlib"}),
    "dist": frozenset({"ray"}),
    "cli": frozenset({"filelock", "typer", "rich", "yaml"}),
    "system": frozenset({"psutil"}),
}
# Maps a file or a folder that may import torch to the reason.
TORCH: dict[str, str] = {
    "ops/reference/": "the definition of every op is written in torch",
    "ops/triton/": "kernels for GPUs work on torch's tensors",
    "ops/torchlib/": "calls torch's own kernels",
    "ops/devices.py": "asks torch for devices, in the functions that were asked for one",
    "train/": "gradients, optimizers and data parallelism are torch's",
}
# Maps a file or a function above the limits to the reason.
LONG_FILES: dict[str, str] = {}
LONG_FUNCTIONS: dict[str, str] = {}


def package_of(path: Path) -> str:
    """Return the package of a file: its folder under ridgeline/, or its own name at the top."""
    first = path.relative_to(SOURCE).parts[0]
    return first.removesuffix(".py")


def imports(path: Path) -> Iterator[str]:
    """Yield every module that a file imports, at its top or inside functions, by its full name."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path}:{node.lineno}: imports are absolute here"
            yield from (_resolve(str(node.module), alias.name) for alias in node.names)
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            function = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if function in ("import_module", "__import__"):
                yield str(node.args[0].value)


def _resolve(module: str, name: str) -> str:
    """Resolve `from module import name`: return `module.name` if there is such a file of ours, else `module`."""
    top, *rest = module.split(".")
    found = SOURCE.joinpath(*rest, name) if top == "ridgeline" else None
    exists = found and (found.is_dir() or any(found.with_suffix(s).exists() for s in (".py", ".pyi")))
    return f"{module}.{name}" if exists else module


def owner(module: str) -> str:
    """Return the package to which a module of ours belongs."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else "__init__"


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(SOURCE)))
def test_the_allowed_imports(path: Path) -> None:
    package, name = package_of(path), path.relative_to(SOURCE).as_posix()
    assert package in MAY_IMPORT, f"{package} is new: say in MAY_IMPORT what it may import"
    ours, others = MAY_IMPORT[package], THIRD_PARTY.get(package, frozenset())
    for module in imports(path):
        top = module.split(".")[0]
        if top == "ridgeline":
            allowed = ours is None or owner(module) in ours | EVERYWHERE | {package}
            assert allowed, f"{name} imports {module}, but {package} may import only {sorted(ours or ())}"
            if package == "load" and owner(module) == "ops":
                plain = {"ridgeline.ops.api", "ridgeline.ops.mapped"}
                assert module in plain, f"{name}: load may import only signatures and mapped files of ops"
            if package == "runtime" and owner(module) == "sched":
                plain = {"ridgeline.sched.work", "ridgeline.sched.stats"}
                assert module in plain, f"{name}: runtime may import only the plain data of sched"
        elif top == "torch":
            assert any(name.startswith(allowed) for allowed in TORCH), f"{name} imports {module}"
        elif top == "triton":
            assert name.startswith("ops/triton/"), f"{name} imports {module}"
        else:
            assert top in sys.stdlib_module_names or top in others, f"{name} imports {module}"


def test_no_cycles_between_packages() -> None:
    graph: dict[str, set[str]] = {}
    for path in FILES:
        targets = {owner(m) for m in imports(path) if m.split(".")[0] == "ridgeline"}
        graph.setdefault(package_of(path), set()).update(targets - {package_of(path)})
    assert {"spec", "archs", "ops", "nn", "load", "runtime"} <= set(graph)  # an empty graph has no cycles either
    graphlib.TopologicalSorter(graph).prepare()  # raises CycleError, which shows the cycle


def files_imported() -> dict[str, set[str]]:
    """Return, for each module of ours, the modules that define its imports, even if a package re-exports them."""
    names = {module_name(path): path for path in FILES}
    exported = {
        (module, alias.asname or alias.name): (str(node.module), alias.name)
        for module, path in names.items()
        if path.name == "__init__.py"
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }

    def home(module: str, name: str) -> str:
        if name == "_kernels":  # a compiled module
            return name
        if f"{module}.{name}" in names:
            return f"{module}.{name}"
        return home(*exported[module, name]) if (module, name) in exported else module

    found: dict[str, set[str]] = {}
    for module, path in names.items():
        tree = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        froms = [node for node in tree if isinstance(node, ast.ImportFrom)]
        found[module] = {home(str(node.module), alias.name) for node in froms for alias in node.names} & set(names)
        found[module].discard(module)
    return found


def test_lazy_names_of_spec_are_those_of_its_modules() -> None:
    spec = importlib.import_module("ridgeline.spec")
    assert set(spec._MODULES) == set(spec.__all__)
    for name in spec.__all__:
        assert getattr(spec, name) is getattr(importlib.import_module(f"ridgeline.spec.{spec._MODULES[name]}"), name)


def module_name(path: Path) -> str:
    """Return the dotted name of a file of ours."""
    parts = path.relative_to(SOURCE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def test_no_cycles_between_files() -> None:
    """Imports inside functions and imports for types count too, because a reader follows them as well."""
    graph = files_imported()
    assert "ridgeline.sched.work" in graph["ridgeline.runtime.runner"]
    assert "ridgeline.spec.attention" in graph["ridgeline.nn.mixers"]  # which imports it from ridgeline.spec
    graphlib.TopologicalSorter(graph).prepare()
    planted = {**graph, "ridgeline.sched.work": {"ridgeline.runtime.runner"}}
    with pytest.raises(graphlib.CycleError):
        graphlib.TopologicalSorter(planted).prepare()


def test_the_import_reader_sees_every_form(tmp_path: Path) -> None:
    """A rule over imports needs a reader that finds all of them."""
    path = tmp_path / "x.py"
    path.write_text(
        "import a.b\nfrom ridgeline.ops import api, OpsTable\n"
        "def f():\n    from c import d\n    import importlib\n    importlib.import_module('torch.nn')\n"
    )
    assert set(imports(path)) == {"a.b", "ridgeline.ops.api", "ridgeline.ops", "c", "importlib", "torch.nn"}


def test_files_and_functions_stay_small() -> None:
    too_long = []
    for path in FILES:
        text, name = path.read_text(encoding="utf-8"), path.relative_to(SOURCE).as_posix()
        if len(text.splitlines()) > 500 and name not in LONG_FILES:
            too_long.append(name)
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                lines = (node.end_lineno or node.lineno) - node.lineno + 1
                if lines > 60 and f"{name}:{node.name}" not in LONG_FUNCTIONS:
                    too_long.append(f"{name}:{node.name}")
    assert not too_long, f"over 500 lines in a file or 60 in a function: {too_long}"


# Instructions of x86 (SSE to AVX-512, VNNI, AMX) and of ARM (NEON, SVE, SME), and the headers that declare them.
INSTRUCTIONS = re.compile(
    r"\b_mm\d*_|\b__m\d{3}|\bv?p?dpbusd|\bvpdp|\b_tile_|\b__tile|\btile(?:load|stored?|zero|release)d?\b|\bt(?:dp|cmm)[a-z0-9]+\b"
    r"|\bv(?:ld|st)[1-4]q?_|\bv[a-z0-9]+q?_(?:lane_|laneq_|n_|high_)?[fsup]\d+|\bbf?dotq|\b(?:float|int|uint)\d+x\d+(?:x\d)?_t\b"
    r"|\bsv[a-z0-9]+_[a-z]|\b__arm_|arm_(?:neon|sve|sme|acle)|\b[a-z]{1,2}mmintrin|\b\w+intrin\.h"
)


def names_instructions(text: str) -> bool:
    """Return whether C++ source names instructions of a processor, which only three headers may do."""
    return bool(INSTRUCTIONS.search(text))


def test_kernels_stay_small() -> None:
    """Files of C++ are short, and three of them name instructions."""
    found = []
    for path in sorted(ROOT.glob("csrc/**/*.*")):
        text = path.read_text(encoding="utf-8")
        lines = text.splitlines()
        if len(lines) > 500:
            found.append(f"{path.name}: {len(lines)} lines")
        found += [f"{path.name}:{i}: over 120 columns" for i, line in enumerate(lines, 1) if len(line) > 120]
        if path.name not in ("simd.h", "dots.h", "unit_registers.h") and names_instructions(text):
            found.append(f"{path.name}: names instructions, which is for simd.h, dots.h and unit_registers.h")
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    "line",
    [
        "__m512 a = _mm512_loadu_ps(p);", "_mm_pause();", 'asm("vpdpbusd %0");', "#include <immintrin.h>",
        "#include <emmintrin.h>", "_tile_loadd(0, p, 64);", "_tile_dpbssd(0, 1, 2);", 'asm("tdpbf16ps %tmm0");',
        "__tile_dpbf16ps(&c, a, b);", 'asm("tdpbusd");', "float32x4_t a;", "int8x16_t b;", "a = vld1q_f32(p);",
        "vst1_u8(p, x);", "a = vfmaq_f32(a, b, c);", "a = vdotq_s32(a, b, c);", "a = vfmaq_laneq_f32(a, b, c, 1);",
        "#include <arm_neon.h>", "#include <arm_sve.h>", "svfloat32_t a = svld1_f32(g, p);", "vmmlaq_s32(a, b, c);",
    ],
)  # fmt: skip
def test_instructions_are_recognized(line: str) -> None:
    assert names_instructions(line)


@pytest.mark.parametrize(
    "line",
    [
        "int64_t tile = tiles.tile_of(token);", "out[v] = keys + v * W;", "void prefetch(const char* p);", "vt = x;",
        "tile_zero(a);", "tdata.size()", "vector_of(ids)", "svec.push_back(1);", "std::vector<float> v1_s;",
    ],
)  # fmt: skip
def test_plain_code_is_not_taken_for_instructions(line: str) -> None:
    assert not names_instructions(line)


# This is the head of a definition as clang-format writes it, not a forward declaration, nor a member's (`struct A::B
# {`).
TYPE = (
    r"\s*(?:template\s*<.*>\s*)?(?:struct|class|enum(?: class)?)\s+(?:alignas\(\w+\)\s*)?"
    r"(\w+)\s*(?:final\s*)?(?::[^:].*)?\{"
)


def types_of(text: str) -> Iterator[tuple[str, str]]:
    """Yield (namespace, name) of each type in a named namespace of C++ source, whose name other files can use."""
    open_blocks: list[str | None] = []  # the namespace of each open brace, None for any other block
    for line in text.splitlines():
        line = re.sub(r'//.*|"(\\.|[^"\\])*"|\'(\\.|[^\'\\])\'', "", line)
        namespace = re.match(r"\s*namespace\s*([\w:]*)\s*\{", line)
        found = re.match(TYPE, line)
        if found and all(open_blocks):
            yield "::".join(str(block) for block in open_blocks), found[1]
        for brace in re.findall(r"[{}]", line):
            if brace == "}":
                open_blocks.pop()
            else:
                open_blocks.append(namespace[1] if namespace else None)
                namespace = None


def test_each_type_of_the_kernels_is_defined_once() -> None:
    """Two types of one name in one namespace break C++'s one-definition rule, which no compiler reports."""
    files: dict[tuple[str, str], list[str]] = {}
    for path in sorted(ROOT.glob("csrc/**/*.*")):
        for found in types_of(path.read_text(encoding="utf-8")):
            files.setdefault(found, []).append(path.name)
    assert ("ridgeline", "Matrix") in files
    assert ("ridgeline::RL_ISA", "Span") in files
    assert not {found: names for found, names in files.items() if len(names) > 1}
    first = "namespace a {\nstruct X {\n};\nnamespace {\nstruct Y {};\n}\nint f() {\nstruct Z {};\n}\n}\n"
    planted = first + "namespace a {\nenum class X { b };\nstruct W;\nstruct W::V {};\n}"
    assert list(types_of(planted)) == [("a", "X"), ("a", "X")]


def test_drawn_comments_are_intact() -> None:
    """A formatter that refilled a drawn comment left a word alone on a line above an indented one."""
    broken = re.compile(r"^ *// *[a-z]+\n *// {3,}", re.MULTILINE)
    assert broken.search("//   a  b, sums\n//   of\n//      c")
    assert not [p.name for p in sorted(ROOT.glob("csrc/**/*.*")) if broken.search(p.read_text(encoding="utf-8"))]


def modules_after(code: str) -> set[str]:
    """Return the top-level modules that are loaded after `code` has run in a fresh interpreter."""
    code += "\nimport sys; print('\\n'.join(sys.modules))"
    env = {**os.environ, "PYTHONPATH": str(SOURCE.parent)}
    run = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    return {line.split(".")[0] for line in run.stdout.split()}


@pytest.mark.parametrize(
    ("code", "absent"),
    [
        ("import ridgeline", {"torch", "numpy"}),
        ("import ridgeline.spec, ridgeline.archs", {"torch", "numpy"}),
        ("import ridgeline.plan.report, ridgeline.catalog.models", {"torch", "numpy", "matplotlib"}),
        ("from ridgeline.catalog.models import find_model; find_model('mistral-7b')", {"torch", "numpy"}),
        ("import ridgeline.ops, ridgeline.quant, ridgeline.nn", {"torch"}),
        ("import ridgeline.load.checkpoint, ridgeline.load.weights, ridgeline.load.tokenizer", {"torch"}),
        ("import ridgeline.runtime.load, ridgeline.runtime.step", {"torch"}),
        ("from ridgeline import LLM, SamplingParams", {"torch", "triton"}),
        ("import ridgeline.cli.main", {"torch", "triton"}),
        ("import ridgeline.dist.ray_cluster, ridgeline.dist.ray_process", {"torch", "ray"}),
        ("from ridgeline.ops import open_table; open_table('cpu')", {"torch", "triton"}),
    ],
)
def test_importing_is_cheap(code: str, absent: set[str]) -> None:
    loaded = modules_after(code)
    assert "ridgeline" in loaded
    assert not loaded & absent


def text_files() -> Iterator[Path]:
    """Return the files of the repository, new ones included; without git, every file under the root."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    try:
        listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\0")
        paths = [ROOT / name for name in listed if name]
    except (OSError, subprocess.CalledProcessError):
        paths = [p for p in ROOT.rglob("*") if not any(part.startswith(".") for part in p.relative_to(ROOT).parts)]
    for path in paths:
        if path.is_file() and "__pycache__" not in path.parts and b"\0" not in path.read_bytes():
            yield path


def test_no_paths_of_one_machine() -> None:
    # A match after a word character is the middle of a URL or of a relative path.
    machine = re.compile(r"(?<![\w.-])/(?:work|root|home|tmp)/")
    assert machine.search("cd /" + "work/x")
    found = []
    for path in text_files():
        for number, line in enumerate(path.read_text(encoding="utf-8", errors="replace").splitlines(), 1):
            if machine.search(line):
                found.append(f"{path.relative_to(ROOT)}:{number}: {line.strip()[:80]}")
    assert not found, "\n".join(found)


def test_public_names_are_documented() -> None:
    checked, bare = 0, []
    for folder in sorted(p.parent for p in SOURCE.rglob("__init__.py")):
        module = importlib.import_module(".".join(("ridgeline", *folder.relative_to(SOURCE).parts)))
        for name in getattr(module, "__all__", ()):
            item = getattr(module, name)
            if inspect.isclass(item) or inspect.isfunction(item):
                checked += 1
                doc = item.__doc__ or ""
                # the docstring that dataclass and NamedTuple generate
                if not doc.strip() or doc.startswith(f"{name}("):
                    bare.append(f"{module.__name__}.{name}")
    assert checked > 25
    assert not bare, bare
