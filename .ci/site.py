"""A hook of mkdocs: adds the files outside docs/ that its pages link to, and the pages of the repository's root.

In the repository, links are relative to a file, so that they work where the files are read. On the site, the files of
docs/ are at the top, and the others beside them.
"""

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]
PAGES = ("ARCHITECTURE.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md")
LINK = re.compile(r"(?<=\]\()(?!\w+:|#|/)([^)#\s]+)")


def on_files(files: Files, config: Any) -> Files:
    """Add the root's pages, and every other file that a page links to."""
    wanted = dict.fromkeys(PAGES)
    for page in [*(file for file in files if file.src_uri.endswith(".md"))]:
        for target in LINK.findall((ROOT / "docs" / page.src_uri).read_text(encoding="utf-8")):
            wanted[source(f"docs/{page.src_uri}", target)] = None
    for page in PAGES:
        for target in LINK.findall((ROOT / page).read_text(encoding="utf-8")):
            wanted[source(page, target)] = None
    for path in wanted:
        if not path.startswith("docs/") and (ROOT / path).is_file():
            files.append(File.generated(config, site(path), abs_src_path=str(ROOT / path)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Point the links of a page to the site's files."""
    uri = page.file.src_uri
    own = uri if (ROOT / uri).is_file() and not (ROOT / "docs" / uri).is_file() else f"docs/{uri}"

    def link(found: re.Match[str]) -> str:
        return posixpath.relpath(site(source(own, found[1])), posixpath.dirname(uri) or ".")

    return LINK.sub(link, markdown)


def source(page: str, target: str) -> str:
    """Return the path in the repository that a link of a page means."""
    return posixpath.normpath(posixpath.join(posixpath.dirname(page), target))


def site(path: str) -> str:
    """Return the path on the site of a file of the repository."""
    return path.removeprefix("docs/") if path.startswith("docs/") else path
