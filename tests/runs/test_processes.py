"""Processes of this machine: they end, together, in the time they have."""

import subprocess
import sys
import time

from feddg.runs.processes import end


def test_all_have_the_same_while_to_end() -> None:
    asleep = "import time; time.sleep(60)"
    children = [
        subprocess.Popen([sys.executable, "-c", asleep], stdin=subprocess.PIPE, text=True)
        for _ in range(4)
    ]
    began = time.monotonic()
    end(children, 1.0)
    assert time.monotonic() - began < 3.0
    assert all(child.returncode is not None for child in children)
