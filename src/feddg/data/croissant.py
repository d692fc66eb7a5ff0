"""Writes a data set's metadata as Croissant: JSON-LD for search engines and other libraries.

Croissant 1.0 (http://mlcommons.org/croissant/1.0). The table of the images is written beside it.
``--data table`` reads that table too; it names the files and, where known, the clients that hold
them.
"""

import hashlib
import json
from pathlib import Path

from feddg.data.data_set import DataSet
from feddg.data.images import ImageTable
from feddg.errors import DataError
from feddg.records import as_csv
from feddg.storage import file_faults, replace_bytes

FRAME = Path(__file__).with_name("croissant.jsonld")
"""What the metadata of every data set begins with: its terms, kind and version."""
COLUMNS = {
    "path": "file of the image, below the folder of the images",
    "label": "its class",
    "domain": "its domain",
    "client": "who holds it",
    "split": "its role: train, val, test, id_val or id_test",
}


def write_croissant(table: ImageTable, definition: DataSet, file: Path) -> tuple[Path, Path]:
    """Writes the metadata of images and the table that the metadata refers to.

    Args:
        table: the images.
        definition: the definition of their data set.
        file: where to write; must end in ``.json``. The table gets the same name with ``.csv``.

    Returns:
        The paths of both files.

    Raises:
        DataError: the name does not end in ``.json``, or a file cannot be written.
    """
    if file.suffix.lower() != ".json":
        raise DataError(f"{file}: Croissant is JSON; give a name that ends in .json.")
    listing = file.with_suffix(".csv")
    content = _listing(table)
    metadata = croissant(table, definition, listing.name, hashlib.sha256(content).hexdigest())
    with file_faults(DataError, f"Cannot write {file} and {listing.name}"):
        replace_bytes(listing, content)
        replace_bytes(file, (json.dumps(metadata, indent=1, ensure_ascii=False) + "\n").encode())
    return file, listing


def croissant(
    table: ImageTable, definition: DataSet, listing: str, checksum: str
) -> dict[str, object]:
    """Returns the metadata, ready for JSON.

    Args:
        table: the images.
        definition: the definition of their data set.
        listing: file name of the table of the images.
        checksum: SHA-256 of that table.
    """
    about = definition.publication
    description: dict[str, object] = {
        **json.loads(FRAME.read_text(encoding="utf-8")),
        "name": definition.name,
        "description": f"{definition.summary}. {len(table)} images of {len(table.class_names)} "
        f"classes in {len(table.domain_names)} domains.",
    }
    if about is not None:
        texts = {"citeAs": about.citation, "license": about.licence, "url": about.address}
        description |= {name: text for name, text in texts.items() if text}
    description["distribution"] = [
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
    description["recordSet"] = [_images(table)]
    return description


def _images(table: ImageTable) -> dict[str, object]:
    def named(kind: str, id: str, about: str) -> dict[str, object]:
        return {"@type": kind, "@id": id, "name": id.rpartition("/")[2], "description": about}

    fields = [
        {
            **named("cr:Field", f"images/{name}", COLUMNS[name]),
            "dataType": "sc:Text",
            "source": {"fileObject": {"@id": "images-table"}, "extract": {"column": name}},
        }
        for name in _columns(table)
    ]
    about = "the images: class, domain, and where known who holds them and their split"
    head = named("cr:RecordSet", "images", about)
    return {**head, "field": fields, "key": {"@id": "images/path"}}


def _columns(table: ImageTable) -> dict[str, list[str]]:
    """Returns the columns of the table of the images."""
    columns = {
        "path": list(table.paths),
        "label": [table.class_names[label] for label in table.labels.tolist()],
        "domain": [table.domain_names[domain] for domain in table.domains.tolist()],
    }
    if table.clients is not None:
        columns["client"] = table.clients.tolist()
    if table.split is not None:
        columns["split"] = table.split.tolist()
    return columns


def _listing(table: ImageTable) -> bytes:
    columns = _columns(table)
    return as_csv([columns, *zip(*columns.values())]).encode()
