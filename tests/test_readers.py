"""Packages that read run folders: the core does without them, and others bring commands, too."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

import feddg
from feddg.cli import app
from feddg.errors import FeddgError, MissingPackage
from feddg.readers import find, function, readers
from feddg.runs.reading import read_run

PACKAGE, TESTS = Path(feddg.__file__).parent, Path(__file__).parent
OWN = TESTS / "helpers" / "own_command"
READERS = {Path(str(reader.__file__)).parent.name for reader in readers()}
QUICK = ("federation/test_server.py", "federation/test_transport.py", "privacy/test_defence.py")
WHOLE = ("clients", "evaluation", "federation", "methods", "models", "styles", QUICK[-1])
WHOLE += ("test_messages.py", "test_rng.py")
"""Files and folders of the tests of the core."""
BOTH = (
    "federation/test_head_start.py",
    "federation/test_second_device.py",
    "methods/test_baselines.py",
    "methods/test_ccst.py",
    "methods/test_fedig_a.py",
    "models/test_backbones.py",
    "styles/test_codec.py",
    "styles/test_codecs.py",
    "styles/test_ranges.py",
)
"""Files among them that also serve a model, deploy it, or train a codec as the benchmarks do."""


@pytest.fixture(scope="module")
def core(tmp_path_factory) -> dict[str, str]:
    """An environment with a copy of the package that lacks what reads run folders."""
    place = tmp_path_factory.mktemp("core")
    absent = shutil.ignore_patterns(*READERS)  # what is compiled comes along
    shutil.copytree(PACKAGE, place / "feddg", ignore=absent)
    return {**os.environ, "PYTHONPATH": str(place), "OMP_NUM_THREADS": "1"}


def carried_out(environment, *command) -> str:
    """What a Python process prints, which must end well."""
    done = subprocess.run(
        [sys.executable, *map(str, command)],
        cwd=TESTS.parent,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_these_packages_bring_their_commands():
    assert {"attacks", "deploy", "prediction", "report", "serving"} == READERS
    for reader in readers():
        for names in reader.FUNCTIONS.values():
            for name in names.split() if not reader.NEEDS else ():
                assert callable(getattr(feddg, name))


@pytest.mark.parametrize("tests", [QUICK, pytest.param(WHOLE, marks=pytest.mark.slow)])
def test_the_core_passes_its_tests_without_them(core, tests):
    found = carried_out(core, "-c", "import feddg; print(feddg.__file__)")
    assert found.startswith(core["PYTHONPATH"])
    files = [*(TESTS / name for name in tests), *(f"--ignore={TESTS / name}" for name in BOTH)]
    carried_out(core, "-m", "pytest", "-q", "-p", "no:cacheprovider", *files)


def test_without_them_a_run_is_carried_out_and_has_no_page(core, tmp_path):
    run = ("run", "--data", "digits", "--hold-out", "ink", "--rounds", 1, "--image-size", 8)
    shown = carried_out(core, "-m", "feddg", *run, "--clients", 2, "--out", tmp_path, "-q")
    (folder,) = tmp_path.iterdir()
    assert shown == f"folder: {folder}\n"
    assert read_run(folder).accuracy is not None
    assert not (folder / "report.html").exists()
    assert "predict" not in carried_out(core, "-m", "feddg", "--help")


def test_what_nobody_brings_is_said():
    assert find("nothing") is None
    with pytest.raises(MissingPackage, match="`nothing`"):
        function("nothing")
    with pytest.raises(AttributeError, match="'nothing'"):
        feddg.nothing


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """Makes a package of another whose entry point stands for a command."""

    def install(value: str) -> None:
        about = tmp_path / "feddg_weakest-1.0.dist-info"
        about.mkdir()
        (about / "METADATA").write_text(
            "Metadata-Version: 2.1\nName: feddg-weakest\nVersion: 1.0\n"
        )
        (about / "entry_points.txt").write_text(f"[feddg.commands]\nweakest = {value}\n")
        shutil.copy(OWN / "feddg_weakest.py", tmp_path)
        monkeypatch.syspath_prepend(tmp_path)

    return install


def test_a_command_of_another_package_stands_beside_ours(installed, finished):
    installed("feddg_weakest:weakest")
    shown = CliRunner().invoke(app, ["weakest", str(finished)])
    assert shown.stdout.startswith("sketch: "), shown.output
    shown = CliRunner().invoke(app, ["weakest", "--help"]).stdout
    assert "Name the domain" in shown
    assert "--split" in shown


def test_a_command_that_cannot_be_loaded_takes_no_other_down(installed):
    installed("feddg_weakest:absent")
    assert CliRunner().invoke(app, ["methods"]).exit_code == 0
    shown = CliRunner().invoke(app, ["--help"])
    assert (shown.exit_code, "weakest  feddg-weakest" in shown.stdout) == (0, True)
    with pytest.raises(FeddgError, match="'weakest': feddg_weakest:absent cannot be loaded"):
        CliRunner().invoke(app, ["weakest"], catch_exceptions=False)
