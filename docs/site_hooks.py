"""Hooks of the documentation site: links that leave docs/, and checks of what was built.

A link such as ../configs/launch/slurm.yaml leads to the file in the repository. On the site it
leads to a page with the text of that file, or of the files in that folder.
"""

from __future__ import annotations

import json
import posixpath
import re
from collections.abc import Iterator
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
OUTSIDE = "files"
IN_NAV = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")
SHOWN = {".ipynb": "json", ".py": "python", ".toml": "toml", ".txt": "text", ".yaml": "yaml"}
_LINK = re.compile(r"""(?P<start>\]\(|\b(?:src|href)=")(?P<path>[^)"#\s:]+)""")
_LOADED = re.compile(
    r"""<(?:script|img|iframe|source)\b[^>]*\bsrc=["']?(?:https?:)?//[^"'> ]*"""
    r"""|<link\b(?=[^>]*\brel=["']?(?:stylesheet|preconnect|preload|icon))[^>]*//[^"'> ]*""",
    re.IGNORECASE,
)
_FOUND = {"lane": "glossary.html", "global_batch_size": "reference.html", "open_parts": "api.html"}
_BOOST = {"api.md": 4, "glossary.md": 4, "how_do_i.md": 2, "reference.md": 4}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds a page for each file and folder outside docs/ that pages link to."""
    texts = {f"docs/{file.src_uri}": file.content_string for file in files.documentation_pages()}
    found = [path for page, text in texts.items() for path in _targets(page, text)]
    left, added = [*IN_NAV, *found], set[str]()
    while left:
        path = left.pop()
        if path.startswith("docs/") or path in added or not (ROOT / path).exists():
            continue
        added.add(path)
        text = _page_of(ROOT / path)
        files.append(File.generated(config, site_path(path), content=text))
        left += _targets(path, text) if path.endswith(".md") else []
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Points links between docs/ and the rest of the repository to pages of the site."""
    here = page.file.src_uri
    page.meta["search"] = {"boost": _BOOST.get(here, 0.5 if here.startswith(OUTSIDE) else 1)}
    path = here.removeprefix(f"{OUTSIDE}/") if here.startswith(OUTSIDE) else f"docs/{here}"

    def changed(link: re.Match[str]) -> str:
        target = _resolved(path, link["path"])
        if path.startswith("docs/") == target.startswith("docs/") and target.endswith(".md"):
            return link[0]
        if not (ROOT / target).exists():
            return link[0]
        inside = posixpath.relpath(site_path(target), posixpath.dirname(here))
        return f"{link['start']}{inside}"

    return _LINK.sub(changed, markdown)


def on_post_build(config: MkDocsConfig) -> None:
    """Checks the site: nothing is loaded from other servers, and the search knows its words."""
    site = Path(config.site_dir)
    for page in sorted(site.rglob("*.html")):
        if loaded := _LOADED.search(page.read_text(encoding="utf-8")):
            raise PluginError(f"{page} loads from another server: {loaded[0]}")
    index = json.loads((site / "search" / "search_index.json").read_text(encoding="utf-8"))
    for word, name in _FOUND.items():
        entries = [entry for entry in index["docs"] if entry["location"].partition("#")[0] == name]
        if not any(word in entry["title"] + entry["text"] for entry in entries):
            raise PluginError(f"the search index does not have the word {word} of {name}")


def site_path(path: str) -> str:
    """The source of the page of the site that shows a file or folder of the repository."""
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    return f"{OUTSIDE}/{path}" + ("" if path.endswith(".md") else ".md")


def _resolved(page: str, target: str) -> str:
    """The file or folder of the repository that a page links to; of a folder, its README.md."""
    path = posixpath.normpath(posixpath.join(posixpath.dirname(page), target))
    return f"{path}/README.md" if (ROOT / path / "README.md").is_file() else path


def _targets(page: str, text: str) -> list[str]:
    """Paths in the repository that a page links to."""
    return [_resolved(page, link["path"]) for link in _LINK.finditer(text)]


def _page_of(path: Path) -> str:
    if path.suffix == ".md":
        return path.read_text(encoding="utf-8")
    shown = [path] if path.is_file() else sorted(path.rglob("*"))
    lines = [f"# {path.relative_to(ROOT)}"]
    for file in shown:
        if path.is_file() or file.suffix in SHOWN:
            heading = [] if file == path else [f"## {file.relative_to(path)}"]
            lines += [*heading, *_blocks(file)]
    return "\n\n".join(lines)


def _blocks(file: Path) -> Iterator[str]:
    """The text of a file as Markdown: a block of code, or the cells of a notebook."""
    text = file.read_text(encoding="utf-8")
    if file.suffix != ".ipynb":
        yield f"~~~~{SHOWN.get(file.suffix, 'text')}\n{text}\n~~~~"
        return
    for cell in json.loads(text)["cells"]:
        source = "".join(cell["source"])
        yield source if cell["cell_type"] == "markdown" else f"~~~~python\n{source}\n~~~~"
