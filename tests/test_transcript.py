"""The page from folders of images to answers, replayed: every command of it, one after another."""

import csv
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

PAGE = Path(__file__).parent.parent / "docs" / "from_folders_to_answers.md"
INSTALLS = "pip install"


def commands() -> list[str]:
    """The page's commands, a block each."""
    return re.findall(r"^```sh\n(.*?)^```$", PAGE.read_text("utf-8"), re.MULTILINE | re.DOTALL)


@pytest.fixture
def place(tmp_path, monkeypatch):
    """An empty folder in which `feddg` and `python` are those of this process."""
    if shutil.which("bash") is None or shutil.which("curl") is None:
        pytest.skip("needs bash and curl")
    for name in ("fastapi", "python_multipart", "onnx", "onnxruntime", "onnxscript"):
        pytest.importorskip(name, reason="needs the extras `export` and `serve`")
    programs = tmp_path / "programs"
    programs.mkdir()
    for name, module in (("feddg", "-m feddg"), ("python", "")):
        program = programs / name
        program.write_text(f'#!/bin/sh\nexec "{sys.executable}" {module} "$@"\n')
        program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("FEDDG_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "place"
    folder.mkdir()
    return folder


def carry_out(command: str, folder: Path) -> str:
    done = subprocess.run(
        ["bash", "-euc", command], cwd=folder, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.mark.slow
def test_every_command_of_the_page_does_what_it_says(place):
    found = [command for command in commands() if not command.startswith(INSTALLS)]
    names = [command.split()[1] for command in found if command.startswith("feddg")]
    assert names == ["data", "run", "predict", "export", "serve"]
    make, inspect, train, predict, export, serve, ask = found
    carry_out(make, place)
    assert "photo" in carry_out(inspect, place)
    # Shorter than on the page: what is learned is not looked at here.
    carry_out(train.replace("--local-epochs 8", "--local-epochs 1"), place)
    (run,) = (place / "runs").iterdir()
    assert (run / "report.html").is_file()
    assert "95 % interval" in (run / "model_card.md").read_text("utf-8")
    carry_out(predict, place)
    with (place / "labels.csv").open(newline="", encoding="utf-8") as table:
        rows = list(csv.DictReader(table))
    assert len(rows) == len(list((place / "new").iterdir())) > 100
    assert all(row["label"] for row in rows)
    assert "data:image/jpeg" in (place / "labels.html").read_text("utf-8")
    carry_out(export, place)
    assert (place / "model.onnx").stat().st_size > 1000
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    started = subprocess.Popen(
        ["bash", "-euc", f"exec {serve.strip()} --port {port}"],
        cwd=place,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        for line in started.stdout:
            if f"127.0.0.1:{port}" in line:
                break
        for _ in range(100):
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    break
            time.sleep(0.1)
        answer = json.loads(carry_out(ask.replace("8000", str(port)), place))
    finally:
        started.terminate()
        started.communicate(timeout=60)
    labelled = {Path(row["file"]).name: row["label"] for row in rows}
    (image,) = answer["images"]
    assert image["label"] == labelled[image["name"]]
