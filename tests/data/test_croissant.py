"""Metadata as Croissant: what MLCommons' own library makes of it, and the table beside it."""

import csv
import hashlib
import json
from pathlib import Path

import pytest

import published_trees as trees
from feddg.data.croissant import write_croissant
from feddg.data.data_set import DATA_SETS, load_source
from feddg.errors import DataError
from published_trees import NAMES, hospital, write_table


def written(tmp_path: Path, source: str, make) -> tuple[Path, Path]:
    table = load_source(source, make(tmp_path / "images"))
    return write_croissant(table, DATA_SETS[source], tmp_path / "out/croissant.json")


@pytest.fixture(scope="module")
def mlcroissant():
    """MLCommons' library; an extra of development."""
    import warnings

    with warnings.catch_warnings():  # its own imports are not ours to mend
        warnings.simplefilter("ignore")
        return pytest.importorskip("mlcroissant", reason="needs mlcroissant (feddg[dev])")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("source", "make"), [("vlcs", trees.vlcs_folders), ("iwildcam", trees.iwildcam)]
)
def test_mlcommons_library_reads_it(tmp_path: Path, mlcroissant, source: str, make) -> None:
    file, _ = written(tmp_path, source, make)
    table = load_source(source, tmp_path / "images")
    found = mlcroissant.Dataset(jsonld=file)
    assert not found.metadata.ctx.issues.errors
    assert found.metadata.name == source
    records = list(found.records("images"))
    assert len(records) == len(table)
    text = {name.removeprefix("images/"): value for name, value in records[5].items()}
    assert text["path"].decode() == table.paths[5]
    assert text["label"].decode() == table.class_names[table.labels[5]]
    assert text["domain"].decode() == table.domain_names[table.domains[5]]
    assert ("client" in text) == (source == "iwildcam")


@pytest.mark.filterwarnings("ignore")
def test_mlcommons_library_reads_all_columns_of_the_users_own_table(
    tmp_path: Path, mlcroissant
) -> None:
    rows = [[*row, f"p{number}", "60+"] for number, row in enumerate(hospital(tmp_path))]
    own = write_table(tmp_path / "patients.csv", rows, (*NAMES, "group", "age band"))
    names = ("age band", "label")
    table = load_source("table", own, subgroups=names)
    file, listing = write_croissant(table, DATA_SETS["table"], tmp_path / "c.json")
    found = mlcroissant.Dataset(jsonld=file)
    assert not found.metadata.ctx.issues.errors
    (first, *_), again = found.records("images"), load_source("table", listing, subgroups=names)
    columns = listing.read_text("utf-8").splitlines()[0].split(",")
    assert {"group", "age band"} <= {*columns}
    assert {f"images/{name.replace(' ', '+')}" for name in columns} == {*first}
    assert first["images/age+band"] == b"60+"
    assert again.groups.tolist() == table.groups.tolist()
    assert {name: texts.tolist() for name, texts in again.subgroups.items()} == {
        name: texts.tolist() for name, texts in table.subgroups.items()
    }


def test_images_that_are_no_files_have_no_table(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="files of images; 'emoji' has none"):
        write_croissant(load_source("emoji"), DATA_SETS["emoji"], tmp_path / "emoji.json")
    assert not list(tmp_path.iterdir())


def test_every_term_is_declared(tmp_path: Path) -> None:
    """Where the library is not there: every key is one of the context's, or schema.org's."""
    file, _ = written(tmp_path, "vlcs", trees.vlcs_folders)
    schema_org = {"name", "description", "version", "license", "url", "distribution"}
    schema_org |= {"contentUrl", "encodingFormat", "sha256"}

    def check(node: object) -> None:
        if isinstance(node, list):
            for one in node:
                check(one)
        elif isinstance(node, dict):
            for key, value in node.items():
                assert key.startswith("@") or key in context or key in schema_org, key
                if key not in ("@context", "data"):
                    check(value)

    content = json.loads(file.read_text("utf-8"))
    context = content["@context"]
    check(content)
    assert content["conformsTo"] == "http://mlcommons.org/croissant/1.0"
    assert content["citeAs"] == DATA_SETS["vlcs"].publication.citation


def test_the_table_beside_it_is_one_of_ours(tmp_path: Path) -> None:
    file, listing = written(tmp_path, "camelyon17", trees.camelyon17)
    metadata = json.loads(file.read_text())
    assert metadata["license"] == "CC0 1.0 (public domain)"
    found = metadata["distribution"][0]
    assert found["contentUrl"] == listing.name
    assert found["sha256"] == hashlib.sha256(listing.read_bytes()).hexdigest()
    assert {path.stat().st_mode & 0o777 for path in (file, listing)} == {0o600}
    before = load_source("camelyon17", tmp_path / "images")
    after = load_source("table", listing, images=before.root)
    assert after.paths == before.paths
    assert after.clients.tolist() == before.clients.tolist()
    assert after.split.tolist() == before.split.tolist()
    assert after.counts().tolist() == before.counts().tolist()


def test_names_that_a_spreadsheet_would_compute_are_texts(tmp_path: Path) -> None:
    trees.images(tmp_path / "images", ["=north/a", "=north/b", "south/a", "south/b"])
    table = load_source("folder", tmp_path / "images")
    _, listing = write_croissant(table, DATA_SETS["folder"], tmp_path / "c.json")
    rows = list(csv.reader(listing.read_text("utf-8").splitlines()))
    assert rows[1][2] == "'=north"
    assert load_source("table", listing, images=table.root).domain_names[0] == "=north"


def test_another_ending_is_refused(tmp_path: Path) -> None:
    table = load_source("vlcs", trees.vlcs_folders(tmp_path / "images"))
    with pytest.raises(DataError, match=r"ends in \.json"):
        write_croissant(table, DATA_SETS["vlcs"], tmp_path / "c.yaml")


def test_the_users_own_table_is_not_written_over(tmp_path: Path) -> None:
    own = write_table(tmp_path / "patients.csv", hospital(tmp_path))
    before = own.read_bytes()
    table = load_source("table", own)
    with pytest.raises(DataError, match=r"patients\.csv would be overwritten"):
        write_croissant(table, DATA_SETS["table"], tmp_path / "patients.json")
    assert own.read_bytes() == before
