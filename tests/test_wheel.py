"""The wheel, installed into an empty environment, has everything a run needs; so has the sdist."""

import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def tracked() -> list[str]:
    """The files that the checkout tracks, from its root."""
    files = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    if files.returncode:
        pytest.skip("needs a checkout")
    return [name for name in files.stdout.splitlines() if (ROOT / name).is_file()]


@pytest.fixture(scope="module")
def built(tracked, tmp_path_factory) -> Path:
    """A folder with both files, built from what the checkout tracks; nothing is fetched for it."""
    pytest.importorskip("build", reason="needs the package build")
    pytest.importorskip("hatchling", reason="needs the package hatchling")
    tree = tmp_path_factory.mktemp("tree")
    for name in tracked:
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tree / name)
    out = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", out, tree]
    subprocess.run(command, check=True)
    return out


def test_both_files_hold_every_file_of_the_package(built, tracked):
    own = {name for name in tracked if name.startswith("src/feddg/")}
    (wheel,) = built.glob("*.whl")
    inside = {f"src/{name}" for name in zipfile.ZipFile(wheel).namelist()}
    assert {name for name in inside if name.startswith("src/feddg/")} == own
    (sdist,) = built.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        inside = {name.partition("/")[2] for name in archive.getnames()}
    assert own | {"README.md", "LICENSE", "tests/test_wheel.py"} <= inside


def test_the_wheel_writes_a_deployment(built, tmp_path):
    pytest.importorskip("flwr", reason="Flower is an optional extra")
    (wheel,) = built.glob("*.whl")
    zipfile.ZipFile(wheel).extractall(tmp_path / "unpacked")
    (tmp_path / "experiment.yaml").write_text("data: digits")
    command = [sys.executable, "-m", "feddg", "deploy", "init", "app", "--site", "ink"]
    command += ["--experiment", "experiment.yaml"]
    environment = {**os.environ, "PYTHONPATH": str(tmp_path / "unpacked")}
    subprocess.run(command, cwd=tmp_path, env=environment, check=True)
    assert (tmp_path / "app" / "sites" / "ink" / "make_key.sh").is_file()


@pytest.mark.slow
def test_a_run_from_an_empty_environment(built, tmp_path):
    (wheel,) = built.glob("*.whl")
    bin_folder = tmp_path / "env" / ("Scripts" if sys.platform == "win32" else "bin")
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "env"], check=True)
    python = bin_folder / "python"
    subprocess.run([python, "-m", "pip", "install", "--quiet", "uv"], check=True)
    subprocess.run(
        [bin_folder / "uv", "pip", "install", "--quiet", "--python", python, wheel], check=True
    )
    command = [bin_folder / "feddg", "run", "--data", "digits", "--hold-out", "sketch"]
    command += ["--method", "pardon", "--rounds", "1", "--out", tmp_path / "runs", "-q"]
    subprocess.run(command, cwd=tmp_path, check=True)
    (page,) = (tmp_path / "runs").glob("*/report.html")
    assert "PARDON" in page.read_text("utf-8")
