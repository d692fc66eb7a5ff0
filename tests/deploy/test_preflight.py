"""A site's preflight: what is in order is go, and each thing that is not is named."""

import base64
import http.server
import json
import os
import shutil
import ssl
import subprocess
import threading

import numpy
import pytest
from PIL import Image
from typer.testing import CliRunner

pytest.importorskip("flwr", reason="Flower is an optional extra")

from codec_files import write_vgg19
from feddg.cli import app
from feddg.data.images import listed_images
from feddg.deploy import preflight
from feddg.deploy.keys import public_key
from feddg.deploy.preflight import check_connection, check_disk, check_images
from feddg.deploy.setup import JoinFile, deployment_fields, read_join, write_app
from feddg.deploy.site import SiteConfig, read_experiment
from feddg.errors import FeddgError
from feddg.experiment import Experiment
from stand_in_proxy import StandInProxy

DATA = {"source": "folder", "image_size": 16, "id_val": 0, "id_test": 0}
TRAIN = {"rounds": 1, "local_epochs": 1, "batch_size": 4, "augmentation": "none"}


@pytest.fixture(scope="module")
def deployment(tmp_path_factory):
    """A deployment's folder with keys, a proxy that answers, and the site's folder."""
    if shutil.which("openssl") is None or shutil.which("ssh-keygen") is None:
        pytest.skip("needs openssl and ssh-keygen")
    folder = tmp_path_factory.mktemp("deployment") / "app"
    server = http.server.HTTPServer(("127.0.0.1", 0), StandInProxy)
    address = f"127.0.0.1:{server.server_port}"
    fields = {"data": DATA, "train": TRAIN, "model": {"backbone": "cnn", "weights": "none"}}
    clients = deployment_fields(["north"])["clients"]
    chosen = Experiment(**fields, hold_out="sketch", clients=clients)
    write_app(folder, chosen, ["north"], address=address, classes=["corn", "wheat"])
    site = folder / "sites" / "north"
    for script in (folder / "make_keys.sh", site / "make_key.sh"):
        subprocess.run(["sh", str(script)], check=True, capture_output=True)
    for name in ("ca.crt", "trusted.yaml"):
        shutil.copy(folder / "keys" / name, site / name)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(folder / "keys" / "server.crt", folder / "keys" / "server.key")
    server.socket = context.wrap_socket(server.socket, server_side=True)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield site
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def images(tmp_path):
    for kind in ("corn", "wheat"):
        for number in range(12):
            file = tmp_path / "images" / kind / f"{number}.png"
            file.parent.mkdir(parents=True, exist_ok=True)
            Image.new("RGB", (20, 20), (number, 9, 9)).save(file)
    return tmp_path / "images"


def severities(checks):
    return {check.code: check.severity for check in checks}


def site_checks(deployment, images, cache, **changes):
    """Returns the checks of a site whose join file is changed, by code."""
    join = read_join(deployment).model_copy(update=changes)
    config = SiteConfig(site="north", images=str(images), domain="north", cache=cache, device="cpu")
    return {check.code: check for check in check_images(join, config)}


def with_fields(deployment, **fields):
    """Returns the text of the deployment's experiment with other fields."""
    chosen = read_experiment({"experiment": read_join(deployment).experiment}).model_dump()
    return Experiment.model_validate(chosen | fields).to_yaml()


@pytest.fixture
def listed(deployment, monkeypatch):
    """The site's key is on the proxy's list."""
    key = base64.b64encode(public_key(deployment / "north.pub"))
    monkeypatch.setattr(StandInProxy, "listed", (key.decode("ascii"),))


def check_command(deployment, images, tmp_path, *flags):
    command = ["deploy", "check", str(deployment), "--images", str(images), "--domain", "north"]
    command += ["--cache", str(tmp_path / "cache"), "--device", "cpu", *flags]
    return CliRunner().invoke(app, command)


def test_a_site_in_order_is_go(deployment, images, tmp_path, listed):
    ended = check_command(deployment, images, tmp_path, "--json")
    assert ended.exit_code == 0, ended.output
    found = {check["code"]: check for check in json.loads(ended.stdout)}
    assert {check["severity"] for check in found.values()} <= {"note", "warning"}
    sure = ("key", "clock", "registration", "images", "disk", "speed")
    assert all(found[code]["severity"] == "note" for code in sure)
    assert found["images"]["text"] == "24 of 24 images can be used."
    assert list((tmp_path / "cache").rglob("*.npy"))  # joining will not decode them again


def test_a_key_that_is_not_on_the_list_is_no_go(deployment, images, tmp_path):
    ended = check_command(deployment, images, tmp_path, "--json")
    assert ended.exit_code == 1
    found = {check["code"]: check for check in json.loads(ended.stdout)}
    assert "north.pub" in found.pop("registration")["advice"]
    assert {check["severity"] for check in found.values()} <= {"note", "warning"}
    offline = check_command(deployment, images, tmp_path, "--offline")
    assert offline.exit_code == 0
    assert "connection were not checked" in offline.output
    assert "can join" not in offline.output


def test_a_proxy_that_refuses_everybody_alike_is_no_go(deployment, monkeypatch):
    monkeypatch.setattr("feddg.deploy.preflight.DOOR", "/elsewhere")
    found = {check.code: check for check in check_connection(deployment, read_join(deployment))}
    assert found["registration"].severity == "error"
    assert "403" in found["registration"].text


@pytest.mark.parametrize("held", [{"test": ["North"]}, {"val": ["north"]}])
def test_a_site_of_a_held_out_domain_takes_no_part_in_training(deployment, images, tmp_path, held):
    changes = [{"experiment": with_fields(deployment, hold_out={"test": ["sketch"], **held})}]
    if "test" in held:
        changes.append({"tested": ("North",)})
    for changed in changes:
        (fault,) = site_checks(deployment, images, tmp_path / "cache", **changed).values()
        assert (fault.code, fault.severity) == ("joining", "error")
        said = "This site would train on 'north', which this run holds out; give it images of other"
        assert fault.text.startswith(said)
        found = site_checks(deployment, images, tmp_path / "cache", trains=False, **changed)
        assert found["speed"].severity == "note"


@pytest.mark.parametrize(
    ("ahead", "severity"),
    [(-60, "error"), (0, "note"), (100, "note"), (900, "error")],
)
def test_a_clock_that_flower_would_refuse_is_no_go(deployment, monkeypatch, ahead, severity):
    monkeypatch.setattr(StandInProxy, "ahead", ahead)
    assert severities(check_connection(deployment, read_join(deployment)))["clock"] == severity


def test_faults_of_folder_and_connection_are_named(deployment, tmp_path):
    site = tmp_path / "site"
    shutil.copytree(deployment, site)
    (site / "north").chmod(0o644)
    (site / "trusted.yaml").write_text("fpk_a: no key")
    join = read_join(site).model_copy(update={"feddg": "9.9.9", "address": "127.0.0.1:9"})
    found = severities(check_connection(site, join))
    bad = {name for name, severity in found.items() if severity == "error"}
    assert bad == {"feddg", "key", "trusted-apps", "proxy"}
    os.unlink(site / "north")
    (site / "ca.crt").write_text("no certificate")
    found = severities(check_connection(site, join))
    assert found["key"] == found["proxy"] == "error"


def test_another_certificate_is_no_go(deployment, tmp_path):
    site = tmp_path / "site"
    shutil.copytree(deployment, site)
    other = tmp_path / "other"
    chosen = Experiment(data="digits", clients={"number": 1, "partition": "domain"})
    write_app(other, chosen, ["ink"])
    subprocess.run(["sh", str(other / "make_keys.sh")], check=True, capture_output=True)
    shutil.copy(other / "keys" / "ca.crt", site / "ca.crt")
    proxy = [c for c in check_connection(site, read_join(site)) if c.code == "proxy"]
    assert proxy[0].severity == "error"
    assert "certificate" in proxy[0].text


def test_faults_of_the_images_are_named(deployment, images, tmp_path):
    cache = tmp_path / "cache"
    for count, severity in ((2, "note"), (6, "error")):
        for number in range(count):
            (images / "corn" / f"bad{number}.png").write_bytes(b"no image")
        found = site_checks(deployment, images, cache)
        assert found["images"].text == f"24 of {24 + count} images can be used."
        assert found["images"].severity == severity
        assert found["images-left-out"].severity == "warning"
        assert "bad0.png (not an image in a known format)" in found["images-left-out"].text
    strict = with_fields(deployment, data={**DATA, "on_bad_image": "fail"})
    found = site_checks(deployment, images, cache, experiment=strict)
    assert "6 of 30 images cannot be used" in found["joining"].text
    (images / "rye").mkdir()
    Image.new("RGB", (8, 8)).save(images / "rye" / "a.png")
    for trains in (True, False):
        (fault,) = site_checks(deployment, images, cache, trains=trains).values()
        assert (fault.code, fault.severity) == ("joining", "error")
        assert "has the class 'rye', and this run has corn, wheat" in fault.text
    (fault,) = site_checks(deployment, tmp_path / "nowhere", cache).values()
    assert (fault.code, fault.severity) == ("joining", "error")


def test_a_codec_that_the_site_does_not_have_is_named(deployment, images, tmp_path):
    cache = tmp_path / "cache"
    files = {"encoder": "vgg_normalised.pth", "decoder": "decoder.pth"}
    paths = {part: str(tmp_path / name) for part, name in files.items()}
    method = {"name": "pardon", "codec": "vgg19", **paths}
    chosen = with_fields(deployment, method=method)
    found = site_checks(deployment, images, cache, experiment=chosen)
    assert found["joining"].severity == "error"
    assert paths["encoder"] in found["joining"].text
    write_vgg19(tmp_path)
    found = site_checks(deployment, images, cache, experiment=chosen)
    assert found["speed"].severity != "error"


def test_classes_that_nobody_named_are_to_be_compared(deployment, images, tmp_path):
    for classes, text in (((), "There are 2: corn, wheat."), (("corn", "wheat", "rye"), "rye")):
        found = site_checks(deployment, images, tmp_path / "cache", classes=classes)["classes"]
        assert found.severity == "warning"
        assert text in found.text


def test_a_machine_that_is_too_slow_or_full_is_no_go(deployment, images, tmp_path, monkeypatch):
    cache = tmp_path / "cache"
    first, again = (site_checks(deployment, images, cache)["disk"] for _ in range(2))
    needed = [disk.text.partition("about ")[2] for disk in (first, again)]
    assert needed[0] == needed[1]  # though the pixels are there now
    monkeypatch.setattr(preflight, "ROUND_DEADLINE", 1e-9)
    monkeypatch.setattr(preflight, "SPARE_BYTES", 2**60)
    found = site_checks(deployment, images, cache)
    assert found["speed"].severity == found["disk"].severity == "error"
    folder = tmp_path / "a file"
    folder.write_text("")
    (fault,) = site_checks(deployment, images, folder / "cache").values()
    assert (fault.code, fault.severity) == ("joining", "error")
    assert str(folder) in fault.text


def test_a_folder_without_join_file_or_with_another_experiment_is_one_clear_line(tmp_path):
    with pytest.raises(FeddgError, match="the folder sites/NAME"):
        read_join(tmp_path)
    join = JoinFile(site="a", address="b:1", feddg="0", flwr="1", experiment="colour: red")
    (fault,) = check_images(join, SiteConfig(site="a", images="digits:ink", cache=tmp_path))
    assert (fault.code, fault.severity) == ("joining", "error")
    assert "colour" in fault.text


def test_features_need_no_room_for_pixels(tmp_path):
    count = 100_000
    rows = numpy.zeros((count, 2), numpy.float32)
    names, labels = [str(row) for row in range(count)], ["x", "y"] * (count // 2)
    table = listed_images(None, names, labels, ["a"] * count, images=rows)
    chosen = Experiment(data={"source": "features", "features": 2}, model={"weights": None})
    assert "about 1.07\N{NO-BREAK SPACE}GB are" in check_disk(table, chosen, tmp_path).text


@pytest.mark.parametrize(
    ("method", "privacy"),
    [
        ("fedavg", {"record_epsilon": 8}),
        *((name, {"style_epsilon": 8}) for name in ("pardon", "ccst", "vista")),
        ("pardon", {"style_epsilon": 8, "style_unit": "client", "epsilon": 8}),
    ],
)
def test_noise_is_tried_as_it_is_trained(method, privacy):
    pytest.importorskip("dp_accounting", reason="differential privacy is an extra")
    private = {"method": method, "privacy": privacy, "data": DATA, "train": TRAIN}
    model = {"backbone": "cnn_gn", "weights": "none"}
    assert preflight.seconds_per_image(Experiment(**private, model=model), 2) > 0


def test_groups_that_a_site_only_evaluates_by_are_looked_for(deployment, images, tmp_path):
    grouped = with_fields(deployment, data={**DATA, "group_by": "(?P<group>n[0-9]+)_"})
    found = site_checks(deployment, images, tmp_path, experiment=grouped, trains=False)
    assert found["joining"].severity == "error"
    assert "group" in found["joining"].text
