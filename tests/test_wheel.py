"""The wheel, installed into an empty environment, has everything a run needs; so has the sdist."""

import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
NEEDED = (
    "feddg/py.typed",
    "feddg/styles/assets/compact_encoder.safetensors",
    "feddg/styles/assets/compact_decoder.safetensors",
    "feddg/report/templates/page.html.j2",
)


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> Path:
    """A folder with both files, built from what the checkout tracks."""
    pytest.importorskip("build", reason="needs the package build")
    tree = tmp_path_factory.mktemp("tree")
    files = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    if files.returncode:
        pytest.skip("needs a checkout")
    for name in files.stdout.splitlines():
        if (ROOT / name).is_file():
            (tree / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, tree / name)
    out = tmp_path_factory.mktemp("dist")
    subprocess.run([sys.executable, "-m", "build", "--outdir", out, tree], check=True)
    return out


@pytest.mark.slow
def test_both_files_hold_code_templates_and_weights(built):
    (wheel,) = built.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert set(NEEDED) <= set(names)
    own = [p.relative_to(ROOT / "src") for p in (ROOT / "src" / "feddg").rglob("*.py")]
    assert {path.as_posix() for path in own} <= set(names)
    (sdist,) = built.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        inside = {name.partition("/")[2] for name in archive.getnames()}
    assert {f"src/{name}" for name in NEEDED} <= inside
    assert {"README.md", "LICENSE", "tests/test_wheel.py"} <= inside


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
