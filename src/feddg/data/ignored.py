"""What lies in a folder of images and is no part of the table: counted by kind, said once."""

import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from feddg.data.fingerprint import file_of
from feddg.data.image_formats import REMEDIES
from feddg.data.images import IMAGE_SUFFIXES, ImageTable
from feddg.data.remarks import SHOWN, Remark

DEEPER, OUTSIDE, LEFT_OUT = "in deeper folders", "outside a class folder", "of folders left out"
UNLISTED = "images that are not in"


@dataclass
class Ignored:
    """Files of one kind that are not used.

    Attributes:
        count: how many.
        examples: the first paths, below the root.
    """

    count: int = 0
    examples: list[str] = field(default_factory=list)

    def add(self, path: str) -> None:
        """Counts a file."""
        self.count += 1
        if len(self.examples) < SHOWN:
            self.examples.append(path)


def ignored_files(table: ImageTable, depth: int = 3) -> dict[str, Ignored]:
    """Counts the files below a table's root that are none of its rows; hidden ones do not count.

    Args:
        table: all images, those included that cannot be decoded.
        depth: how many parts the path of an image has: domain, class and file.

    Returns:
        By kind: where an image lies that is not used, or the suffix of another file.
    """
    found: dict[str, Ignored] = {}
    if table.root is None:
        return found
    used = set(map(file_of, table.paths))
    for path in _files(table.root):
        if path not in used:
            kind = _kind(path, depth)
            if table.listed_in and kind in (DEEPER, OUTSIDE, LEFT_OUT):
                kind = f"{UNLISTED} {table.listed_in}"
            found.setdefault(kind, Ignored()).add(path)
    return found


def about_ignored(found: dict[str, Ignored]) -> Iterator[Remark]:
    """Says what is ignored: images and what holds images as warnings, other files as a note."""
    for kind in (DEEPER, OUTSIDE, LEFT_OUT):
        if kind in found:
            yield Remark(
                "warning",
                f"ignored: {_files_text(found[kind])} {kind}; images lie as "
                "<root>/<domain>/<class>/<image>",
            )
    for suffix, ignored in found.items():
        if suffix in REMEDIES:
            text = f"ignored: {_files_text(ignored)} ending in {suffix}: {REMEDIES[suffix]}"
            yield Remark("warning", text)
    others = {kind: one.count for kind, one in found.items() if kind not in REMEDIES}
    others = {k: n for k, n in others.items() if k not in (DEEPER, OUTSIDE, LEFT_OUT)}
    for kind in [kind for kind in others if kind.startswith(UNLISTED)]:
        yield Remark("note", f"ignored: {others.pop(kind):,} {kind}")
    if others:
        counts = ", ".join(f"{number} {kind}" for kind, number in sorted(others.items()))
        yield Remark("note", f"ignored, as they are no images: {counts}")


def _files(root: Path) -> Iterator[str]:
    for folder, folders, files in os.walk(root):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        below = os.path.relpath(folder, root).replace(os.sep, "/")
        for name in sorted(files):
            if not name.startswith("."):
                yield name if below == "." else f"{below}/{name}"


def _kind(path: str, depth: int) -> str:
    suffix = os.path.splitext(path)[1].lower()
    if suffix not in IMAGE_SUFFIXES:
        return suffix or "without a suffix"
    parts = path.count("/") + 1
    return DEEPER if parts > depth else OUTSIDE if parts < depth else LEFT_OUT


def _files_text(ignored: Ignored) -> str:
    more = ", ..." if ignored.count > len(ignored.examples) else ""
    files = "file" if ignored.count == 1 else "files"
    return f"{ignored.count:,} {files} ({', '.join(ignored.examples)}{more})"
