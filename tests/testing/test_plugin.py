"""Rules as tests, in a project of somebody's own."""

import subprocess
import sys
from importlib.metadata import entry_points

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


def test_every_rule_is_a_test_and_the_broken_one_fails(tmp_path):
    (tmp_path / "test_mine.py").write_text(PROJECT)
    shown = pytest_there(tmp_path, "-k", "kept_on_self or settings_are_checked")
    assert f"FAILED {TEST}[Forgetful-nothing_is_kept_on_self]" in shown
    assert "training changed self.last" in shown
    assert f"PASSED {TEST}[Forgetful-settings_are_checked]" in shown


def test_a_check_of_nothing_is_no_check(tmp_path):
    (tmp_path / "test_mine.py").write_text("def test_it(feddg_check):\n    feddg_check()\n")
    assert "feddg_check needs the mark feddg(method=MyMethod)" in pytest_there(tmp_path)


def test_pytest_starts_without_importing_torch():
    program = "import feddg.pytest_plugin, sys; assert not {'torch', 'numpy'} & sys.modules.keys()"
    subprocess.run([sys.executable, "-c", program], check=True)
