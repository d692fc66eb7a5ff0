"""iWildCam as WILDS has it: animals before 323 camera traps, each a domain."""

from pathlib import Path

from feddg.data.columns import read_columns
from feddg.data.data_set import DataSet, Publication, PublishedFile, register_data_set
from feddg.data.images import ImageTable
from feddg.data.listed_images import listed_images
from feddg.data.published import compare_counts, published_root
from feddg.data.sets.pardon_protocol import PARDON_PROTOCOL
from feddg.data.wilds_folders import METADATA, check_images, read_metadata, roles
from feddg.errors import DataError
from feddg.settings import merge

AROUND = ("iwildcam_v2.0", "iwildcam")
CATEGORIES = "categories.csv"
UNUSED = 99_999
"""Label of the categories that no image has."""


def list_iwildcam(root: Path | None) -> ImageTable:
    """IWildCam in WILDS' folder; every image lies in ``train/``, whatever its split.

    Domains are camera traps: those that train first, then the others, each by their number.

    Raises:
        DataError: ``metadata.csv`` or the images are not there, or a row is of another form.
    """
    folder = published_root(IWILDCAM, root)
    wanted = ("split", "location_remapped", "y", "filename")
    found = read_metadata(folder, IWILDCAM.title, AROUND, wanted)
    labels, places, split = found.numbers("y"), found.numbers("location_remapped"), roles(found)
    for index, name in enumerate(found["filename"]):
        if not name or "/" in name or "\\" in name:
            raise DataError(f"{found.row(index)} has {name!r} as filename; expected a file's name.")
        if labels[index] < 0 or places[index] < 0:
            raise DataError(f"{found.row(index)} has a negative y or location_remapped.")
    home = found.file.parent
    names = _class_names(home, max(labels) + 1)
    paths = [f"train/{name}" for name in found["filename"]]
    check_images(home, paths, METADATA)
    training = {place for place, role in zip(places, split) if role == "train"}
    order = sorted(set(places), key=lambda place: (place not in training, place))
    locations = [f"location_{place}" for place in places]
    table = listed_images(
        home,
        paths,
        [names[label] for label in labels],
        locations,
        listed_in=METADATA,
        split=split,
        clients=locations,
        class_names=names,
        domain_names=[f"location_{place}" for place in order],
    )
    compare_counts(IWILDCAM, table)
    return table


def _class_names(folder: Path, count: int) -> list[str]:
    """Returns the names of the classes by their label; made up where no file says them."""
    file = folder / CATEGORIES
    known: dict[int, str] = {}
    if file.is_file():
        found = read_columns(file, ("y", "name"))
        known = {y: name for y, name in zip(found.numbers("y"), found["name"]) if y != UNUSED}
        count = max(count, max(known, default=-1) + 1)
    names = [known.get(label) or f"class_{label}" for label in range(count)]
    return [name if names.count(name) == 1 else f"{name}_{y}" for y, name in enumerate(names)]


IWILDCAM = register_data_set(
    DataSet(
        name="iwildcam",
        summary="iWildCam (Beery et al. 2020, as in WILDS): 182 species before 323 camera traps",
        load=list_iwildcam,
        # One client for each training location; a tenth of them in a round.
        preset=merge(
            PARDON_PROTOCOL,
            {
                "clients": {"number": 243, "per_round": 24},
                "train": {"rounds": 100},
            },
        ),
        class_count=182,
        split_counts={
            "train": 129_809,
            "val": 14_961,
            "test": 42_791,
            "id_val": 7_314,
            "id_test": 8_154,
        },
        publication=Publication(
            citation="S. Beery, E. Cole and A. Gjoka, The iWildCam 2020 Competition Dataset, 2020; "
            "split: P. W. Koh et al., WILDS: A Benchmark of in-the-Wild Distribution Shifts, "
            "ICML 2021",
            address="https://wilds.stanford.edu/datasets/",
            licence="Community Data License Agreement - Permissive - Version 1.0",
            files=(
                PublishedFile(
                    address="https://worksheets.codalab.org/rest/bundles/"
                    "0x6313da2b204647e79a14b468131fcd64/contents/blob/",
                    name="iwildcam_v2.0.tar.gz",
                    bytes=11_957_420_032,
                    into="iwildcam_v2.0",
                ),
            ),
        ),
        layouts=("`iwildcam_v2.0/{metadata.csv,categories.csv,train/}` (WILDS)",),
        protocol="official: 243 locations train, 32 validate, 48 test; macro-F1 is "
        "official (`--set evaluate.select_by=macro_f1`)",
        clients="camera trap",
    )
)
