"""Registering sites and running signed apps, up to the SuperLink; beyond it the slow tests go."""

import subprocess

import pytest

pytest.importorskip("flwr", reason="Flower is an optional extra")

from feddg.errors import FeddgError
from feddg.experiment import Experiment
from feddg.flower.app_folder import write_app
from feddg.flower.control import let_through, public_key, register_site, run_signed
from feddg.flower.identity import fingerprint
from feddg.flower.signing import sign_app


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("FLWR_HOME", str(tmp_path))  # what is set in there does not stay
    chosen = Experiment(data="digits", clients={"number": 1})
    write_app(tmp_path / "app", chosen, ["ink"], address="127.0.0.1:9", superlink_port=10)
    subprocess.run(["sh", tmp_path / "app/make_keys.sh"], capture_output=True, check=True)
    subprocess.run(["sh", tmp_path / "app/sites/ink/make_key.sh"], capture_output=True, check=True)
    return tmp_path / "app"


def test_a_fingerprint_is_the_one_that_ssh_keygen_shows(folder):
    key = folder / "sites" / "ink" / "ink.pub"
    shown = subprocess.run(["ssh-keygen", "-l", "-f", key], capture_output=True, text=True)
    assert fingerprint(public_key(key)) == shown.stdout.split()[1]


def test_the_list_of_keys_holds_one_per_site(tmp_path):
    file = tmp_path / "sites.map"
    let_through(file, "ink", b"one")
    let_through(file, "blue-ink", b"two")
    let_through(file, "ink", b"three")
    assert file.read_text() == '"dHdv" blue-ink;\n"dGhyZWU=" ink;\n'


def test_only_sites_keys_of_this_deployments_sites_are_registered(folder):
    key = folder / "sites" / "ink" / "ink.pub"
    with pytest.raises(FeddgError, match=r"'\.\./sites/ink' is no site of the deployment"):
        register_site(folder, "../sites/ink", key)
    with pytest.raises(FeddgError, match="sites' keys are of type ecdsa"):
        register_site(folder, "ink", folder / "keys" / "signing.pub")
    with pytest.raises(FeddgError, match="is no public key"):
        register_site(folder, "ink", folder / "LICENSE")


def test_a_superlink_that_is_not_there_is_said(folder):
    with pytest.raises(FeddgError, match="the SuperLink cannot be reached; is it running"):
        register_site(folder, "ink", folder / "sites" / "ink" / "ink.pub")
    assert (folder / "proxy" / "sites.map").read_text() == ""
    with pytest.raises(FeddgError, match="holds no signed app"):
        run_signed(folder)
    sign_app(folder)
    with pytest.raises(FeddgError, match=r"superlink\.db is not there: start the SuperLink"):
        run_signed(folder)
