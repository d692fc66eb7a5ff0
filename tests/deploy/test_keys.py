"""Registering sites and running signed apps, up to the SuperLink; beyond it the slow tests go."""

import json
import os
import subprocess
import tomllib
import zipfile

import pytest
import yaml
from flwr.supernode.cli.flower_supernode import (
    _try_obtain_trusted_entities,
    _validate_public_keys_ed25519,
)
from flwr.supernode.start_client_internal import _verify_fab

from feddg.deploy.keys import (
    BUNDLE,
    SIGNATURE,
    let_through,
    public_key,
    read_signed,
    register_site,
    run_signed,
    sign_app,
    signed_fab,
)
from feddg.deploy.setup import write_app
from feddg.deploy.transport import fingerprint
from feddg.errors import FeddgError
from feddg.experiment import Experiment

pytest.importorskip("flwr", reason="Flower is an optional extra")


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
    assert file.read_text() == '"~^dHdv$" blue-ink;\n"~^dGhyZWU=$" ink;\n'
    let_through(file, "ink", b"\xfb\xef\xbe")  # of plus signs alone
    assert file.read_text().endswith('\n"~^[+][+][+][+]$" ink;\n')


def test_only_sites_keys_of_this_deployments_sites_are_registered(folder):
    key = folder / "sites" / "ink" / "ink.pub"
    with pytest.raises(FeddgError, match=r"'\.\./sites/ink' is no site of the deployment"):
        register_site(folder, "../sites/ink", key)
    with pytest.raises(FeddgError, match="sites' keys are of type ecdsa"):
        register_site(folder, "ink", folder / "keys" / "signing.pub")
    with pytest.raises(FeddgError, match="is no public key"):
        register_site(folder, "ink", folder / "LICENSE")
    os.mkfifo(folder / "pipe.pub")
    with pytest.raises(FeddgError, match="is no public key"):
        register_site(folder, "ink", folder / "pipe.pub")


def test_a_superlink_that_is_not_there_is_said(folder):
    with pytest.raises(FeddgError, match="the SuperLink cannot be reached"):
        register_site(folder, "ink", folder / "sites" / "ink" / "ink.pub")
    assert (folder / "proxy" / "sites.map").read_text() == ""
    with pytest.raises(FeddgError, match="holds no signed app"):
        run_signed(folder)
    sign_app(folder)
    with pytest.raises(FeddgError, match=r"superlink\.db is not there"):
        run_signed(folder)


# The coordinator's signature, checked by Flower's own code as a SuperNode does.


pytest.importorskip("flwr", reason="Flower is an optional extra")


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Two federations' folders."""
    made = []
    for name in ("ours", "theirs"):
        folder = tmp_path_factory.mktemp("deployments") / name
        write_app(folder, Experiment(data="digits", clients={"number": 1}), ["ink"])
        subprocess.run(["sh", folder / "make_keys.sh"], capture_output=True, check=True)
        made.append(folder)
    return made


def accepted(app, folder):
    """Whether a SuperNode with this federation's trusted.yaml runs an app."""
    trusted = _try_obtain_trusted_entities(folder / "keys" / "trusted.yaml")
    _validate_public_keys_ed25519(trusted)
    return _verify_fab(app, trusted)


def test_sites_run_what_their_own_coordinator_signed_and_nothing_else(folders):
    ours, theirs = folders
    app, foreign = sign_app(ours), sign_app(theirs)
    assert accepted(app, ours)
    assert accepted(foreign, theirs)
    assert not accepted(foreign, ours)
    fields = json.loads((ours / SIGNATURE).read_text())
    others = json.loads((theirs / SIGNATURE).read_text())
    assert accepted(signed_fab(app.content, **fields), ours)
    named = {**others, "key_id": fields["key_id"]}
    assert not accepted(signed_fab(foreign.content, **named), ours)
    assert not accepted(signed_fab(app.content + b"\0", **fields), ours)
    assert not accepted(signed_fab(foreign.content + b"\0", **fields), ours)
    later = {**fields, "signed_at": fields["signed_at"] + 1}
    assert not accepted(signed_fab(app.content, **later), ours)
    assert read_signed(ours) == app


def test_only_the_configuration_is_bundled(folders):
    sign_app(folders[0])
    with zipfile.ZipFile(folders[0] / BUNDLE) as bundle:
        names = set(bundle.namelist())
        assert names - {".info/CONTENT"} == {"pyproject.toml", "LICENSE"}
        project = tomllib.loads(bundle.read("pyproject.toml").decode())
    assert project["tool"]["flwr"]["app"]["components"]["clientapp"].startswith("feddg.")


def test_what_was_changed_after_signing_is_not_run(folders, tmp_path):
    import shutil

    folder = tmp_path / "app"
    shutil.copytree(folders[0], folder)
    sign_app(folder)
    project = folder / "pyproject.toml"
    project.write_text(project.read_text().replace("wait-seconds = 300.0", "wait-seconds = 3.0"))
    with pytest.raises(FeddgError, match=r"feddg deploy sign"):
        read_signed(folder)
    sign_app(folder)
    assert read_signed(folder)
    (folder / BUNDLE).write_bytes(b"other")
    with pytest.raises(FeddgError, match="is not the one that was signed"):
        read_signed(folder)
    (folder / SIGNATURE).write_text("{")
    with pytest.raises(FeddgError, match="holds no signed app"):
        read_signed(folder)


def test_a_key_that_sites_do_not_trust_signs_nothing(folders):
    ours, theirs = folders
    with pytest.raises(FeddgError, match="does not hold this key"):
        sign_app(ours, theirs / "keys" / "signing")
    with pytest.raises(FeddgError, match="is no signing key"):
        sign_app(ours, ours / "keys" / "ca.key")
    with pytest.raises(FeddgError, match="is no signing key"):
        sign_app(ours, ours / "keys" / "absent")


def test_the_signing_key_may_lie_elsewhere(folders, tmp_path):
    key = tmp_path / "stick"
    key.write_bytes((folders[0] / "keys" / "signing").read_bytes())
    assert accepted(sign_app(folders[0], key), folders[0])
    trusted = yaml.safe_load((folders[0] / "keys" / "trusted.yaml").read_text())
    assert list(trusted) == [next(iter(read_signed(folders[0]).verifications))]
