"""Sites whose own program says what is trained: segmentation over Flower's grid."""

import functools
import os
import urllib.request
from pathlib import Path
from typing import ClassVar

import pytest

pytest.importorskip("flwr", reason="Flower is an optional extra")

import torch
from safetensors.torch import load_file
from torch import nn
from torch.utils.data import Dataset

import discs
import feddg
from discs import SEGMENT, Discs, SmallUNet
from feddg.deploy.server_app import transport_to_programs
from feddg.deploy.transport import Policy
from feddg.diagnostics import collected
from feddg.errors import ExperimentError, RunError
from feddg.models.backbones import own_state
from federations import same
from flower_grid import LocalGrid, public_key
from loopback import BIN, Processes, free_port

SEEDS = {"oslo": 0, "lyon": 1, "graz": 5}
FIELDS = {"lr": 0.01, "batch_size": 6, "averaging": "none", "precision": "float32", "rounds": 2}
CASES = [
    ("fedavg", {}),
    ("ccst", {}),
    ("scaffold", {}),
    ("fedavg", {"defences": ["median"]}),
    ("fedavg", {"normalization": "frozen", "defences": ["secure_aggregation"]}),
]


class Program:
    """What stands in the program of coordinator and sites: all but the images is the same."""

    method, fields = CASES[0]

    @classmethod
    def federation(cls, data, **more):
        given = FIELDS | cls.fields | more
        return feddg.Federation(data, SmallUNet(), cls.method, task=SEGMENT, **given)


def oslo():
    return Program.federation([Discs(SEEDS["oslo"])], number=3)


def lyon():
    return Program.federation([Discs(SEEDS["lyon"])], number=3)


def graz():
    return Program.federation([Discs(SEEDS["graz"])], number=3)


def two_data_sets():
    return Program.federation([Discs(3), Discs(4)], number=3)


def no_federation():
    return SmallUNet()


def grid(folder, **changed):
    nodes = {
        site: {"program": f"{__name__}:{changed.get(site, site)}", "cache": str(folder / site)}
        for site in SEEDS
    }
    return LocalGrid(nodes)


POLICY = Policy(3, wait=0.01, poll=0.001)


def over(nodes, run="run-1"):
    """The coordinator's federation, which knows shapes from images of its own."""
    transport = transport_to_programs(nodes, list(SEEDS), run, POLICY)
    return Program.federation([Discs(9, count=2)], transport=transport)


@pytest.mark.parametrize(("method", "fields"), CASES)
def test_a_segmentation_over_flower_has_the_bits_of_one_in_memory(
    tmp_path, monkeypatch, method, fields
):
    monkeypatch.setattr(Program, "method", method)
    monkeypatch.setattr(Program, "fields", fields)
    here = Program.federation([Discs(seed) for seed in SEEDS.values()]).fit(2)
    there = over(grid(tmp_path)).fit(2)
    assert same(there.server.state.weights, here.server.state.weights)
    assert there.server.state.round == 2
    if method != "fedbn":  # every site has its own
        assert there.evaluate(Discs(2)).mean == here.evaluate(Discs(2)).mean


def test_a_name_belongs_to_the_first_key_that_used_it(tmp_path, caplog):
    nodes = grid(tmp_path)
    (lyon,) = (id for id, name in nodes.nodes.items() if name == "lyon")
    program = {"program": f"{__name__}:graz", "cache": str(tmp_path / "another")}
    nodes.connect("lyon", program, public_key("somebody else"))
    there = over(nodes)
    assert there.transport.registry.node_of[1] == lyon
    assert "but the name belongs to the key SHA256" in caplog.text


class OfTwo(Discs):
    domains: ClassVar = ["dark", "light"] * 6


@pytest.mark.parametrize(
    ("sites", "severity"), [((), "warning"), (("oslo",), "note"), (SEEDS, None)]
)
def test_the_coordinator_says_which_sites_have_nothing_to_compare(
    tmp_path, monkeypatch, sites, severity
):
    """By what they registered; its own images only show shapes, and a site sees itself alone."""
    monkeypatch.setattr(Program, "method", "mixup")
    for site in SEEDS:
        kind = OfTwo if site in sites else Discs
        make = functools.partial(Program.federation, [kind(SEEDS[site])], number=3)
        monkeypatch.setitem(globals(), site, make)
    with collected() as said:
        over(grid(tmp_path))
    found = [one for one in said if one.code == "one-domain-clients"]
    assert [one.severity for one in found] == ([severity] if severity else [])
    assert all("2 of 3 clients" in one.text for one in found if severity == "note")


def test_a_private_segmentation_runs_over_flower(tmp_path, monkeypatch):
    """Without the bits of another: nobody but the site knows its noise."""
    private = {"normalization": "frozen", "privacy": {"record_epsilon": 8.0}}
    monkeypatch.setattr(Program, "fields", private)
    there = over(grid(tmp_path)).fit(2)
    assert there.server.state.round == 2
    assert 0 <= there.evaluate(Discs(2)).mean <= 1


NOISED = {"record_epsilon": 8.0}
AT_CLIENTS = {"epsilon": 8.0, "noised_at": "client", "clipping": "fixed"}
NO_PRIVACY = {"privacy": None}


@pytest.mark.parametrize(
    ("fields", "other", "words"),
    [
        ({"privacy": NOISED}, NO_PRIVACY, "counts on noised_records"),
        ({"privacy": NOISED}, {"rounds": 9}, "its noise is not what the coordinator accounts for"),
        ({"privacy": NOISED, "rounds": 4}, {"local_epochs": 2, "rounds": 2}, "'epochs': 2"),
        ({"privacy": AT_CLIENTS}, NO_PRIVACY, "counts on clipping"),
        ({"privacy": AT_CLIENTS}, {"rounds": 9}, "its noise is not what the coordinator accounts"),
    ],
)
def test_a_program_with_other_noise_than_the_coordinator_accounts_for_sends_nothing(
    tmp_path, monkeypatch, fields, other, words
):
    monkeypatch.setattr(Program, "fields", {"normalization": "frozen", **fields})
    make = functools.partial(Program.federation, [Discs(SEEDS["graz"])], number=3, **other)
    monkeypatch.setitem(globals(), "graz", make)
    there = over(grid(tmp_path))
    (refused,) = there.server.round().refused
    assert refused.client == list(SEEDS).index("graz")
    assert words in refused.reason


def test_a_coordinator_that_was_stopped_goes_on(tmp_path, monkeypatch):
    monkeypatch.setattr(Program, "method", "scaffold")  # sites remember
    here = Program.federation([Discs(seed) for seed in SEEDS.values()]).fit(2)
    nodes = grid(tmp_path)
    first = over(nodes).fit(1)
    second = over(nodes).resume(first.server.state, {})
    second.transport.hand_out(first.server.state.context)
    assert same(second.fit(1).server.state.weights, here.server.state.weights)


class Colours(Dataset):
    """Images of one colour each, whose classes are numbered as ``ImageFolder`` would."""

    every: ClassVar = {"blue": 2, "green": 1, "red": 0, "white": slice(None)}

    def __init__(self, *classes):
        self.classes = list(classes)

    def __len__(self):
        return 4 * len(self.classes)

    def __getitem__(self, index):
        label = index % len(self.classes)
        image = torch.full((3, 8, 8), 0.02 * (index // len(self.classes)))
        image[self.every[self.classes[label].lower()]] += 0.9
        return image, label


class Classes:
    """What stands in the program of sites with classes; some lack one."""

    sites: ClassVar = {
        "oslo": ["green", "red"],
        "lyon": ["blue", "green", "white"],
        "graz": ["blue", "red"],
    }

    @classmethod
    def federation(cls, data, **more):
        torch.manual_seed(0)
        net = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(3, 4))
        given = {**FIELDS, "lr": 0.5, "optimizer": "sgd", **more}
        return feddg.Federation(data, net, **given)


def classes_of_oslo():
    return Classes.federation([Colours(*Classes.sites["oslo"])], number=3)


def classes_of_lyon():
    return Classes.federation([Colours(*Classes.sites["lyon"])], number=3)


def classes_of_graz():
    return Classes.federation([Colours(*Classes.sites["graz"])], number=3)


def nodes_with_classes(folder):
    return grid(folder, **{site: f"classes_of_{site}" for site in SEEDS})


@pytest.mark.parametrize("names", [None, ["white", "red", "green", "blue"]])
def test_sites_that_lack_classes_are_joined_by_name(tmp_path, names):
    said = {} if names is None else {"class_names": names}
    here = Classes.federation([Colours(*own) for own in Classes.sites.values()], **said).fit(20)
    transport = transport_to_programs(nodes_with_classes(tmp_path), list(SEEDS), "run-1", POLICY)
    there = Classes.federation([Colours("red", "white")], transport=transport, **said).fit(20)
    assert there.class_names == here.class_names == tuple(names or Colours.every)
    assert same(there.server.state.weights, here.server.state.weights)
    assert there.evaluate(Colours("green", "red", "white")).accuracy == 1.0


def test_sites_whose_classes_cannot_be_joined_are_refused(tmp_path, monkeypatch):
    nodes = nodes_with_classes(tmp_path)
    monkeypatch.setitem(Classes.sites, "graz", ["Red"])
    with pytest.raises(ExperimentError, match="site 'graz' has a class 'Red'"):
        transport_to_programs(nodes, list(SEEDS), "run-2", POLICY)
    monkeypatch.setitem(Classes.sites, "graz", ["blue", "red"])
    transport = transport_to_programs(nodes, list(SEEDS), "run-3", POLICY)
    said = ["white", "red", "green", "grey"]
    with pytest.raises(ExperimentError, match="'blue', which is none of the federation's"):
        Classes.federation([Colours("red")], transport=transport, class_names=said)


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ("no_federation", "must return a feddg.Federation"),
        ("not_there", "cannot be used: module"),
        ("two_data_sets", "has 2 data sets, and a site is one client"),
    ],
)
def test_a_program_that_makes_no_site_is_said_there(tmp_path, caplog, changed, words):
    with pytest.raises(RunError, match="missing: graz"):
        over(grid(tmp_path, graz=changed))
    assert words in caplog.text


def test_a_site_cannot_train_alone_for_all():
    with pytest.raises(ExperimentError, match="1 of 3 clients are here"):
        oslo().fit(1)


COORDINATOR = """
from pathlib import Path

from flwr.serverapp import ServerApp

import sites
from feddg.deploy.server_app import transport_to_programs

app = ServerApp()


@app.main()
def main(grid, context):
    transport = transport_to_programs(grid, ["oslo", "lyon"], "run-1", keys=None)
    sites.federation(9, transport=transport).fit(2).save(Path(context.run_config["out"]))
"""
SITES = f"""
import feddg
from discs import SEGMENT, Discs, SmallUNet


def federation(*seeds, **more):
    return feddg.Federation([*map(Discs, seeds)], SmallUNet(), task=SEGMENT, **{FIELDS}, **more)


def oslo():
    return federation(0, number=2)


def lyon():
    return federation(1, number=2)
"""
APP = """
[project]
name = "discs"
version = "1.0.0"
dependencies = []

[tool.flwr.app]
publisher = "sites"

[tool.flwr.app.components]
serverapp = "coordinator:app"
clientapp = "feddg.deploy.client_app:app"

[tool.flwr.app.config]
out = ""
"""


@pytest.mark.slow
def test_supernodes_run_the_programs_of_their_sites(tmp_path):
    """A real SuperLink with two SuperNodes; without TLS, which the deployment's own tests have."""
    app = tmp_path / "app"
    app.mkdir()
    (app / "pyproject.toml").write_text(APP)
    (app / "coordinator.py").write_text(COORDINATOR)
    (tmp_path / "sites.py").write_text(SITES)
    link = f"127.0.0.1:{free_port()}"
    (tmp_path / "config.toml").write_text(
        f'[superlink]\ndefault = "here"\n\n[superlink.here]\naddress = "{link}"\ninsecure = true\n'
    )
    paths = [tmp_path, Path(discs.__file__).parent]
    with Processes(tmp_path, app, tmp_path, PYTHONPATH=os.pathsep.join(map(str, paths))) as here:
        host, port = link.split(":")
        here.spawn(
            "superlink", BIN / "flower-superlink", "--insecure", "--host", host, "--port", port
        )
        here.await_link(lambda: urllib.request.urlopen(f"http://{link}/health"))
        for site in ("oslo", "lyon"):
            here.spawn(
                site, BIN / "flower-supernode", "--insecure", "--superlink", link,
                "--port", free_port(),
                "--node-config", f'site="{site}" program="sites:{site}" cache="{tmp_path / site}"',
            )  # fmt: skip
        out = tmp_path / "unet.safetensors"
        run = ("run", app, "here", "--run-config", f'out="{out}"', "--stream")
        here.call(BIN / "flwr", *run, timeout=600)
    expected = own_state(Program.federation([Discs(0), Discs(1)]).fit(2).model)
    assert same(load_file(out), expected)
