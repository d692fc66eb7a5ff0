"""What is imported is declared, extras match, and one that is missing is named in one line."""

import ast
import re
import sys
import tomllib
from pathlib import Path

import numpy
import pytest
import tifffile
from PIL import Image

from feddg import cli
from feddg.api import compare
from feddg.data.decoding import decode_image
from feddg.errors import EXTRAS, MissingPackage

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
DISTRIBUTIONS = {
    "PIL": "pillow",
    "sklearn": "scikit-learn",
    "yaml": "pyyaml",
}
"""Distributions that are not called as the modules they bring."""


def names(requirements):
    return {re.split(r"[<>=!~\[; ]", requirement)[0].lower() for requirement in requirements}


def distribution(module):
    return DISTRIBUTIONS.get(module, module.replace("_", "-")).lower()


BASE = names(PROJECT["dependencies"])
OPTIONAL = {
    extra: names(requirements)
    for extra, requirements in PROJECT["optional-dependencies"].items()
    if extra not in ("dev", "docs", "notebooks")
}


def imported(tree):
    """The top-level modules that a file imports, with the number of the line."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((name.name.split(".")[0], node.lineno) for name in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            yield str(node.module).split(".")[0], node.lineno


def test_everything_that_is_imported_is_declared():
    foreign = [
        (path.relative_to(ROOT / "src").as_posix(), line, module)
        for path in sorted((ROOT / "src").rglob("*.py"))
        for module, line in imported(ast.parse(path.read_text("utf-8")))
        if module not in sys.stdlib_module_names and module not in ("feddg", "__future__")
    ]
    known = BASE | set().union(*OPTIONAL.values())
    undeclared = [place for place in foreign if distribution(place[2]) not in known]
    assert undeclared == []
    assert len(foreign) > 300


def test_the_helper_knows_every_extra_with_a_module_of_its_own():
    for extra, modules in EXTRAS.items():
        assert {distribution(module) for module in modules} <= OPTIONAL[extra], extra
    assert OPTIONAL.keys() - EXTRAS.keys() == {"lite"}  # weights alone, asked for by weights


def deep_tiff(root):
    """A folder with a TIFF of 16 bits, whose writer is not needed to read what is plain."""
    for domain in ("dark", "light"):
        for label in ("cat", "dog"):
            (root / "images" / domain / label).mkdir(parents=True)
            for number in range(6):
                file = root / "images" / domain / label / f"{number}.tif"
                Image.new("RGB", (16, 16), (40 * number, 0, 0)).save(file)
    tifffile.imwrite(file, numpy.zeros((16, 16, 3), "uint16"), photometric="rgb")


def a_table(root):
    (root / "rows.parquet").write_bytes(b"PAR1")


RUN = ("run", "--data", "digits", "--hold-out", "sketch", "--out", "runs", "-q")
FOLDER = ("run", "--root", "images", "--hold-out", "light", "--out", "runs")
TABLE = ("run", "--data", "features", "--root", "rows.parquet", "--out", "runs")
SEVERAL = ("compare", "--data", "digits", "--hold-out", "ink", "--methods", "fedavg", "--launcher")
REFUSED = {
    "lora": (*RUN, "--set", "train.trainable=lora"),
    "privacy": (*RUN, "--set", "privacy.epsilon=8"),
    "secure": (*RUN, "--set", "defences=[secure_aggregation]"),
    "tensorboard": (*RUN, "--track", "tensorboard"),
    "wandb": (*RUN, "--track", "wandb"),
    "tiff": FOLDER,
    "parquet": TABLE,
    "huggingface": ("run", "--data", "huggingface", "--root", "images", "--out", "runs"),
    "slurm": (*SEVERAL, "slurm"),
    "attacks": ("privacy", "attack", "a_run", "--kind", "server"),
    "export": ("export", "a_run", "--onnx", "model.onnx"),
    "serve": ("serve", "a_run"),
    "flower": ("deploy", "check", "app", "--images", "images"),
}
MADE = {"tiff": deep_tiff, "parquet": a_table}


@pytest.mark.parametrize("extra", REFUSED)
def test_what_is_missing_is_said_in_one_line_before_anything_is_computed(
    extra, tmp_path, monkeypatch, capsys
):
    MADE.get(extra, lambda root: None)(tmp_path)
    for module in EXTRAS[extra]:
        monkeypatch.setitem(sys.modules, module, None)  # what an absent package looks like
    for name in [*sys.modules]:
        if name.startswith(("feddg.serving", "feddg.deploy")):
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setenv("FEDDG_TRACK", "")
    monkeypatch.setenv("FEDDG_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(sys, "argv", ["feddg", *REFUSED[extra]])
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 1
    line = capsys.readouterr().err.splitlines()[-1]
    assert line.startswith("error: ")
    assert f" needs the package {EXTRAS[extra][0]}: pip install 'feddg[{extra}]'" in line
    assert not list(tmp_path.rglob("metrics.jsonl"))


def test_plain_tiffs_and_deep_grey_pngs_need_no_extra(tmp_path, monkeypatch):
    for module in EXTRAS["tiff"]:
        monkeypatch.setitem(sys.modules, module, None)
    Image.new("RGB", (4, 4), (9, 99, 199)).save(tmp_path / "plain.tif")
    assert (decode_image(tmp_path / "plain.tif", 2) == (9, 99, 199)).all()
    Image.fromarray(numpy.full((4, 4), 65535, "uint16")).save(tmp_path / "deep.png")
    assert (decode_image(tmp_path / "deep.png", 2) == 255).all()


def test_a_comparison_stops_before_its_first_run_if_the_last_one_lacks_a_package(
    tmp_path, monkeypatch
):
    monkeypatch.setitem(sys.modules, "cryptography", None)
    masked = {"name": "fedavg", "experiment": {"defences": ["secure_aggregation"]}, "label": "m"}
    plan = {"base": {"data": "digits"}, "hold_out": ["ink"], "methods": ["fedavg", masked]}
    with pytest.raises(MissingPackage, match=r"secure_aggregation needs .*'feddg\[secure\]'"):
        compare(plan, tmp_path / "out")
    assert not list(tmp_path.rglob("metrics.jsonl"))
