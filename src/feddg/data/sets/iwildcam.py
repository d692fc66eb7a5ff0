"""iWildCam as WILDS has it: animals before 323 camera traps, each a domain."""

from feddg.data.data_set import DataSet, Publication, register_data_set
from feddg.data.sets.pardon_protocol import PARDON_PROTOCOL
from feddg.settings import merge

register_data_set(
    DataSet(
        name="iwildcam",
        summary="iWildCam (Beery et al. 2020, as in WILDS): 182 species before 323 camera traps",
        instead="WILDS' own folder, with all images in train/ and their places in metadata.csv, is "
        "not read yet. Arrange the images as root/location/species/image and give "
        "--data folder --root FOLDER --preset iwildcam, with the benchmark's split as "
        "--split-file, a CSV with the columns split and path",
        # One client for each training location; a tenth of them in a round.
        preset=merge(
            PARDON_PROTOCOL,
            {"clients": {"number": 243, "per_round": 24}, "train": {"rounds": 100}},
        ),
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
        ),
    )
)
