"""What `feddg deploy init` writes around the app: keys, services, containers, permissions."""

import configparser
import re
import shlex
import stat
import subprocess

import pytest
import yaml

pytest.importorskip("flwr", reason="Flower is an optional extra")

from feddg.deploy.setup import require_fit_for_sites, write_app
from feddg.errors import ExperimentError
from feddg.experiment import Experiment

SITES = ("ink", "chalk")


@pytest.fixture
def folder(tmp_path):
    chosen = Experiment(data="digits", clients={"number": 2, "partition": "domain"})
    write_app(tmp_path / "app", chosen, SITES, evaluation_sites=["clinic"], address="fl.org:8443")
    return tmp_path / "app"


def make_keys(folder):
    return subprocess.run(["sh", "make_keys.sh"], cwd=folder, capture_output=True, text=True)


def contents(folder):
    return {file.name: file.read_bytes() for file in (folder / "keys").iterdir()}


def mode(path):
    return stat.S_IMODE(path.stat().st_mode)


def test_only_the_owner_may_read_what_is_written(folder):
    assert make_keys(folder).returncode == 0
    for path in [folder, *folder.rglob("*")]:
        private = 0o700 if path.is_dir() or path.suffix == ".sh" else 0o600
        assert mode(path) == private, path


def test_keys_are_made_once_and_what_was_interrupted_is_completed(folder):
    assert make_keys(folder).returncode == 0
    before = contents(folder)
    names = {"ca.key", "ca.crt", "server.key", "server.crt", "signing", "signing.pub"}
    assert set(before) == {*names, "trusted.yaml"} | (set(before) & {"ca.srl"})
    again = make_keys(folder)
    assert again.returncode == 0
    assert "keys/ca.crt is there: kept" in again.stdout
    assert contents(folder) == before
    for gone in ("server.crt", "signing.pub", "trusted.yaml"):
        (folder / "keys" / gone).unlink()
    assert make_keys(folder).returncode == 0
    after = contents(folder)
    assert {name for name in before if after[name] != before[name]} <= {"server.crt", "ca.srl"}


def test_a_certificate_without_its_key_is_not_replaced(folder):
    assert make_keys(folder).returncode == 0
    (folder / "keys" / "ca.key").unlink()
    before = contents(folder)
    refused = make_keys(folder)
    assert refused.returncode == 1
    assert "its key keys/ca.key is not: bring it back" in refused.stderr
    assert contents(folder) == before


def test_the_certificate_is_for_the_coordinators_names_and_signs_nothing(folder):
    assert make_keys(folder).returncode == 0
    command = ["openssl", "x509", "-in", folder / "keys/server.crt", "-noout", "-text"]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert "DNS:localhost, IP Address:127.0.0.1, DNS:fl.org" in text
    assert "CA:FALSE" in text
    assert "TLS Web Server Authentication" in text
    command = ["openssl", "verify", "-CAfile", folder / "keys/ca.crt", folder / "keys/server.crt"]
    subprocess.run(command, capture_output=True, check=True)


def test_a_sites_key_is_made_once(folder):
    script = folder / "sites" / "ink" / "make_key.sh"
    subprocess.run(["sh", script], capture_output=True, check=True)
    key = script.parent / "ink"
    before = key.read_bytes()
    assert mode(key) == 0o600
    done = subprocess.run(["sh", script], capture_output=True, text=True, check=True)
    assert "ink is there: kept" in done.stdout
    assert key.read_bytes() == before


def test_a_service_that_may_write_nowhere_else_installs_apps_in_its_cache(folder):
    for file in folder.rglob("feddg-site.service"):
        unit = file.read_text()
        (home,) = re.findall(r"FLWR_HOME=(\S+)", unit)
        (cache,) = re.findall(r"^CacheDirectory=(.+)", unit, re.MULTILINE)
        assert "ProtectSystem=strict" in unit
        assert home.startswith(f"/var/cache/{cache}/")


def commands(folder):
    """The SuperLink's and a SuperNode's command lines, by where they stand."""
    for file in folder.rglob("*.service"):
        unit = configparser.RawConfigParser(strict=False)
        unit.optionxform = str
        unit.read(file)
        yield file.name, shlex.split(unit["Service"]["ExecStart"])
    for file in folder.rglob("compose.yaml"):
        for name, service in yaml.safe_load(file.read_text())["services"].items():
            yield f"{file.parent.name}/{name}", service["command"]
    for line in re.findall(
        r"^ {4}(flower-\S+(?:[^\n]*\\\n)*[^\n]*)", (folder / "START.md").read_text(), re.MULTILINE
    ):
        yield "START.md", shlex.split(line.replace("\\\n", " "))


def test_every_way_of_starting_keeps_the_superlink_on_loopback_and_sites_to_signed_apps(folder):
    found = {"superlink": 0, "supernode": 0}
    for where, command in commands(folder):
        text = " ".join(command).replace("=", " ")
        if "flower-superlink" in text:
            found["superlink"] += 1
            assert "--host 127.0.0.1 --port 8444" in text, where
            assert "--enable-supernode-auth" in text
            assert "--ssl-certfile keys/server.crt" in text
            assert "--insecure" not in text
        elif "flower-supernode" in text:
            found["supernode"] += 1
            assert "--superlink fl.org:8443 --root-certificates ca.crt" in text, where
            assert "--trusted-entities trusted.yaml" in text
            assert "--auth-supernode-private-key" in text
        else:
            assert "nginx" in text
    assert found == {"superlink": 3, "supernode": 9}


def test_containers_run_without_root_and_only_the_proxy_is_published(folder):
    files = [folder / "compose.yaml", *folder.glob("sites/*/compose.yaml")]
    assert len(files) == 4
    for file in files:
        for name, service in yaml.safe_load(file.read_text())["services"].items():
            assert service["user"] == "1000:1000"
            assert service["cap_drop"] == ["ALL"]
            assert service["security_opt"] == ["no-new-privileges:true"]
            assert service["read_only"] is True
            assert service["restart"] == "unless-stopped"
            assert ("ports" in service) == (name == "proxy")
    coordinator = yaml.safe_load((folder / "compose.yaml").read_text())["services"]
    assert coordinator["superlink"]["network_mode"] == "service:proxy"
    assert coordinator["proxy"]["ports"] == ["8443:8443"]
    mounted = " ".join(coordinator["proxy"]["volumes"])
    assert "ca.key" not in mounted
    assert "signing" not in mounted


def test_services_start_again_for_ever(folder):
    for file in folder.rglob("*.service"):
        unit = configparser.RawConfigParser(strict=False)
        unit.optionxform = str
        unit.read(file)
        assert unit["Service"]["Restart"] == "always"
        assert unit["Unit"]["StartLimitIntervalSec"] == "0"
        assert unit["Service"]["UMask"] == "0077"
        assert unit["Service"]["User"] == "feddg"


def test_a_path_that_would_mean_something_in_a_unit_file_is_refused(tmp_path):
    chosen = Experiment(data="digits", clients={"number": 2})
    for name in ("a b", "a'b", "a$b", "a:b"):
        with pytest.raises(ExperimentError, match="choose a folder without"):
            write_app(tmp_path / name, chosen, SITES)
    with pytest.raises(ExperimentError, match="at least one site that trains: --site"):
        write_app(tmp_path / "app", chosen, [], evaluation_sites=SITES)


@pytest.mark.parametrize("name", ["local", "centralised", "mixstyle+local", "centralised+mixstyle"])
def test_some_methods_do_not_run_over_a_network(name):
    with pytest.raises(ExperimentError, match="cannot run over a network"):
        require_fit_for_sites(Experiment(method=name, data={"id_val": 0.0, "id_test": 0.0}))
