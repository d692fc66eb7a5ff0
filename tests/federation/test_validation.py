"""Messages against their declared forms, changes against those before, and rounds tried again."""

import math
from typing import ClassVar

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as some

from feddg.errors import ClientError, NotEnoughUpdates
from feddg.federation.validation import CHANGES, ChangeSizes, MessageChecks, layout_fault
from feddg.messages import (
    EntrySchema,
    Message,
    Refusal,
    SchemaContext,
    Update,
    plain_text,
)
from feddg.methods.base import FoundOut, Method, Round, State
from feddg.methods.composition import build_method
from feddg.settings import ExperimentSettings, ServerSettings
from federations import federation, same

EXPECTED = {"w": torch.zeros(2, 2), "n": torch.tensor(0)}


def weights(without=(), **change):
    found = {"w": torch.zeros(2, 2), "n": torch.tensor(4)} | change
    return {name: tensor for name, tensor in found.items() if name not in without}


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        (weights(without=["w"]), "lack ['w']"),
        (weights(x=torch.zeros(1)), "unknown ['x']"),
        (weights(w=torch.zeros(2, 3)), "'w' is (2, 3)"),
        (weights(w=torch.zeros(2, 2).double()), "float64"),
        (weights(w=torch.full((2, 2), math.nan)), "'w' is not finite"),
        (weights(w=torch.tensor([[math.inf, -math.inf], [0, 0]])), "'w' is not finite"),
    ],
)
def test_bad_weights_are_named(bad, words):
    assert words in (fault_of(bad) or "")


def fault_of(found):
    """What is wrong with weights where nobody limits how far they may move."""
    return layout_fault(found, EXPECTED) or refusal(None, State(EXPECTED), Update(0, 1, found))


def refusal(times, state, *updates):
    """Why the last of a round's updates is refused, or None."""
    sizes, round = ChangeSizes(times), Round(state.round + 1, [], state)
    for update in updates:
        try:
            sizes.received(update, round)
        except ClientError as error:
            return str(error)
    return None


def test_good_weights_pass_even_when_their_sum_overflows():
    assert fault_of(weights()) is None
    assert fault_of(weights(w=torch.full((2, 2), 3e38))) is None


# Declared forms

KNOWN = SchemaContext(
    classes=3, clients=4, features=5, image_size=16, shapes={"a": torch.Size([2, 2])}
)


class Talkative(Method):
    """Sends one of each form."""

    name: ClassVar[str] = "talkative"
    sends: ClassVar = Method.sends | {
        "update/fixed": EntrySchema("two by features", (2, "features")),
        "update/held": EntrySchema("one row each", ("held", 3)),
        "update/ids": EntrySchema("their classes", ("held",), torch.int64, low=0, high="classes"),
        "update/entries/*": EntrySchema("like weights", entry_of="entries/"),
        "update/count": EntrySchema("a whole number", integer=True, low=0, high=9),
        "update/rarely": EntrySchema("only if asked", when=lambda method: False),
    }


def extras(without=(), scalars=None, **change):
    tensors = {
        "fixed": torch.zeros(2, 5),
        "held": torch.zeros(7, 3),
        "ids": torch.zeros(7, dtype=torch.int64),
        "entries/a": torch.zeros(2, 2),
    } | change
    kept = {name: tensor for name, tensor in tensors.items() if name not in without}
    return Message(kept, {"count": 3} if scalars is None else scalars)


@pytest.fixture
def checks():
    found = MessageChecks(Talkative(), federation().network, 4, ExperimentSettings())
    found._context = KNOWN
    return found


def test_what_fits_passes(checks):
    assert checks.message_fault("update", extras()) is None


def test_what_does_not_fit_is_named(subtests, checks):
    for message, words in [
        (extras(without=["fixed"]), "lacks 'fixed'"),
        (extras(scalars={}), "lacks 'count'"),
        (extras(more=torch.zeros(1)), "undeclared entry 'more'"),
        (extras(rarely=torch.zeros(1)), "undeclared entry 'rarely'"),
        (extras(scalars={"count": 3, "more": 1}), "undeclared entry 'more'"),
        (extras(fixed=torch.zeros(2, 6)), "(2, 6), expected (2, features)"),
        (extras(fixed=torch.zeros(10)), "(10)"),
        (extras(fixed=torch.zeros(2, 5).half()), "is float16, expected float32"),
        (extras(fixed=torch.full((2, 5), math.nan)), "not finite"),
        (extras(held=torch.zeros(0, 3), ids=torch.zeros(0, dtype=torch.int64)), "(0, 3)"),
        (extras(ids=torch.zeros(6, dtype=torch.int64)), "'ids' has shape (6)"),
        (extras(ids=torch.full((7,), 3)), "outside 0 .. 2"),
        (extras(ids=torch.full((7,), -1)), "outside 0 .. 2"),
        (extras(**{"entries/a": torch.zeros(4)}), "'entries/a'"),
        (extras(**{"entries/b": torch.zeros(2, 2)}), "'entries/b'"),
        (extras(scalars={"count": 3.0}), "whole number"),
        (extras(scalars={"count": True}), "expected a number"),
        (extras(scalars={"count": "3"}), "expected a number"),
        (extras(scalars={"count": 10}), "outside 0 .. 9"),
        (extras(scalars={"count": torch.zeros(())}), "must be a number"),
        (extras(scalars={"count": 3, "fixed": 2}), "must be a tensor"),
    ]:
        with subtests.test(words=words):
            if any(isinstance(value, torch.Tensor) for value in message.scalars.values()):
                message = Message({**message.tensors, "count": torch.zeros(())}, {})
            fault = checks.message_fault("update", message)
            assert words in (fault or "")


@pytest.mark.parametrize("count", [0, -3, 2.5, True, "10", 10**30])
def test_the_number_of_examples_is_what_was_registered(count):
    small = federation()
    checks = MessageChecks(small.method, small.network, 3, small.settings, registered={1: 10})
    sound = {name: tensor.clone() for name, tensor in small.server.state.weights.items()}
    assert checks.update_fault(Update(1, 10, sound), small.server.state) is None
    assert "examples" in checks.update_fault(Update(1, count, sound), small.server.state)


def test_every_method_that_sends_more_declares_its_forms(subtests):
    for name in ["pardon", "ccst", "elcfs", "fpl", "copa", "scaffold", "feddg-ga", "afl"]:
        with subtests.test(name=name):
            more = {
                k: form for k, form in build_method(name, {}).sends.items() if k not in Method.sends
            }
            assert more
            assert all(
                form.shape is not None or form.entry_of or form.integer for form in more.values()
            )


@given(some.text(max_size=600))
def test_plain_text_is_one_harmless_line(text):
    found = plain_text(text, 100)
    assert len(found) <= 100
    assert found.isprintable()


# How far clients move the weights


def moved(client, by):
    return Update(client, 1, {"w": torch.full((4,), by), "n": torch.tensor(1)})


def known(*medians):
    extras = {CHANGES: torch.tensor(medians, dtype=torch.float64)} if medians else {}
    return State({"w": torch.zeros(4), "n": torch.tensor(1)}, extras)


def remembered(before, *updates, refused=(), heads=0):
    """What a round remembers of its changes."""
    sizes, round = ChangeSizes(100.0, heads), Round(1, [], before)
    for update in updates:
        sizes.received(update, round)
    for client in refused:
        sizes.refused(Refusal(client, "for another reason"), round)
    return sizes.completed(before.next(), round).extras.get(CHANGES)


def test_what_is_held_against_nothing_is_not_remembered():
    """Under noise the lengths would be numbers without any, in a checkpoint that may be read."""
    sizes, before = ChangeSizes(None), known(3.0)
    round = Round(1, [], before)
    sizes.received(moved(0, 1.0), round)
    assert CHANGES not in sizes.completed(before.next(), round).extras


def test_the_median_of_a_rounds_changes_is_remembered():
    updates = [moved(client, by) for client, by in enumerate((1.0, 2.0, 3.0))]
    assert remembered(known(), *updates).tolist() == [4.0]
    assert remembered(known(7.0), *updates).tolist() == [7.0, 4.0]
    assert remembered(known(*range(1, 21)), *updates).tolist() == [*range(2, 21), 4.0]


def test_what_was_refused_or_moved_nothing_is_not_remembered():
    updates = [moved(client, by) for client, by in enumerate((1.0, 0.0, 1.1))]
    assert remembered(known(), *updates, refused=[2]).tolist() == [2.0]
    assert remembered(known(5.0), moved(0, 0.0)).tolist() == [5.0]


def test_after_rounds_of_the_heads_alone_changes_are_measured_anew():
    assert remembered(known(5.0), moved(0, 1.0), heads=1) is None


def test_one_far_beyond_the_last_rounds_is_refused_at_once():
    state = known(4.0, 4.0, 5.0)
    assert refusal(10.0, state, moved(0, 20.0)) is None
    assert "more than 10 times the median change" in refusal(10.0, state, moved(1, 20.1))


def test_in_the_first_round_it_must_not_be_absurd():
    state = known()  # of weights 0 long: the limit is 1e4 times 1
    assert refusal(10.0, state, moved(0, 5e3)) is None
    assert "more than training can (1e+04)" in refusal(10.0, state, moved(0, 5.1e3))


def test_what_is_absurd_at_first_names_the_learning_rate():
    def refused(state, update):
        with pytest.raises(ClientError) as error:
            ChangeSizes(10.0, lr=100.0).received(update, Round(state.round + 1, [], state))
        return str(error.value)

    assert refused(known(), moved(0, 5.1e3)).endswith("(1e+04); lower train.lr (now 100)")
    assert refused(known(), moved(0, math.nan)).endswith("infinite); lower train.lr (now 100)")
    assert "train.lr" not in refused(known(4.0), moved(0, 5.1e3))


def found_out(before, *lengths):
    """Whom a round of such changes is done again without."""
    sizes, round = ChangeSizes(10.0), Round(1, [], before)
    updates = (sizes.received(moved(*one), round) for one in enumerate(lengths))
    try:
        list(sizes.collected(updates, round))
    except FoundOut as error:
        return [found.client for found in error.refusals]
    return []


def test_in_the_first_round_one_far_beyond_the_others_is_found_when_all_are_in():
    assert found_out(known(), 1.0, 30.0, 1.0, 1.0, 40.0) == [1, 4]
    assert found_out(known(), 30.0, 1.0, 1.0) == [0]
    assert found_out(known(20.0), 30.0, 1.0, 1.0) == []  # held against that already


def test_two_alone_accuse_nobody_nor_do_clients_that_move_nothing():
    assert found_out(known(), 1.0, 30.0) == []
    assert found_out(known(), 0.0, 0.0, 0.0, 1.0) == []


def test_none_means_no_limit():
    for state in (known(), known(1.0)):
        assert refusal(None, state, moved(0, 1e30)) is None


def test_a_mean_that_cannot_be_taken_apart_may_move_a_tenth_as_far():
    mean = Update(0, 4, moved(0, 2.1).weights, members=(0, 1, 2))
    assert "more than 1 times the median change" in refusal(10.0, known(4.0), mean)


# Rounds that are tried again


class Fragile(Method):
    """Its server chokes on what client 1 sends."""

    fault: Exception = KeyError("no such class")

    def aggregate(self, state, updates):
        def watched():
            for update in updates:
                if update.client == 1:
                    raise self.fault
                yield update

        return super().aggregate(state, watched())


def test_a_hook_that_fails_on_a_message_refuses_its_client_and_the_round_goes_on():
    small, calm = federation(Fragile()), federation()
    row = small.server.round()
    calm.server.sample = lambda round, attempt=0: [0, 2]
    calm.server.round()
    assert same(small.server.state.weights, calm.server.state.weights)
    assert [refusal.client for refusal in row.refused] == [1]
    assert "cannot be worked with (KeyError)" in row.refused[0].reason


@pytest.mark.parametrize("fault", [torch.OutOfMemoryError("2 GiB"), MemoryError()])
def test_no_client_is_left_out_because_the_server_has_too_little_memory(fault):
    small = federation(Fragile())
    small.method.fault = fault
    with pytest.raises(type(fault)):
        small.server.round()


def test_nobody_is_left_out_for_an_error_that_is_due_to_nobody():
    class Broken(Method):
        def aggregate(self, state, updates):
            list(updates)
            raise KeyError("a fault of its own")

    small = federation(Broken())
    with pytest.raises(KeyError, match="of its own"):
        small.server.round()
    assert not [row for row in small.ledger if row["kind"] == "refusal"]


def test_a_round_without_good_updates_leaves_the_state_as_it_was():
    small = federation(Fragile(), sizes=(5, 5), server_settings=ServerSettings(min_updates=2))
    state = small.server.state
    with pytest.raises(NotEnoughUpdates, match=r"0 good updates of 1.*min_updates is 2"):
        small.server.round()
    assert small.server.state is state
    assert state.round == 0


def test_the_medians_are_remembered_in_the_state():
    small = federation()
    small.run(2)
    assert len(small.server.state.extras["server/changes"]) == 2
