"""Every Dockerfile and compose file, checked as far as that goes without building it."""

import json
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from typer.main import get_command

from documented_commands import ROOT
from feddg.cli import app

SERVE = ROOT / "containers" / "serve"
pytestmark = pytest.mark.skipif(not SERVE.is_dir(), reason="the containers are in the checkout")


# Dockerfiles as the builder reads them, and rules: hadolint's, and Docker's own, that matter here.

Instruction = tuple[str, str]
"""Its name in capitals, and the rest of its line."""


def instructions(file: Path) -> list[Instruction]:
    """Returns a Dockerfile's instructions, continued lines joined, comments left out."""
    lines = [line for line in file.read_text("utf-8").splitlines() if not line.startswith("#")]
    joined = re.sub(r"\\\n\s*", "", "\n".join(lines))
    split = (line.split(None, 1) for line in joined.splitlines() if line.strip())
    return [(name.upper(), rest) for name, rest in split]


def shell_commands(said: list[Instruction]) -> Iterator[list[str]]:
    """Yields the commands that RUN carries out, one by one."""
    for name, rest in said:
        if name == "RUN":
            for command in rest.split("&&"):
                yield shlex.split(command)


def faults(file: Path, context: Path) -> list[str]:
    """Returns which rules a Dockerfile breaks.

    Args:
        file: the Dockerfile.
        context: the folder that it is built from.
    """
    said = instructions(file)
    return [*_base(said), *_copies(said, context), *_commands(said), *_start(said)]


def _base(said: list[Instruction]) -> Iterator[str]:
    if said[0][0] not in ("FROM", "ARG"):
        yield "the first instruction is not FROM"
    for name, rest in said:
        if name == "FROM" and (":" not in rest or rest.endswith(":latest")):
            yield f"{rest} has no version"
        if name == "ADD":
            yield "ADD, where COPY does"
        if name in ("ENV", "ARG") and re.search(r"(?i)password|secret|token", rest):
            yield f"a secret in the image: {rest}"


def _copies(said: list[Instruction], context: Path) -> Iterator[str]:
    for name, rest in said:
        if name == "COPY":
            *sources, _ = [word for word in rest.split() if not word.startswith("--")]
            for source in sources:
                if source in (".", "./"):
                    yield "everything is copied"
                elif "*" not in source and not (context / source).exists():
                    yield f"{source} is copied, but not there"


def _commands(said: list[Instruction]) -> Iterator[str]:
    for words in shell_commands(said):
        if words[0] == "sudo":
            yield "sudo"
        if words[:2] == ["pip", "install"] and "--no-cache-dir" not in words:
            yield "pip keeps a cache"
        if words[:2] == ["apt-get", "install"] and "-y" not in words:
            yield "apt-get asks"


def _start(said: list[Instruction]) -> Iterator[str]:
    users = [place for place, (name, _) in enumerate(said) if name == "USER"]
    if not users or said[users[-1]][1].split(":")[0] in ("root", "0"):
        yield "it runs as root"
    for place, (name, rest) in enumerate(said):
        if name in ("ENTRYPOINT", "CMD"):
            if users and place < users[-1]:
                yield f"{name} stands before USER"
            if not rest.startswith("["):
                yield f"{name} starts a shell, which takes no signal"
            else:
                json.loads(rest)


@pytest.fixture
def deployment(tmp_path):
    """What ``feddg deploy init`` writes."""
    pytest.importorskip("flwr", reason="Flower is an optional extra")
    from feddg.deploy.setup import write_app
    from feddg.experiment import Experiment

    chosen = Experiment(data="digits", clients={"number": 2, "partition": "domain"})
    write_app(tmp_path / "app", chosen, ("north", "south"), address="fl.org:8443")
    return tmp_path / "app"


def compose_files(folder: Path) -> list[Path]:
    return sorted(folder.rglob("compose.yaml"))


def services(file: Path) -> dict[str, dict]:
    return yaml.safe_load(file.read_text("utf-8"))["services"]


def test_the_servers_image_keeps_the_rules():
    assert faults(SERVE / "Dockerfile", ROOT) == []


def test_the_deployments_images_keep_the_rules(deployment):
    files = sorted(deployment.rglob("Dockerfile"))
    assert [faults(file, file.parent) for file in files] == [[]] * len(files)
    for file in compose_files(deployment):
        for service in services(file).values():
            if "build" in service:
                assert (file.parent / service["build"] / "Dockerfile") in files, file


def test_a_broken_rule_is_found(subtests, tmp_path_factory):
    for text, fault in [
        ("FROM python\nUSER 1", "python has no version"),
        ("FROM python:3.12\nCOPY absent /x\nUSER 1", "absent is copied, but not there"),
        ("FROM python:3.12\nCOPY . /x\nUSER 1", "everything is copied"),
        ("FROM python:3.12\nRUN true && \\\n pip install x\nUSER 1", "pip keeps a cache"),
        ("FROM python:3.12\nUSER root", "it runs as root"),
        ("FROM python:3.12", "it runs as root"),
        ("FROM python:3.12\nUSER 1\nCMD feddg", "CMD starts a shell, which takes no signal"),
    ]:
        with subtests.test(text=text, fault=fault):
            tmp_path = tmp_path_factory.mktemp("case")
            (tmp_path / "Dockerfile").write_text(text)
            assert faults(tmp_path / "Dockerfile", tmp_path) == [fault]


def test_the_server_is_published_where_the_page_says():
    (service,) = services(SERVE / "compose.yaml").values()
    said = dict(instructions(SERVE / "Dockerfile"))
    serve = get_command(app).get_command(None, "serve")
    flags = serve.get_params(serve.make_context("serve", ["run"], resilient_parsing=True))
    (own,) = (flag.default for flag in flags if "--port" in flag.opts)
    assert said["EXPOSE"] == str(own)
    assert service["ports"] == [f"127.0.0.1:{own}:{own}"]
    assert f":{own}/health" in said["HEALTHCHECK"]
    assert f"http://127.0.0.1:{own}/" in (ROOT / "docs" / "use_a_model.md").read_text("utf-8")


def test_the_servers_image_installs_extras_that_there_are():
    (pip,) = (
        words for words in shell_commands(instructions(SERVE / "Dockerfile")) if "pip" in words
    )
    (asked,) = re.findall(r"/source\[(.*)\]", " ".join(pip))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    assert set(asked.split(",")) <= set(project["optional-dependencies"])
    assert {"dicom", "tiff"} <= set(asked.split(","))


def test_every_image_of_a_deployment_reads_what_a_hospital_has(deployment):
    files = sorted(deployment.rglob("Dockerfile"))
    assert len(files) == 3
    for file in files:
        (asked,) = re.findall(r"feddg\[(.*?)\]", file.read_text("utf-8"))
        assert {"flower", "dicom", "tiff"} == set(asked.split(",")), file


def test_what_is_copied_is_not_ignored():
    """And nothing else is sent to whoever builds: no runs, no images."""
    ignored = (SERVE / "Dockerfile.dockerignore").read_text("utf-8").split("\n")
    allowed = {line[1:] for line in ignored if line.startswith("!")}
    said = instructions(SERVE / "Dockerfile")
    copied = {word for name, rest in said if name == "COPY" for word in rest.split()[:-1]}
    assert "*" in ignored
    assert copied == allowed


def test_flower_knows_every_flag_of_the_containers(deployment):
    superlink = pytest.importorskip("flwr.superlink.cli.flower_superlink")
    supernode = pytest.importorskip("flwr.supernode.cli.flower_supernode")
    parsers = {
        "flower-superlink": superlink._parse_args_run_superlink,
        "flower-supernode": supernode._parse_args_run_supernode,
    }
    seen = []
    for file in compose_files(deployment):
        for service in services(file).values():
            program, *words = service["command"]
            if program in parsers:
                seen.append(program)
                parsers[program]().parse_args(words)
    assert sorted(seen) == ["flower-superlink", "flower-supernode", "flower-supernode"]


def test_what_the_coordinators_containers_mount_is_there(deployment):
    made = subprocess.run(["sh", "make_keys.sh"], cwd=deployment, capture_output=True)
    if made.returncode:
        pytest.skip("needs openssl and ssh-keygen")
    for service in services(deployment / "compose.yaml").values():
        for volume in service["volumes"]:
            source = volume.split(":")[0]
            if source.startswith("."):
                assert (deployment / source).exists(), volume


@pytest.mark.slow
def test_what_is_copied_into_the_servers_image_makes_the_package(tmp_path):
    pytest.importorskip("build", reason="needs the package build")
    for name, rest in instructions(SERVE / "Dockerfile"):
        if name == "COPY":
            *sources, place = rest.split()
            target = tmp_path / place.strip("/")
            for source in sources:
                if (ROOT / source).is_dir():
                    shutil.copytree(ROOT / source, target, dirs_exist_ok=True)
                else:
                    target.mkdir(parents=True, exist_ok=True)
                    shutil.copy(ROOT / source, target)
    command = [sys.executable, "-m", "build", "--wheel", "--outdir", tmp_path, tmp_path / "source"]
    subprocess.run(command, check=True)
    (wheel,) = tmp_path.glob("*.whl")
    assert "feddg/serving/server.py" in zipfile.ZipFile(wheel).namelist()
