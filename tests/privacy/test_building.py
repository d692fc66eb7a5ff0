"""Defences by name: a new one is one definition; order, memory, names and the experiment."""

import pytest
import yaml

from feddg.errors import ExperimentError
from feddg.experiment import Experiment
from feddg.federation.server import Hooks
from feddg.privacy.building import Defences
from feddg.privacy.defence import Defence, WeightNames
from federations import federation, same


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


def test_mistakes_name_the_field(subtests):
    for fields, words in [
        ({"defences": "medain"}, "did you mean 'median'"),
        (
            {"defences": [{"name": "krum", "bad_client": 2}]},
            r"unknown field 'bad_client' .did you mean 'bad_clients'",
        ),
        ({"defences": [{"name": "krum", "bad_clients": 0}]}, "defence krum: bad_clients: "),
        ({"defences": ["clipping"]}, "privacy: {clipping: fixed}"),
        ({"defences": 3}, "defences: .* valid dictionary .*got 3"),
        ({"defences": [{"settings": {}}]}, "defences: name: Field required"),
        ({"privacy": {"clippin": "fixed"}}, "did you mean 'clipping'"),
        ({"privacy": {"clipping": "soft"}}, "privacy.clipping"),
        ({"privacy": {"clipping_norm": 0}}, "privacy.clipping_norm"),
        ({"privacy": {"clipping": "fixed", "noise_multiplier": float("inf")}}, "noise_multiplier"),
    ]:
        with subtests.test(words=words), pytest.raises(ExperimentError, match=words):
            Experiment(**DIGITS, **fields)
