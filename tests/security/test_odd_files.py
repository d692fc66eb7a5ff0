"""Whatever reads a file from outside refuses the catalogue of odd files in a line that names it."""

from pathlib import Path

import pytest

from feddg.comparison.plan import load_plan
from feddg.comparison.results import read_comparison
from feddg.comparison.results_file import read_results
from feddg.data.data_set import load_source
from feddg.data.images import from_folder
from feddg.data.protocols import from_csv
from feddg.errors import FeddgError
from feddg.experiment import load_experiment
from feddg.models.backbones import read_weights
from feddg.runs.reading import read_run
from image_folders import make_folder
from odd_inputs import ODD_FILES

READERS = {
    "experiment.yaml": lambda file, images: load_experiment(file),
    "plan.yaml": lambda file, images: load_plan(file),
    "run/experiment.yaml": lambda file, images: read_run(file.parent).settings,
    "split.csv": lambda file, images: from_csv(images, file),
    "table.csv": lambda file, images: load_source("table", file),
    "features.csv": lambda file, images: load_source("features", file),
    "features.parquet": lambda file, images: load_source("features", file),
    "features.safetensors": lambda file, images: load_source("features", file),
    "results.csv": lambda file, images: read_results(file),
    "comparison.json": lambda file, images: read_comparison(file.parent),
    "weights.safetensors": lambda file, images: read_weights(file),
    "weights.pth": lambda file, images: read_weights(file),
}
FINE = {
    *(("experiment.yaml", "empty"), ("plan.yaml", "empty"), ("run/experiment.yaml", "empty")),
    ("results.csv", "missing"),
}
"""What is allowed: nothing said, nothing there yet."""


@pytest.mark.parametrize("name", READERS)
def test_odd_files_are_refused_in_one_line(name: str, tmp_path: Path, subtests) -> None:
    images = from_folder(make_folder(tmp_path / "images", ("a", "b"), ("cat", "dog"), 1))
    for number, (what, put) in enumerate(ODD_FILES.items()):
        file = tmp_path / str(number) / name
        file.parent.mkdir(parents=True)
        put(file)
        with subtests.test(what):
            if (name, what) in FINE:
                READERS[name](file, images)
                continue
            with pytest.raises(FeddgError) as refused:
                READERS[name](file, images)
            assert file.name in str(refused.value)
            assert "\n" not in str(refused.value)
