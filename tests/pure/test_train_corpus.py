"""Corpora: which files become documents, no function on both sides, and manifests that pin both sides."""

from __future__ import annotations

import ast
import json
import platform
import shutil
import textwrap
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ridgeline.errors import DataError, RequestError
from ridgeline.train.data.corpus import Corpus, Document
from ridgeline.train.data.held_out import cut_functions, function_key, split
from ridgeline.train.data.manifest import Manifest

STDLIB_3_11_7 = "7e9d7934074a84f9f1301bfbbf97e29fd5d3dda0df2e815661684c67c7bc6091"  # held-out share 0.05, seed 0


def write(folder: Path, **files: str | bytes) -> Path:
    for name, content in files.items():
        path = folder / name.replace("__", "/").replace("_dot_", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content.encode() if isinstance(content, str) else content)
    return folder


def a_folder(folder: Path) -> Path:
    return write(
        folder,
        b_dot_md="second\r\n",
        a__x_dot_py="\ufeffx = 1\n",
        rows_dot_jsonl='{"text": "one\u2028two"}\n\n{"text": " "}\n{"text": "second\\r\\n", "id": 3}\n',
        empty_dot_txt=" \n",
        nul_dot_bin=b"text\0",
        latin_dot_txt="é".encode("latin-1"),
        _dot_git__config="hidden",
    )


def test_the_files_of_a_folder_that_become_documents(tmp_path: Path) -> None:
    corpus = Corpus.from_paths([a_folder(tmp_path / "data")], license="CC0")
    assert [(d.name, d.text) for d in corpus.documents] == [
        ("a/x.py", "x = 1\n"),
        ("b.md", "second\r\n"),
        ("rows.jsonl:1", "one\u2028two"),
    ]
    assert [(s.name, s.reason) for s in corpus.skipped] == [
        ("empty.txt", "empty"),
        ("latin.txt", "not UTF-8 text"),
        ("nul.bin", "not UTF-8 text"),
        ("rows.jsonl:3", "empty"),
        ("rows.jsonl:4", "the same text as another"),
    ]
    assert corpus.license == "CC0"
    assert "3 documents" in corpus.report()
    assert "2 empty, 2 not UTF-8 text, 1 the same text as another" in corpus.report()


def test_names_do_not_depend_on_where_the_files_lie(tmp_path: Path) -> None:
    a_folder(tmp_path / "one")
    shutil.copytree(tmp_path / "one", tmp_path / "deep" / "two")
    one, two = tmp_path / "one", tmp_path / "deep" / "two"
    assert Corpus.from_paths([one]).documents == Corpus.from_paths([two]).documents
    assert (
        Corpus.from_paths([one / "a", one / "b.md", one / "b.md"]).documents == Corpus.from_paths([one]).documents[:2]
    )
    assert Corpus.from_paths([one / "b.md", one / "a"]).documents == Corpus.from_paths([one]).documents[:2]
    assert [d.name for d in Corpus.from_paths([one / "a" / "x.py"]).documents] == ["x.py"]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("x.txt", b"", r"x\.txt is empty"),
        ("x.txt", b" \r\n", r"x\.txt is empty"),
        ("x.txt", b"\xff", r"x\.txt is not UTF-8 text"),
        ("x.txt", b"a\0", r"x\.txt is not UTF-8 text"),
        ("x.jsonl", b"\n", r"x\.jsonl is empty"),
        ("x.jsonl", b'{"text": ""}\n', "no text to train on: .*1 empty"),
        ("x.jsonl", b'{"text": "a"}\n{"txt": "a"}', r'x\.jsonl:2 is not an object with a "text"'),
        ("x.jsonl", b'["a"]', r"x\.jsonl:1"),
        ("x.jsonl", b"{", r"x\.jsonl:1"),
        ("x.jsonl", b'{"text": "\\ud800"}', r"x\.jsonl:1"),
        ("x.jsonl", b"[" * 100_000, r"x\.jsonl:1"),
        (None, b"", "does not exist"),
    ],
)
def test_a_file_that_cannot_be_used_is_named(tmp_path: Path, name: str | None, content: bytes, message: str) -> None:
    if name:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=message):
        Corpus.from_paths([tmp_path / (name or "absent")])


def test_a_folder_without_text_and_no_path_at_all(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"no text to train on: .*0 documents.*1 not UTF-8"):
        Corpus.from_paths([write(tmp_path, x_dot_bin=b"\xff")])
    with pytest.raises(DataError, match="no path"):
        Corpus.from_paths([])


def test_files_of_a_library_that_are_equal_everywhere(tmp_path: Path) -> None:
    for index in range(100):
        write(tmp_path, **{f"test__sub__test_{index}_dot_py": f"x = {index}\n"})
    write(tmp_path, os_dot_py="import abc\n", os_dot_txt="no Python", test__latin_dot_py=b"# \xe9\n")
    for folder in ("site-packages", "dist-packages", "config-3.11-x86_64-linux-gnu"):
        write(tmp_path / folder, a_dot_py=f"{folder!r}\n")
    (tmp_path / "_sysconfigdata__linux_.py").write_text("paths = 1\n")
    (tmp_path / "sitecustomize.py").write_text("paths = 2\n")
    corpus = Corpus.stdlib(tmp_path)
    assert [d.name for d in corpus.documents if not d.name.startswith("test/sub/")] == ["os.py"]
    assert len(corpus.documents) == 101
    assert [s.name for s in corpus.skipped] == ["test/latin.py"]
    assert corpus.license.startswith("PSF")


def test_a_library_without_its_tests_is_refused_with_the_remedy(tmp_path: Path) -> None:
    write(tmp_path, os_dot_py="x = 1\n", test__test_support_dot_py="x = 2\n")  # as in Debian
    write(tmp_path, **{f"test__support__part{i}_dot_py": f"x = {i}\n" for i in range(150)})
    with pytest.raises(DataError, match=r"without its tests.*libpython3\.\d+-testsuite.*python3-test.*pyenv"):
        Corpus.stdlib(tmp_path)


# ---- functions that occur on both sides


def functions(text: str) -> Iterator[ast.AST]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        tree = ast.parse(text)
    return (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))


def dumps(documents: tuple[Document, ...]) -> set[str]:
    """Return all functions of the documents that parse, as ast.dump writes them. This is the oracle."""
    found = set()
    for document in documents:
        try:
            found |= {ast.dump(f) for f in functions(document.text)}
        except SyntaxError:
            continue
    return found


FUNCTIONS = [
    "def f(a, b=1):\n    return a\n",
    "def f( a, b = 1 ):  # the same\n\n    return ( a )\n",
    "def f(a, b=True):\n    return a\n",
    "def f(a, b=1.0):\n    return a\n",
    "def g(a, b=1):\n    return a\n",
    "async def f(a, b=1):\n    return a\n",
    "@deco(1)\n@other\ndef f(a, b=1):\n    return a\n",
    "def f(a, b=1): return '1', b'1', \"\\d\", ...\n",
    "def f(a, b=1): return [], [None], ['None'], [[]]\n",
    "def f(a, b=1): return [None, []], ['None', [1]], 1j\n",
    "def f(a, b=1):\n    if a:\n        b\n        a\n",
    "def f(a, b=1):\n    if a:\n        b\n    else:\n        a\n",
    'def h():\n    """Says\n  what."""\n\n    x = """\nno indent\n"""\n',
]


def test_keys_are_equal_where_the_trees_are() -> None:
    trees = [tree for text in [*FUNCTIONS, Path(ast.__file__).read_text()] for tree in functions(text)]
    pairs = [(function_key(tree), ast.dump(tree)) for tree in trees]
    assert len(pairs) > len(set(pairs)) == len({key for key, _ in pairs}) == len({dump for _, dump in pairs}) > 100
    assert pairs[0] == pairs[1] != pairs[2]


def test_keys_of_deep_trees_and_long_numbers() -> None:
    for body in ("a" + " + a" * 900, "0x" + "f" * 10_000):
        (tree,) = functions(f"def f(a): return {body}\n")
        assert len(function_key(tree)) == 32


@st.composite
def blocks(draw: st.DrawFn, depth: int = 0) -> str:
    """Generate Python statements, with functions of few kinds in all positions where functions can be."""
    parts = []
    for kind in draw(st.lists(st.integers(0, 8), min_size=1, max_size=4)):
        inner = textwrap.indent(draw(blocks(depth + 1)), "    ") if depth < 2 and kind > 2 else "    pass\n"
        parts.append(
            [
                draw(st.sampled_from(FUNCTIONS)),
                f"x = {draw(st.integers(0, 3))}\n",
                f"def k{draw(st.integers(0, 2))}(): return 1; x = 2\n",
                f"class A:\n{inner}",
                f"def outer():\n{inner}",
                f"if x:\n{inner}else:\n    def f(): pass\n",
                f"try:\n{inner}except A:\n    def f(): pass\nfinally:\n{inner}",
                f"match x:\n    case 1:\n        def f(): pass\n    case 2:\n{textwrap.indent(inner, '    ')}",
                f"@deco\nasync def outer(a=lambda: 1):\n    # a comment\n{inner}\n    # at the end\n",
            ][kind]
        )
    return "".join(parts)


@settings(max_examples=60, deadline=None)
@given(st.lists(blocks(), min_size=2, max_size=6), st.sampled_from(["\n", "\r\n", "\r"]), st.integers(0, 99))
def test_no_function_is_on_both_sides(texts: list[str], line_end: str, seed: int) -> None:
    documents = tuple(Document(f"{i}.py", t.replace("\n", line_end)) for i, t in enumerate(texts))
    try:
        parts = split(documents, 0.5, seed)
    except DataError:
        return  # a side was empty
    before = {d.name: d.text for d in documents}
    known, left = dumps(parts.train), dumps(parts.held_out)
    assert not known & left
    assert all(before[d.name] == d.text for d in parts.train)
    names = {d.name for d in parts.held_out} | set(parts.dropped)
    assert names | {d.name for d in parts.train} == before.keys()
    for name in names:  # a text without functions of the other side does not change
        clean = {ast.dump(f) for f in functions(before[name]) if not {ast.dump(g) for g in ast.walk(f)} & known}
        assert clean <= left
        if not {ast.dump(f) for f in functions(before[name])} & known:
            assert Document(name, before[name]) in parts.held_out
    assert parts.num_left == sum(1 for d in parts.held_out for _ in functions(d.text))


def cut(text: str, train: str) -> str | None:
    return cut_functions(text, {function_key(f) for f in functions(train)})[0]


def test_the_lines_that_a_cut_removes() -> None:
    train = "class B:\n    def f(self): pass\n    @staticmethod\n    def g(): pass\n"
    text = (
        "class A:\n    # of f\n    def f(self):\n        pass  # done\n    @staticmethod\n    # of g\n    def g():\n"
        "        pass\n\nclass C:\n    '''Doc'''\n    def f(self): pass\n\n    def h(self):\n        pass"
    )
    assert cut(text, train) == (
        "class A:\n    # of f\n    pass\n\nclass C:\n    '''Doc'''\n\n    def h(self):\n        pass"
    )


def test_a_known_function_is_removed_with_its_inner_functions() -> None:
    text = "class A:\n    def outer():\n        def inner(): pass\n"
    assert cut_functions(text, {function_key(f) for f in functions(text)}) == ("class A:\n    pass\n", 1)


def test_the_rest_of_a_cut_is_cut_if_it_is_known_too() -> None:
    train = "def inner(): return 1\ndef outer():\n    x = 1\n"
    assert cut("def outer():\n    x = 1\n    def inner(): return 1\ny = 2\n", train) == "y = 2\n"


def test_a_document_without_parsable_text_is_dropped() -> None:
    assert cut("x = 1\nif x:\\\n\n  def f(): pass\n", "def f(): pass\n") == "x = 1\nif x:\\\n\n  pass\n"
    assert cut("@(\n    deco)\ndef f(): pass\n", "@deco\ndef f(): pass\n") is None
    texts = ["def f(): pass\n", "# f\ndef f(): pass\n\n", "@(\n    deco)\ndef g(): pass\n", "@deco\ndef g(): pass\n"]
    texts += ["x = 1", "\ndef f(): pass\n \n"]
    seed = next(s for s in range(999) if sides(s, 6) == (0, 1, 1, 0, 1, 1))
    parts = split([Document(f"{i}.py", t) for i, t in enumerate(texts)], 0.5, seed)
    assert [d.text for d in parts.held_out] == ["# f\n\n", "x = 1"]
    assert (parts.dropped, parts.num_cut, parts.num_left) == (("2.py", "5.py"), 3, 0)


def sides(seed: int, count: int) -> tuple[int, ...]:
    """Return 1 for each document N.py that is held out."""
    try:
        parts = split([Document(f"{i}.py", f"x = {i}") for i in range(count)], 0.5, seed)
    except DataError:
        return ()
    held_out = {d.name for d in parts.held_out}
    return tuple(int(f"{i}.py" in held_out) for i in range(count))


def test_files_that_do_not_parse_are_for_training_and_their_functions_count() -> None:
    old = "class A:\n    @deco\n    def f(self):\n        return 1\n\n    def g(self):\n        print 'old'\nx = 1\n"
    new = "def g(self):\n    return 2\n@deco\ndef f(self):\n    return 1\n"
    seed = next(s for s in range(999) if sides(s, 3) == (1, 1, 0))
    parts = split([Document("0.py", old), Document("1.py", new), Document("2.py", "x = 1")], 0.5, seed)
    assert [d.name for d in parts.train] == ["0.py", "2.py"]
    assert [d.text for d in parts.held_out] == ["def g(self):\n    return 2\n"]


def test_the_share_and_the_names_decide() -> None:
    documents = [Document(f"{i}.txt", "def f(): pass\n") for i in range(4000)]
    parts = split(documents, 0.1, seed=3)
    assert 320 < len(parts.held_out) < 480  # 400 +- 4 standard deviations
    assert split(documents[::-1], 0.1, seed=3).held_out == parts.held_out[::-1]
    assert {d.name for d in split(documents[:2000], 0.1, seed=3).held_out} <= {d.name for d in parts.held_out}
    assert split(documents, 0.1, seed=4).held_out != parts.held_out
    assert split(documents, 0.0).train == tuple(documents)
    for share in (-0.1, 1.0):
        with pytest.raises(RequestError, match="held-out share"):
            split(documents, share)
    with pytest.raises(DataError, match="give 1 for training and 0 held out"):
        split(documents[:1], 0.01)


# ---- manifests


def a_manifest() -> Manifest:
    documents = tuple(Document(f"{i}.py", f"def f{i}(): pass\nx = 1\n") for i in range(40))
    corpus = Corpus("files of x", "MIT", documents)
    return Manifest.build(corpus, split(documents, 0.3))


def test_a_manifest_round_trips_and_notices_edits() -> None:
    manifest = a_manifest()
    text = manifest.to_json()
    assert Manifest.from_json(text) == manifest
    data = json.loads(text)
    assert data["hash"] == manifest.hash
    assert data["license"] == "MIT"
    assert data["python"] == platform.python_version()
    assert sum(side["documents"] for side in data["totals"].values()) == 40 == len(data["entries"])
    assert sum(side["bytes"] for side in data["totals"].values()) == sum(e.num_bytes for e in manifest.entries)
    for old, new in (
        ('"1.py"', '"a.py"'),
        ('"side": "train"', '"side": "held-out"'),
        ('"documents": ', '"documents": 9'),
    ):
        assert old in text
        with pytest.raises(DataError, match="edited"):
            Manifest.from_json(text.replace(old, new, 1))
    for damaged in ("", "{}", "[]", text[:-9], text.replace('"sha256"', '"md5"')):
        with pytest.raises(DataError, match="not a manifest"):
            Manifest.from_json(damaged)


def test_a_manifest_is_verified_against_a_pinned_one() -> None:
    manifest = a_manifest()
    manifest.verify(manifest)
    manifest.verify(manifest.hash)
    manifest.verify(replace(manifest, license="other words", python="3.99"))
    with pytest.raises(DataError, match=rf"{manifest.hash}, not the pinned 00"):
        manifest.verify("00")
    first, second, third, *rest = manifest.entries
    changed = [replace(first, sha256="0"), replace(second, side="elsewhere"), *rest, replace(third, name="new.py")]
    with pytest.raises(DataError) as error:
        manifest.verify(replace(manifest, entries=tuple(changed)))
    for phrase in (f"{first.name} has another text", f"{second.name} is {second.side}, not elsewhere"):
        assert phrase in str(error.value)
    assert f"{third.name} is new" in str(error.value)
    assert "new.py is missing" in str(error.value)
    for old, new in ((first, changed[0]), (second, changed[1]), (third, changed[-1])):
        assert replace(manifest, entries=(old,)).hash != replace(manifest, entries=(new,)).hash
    with pytest.raises(DataError, match="35 more"):
        manifest.verify(replace(manifest, entries=()))


@pytest.mark.nightly
def test_the_standard_library() -> None:
    try:
        corpus = Corpus.stdlib()
    except DataError as e:
        pytest.skip(str(e))
    parts = split(corpus.documents, 0.05)
    known, left = dumps(parts.train), dumps(parts.held_out)
    assert len(left) > 1000
    assert not known & left
    assert parts.num_cut > 50
    manifest = Manifest.build(corpus, parts)
    assert 0.02 < manifest.totals()["held-out"]["bytes"] / sum(e.num_bytes for e in manifest.entries) < 0.1
    assert len({e.sha256 for e in manifest.entries}) == len(manifest.entries)
    if platform.python_version() == "3.11.7":
        manifest.verify(STDLIB_3_11_7)
