"""A site: its images, its memory on disk, and the app that starts it."""

import shutil
import subprocess
import tomllib

import numpy
import pytest
import torch
from PIL import Image

from odd_inputs import OUTSIDE

pytest.importorskip("flwr", reason="Flower is an optional extra")

from feddg.data.decoding import Reading
from feddg.data.images import from_class_folders
from feddg.data.inspection import survey
from feddg.deploy.preflight import check_depths
from feddg.deploy.server_app import Deployment
from feddg.deploy.setup import deployment_fields, write_app
from feddg.deploy.site import (
    SiteConfig,
    SiteMemory,
    copies_in,
    list_images,
    load_pixels,
    positions,
    read_experiment,
    site_of,
)
from feddg.deploy.wire import Payload, Request
from feddg.errors import ClientError, DataError, ExperimentError, FeddgError, RunError
from feddg.experiment import Experiment
from feddg.messages import Message
from feddg.settings import merge


def value(memory):
    return memory["x"].item() if memory else None


def test_a_round_reads_only_what_earlier_rounds_wrote(tmp_path):
    memory = SiteMemory(tmp_path, "run-1", "ink")
    assert memory.before(1) == {}
    for round in (1, 2, 5):
        memory.keep(round, {"x": torch.tensor(round)})
    assert [value(memory.before(round)) for round in (5, 6, 9)] == [2, 5, 5]
    memory.keep(5, {"x": torch.tensor(50)})  # repeated after a failure
    assert [value(memory.before(round)) for round in (5, 6)] == [2, 50]
    assert len(list(memory.folder.iterdir())) == 2
    assert SiteMemory(tmp_path, "run-2", "ink").before(9) == {}


def test_a_coordinator_that_goes_on_from_an_older_copy_of_its_run_is_not_served(tmp_path):
    """Layers of a site's own would begin anew in the middle of a run, and nobody would know."""
    memory = SiteMemory(tmp_path, "run-1", "ink")
    for round in (1, 2, 3, 4):
        memory.before(round, round - 1)
        memory.keep(round, {"x": torch.tensor(round)})
    for round in (2, 3):
        with pytest.raises(ClientError, match=f"remembers round 4 .*, and not round {round - 1}"):
            memory.before(round, round - 1)
    assert value(memory.before(4, 3)) == 3  # a round that was under way
    assert memory.before(1, 0) == {}  # a program's run under the same key


def test_a_flipped_bit_of_a_memory_is_found_and_said(tmp_path):
    memory = SiteMemory(tmp_path, "run", "ink")
    memory.keep(1, {"x": torch.tensor(1.0)})
    memory.keep(2, {"x": torch.tensor(2.0)})
    flip(memory.folder, "memory-2.*")
    assert value(memory.before(2)) == 1
    with pytest.raises(RunError, match=r"memory-2.* is damaged: .*checksum"):
        memory.before(3)
    for file in memory.folder.glob("memory-2.*"):
        file.unlink()  # as the line says
    assert value(memory.before(3)) == 1


def test_what_was_agreed_is_asked_for_again_once_it_is_damaged(tmp_path):
    memory = SiteMemory(tmp_path, "run", "ink")
    context = Message({"style": torch.ones(2)}, {"groups": 2})
    memory.keep_context("abc", context)
    flip(memory.folder, "context-abc.*")
    assert memory.context("abc") is None
    memory.keep_context("abc", context)
    assert memory.context("abc").scalars == {"groups": 2}


def flip(folder, pattern):
    """Flips the last bit of a file."""
    (file,) = folder.glob(pattern)
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)


def test_what_was_agreed_is_kept_under_its_digest(tmp_path):
    memory = SiteMemory(tmp_path, "run", "ink")
    assert memory.context("ab12") is None
    memory.keep_context("ab12", Message({"style": torch.ones(2)}, {"k": 3}))
    found = SiteMemory(tmp_path, "run", "ink").context("ab12")
    assert found.scalars == {"k": 3}
    assert found.tensors["style"].tolist() == [1, 1]


def test_neither_run_nor_site_can_leave_the_cache_folder(subtests):
    for name in [*OUTSIDE, "a/b", "", ".hidden"]:
        with subtests.test(name=name):
            with pytest.raises(ClientError, match="run"):
                Request.read(Payload({"run": name}))
            for images in ({"images": "/x"}, {"program": "a:b"}):
                with pytest.raises(FeddgError, match="site: String should match"):
                    SiteConfig.read({"site": name, **images})


@pytest.fixture
def images(tmp_path):
    """``root/class/*`` with two images of dogs and one of a cat."""
    for path in ("dog/1.png", "dog/2.png", "cat/1.png"):
        file = tmp_path / "images" / path
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(numpy.full((20, 20, 3), 90, numpy.uint8)).save(file)
    return tmp_path / "images"


def test_a_folder_of_classes_becomes_one_domain_numbered_as_the_federation_does(images, tmp_path):
    chosen = Experiment(data={"source": "folder", "image_size": 16})
    table, pixels = load_pixels(str(images), "clinic", chosen, tmp_path / "cache")
    assert (table.class_names, table.domain_names) == (("cat", "dog"), ("clinic",))
    assert pixels.gather(torch.arange(3)).shape == (3, 3, 16, 16)
    found = positions(table, ["ant", "cat", "dog"], ["home", "clinic"])
    assert found.labels.tolist() == [1, 2, 2]
    assert found.domains.tolist() == [1, 1, 1]
    with pytest.raises(DataError, match="class or domain 'cat' is not among"):
        positions(table, ["ant", "dog"], ["clinic"])
    with pytest.raises(DataError, match="No images were found"):
        load_pixels(str(images / "dog"), "clinic", chosen, tmp_path / "cache")


def test_that_bit_depths_stay_at_the_site_is_said(tmp_path):
    pytest.importorskip("tifffile", reason="reading 16 bits is an extra")
    for name in ("cat/1.png", "dog/2.png"):
        (tmp_path / name).parent.mkdir()
        Image.fromarray(numpy.full((8, 8), 4000, numpy.uint16)).save(tmp_path / name)
    table = from_class_folders(tmp_path, "ward")
    for values, times in (("full", 0), ("auto", 1)):
        data = {"source": "folder", "image_size": 8, "range": values}
        depths = survey(table, Reading(values)).depths
        found = [d.text for d in check_depths(depths, Experiment(data=data))]
        assert len(found) == times
        assert all("use 12 bits" in text for text in found)


def test_copies_of_an_image_are_not_trained_on_under_an_epsilon_for_one(images, tmp_path, caplog):
    """As in one process; the coordinator is not told which they are, the site's own log is."""
    pytest.importorskip("dp_accounting", reason="differential privacy is an extra")
    node = {"site": "ward", "images": str(images), "domain": "ward", "cache": str(tmp_path)}
    data = {"source": "folder", "root": images, "image_size": 16, "id_val": 0, "id_test": 0}

    def site(**more):
        chosen = Experiment(**{"data": data, "privacy": {"record_epsilon": 1.0}} | more)
        return site_of(node, {"experiment": chosen.to_yaml()})

    with pytest.raises(ClientError, match="holds an image more than once") as refused:
        site()._require_single()
    assert ".png" not in str(refused.value)
    assert "3 files are 1 image" in caplog.text
    site(privacy={})._require_single()
    for duplicates in ("warn", "ignore"):
        warned = site(data=data | {"duplicates": duplicates})
        warned._require_single()
        found = copies_in(warned.table, warned.experiment, tmp_path)
        assert (found.severity, found.code) == ("warning", "copies-weaken-epsilon")


def test_a_site_s_device_is_that_of_its_own_config(images, tmp_path):
    node = {"site": "ward", "images": str(images), "domain": "ward", "cache": str(tmp_path)}
    data = {"source": "folder", "root": images, "image_size": 16, "id_val": 0, "id_test": 0}
    text = Experiment(data=data, device="cuda").to_yaml()
    assert site_of(node, {"experiment": text}).experiment.device == "auto"
    assert site_of({**node, "device": "cpu"}, {"experiment": text}).experiment.device == "cpu"
    with pytest.raises(ExperimentError, match="no 'experiment'; write the app with"):
        site_of(node, {})


def test_a_node_config_names_what_is_wrong():
    assert SiteConfig.read({"site": "a", "images": "/x", "partition-id": 3}).domain is None
    with pytest.raises(FeddgError, match="give either images or program"):
        SiteConfig.read({"site": "a"})


def test_the_written_app_holds_the_experiment_and_readable_start_lines(tmp_path):
    sites = ["ink", "north-2"]
    chosen = Experiment(name='a "quoted" \\ name', **_without_data(sites))
    write_app(tmp_path / "app", chosen, sites, address="10.1.2.3:8443", out=tmp_path / "r")
    project = tomllib.loads((tmp_path / "app/pyproject.toml").read_text())
    config = project["tool"]["flwr"]["app"]["config"]
    assert read_experiment(config) == chosen
    assert Deployment.read(config).sites == tuple(sites)
    assert (tmp_path / "app/LICENSE").is_file()
    start = (tmp_path / "app/START.md").read_text()
    assert "feddg deploy register . north-2 north-2.pub" in start
    assert "--superlink 10.1.2.3:8443 --root-certificates ca.crt --trusted-entities" in start
    script = (tmp_path / "app/make_keys.sh").read_text()
    assert "subjectAltName=DNS:localhost,IP:127.0.0.1,IP:10.1.2.3" in script
    subprocess.run(["sh", "-n", tmp_path / "app/make_keys.sh"], check=True)
    with pytest.raises(ExperimentError, match="exists already"):
        write_app(tmp_path / "app", chosen, sites)


def test_sites_do_not_learn_where_the_coordinators_own_images_lie(tmp_path):
    sites = ["ink", "north-2"]
    fields = merge(_without_data(sites), {"data": {"source": "folder", "root": "/home/me/secret"}})
    write_app(tmp_path / "app", Experiment(**fields), sites)
    texts = [f.read_text() for f in (tmp_path / "app").rglob("*") if f.is_file()]
    assert texts
    assert not any("/home/me/secret" in text for text in texts)


def test_an_app_has_as_many_clients_as_sites(tmp_path):
    sites = ["ink", "north-2"]
    write_app(tmp_path / "app", Experiment(data="digits", clients={"number": 7}), sites)
    config = tomllib.loads((tmp_path / "app/pyproject.toml").read_text())["tool"]["flwr"]["app"]
    assert read_experiment(config["config"]).clients.number == len(sites)


def _without_data(sites):
    fields = deployment_fields(sites)
    return {"clients": fields["clients"]} | {"data": {"source": "digits", **fields["data"]}}


def test_names_that_do_not_work_are_refused(subtests, tmp_path_factory):
    for sites, address, words in [
        (["a b"], "h:1", "letters, digits"),
        ([], "h:1", "at least one site"),
        (["a", "a"], "h:1", "each site once"),
        (["a"], "host", "HOST:PORT"),
        (["a"], "h';rm:1", "HOST:PORT"),
        (["a"], "host:70000", "HOST:PORT"),
    ]:
        with subtests.test(sites=sites, address=address, words=words):
            tmp_path = tmp_path_factory.mktemp("case")
            with pytest.raises(ExperimentError, match=words):
                write_app(tmp_path / "app", Experiment(data="digits"), sites, address=address)


def test_domains_that_are_left_out_are_not_opened_at_a_site(images, tmp_path):
    (tmp_path / "both").mkdir()
    for domain in ("ward", "attic"):
        shutil.copytree(images, tmp_path / "both" / domain)
    data = {"source": "folder", "leave_out": ["Attic", "cellar"]}
    table = list_images(str(tmp_path / "both"), None, Experiment(data=data).data)
    assert table.domain_names == ("ward",)
    assert len(table) == 3


def test_what_sites_cannot_do_is_said_before_round_1(tmp_path):
    own = {"data": {"source": "digits", "id_val": 0, "id_test": 0}}
    none_aside, all_images = "sites have no validation images", "leave data.split_file out"
    for more, words in (
        ({"evaluate": {"decision": "3"}}, none_aside),
        ({"train": {"select_every": 2}}, none_aside),
        ({"server": {"wise_ft": "auto"}, "model": {"weights": "imagenet"}}, none_aside),
        ({"data": {**own["data"], "split_file": "split.csv"}}, all_images),
    ):
        with pytest.raises(ExperimentError, match=words):
            write_app(tmp_path / "a", Experiment(**{**own, **more}), ["one"], address="here:9000")
