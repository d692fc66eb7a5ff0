"""The wheel, installed into an empty environment, has everything a run needs; so has the sdist."""

import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import numpy
import pytest
from PIL import Image

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


@pytest.fixture(scope="module")
def empty(built, tmp_path_factory) -> Path:
    """The programs of an environment with the wheel alone and what it requires."""
    (wheel,) = built.glob("*.whl")
    environment = tmp_path_factory.mktemp("environment")
    programs = environment / ("Scripts" if sys.platform == "win32" else "bin")
    subprocess.run([sys.executable, "-m", "venv", environment], check=True)
    python = programs / "python"
    subprocess.run([python, "-m", "pip", "install", "--quiet", "uv"], check=True)
    command = [programs / "uv", "pip", "install", "--quiet", "--python", python, wheel]
    subprocess.run(command, check=True)
    return programs


def in_it(empty, folder, *command) -> str:
    """What a program of the environment prints: no source is at hand, nor a network to rely on."""
    own = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
    offline = {"HF_HUB_OFFLINE": "1", "https_proxy": "http://127.0.0.1:9", "FEDDG_CACHE": "cache"}
    done = subprocess.run(
        [empty / command[0], *map(str, command[1:])],
        cwd=folder,
        env=own | offline,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_a_folder_is_run_compared_predicted_and_reported_from_the_wheel_alone(empty, tmp_path):
    random = numpy.random.default_rng(0)
    for domain, light in (("dark", 60), ("grey", 110), ("light", 160)):
        for label, channel in (("cat", 0), ("dog", 2)):
            (tmp_path / "images" / domain / label).mkdir(parents=True)
            for number in range(8):
                pixels = random.integers(0, light, (40, 40, 3), dtype="uint8")
                pixels[..., channel] += 90
                file = tmp_path / "images" / domain / label / f"{number}.png"
                Image.fromarray(pixels).save(file)
    small = ("--root", "images", "--image-size", 32, "--rounds", 1, "-q")
    in_it(empty, tmp_path, "feddg", "run", *small, "--hold-out", "light", "--method", "pardon")
    (run,) = (tmp_path / "runs").iterdir()
    assert "PARDON" in (run / "report.html").read_text("utf-8")
    table = tmp_path / "labels.csv"
    in_it(empty, tmp_path, "feddg", "predict", run, "images/light", "--out", table)
    assert len(table.read_text("utf-8").splitlines()) == 17
    page = tmp_path / "page.html"
    in_it(empty, tmp_path, "feddg", "report", run, "--out", page)
    assert page.stat().st_size > 10**6
    several = ("--methods", "fedavg,ridge", "--out", "several")
    in_it(empty, tmp_path, "feddg", "compare", *small, *several, "--hold-out", "light")
    assert (tmp_path / "several" / "results.csv").is_file()


@pytest.mark.slow
def test_a_command_of_another_package_runs_beside_the_wheel(empty, tmp_path):
    command = [empty / "uv", "pip", "install", "--quiet", "--python", empty / "python"]
    subprocess.run([*command, ROOT / "tests" / "helpers" / "own_command"], check=True)
    run = ("feddg", "run", "--data", "digits", "--hold-out", "ink", "--rounds", 1, "-q")
    in_it(empty, tmp_path, *run, "--clients", 2, "--image-size", 8)
    (folder,) = (tmp_path / "runs").iterdir()
    assert in_it(empty, tmp_path, "feddg", "weakest", folder).startswith("ink: ")
    assert "weakest" in in_it(empty, tmp_path, "feddg", "--help")


SIZE = """
import os, re
from importlib.metadata import distributions
def name(text):
    return re.sub("[-_.]+", "-", re.match("[A-Za-z0-9_.-]+", text)[0]).lower()
found = {name(one.metadata["Name"]): one for one in distributions()}
theirs, left = set(), ["torch", "torchvision"]
while left:
    one = left.pop()
    if one in found and one not in theirs:
        theirs.add(one)
        left += [name(text) for text in found[one].requires or () if "extra ==" not in text]
cuda = tuple("cuda- nvidia- triton pip uv".split())  # asked for by an extra of an extra
ours = [found[one] for one in found.keys() - theirs if not one.startswith(cuda)]
print(sum(os.path.getsize(f.locate()) for one in ours for f in one.files if f.locate().is_file()))
"""


@pytest.mark.slow
def test_besides_pytorch_and_what_it_brings_270_mb_are_installed(empty, tmp_path):
    assert int(in_it(empty, tmp_path, "python", "-c", SIZE)) < 270e6
