"""A data set's metadata as Croissant: JSON-LD that search engines and other libraries read.

Croissant 1.0 (http://mlcommons.org/croissant/1.0). Beside it lies a table of the images, which
``--data table`` reads as well; it names files and, where they are known, who holds them.
"""

import csv
import hashlib
import io
import json
from pathlib import Path
from typing import Any

from feddg.data.data_set import DataSet
from feddg.data.images import ImageTable
from feddg.errors import DataError
from feddg.records import as_cell
from feddg.storage import replace_bytes, why

CONFORMS_TO = "http://mlcommons.org/croissant/1.0"
COLUMNS = {
    "path": "file of the image, below the folder of the images",
    "label": "its class",
    "domain": "its domain",
    "client": "who holds it",
    "split": "its role: train, val, test, id_val or id_test",
}
_TERMS = (
    *("citeAs", "column", "extract", "field", "fileProperty", "fileObject", "fileSet", "format"),
    *("includes", "isLiveDataset", "jsonPath", "key", "md5", "parentField", "path", "recordSet"),
    *("references", "regex", "repeated", "replace", "separator", "source", "subField", "transform"),
)
CONTEXT: dict[str, Any] = {
    "@language": "en",
    "@vocab": "https://schema.org/",
    "sc": "https://schema.org/",
    "cr": "http://mlcommons.org/croissant/",
    "rai": "http://mlcommons.org/croissant/RAI/",
    "dct": "http://purl.org/dc/terms/",
    "conformsTo": "dct:conformsTo",
    "data": {"@id": "cr:data", "@type": "@json"},
    "dataType": {"@id": "cr:dataType", "@type": "@vocab"},
    "examples": {"@id": "cr:examples", "@type": "@json"},
    **{term: f"cr:{term}" for term in _TERMS},
}


def write_croissant(table: ImageTable, definition: DataSet, file: Path) -> tuple[Path, Path]:
    """Writes the metadata of images, and the table that it speaks of.

    Args:
        table: the images.
        definition: of their data set: what it is called, who published it.
        file: ends in ``.json``; the table goes beside it, under the same name with ``.csv``.

    Returns:
        Both files.

    Raises:
        DataError: the name ends otherwise, or a file cannot be written.
    """
    if file.suffix.lower() != ".json":
        raise DataError(f"{file}: Croissant is JSON; give a name that ends in .json.")
    listing = file.with_suffix(".csv")
    content = _listing(table)
    metadata = croissant(table, definition, listing.name, hashlib.sha256(content).hexdigest())
    try:
        replace_bytes(listing, content)
        replace_bytes(file, (json.dumps(metadata, indent=1, ensure_ascii=False) + "\n").encode())
    except OSError as error:
        raise DataError(f"Cannot write {file} and {listing.name}: {why(error)}.") from None
    return file, listing


def croissant(
    table: ImageTable, definition: DataSet, listing: str, checksum: str
) -> dict[str, Any]:
    """Returns the metadata, ready for JSON.

    Args:
        table: the images.
        definition: of their data set.
        listing: name of the table of the images.
        checksum: its SHA-256.
    """
    about = definition.publication
    found: dict[str, Any] = {
        "@context": CONTEXT,
        "@type": "sc:Dataset",
        "conformsTo": CONFORMS_TO,
        "name": definition.name,
        "description": f"{definition.summary}. {len(table)} images of {len(table.class_names)} "
        f"classes in {len(table.domain_names)} domains.",
        "version": "1.0.0",
    }
    if about is not None:
        said = {"citeAs": about.citation, "license": about.licence, "url": about.address}
        found |= {name: text for name, text in said.items() if text}
    found["distribution"] = [
        {
            "@type": "cr:FileObject",
            "@id": "images-table",
            "name": "images-table",
            "description": "a row for every image",
            "contentUrl": listing,
            "encodingFormat": "text/csv",
            "sha256": checksum,
        }
    ]
    found["recordSet"] = [_images(table), _counts(table)]
    return found


def _images(table: ImageTable) -> dict[str, Any]:
    return {
        "@type": "cr:RecordSet",
        "@id": "images",
        "name": "images",
        "description": "the images: class, domain, and where known who holds them and their split",
        "key": {"@id": "images/path"},
        "field": [
            {
                "@type": "cr:Field",
                "@id": f"images/{name}",
                "name": name,
                "description": COLUMNS[name],
                "dataType": "sc:Text",
                "source": {"fileObject": {"@id": "images-table"}, "extract": {"column": name}},
            }
            for name in _columns(table)
        ],
    }


def _counts(table: ImageTable) -> dict[str, Any]:
    kinds = {"domain": "sc:Text", "label": "sc:Text", "images": "sc:Integer"}
    said = {"domain": "the domain", "label": "the class", "images": "how many images it has"}
    rows = [
        {"counts/domain": domain, "counts/label": label, "counts/images": count}
        for domain, row in zip(table.domain_names, table.counts().tolist())
        for label, count in zip(table.class_names, row)
        if count
    ]
    return {
        "@type": "cr:RecordSet",
        "@id": "counts",
        "name": "counts",
        "description": "images of each class in each domain; classes without any are left out",
        "field": [
            {
                "@type": "cr:Field",
                "@id": f"counts/{name}",
                "name": name,
                "description": said[name],
                "dataType": kind,
            }
            for name, kind in kinds.items()
        ],
        "data": rows,
    }


def _columns(table: ImageTable) -> list[str]:
    absent = {"client": table.clients is None, "split": table.split is None}
    return [name for name in COLUMNS if not absent.get(name)]


def _listing(table: ImageTable) -> bytes:
    columns = {
        "path": list(table.paths),
        "label": [table.class_names[label] for label in table.labels.tolist()],
        "domain": [table.domain_names[domain] for domain in table.domains.tolist()],
        "client": [] if table.clients is None else table.clients.tolist(),
        "split": [] if table.split is None else table.split.tolist(),
    }
    names = _columns(table)
    text = io.StringIO(newline="")
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(names)
    for row in zip(*(columns[name] for name in names)):
        writer.writerow(map(as_cell, row))
    return text.getvalue().encode()
