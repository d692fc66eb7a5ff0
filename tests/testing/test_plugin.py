"""Rules as tests, in a project of somebody's own."""

import subprocess
import sys
from importlib.metadata import entry_points

import pytest

PROJECT = """
import pytest
from feddg import Method

class Forgetful(Method):
    name = "forgetful"
    def loss(self, client, batch):
        self.last = batch.labels_here
        return super().loss(client, batch)

@pytest.mark.feddg(method=Forgetful)
def test_it_keeps_the_rules(feddg_check):
    feddg_check()
"""
TEST = "test_mine.py::test_it_keeps_the_rules"


def pytest_there(folder, *arguments):
    installed = any(one.name == "feddg" for one in entry_points(group="pytest11"))
    plugin = [] if installed else ["-p", "feddg.pytest_plugin"]
    command = [sys.executable, "-m", "pytest", *plugin, "-p", "no:cacheprovider"]
    options = ["-q", "--strict-markers", "-rA", *arguments]
    return subprocess.run([*command, *options], cwd=folder, capture_output=True, text=True).stdout


@pytest.fixture(scope="module")
def shown(tmp_path_factory):
    """What pytest says of two rules for a method, and of a check that names none."""
    folder = tmp_path_factory.mktemp("project")
    (folder / "test_mine.py").write_text(PROJECT)
    (folder / "test_none.py").write_text("def test_none(feddg_check):\n    feddg_check()\n")
    chosen = "kept_on_self or settings_are_checked or test_none"
    return pytest_there(folder, "--continue-on-collection-errors", "-k", chosen)


def test_every_rule_is_a_test_and_the_broken_one_fails(shown):
    assert f"FAILED {TEST}[Forgetful-nothing_is_kept_on_self]" in shown
    assert "training changed self.last" in shown
    assert f"PASSED {TEST}[Forgetful-settings_are_checked]" in shown


def test_a_check_of_nothing_is_no_check(shown):
    assert "feddg_check needs the mark feddg(method=MyMethod)" in shown


def test_pytest_starts_without_importing_torch():
    program = "import feddg.pytest_plugin, sys; assert not {'torch', 'numpy'} & sys.modules.keys()"
    subprocess.run([sys.executable, "-c", program], check=True)
