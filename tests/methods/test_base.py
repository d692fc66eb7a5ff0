"""What every method must do besides what feddg.testing checks (testing/test_check_method.py)."""

import copy
import logging
import math
from fnmatch import fnmatchcase
from pathlib import Path
from typing import get_type_hints

import pytest
import torch

from feddg import Experiment, run
from feddg.errors import ExperimentError, RunError
from feddg.messages import Message, Update
from feddg.methods.base import Method, Round, State, has_global_model, methods
from feddg.methods.composition import method_class
from feddg.models.precision import autocast
from feddg.runs.folder import kept_weights
from feddg.runs.prepare import build as build_parts
from feddg.runs.table import FINAL
from feddg.settings import TrainSettings
from federations import SmallFederation, federation, same

NAMES = tuple(methods())


def test_no_number_of_a_method_is_infinite(subtests):
    """With an infinite weight the loss is infinite or NaN: the first round would say so."""
    for name, method in methods().items():
        numbers = [
            n for n, field in method.Settings.model_fields.items() if field.annotation is float
        ]
        for number in numbers:
            with subtests.test(f"{name}.{number}"), pytest.raises(ExperimentError, match=number):
                method(**{number: math.inf})


def build(name: str, **fields: object) -> SmallFederation:
    """A small federation of which two of four clients take part in a round."""
    wanted = method_class(name).presets.get("*", {}).get("train", {})
    train = TrainSettings(**{"rounds": 2, "batch_size": 4} | wanted)
    return federation(name, sizes=(6, 5, 4, 6), per_round=2, train=train, **fields)


def learned(
    small: SmallFederation,
    state: State | None = None,
    memories: dict | None = None,
    like: dict | None = None,
) -> dict[str, torch.Tensor]:
    """The global weights; or, where clients share none, their own models' by client.

    Clients of ``like`` that have trained nothing yet count with the weights they would start from.
    """
    state, memories = state or small.server.state, memories or small.transport.memories
    if has_global_model(small.method, small.network):
        return state.weights
    models = dict.fromkeys(like or (), state.weights) | memories
    return {f"{id}/{name}": t for id, model in models.items() for name, t in model.items()}


def sent(small: SmallFederation) -> set[str]:
    """Everything the ledger says left a client, as ``purpose/name``."""
    layouts = {row["id"]: row for row in small.ledger if row["kind"] == "layout"}
    up = [row for row in small.ledger if row.get("direction") == "up"]
    return {
        f"{row['purpose']}/{entry}"
        for row in up
        for entry in (
            *(tensor["name"] for tensor in layouts[row["layout"]]["tensors"]),
            *layouts[row["layout"]]["scalars"],
        )
    }


@pytest.mark.parametrize("name", NAMES)
def test_two_rounds(name, subtests):
    small = build(name)
    small.run(1)
    first, memories = copy.deepcopy((small.server.state, small.transport.memories))
    small.server.round()
    state = small.server.state
    assert state.round == 2
    assert all(hasattr(reply, "terms") for reply in small.replies), small.replies
    with subtests.test("finite weights that move, and predict"):
        for tensor in (*state.weights.values(), *state.extras.values()):
            assert torch.isfinite(tensor).all()
        assert not same(learned(small), learned(small, first, memories))
        predict = small.method.predictor(small.network).eval()
        with torch.no_grad():
            logits = predict(torch.rand(5, 3, 16, 16))
        assert logits.shape == (5, 3)
        assert torch.isfinite(logits).all()
    with subtests.test("the same weights where clients train at once"):
        again = build(name, at_once=2)
        again.run(2)
        assert same(again.server.state.weights, state.weights)
        assert same(again.server.state.extras, state.extras)
    with subtests.test("the ledger lists exactly what the class declares"):
        entries, schemas = sent(small), small.method.sends.items()
        declared = [d for d, schema in schemas if schema.when is None or schema.when(small.method)]
        assert not [e for e in entries if not any(fnmatchcase(e, d) for d in declared)]
        assert not [d for d in declared if not any(fnmatchcase(e, d) for e in entries)]
    with subtests.test("a round in bfloat16 moves as in float32"):
        mixed = build(name)
        mixed.worker.autocast = autocast("bfloat16", torch.device("cpu"))
        mixed.run(1)
        assert all(hasattr(reply, "terms") for reply in mixed.replies), mixed.replies
        untrained = learned(build(name), like=memories)
        names = [n for n, _ in small.network.named_parameters()]
        trained = [*names, *(f"{id}/{n}" for id in memories for n in names)]
        before, exact, rounded = (
            torch.cat([weights[n].flatten() for n in trained if n in weights])
            for weights in (untrained, learned(small, first, memories), learned(mixed))
        )
        moved, wanted = rounded - before, exact - before
        assert torch.cosine_similarity(moved, wanted, dim=0) > 0.5
    with subtests.test("a client without images is refused alone"):
        train = small.worker.train
        small = federation(name, train=train, sizes=(5, 0, 5))
        small.run(2)
        assert all(torch.isfinite(t).all() for t in small.server.state.weights.values())
        assert {reply.client for reply in small.replies if hasattr(reply, "reason")} == {1}


def test_every_method_is_described_and_its_settings_are_typed():
    for name in NAMES:
        method = method_class(name)
        assert "\n" not in method.summary, name
        assert all(method.sends.values()), name
        assert method.__doc__ != Method.__doc__, name
        assert get_type_hints(method)["settings"] is method.Settings, name


# A method in a package of its own is found through the entry point, and runs.


METHOD = '''
from feddg import Method


class Lazy(Method):
    """Keeps the weights as they are."""

    name = "lazy"
    summary = "trains nothing"

    def step(self, client, batch):
        client.note({"cross_entropy": self.loss(client, batch)["cross_entropy"]})
        client.steps += 1
'''


def test_a_third_party_method_needs_no_edit_of_feddg(
    tmp_path: Path, cache: Path, fresh: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    package = tmp_path / "site/lazy_package"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "lazy.py").write_text(METHOD)
    about = tmp_path / "site/lazy_package-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: lazy-package\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text(
        "[feddg.methods]\nlazy = lazy_package.lazy:Lazy\nbroken = no_such_module:Nothing\n"
    )
    fresh.syspath_prepend(tmp_path / "site")
    with caplog.at_level(logging.WARNING, logger="feddg"):
        assert method_class("lazy").__module__ == "lazy_package.lazy"
    assert "'broken'" in caplog.text
    train = {"rounds": 1, "local_epochs": 1, "batch_size": 64}
    data = {"source": "digits", "image_size": 8}
    experiment = Experiment(data=data, method="lazy", hold_out="sketch", train=train)
    done = run(experiment, tmp_path, cache=cache, report=False)
    weights, start = (
        kept_weights(done.folder, FINAL)[1],
        build_parts(experiment, 10)[1].state_dict(),
    )
    parameters = [name for name in start if "running" not in name and "num_batches" not in name]
    assert all(torch.equal(weights[name], start[name]) for name in parameters)


def test_the_mean_of_a_term_is_over_the_clients_that_have_it():
    round = Round(1, [0, 1, 2, 3], State({}))
    for client, examples, terms in [
        (0, 12, {"all": 1.0, "own": 0.0}),
        (1, 30, {"all": 2.0}),
        (2, 12, {"all": 3.0, "own": 1.0}),
        (3, 6, {"all": 4.0, "own": 4.0}),
    ]:
        round.add(Update(client, examples, {}, terms=terms))
    assert round.terms["own"] == pytest.approx((0 * 12 + 1 * 12 + 4 * 6) / 30)
    assert round.terms["all"] == pytest.approx((12 + 60 + 36 + 24) / 60)


@pytest.mark.parametrize("share", [math.nan, math.inf, 0.0, -1.0])
def test_a_share_that_is_none_ends_the_run_and_names_the_method(share):
    class Odd(Method):
        name = "odd"

        def share(self, state, update):
            return share if update.client == 1 else 1.0

    small = federation(Odd())
    with pytest.raises(RunError, match=f"method odd: the share of client 1 is {share:g}, and must"):
        small.run()


def test_a_setup_that_fails_says_why():
    class Undeclared(Method):
        name = "undeclared"
        setup = True

        def client_statistics(self, client):
            return Message({"mean": torch.zeros(3)})

    with pytest.raises(
        RunError, match=r"no client could send .*client 2: statistics refused: .*mean"
    ):
        federation(Undeclared()).server.setup()
