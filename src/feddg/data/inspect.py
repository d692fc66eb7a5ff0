"""What a table of images holds, in plain numbers and names."""

from typing import Any

from feddg.data.images import ImageTable
from feddg.data.remarks import similar


def inspect(table: ImageTable) -> dict[str, Any]:
    """Returns a summary that can be written as JSON.

    Returns:
        ``root``; ``images``, ``domains`` and ``classes`` (how many, and the names in order);
        ``counts`` and ``totals`` (images per domain and class, and per domain);
        ``missing`` (for each domain that lacks classes, which ones); ``similar_classes`` (groups
        of class names that differ in spelling only, most likely one class); and ``split`` (images
        per split of the benchmark, if it has one).
    """
    counts = table.counts()
    names = table.class_names
    return {
        "root": None if table.root is None else str(table.root),
        "images": len(table),
        "domains": list(table.domain_names),
        "classes": list(names),
        "counts": {
            domain: dict(zip(names, row.tolist()))
            for domain, row in zip(table.domain_names, counts)
        },
        "totals": dict(zip(table.domain_names, counts.sum(axis=1).tolist())),
        "missing": {
            domain: [name for name, count in zip(names, row) if not count]
            for domain, row in zip(table.domain_names, counts)
            if not row.all()
        },
        "similar_classes": similar(names),
        "split": _split_counts(table),
    }


def _split_counts(table: ImageTable) -> dict[str, int] | None:
    if table.split is None:
        return None
    split = table.split.tolist()
    return {role: split.count(role) for role in dict.fromkeys(split)}
