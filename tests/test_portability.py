"""Nothing in the package needs a module, or a call, that only Unix has."""

import os
import subprocess
import sys

import pytest

from feddg.runs.prepare import peak_memory

UNIX_ONLY = ("fcntl", "grp", "posix", "pty", "pwd", "resource", "syslog", "termios", "tty")

EVERY_MODULE = """
import builtins, importlib, pkgutil, sys

UNIX_ONLY, TRULY = set(sys.argv[1].split(",")), builtins.__import__

def guarded(name, globals=None, *rest, **more):
    asking = (globals or {}).get("__name__") or ""
    if name.partition(".")[0] in UNIX_ONLY and asking.partition(".")[0] == "feddg":
        raise ModuleNotFoundError(f"{asking} imports {name}", name=name)
    return TRULY(name, globals, *rest, **more)

builtins.__import__ = guarded
import feddg

count = 0
for module in pkgutil.walk_packages(feddg.__path__, "feddg."):
    if module.name == "feddg.__main__":
        continue
    try:
        importlib.import_module(module.name)
        count += 1
    except ModuleNotFoundError as error:  # an extra that is not installed
        if error.name in UNIX_ONLY or error.name.startswith("feddg"):
            raise
print(count)
"""


def test_every_module_is_imported_without_the_modules_of_unix():
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", EVERY_MODULE, ",".join(UNIX_ONLY)],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert int(done.stdout) > 100


def test_peak_memory_is_told_where_there_is_no_resource_module(monkeypatch):
    psutil = pytest.importorskip("psutil")
    monkeypatch.setitem(sys.modules, "resource", None)

    class Info:
        peak_wset = 123_456_789

    monkeypatch.setattr(psutil.Process, "memory_info", lambda self: Info())
    assert peak_memory() == 123_456_789
