"""Notebooks run from top to bottom, and what they show is whole; the other examples run, too."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pandas
import pytest

from feddg.comparison.plan import load_plan
from feddg.experiment import load_experiment

EXAMPLES = Path(__file__).parent.parent / "examples"
NOTEBOOKS = sorted(EXAMPLES.glob("*.ipynb"))


def test_there_are_notebooks_without_outputs():
    nbformat = pytest.importorskip("nbformat", reason="needs the extra notebooks")
    assert len(NOTEBOOKS) == 3
    for file in NOTEBOOKS:
        book = nbformat.read(file, as_version=4)
        nbformat.validate(book)
        assert not any(cell.get("outputs") for cell in book.cells)
        assert not any(cell.get("execution_count") for cell in book.cells)


@pytest.mark.slow
@pytest.mark.filterwarnings("default")  # those of Jupyter are not ours
@pytest.mark.parametrize("file", NOTEBOOKS, ids=lambda file: file.stem)
def test_every_notebook_runs(file, tmp_path, monkeypatch):
    nbclient = pytest.importorskip("nbclient", reason="needs the extra notebooks")
    nbformat = pytest.importorskip("nbformat")
    pytest.importorskip("ipykernel")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(path for path in sys.path if path))
    monkeypatch.setenv("FEDDG_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    shutil.copy(EXAMPLES / "nuclei.zip", tmp_path)
    book = nbformat.read(file, as_version=4)
    nbclient.NotebookClient(
        book, timeout=300, resources={"metadata": {"path": str(tmp_path)}}
    ).execute()
    shown = [
        output.data["text/html"]
        for cell in book.cells
        for output in cell.get("outputs", [])
        if output.output_type == "execute_result" and "text/html" in output.data
    ]
    assert shown
    assert any("<table" in page or "data:image/" in page for page in shown)
    assert "Traceback" not in "".join(shown)
    nbformat.write(book, tmp_path / "executed.ipynb")
    assert (tmp_path / "executed.ipynb").stat().st_size < 1_000_000


def test_files_of_examples_can_be_run():
    assert load_experiment(EXAMPLES / "one_run.yaml").hold_out.test == ("noto",)
    assert load_plan(EXAMPLES / "comparison.yaml").methods


@pytest.mark.slow
@pytest.mark.parametrize("program", sorted(EXAMPLES.glob("own_*.py")), ids=lambda file: file.stem)
def test_every_program_runs(program, tmp_path):
    shown = subprocess.run(
        [sys.executable, program], cwd=tmp_path, check=True, capture_output=True, text=True
    )
    assert "%" in shown.stdout


def test_the_nuclei_become_a_collection_with_patients(tmp_path):
    subprocess.run([sys.executable, EXAMPLES / "clinic.py", tmp_path], check=True)
    table = pandas.read_csv(tmp_path / "table.csv")
    assert all((tmp_path / path).is_file() for path in table.path)
    assert (table.groupby("group").size() == 4).all(), "an image is a patient of four quarters"
