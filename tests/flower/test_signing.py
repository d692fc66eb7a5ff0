"""The coordinator's signature, checked by Flower's own code as a SuperNode does."""

import subprocess
import tomllib
import zipfile
from dataclasses import replace

import pytest
import yaml

pytest.importorskip("flwr", reason="Flower is an optional extra")

from flwr.supercore.fab import Fab
from flwr.supernode.cli.flower_supernode import (
    _try_obtain_trusted_entities,
    _validate_public_keys_ed25519,
)
from flwr.supernode.start_client_internal import _verify_fab

from feddg.errors import FeddgError
from feddg.experiment import Experiment
from feddg.flower.app_folder import write_app
from feddg.flower.signing import BUNDLE, SIGNATURE, read_signed, sign_app


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
    return _verify_fab(Fab(app.digest, app.content, app.verifications), trusted)


def test_sites_run_what_their_own_coordinator_signed_and_nothing_else(folders):
    ours, theirs = folders
    app, foreign = sign_app(ours), sign_app(theirs)
    assert accepted(app, ours)
    assert accepted(foreign, theirs)
    assert not accepted(foreign, ours)
    assert not accepted(replace(foreign, key_id=app.key_id), ours)
    assert not accepted(replace(app, content=app.content + b"\0"), ours)
    assert not accepted(replace(app, content=foreign.content + b"\0"), ours)
    assert not accepted(replace(app, signed_at=app.signed_at + 1), ours)
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
    with pytest.raises(FeddgError, match=r"changed since it was signed; run `feddg deploy sign`"):
        read_signed(folder)
    sign_app(folder)
    assert read_signed(folder)
    (folder / BUNDLE).write_bytes(b"other")
    with pytest.raises(FeddgError, match="not signed by a key of"):
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
    assert list(trusted) == [read_signed(folders[0]).key_id]
