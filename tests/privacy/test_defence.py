"""A new defence is one definition; every hook is called with what it promises."""

import pytest
import torch
from pydantic import Field

from feddg.api import run
from feddg.errors import ClientError, ExperimentError
from feddg.experiment import Experiment
from feddg.messages import EntrySchema
from feddg.privacy.defence import DEFENCES, Defence, register
from feddg.runs.reading import read_rows
from feddg.settings import Settings
from federations import federation


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
