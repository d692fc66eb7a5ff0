"""Writes a data set's metadata as Croissant: JSON-LD for search engines and other libraries.

Croissant 1.0 (http://mlcommons.org/croissant/1.0). The table of the images is written beside it.
``--data table`` reads that table too; it names the files and, where known, the clients that hold
them.
"""

import hashlib
import json
from pathlib import Path
from typing import Any
from urllib.parse import quote_plus

from feddg.data.data_set import DataSet
from feddg.data.images import ImageTable
from feddg.errors import DataError
from feddg.records import as_csv
from feddg.storage import file_faults, replace_bytes

FRAME = Path(__file__).with_name("croissant.jsonld")
"""The metadata of every data set: its terms, and what the columns of the table mean."""


def write_croissant(table: ImageTable, definition: DataSet, file: Path) -> tuple[Path, Path]:
    """Writes the metadata of images and the table that the metadata refers to.

    Args:
        table: the images.
        definition: the definition of their data set.
        file: where to write; must end in ``.json``. The table gets the same name with ``.csv``.

    Returns:
        The paths of both files.

    Raises:
        DataError: the name does not end in ``.json``, the images are no files, the table would
            replace the user's own, or a file cannot be written.
    """
    if file.suffix.lower() != ".json":
        raise DataError(f"{file}: Croissant is JSON; give a name that ends in .json.")
    if table.root is None:
        raise DataError(f"Croissant lists files of images; {definition.name!r} has none.")
    listing = file.with_suffix(".csv")
    if listing.name == table.listed_in and listing.exists():
        raise DataError(f"{listing} would be overwritten; give another name than {file.name}.")
    columns = _columns(table)
    content = as_csv([columns, *zip(*columns.values())]).encode()
    metadata = _metadata(table, definition)
    (of_table,), (images,) = metadata["distribution"], metadata["recordSet"]
    of_table |= {"contentUrl": listing.name, "sha256": hashlib.sha256(content).hexdigest()}
    images["field"] = [
        {
            "@type": "cr:Field",
            "@id": f"images/{quote_plus(name)}",  # MLCommons' library takes no blanks
            "name": name,
            "description": images["field"].get(name, "what results tell apart, such as a scanner"),
            "dataType": "sc:Text",
            "source": {"fileObject": {"@id": "images-table"}, "extract": {"column": name}},
        }
        for name in columns
    ]
    with file_faults(DataError, f"Cannot write {file} and {listing.name}"):
        replace_bytes(listing, content)
        replace_bytes(file, (json.dumps(metadata, indent=1, ensure_ascii=False) + "\n").encode())
    return file, listing


def _metadata(table: ImageTable, definition: DataSet) -> dict[str, Any]:
    """Returns the metadata of a data set, with meanings for the columns of the table."""
    about = definition.publication
    metadata: dict[str, Any] = {
        **json.loads(FRAME.read_text(encoding="utf-8")),
        "name": definition.name,
        "description": f"{definition.summary}. {len(table)} images of {len(table.class_names)} "
        f"classes in {len(table.domain_names)} domains.",
    }
    if about is not None:
        texts = {"citeAs": about.citation, "license": about.licence, "url": about.address}
        metadata |= {name: text for name, text in texts.items() if text}
    return metadata


def _columns(table: ImageTable) -> dict[str, list[str]]:
    """Returns the columns of the table of the images."""
    columns = {
        "path": list(table.paths),
        "label": [table.class_names[label] for label in table.labels.tolist()],
        "domain": [table.domain_names[domain] for domain in table.domains.tolist()],
    }
    own = {"client": table.clients, "group": table.groups, "split": table.split}
    more = {**table.subgroups, **own}.items()  # a subgroup may be called as one of ours
    return columns | {n: texts.tolist() for n, texts in more if texts is not None} | columns
