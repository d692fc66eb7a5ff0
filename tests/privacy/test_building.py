"""Defences by name: a new one is one definition; order, memory, names and the experiment."""

import pytest
import torch
import yaml
from pydantic import Field

from feddg.api import run
from feddg.errors import ClientError, ExperimentError
from feddg.experiment import Experiment
from feddg.federation.server import Hooks
from feddg.messages import EntrySchema
from feddg.privacy.building import Defences
from feddg.privacy.defence import DEFENCES, Defence, WeightNames, register
from feddg.runs.reading import read_rows
from feddg.settings import Settings
from federations import federation, same


class ToySettings(Settings):
    """Settings of the toy."""

    limit: int = Field(1000, description="largest number of images")


class Toy(Defence):
    """Halves every change, counts updates, and refuses clients with many images."""

    name = "toy"
    Settings = ToySettings

    @property
    def sends(self):
        return {"update/halved": EntrySchema("that it was halved", integer=True, low=1, high=1)}

    def initial_memory(self):
        return {"seen": torch.zeros((), dtype=torch.int64)}

    def broadcast(self, broadcast, round):
        return self.tell(broadcast, factor=0.5)

    def protect(self, update, received, told):
        for name in self.facts.aggregated:
            trained = update.weights[name]
            halved = received[name] + told.scalars["factor"] * (trained - received[name])
            update.weights = update.weights | {name: halved}
        return self.add(update, "halved", 1)

    def received(self, update, round):
        if update.examples > self.settings.limit:
            raise ClientError("too many images")
        assert update.extras.scalars["toy/halved"] == 1
        return update

    def collected(self, updates, round):
        for update in updates:
            round.scratch[self]["count"] = round.scratch[self].get("count", 0) + 1
            yield update

    def completed(self, state, round):
        seen = self.memory(state)["seen"] + round.scratch[self]["count"]
        self.remember(state, {"seen": seen})
        return state


@pytest.fixture
def toy():
    assert "median" in DEFENCES  # our own are found first
    register(Toy)
    yield
    del DEFENCES._found["toy"]


def test_a_new_defence_is_one_definition_and_runs(toy, tmp_path):
    fields = {"data": {"source": "digits", "image_size": 16}, "hold_out": "sketch"}
    fields |= {"clients": 3, "train": {"rounds": 2, "local_steps": 1}}
    chosen = Experiment(defences=[{"name": "toy", "limit": 5000}], **fields)
    assert chosen.defences[0].settings == {"limit": 5000}
    done = run(chosen, tmp_path, report=False, cache=tmp_path / "cache")
    layouts = [row for row in read_rows(done.folder / "ledger.jsonl") if row["kind"] == "layout"]
    assert {"toy/factor", "toy/halved"} <= {s for row in layouts for s in row["scalars"]}
    with pytest.raises(ExperimentError, match=r"unknown field 'limt' .*did you mean 'limit'"):
        Experiment(defences=[{"name": "toy", "limt": 1}], **fields)


def test_every_hook_is_called_with_what_it_promises(toy):
    plain, halved = federation(), federation(defences=(("toy", {}),))
    start = {name: t.clone() for name, t in plain.server.state.weights.items()}
    for small in (plain, halved):
        small.run(1)
    for name, tensor in halved.server.state.weights.items():
        if tensor.is_floating_point():
            expected = (start[name] + plain.server.state.weights[name]) / 2
            torch.testing.assert_close(tensor, expected, rtol=1e-4, atol=1e-6)
    assert halved.server.state.extras["defences/toy/seen"].item() == 3
    halved.server.round()
    assert halved.server.state.extras["defences/toy/seen"].item() == 6


def test_what_a_defence_refuses_is_refused_by_name(toy):
    record = federation(defences=(("toy", {"limit": 6}),)).server.round()
    assert [(r.client, r.reason) for r in record.refused] == [
        (0, "update refused: too many images")
    ]


class Noting(Defence):
    """Notes when it is called."""

    def __init__(self, name, calls):
        super().__init__()
        self.name, self.calls = name, calls

    def protect(self, update, received, told):
        self.calls.append(("protect", self.name))
        return update

    def received(self, update, round):
        self.calls.append(("received", self.name))
        return update


def test_the_server_undoes_in_the_other_order():
    calls = []
    defences = Defences([Noting("inner", calls), Noting("outer", calls)], WeightNames())
    small = federation(sizes=(5,))
    small.transport._defences = defences
    small.server.hooks = Hooks(reversed(defences.defences))
    small.server.round()
    assert calls == [
        ("protect", "inner"),
        ("protect", "outer"),
        ("received", "outer"),
        ("received", "inner"),
    ]


def test_no_defence_changes_nothing():
    assert same(federation().run(), federation(defences=()).run())


DIGITS = {"data": "digits", "hold_out": "sketch"}


def test_asking_for_no_defence_makes_no_other_experiment():
    plain = Experiment(**DIGITS).id
    assert Experiment(**DIGITS, defences=[], privacy={}).id == plain
    assert Experiment(**DIGITS, privacy={"clipping": "none"}).id == plain


def test_every_spelling_of_a_defence_is_one_experiment():
    short = Experiment(**DIGITS, defences="krum")
    for defences in (["krum"], {"name": "krum"}, [{"name": "krum", "bad_clients": 1}]):
        assert Experiment(**DIGITS, defences=defences).id == short.id
    assert Experiment(**yaml.safe_load(short.to_yaml())).id == short.id
    others = [
        Experiment(**DIGITS, defences=["norm_bounding", "median"]),
        Experiment(**DIGITS, defences=["median", "norm_bounding"]),
        Experiment(**DIGITS, privacy={"clipping": "fixed"}),
        Experiment(**DIGITS),
    ]
    assert len({experiment.id for experiment in (short, *others)}) == 5


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"defences": "medain"}, "did you mean 'median'"),
        (
            {"defences": [{"name": "krum", "bad_client": 2}]},
            r"unknown field 'bad_client' .did you mean 'bad_clients'",
        ),
        ({"defences": [{"name": "krum", "bad_clients": 0}]}, "defence krum: bad_clients: "),
        ({"defences": ["clipping"]}, "privacy: {clipping: fixed}"),
        ({"defences": 3}, "defences: write names"),
        ({"defences": [{"settings": {}}]}, "defences: write names"),
        ({"privacy": {"clippin": "fixed"}}, "did you mean 'clipping'"),
        ({"privacy": {"clipping": "soft"}}, "privacy.clipping"),
        ({"privacy": {"clipping_norm": 0}}, "privacy.clipping_norm"),
        ({"privacy": {"clipping": "fixed", "noise_multiplier": float("inf")}}, "noise_multiplier"),
    ],
)
def test_mistakes_name_the_field(fields, words):
    with pytest.raises(ExperimentError, match=words):
        Experiment(**DIGITS, **fields)
