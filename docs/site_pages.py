"""Makes the documentation site's pages of the repository's own; MkDocs calls this as it builds.

The pages outside ``docs`` (README, CONTRIBUTING, ...) become pages of the site, the reference is
made from the code, and links that lead to files which are no page become plain text.
"""

import importlib.util
import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parent.parent
OUTSIDE = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "SECURITY.md": "security_reports.md",
    "benchmarks/papers/README.md": "papers.md",
}
"""Files of the repository outside ``docs``, and where the site has them."""
_LINK = re.compile(r"(?P<image>!?)\[(?P<text>[^\]]*)\]\((?P<target>[^)\s#]*)(?P<place>#[^)\s]*)?\)")
_BRACKETS = re.compile(r"(?P<code>(?P<ticks>`+).*?(?P=ticks))|\]\[", re.DOTALL)


def on_config(config: Any) -> Any:
    """Completes the table of contents: ``methods/*`` is every page there, the rest is "More"."""
    found = sorted(f.relative_to(ROOT / "docs").as_posix() for f in (ROOT / "docs").rglob("*.md"))
    said = {page for section in config.nav for pages in section.values() for page in pages}
    for section in config.nav:
        for name, pages in section.items():
            if isinstance(pages, list):
                section[name] = [f for page in pages for f in _expanded(page, found, said)]
    listed = {page for section in config.nav for pages in section.values() for page in pages}
    if more := [page for page in found if page not in listed]:
        config.nav.append({"More": more})
    return config


def _expanded(page: str, found: list[str], said: set[str]) -> list[str]:
    folder, star, _ = page.partition("*")
    return [f for f in found if f.startswith(folder) and f not in said] if star else [page]


def on_files(files: Files, config: Any) -> Files:
    """Adds the pages that are not in ``docs``; takes out what is no page there."""
    for name, place in OUTSIDE.items():
        files.append(File.generated(config, place, content=(ROOT / name).read_text("utf-8")))
    for name, text in _reference().items():
        files.append(File.generated(config, f"reference/{name}", content=text))
    for file in list(files):
        if file.src_uri.endswith((".py", ".pyc")):
            files.remove(file)
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Turns the page's links from files of the repository to pages of the site."""
    return linked(markdown, page.file.src_uri, {file.src_uri for file in files})


def linked(markdown: str, uri: str, known: set[str]) -> str:
    """Returns a page with its relative links as the site needs them.

    Args:
        markdown: the page.
        uri: its place in the site.
        known: the site's files.
    """
    back = {place: name for name, place in OUTSIDE.items()}
    home = posixpath.dirname(back.get(uri, f"docs/{uri}"))

    def turned(found: re.Match[str]) -> str:
        target, place = found["target"], found["place"] or ""
        if not target or ":" in target:
            return found[0]
        file = posixpath.normpath(posixpath.join(home, target))
        goal = OUTSIDE.get(file) or file.removeprefix("docs/")
        if goal not in known and (ROOT / file).exists():
            return found["text"]
        shortest = posixpath.relpath(goal, posixpath.dirname(uri) or ".")
        return f"{found['image']}[{found['text']}]({shortest}{place})"

    parts = re.split(r"(^ {0,3}```.*?^ {0,3}```$)", markdown, flags=re.MULTILINE | re.DOTALL)
    return "".join(p if i % 2 else _LINK.sub(turned, _literal(p)) for i, p in enumerate(parts))


def _literal(text: str) -> str:
    """Brackets side by side are text, as on other pages: no link is written in two brackets."""
    return _BRACKETS.sub(lambda found: found[0] if found["code"] else r"]\[", text)


def _reference() -> dict[str, str]:
    spec = importlib.util.spec_from_file_location(
        "generate_reference", Path(__file__).with_name("generate_reference.py")
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    found: dict[str, str] = module.pages()
    return found
