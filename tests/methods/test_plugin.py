"""A method in a package of its own is found through the entry point, and runs."""

import os
import subprocess
import sys
from pathlib import Path

METHOD = '''
from feddg import Method


class Lazy(Method):
    """Keeps the weights as they are."""

    name = "lazy"
    summary = "trains nothing"

    def step(self, client, batch):
        client.log({"cross_entropy": self.loss(client, batch)["cross_entropy"]})
'''
PROGRAM = """
import feddg, sys, torch
from feddg.methods.composition import method_class
from feddg.runs.checkpoints import checkpoint_weights
from feddg.runs.prepare import build

assert method_class("lazy").__module__ == "lazy_package.lazy"
train = {"rounds": 1, "local_epochs": 1, "batch_size": 64}
experiment = feddg.Experiment(data="digits", method="lazy", hold_out="sketch", train=train)
run = feddg.run(experiment, sys.argv[1], report=False)
weights, start = checkpoint_weights(run.folder), build(experiment, 10)[1].state_dict()
parameters = [name for name in start if "running" not in name and "num_batches" not in name]
assert all(torch.equal(weights[name], start[name]) for name in parameters)
"""


def test_a_third_party_method_needs_no_edit_of_feddg(tmp_path: Path):
    package = tmp_path / "site/lazy_package"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "lazy.py").write_text(METHOD)
    about = tmp_path / "site/lazy_package-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: lazy-package\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text(
        "[feddg.methods]\nlazy = lazy_package.lazy:Lazy\nbroken = no_such_module:Nothing\n"
    )
    paths = os.pathsep.join([str(tmp_path / "site"), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": paths, "FEDDG_CACHE": str(tmp_path / "cache")}
    command = [sys.executable, "-c", PROGRAM, str(tmp_path / "runs")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "'broken'" in done.stderr
