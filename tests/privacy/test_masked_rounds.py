"""Lies under secure aggregation: of one site, and of the coordinator, whom the sites do not trust.

A round goes on without the site that lied, or ends with a line that names nobody who did not. And
whatever a coordinator tries, no update of a client follows from the sums it can open.
"""

import json
import shutil
from dataclasses import replace

import numpy
import pytest
import torch

from feddg.api import run
from feddg.deploy.site import SiteMemory
from feddg.errors import ClientError, NotEnoughUpdates, RunError
from feddg.experiment import Experiment
from feddg.federation.inprocess import InProcess
from feddg.messages import Message, Refusal, Update
from feddg.privacy import secure_aggregation as masking
from feddg.privacy.secure_aggregation import (
    CHECK,
    KEYS,
    MASKED,
    SHARES,
    UNMASK,
    SecureAggregation,
    unmasked,
)
from feddg.settings import ServerSettings, TrainSettings
from federations import federation, same

# Sites that lie

SIZES = (7, 5, 6, 4, 8)
TRAIN = TrainSettings(rounds=2, batch_size=4, local_steps=1)
LIAR = 2
HONEST = [id for id in range(len(SIZES)) if id != LIAR]


class Lied:
    """Five clients, of whom one has its replies changed.

    Attributes:
        survivors: of whom each try asked to unmask the sum.
        told: (round, client, reason) of every refusal in the ledger.
    """

    def __init__(self, sizes=SIZES, server=None, **options):
        self.small = federation(
            sizes=sizes,
            train=TRAIN,
            defences=(("secure_aggregation", {}),),
            freeze=True,
            server_settings=server or ServerSettings(),
            **options,
        )
        self.inner = self.small.transport
        self.inner.registered = dict(enumerate(sizes))
        self.survivors = []
        self.changes = {}
        ask, train = self.inner.ask, self.inner.train

        def asked(clients, broadcast, name, question):
            if name == UNMASK:
                self.survivors.append(question.tensors["survivors"].tolist())
            for id, reply in ask(clients, broadcast, name, question):
                if isinstance(reply, Message):
                    reply = self.changed(id, name, reply)
                yield id, reply

        def trained(clients, broadcast):
            for reply in train(clients, broadcast):
                if isinstance(reply, Update):
                    reply = self.changed(reply.client, "train", reply)
                yield reply

        self.inner.ask, self.inner.train = asked, trained

    def changed(self, id, step, reply):
        change = self.changes.get((id, step))
        return reply if change is None else change(reply)

    @property
    def told(self):
        rows = [row for row in self.small.ledger if row["kind"] == "refusal"]
        return [(row["round"], row["client"], row["reason"]) for row in rows]


def entry(name, make):
    """Changes a tensor of a message."""

    def change(reply):
        reply.tensors[name] = make(reply.tensors[name].clone())
        return reply

    return change


def vector(make):
    """Changes a masked update."""

    def change(update):
        masked = make(update.extras.tensors[MASKED].clone())
        return replace(update, extras=Message({**update.extras.tensors, MASKED: masked}))

    return change


def rows_changed(rows):
    def make(tensor):
        tensor[rows] ^= 1
        return tensor

    return make


LOW_ORDER = torch.tensor([1] + [0] * 31, dtype=torch.uint8)

LEFT_OUT = {
    "a zero public key": (KEYS, entry("keys", lambda keys: keys * 0), "sent one public key twice"),
    "one zero public key": (
        KEYS,
        entry("keys", lambda keys: torch.stack([keys[0] * 0, keys[1]])),
        "an invalid public key",
    ),
    "a point of low order": (
        KEYS,
        entry("keys", lambda keys: torch.stack([keys[0], LOW_ORDER])),
        "an invalid public key",
    ),
    "two identical public keys": (
        KEYS,
        entry("keys", lambda keys: keys[[0, 0]]),
        "sent one public key twice",
    ),
    "three public keys": (KEYS, entry("keys", lambda keys: keys[[0, 1, 1]]), "another form"),
    "public keys that are numbers": (KEYS, entry("keys", lambda keys: keys.long()), "another form"),
    "shares that open for nobody": (
        SHARES,
        entry("shares", lambda shares: shares ^ 1),
        "its shares and those of clients 0, 1, 3, 4 do not fit",
    ),
    "shares of noise": (
        SHARES,
        entry("shares", lambda shares: torch.randint_like(shares, 256)),
        "do not fit",
    ),
    "shares that do not open for two": (
        SHARES,
        entry("shares", rows_changed([0, 1])),
        "its shares and those of clients 0, 1 do not fit",
    ),
    "shares for one client too few": (
        SHARES,
        entry("shares", lambda shares: shares[:-1]),
        "another form",
    ),
    "commitments to other shares": (
        SHARES,
        entry("commitments", lambda proofs: proofs ^ 1),
        "do not fit",
    ),
    "a complaint about everybody": (
        CHECK,
        entry("held", lambda held: held & False),
        "its shares and those of clients 0, 1, 3, 4 do not fit",
    ),
    "no complaint and no consent": (CHECK, entry("held", lambda held: held[:0]), "another form"),
    "a masked vector that is too long": (
        "train",
        vector(lambda masked: torch.cat([masked, masked])),
        "another form",
    ),
    "a masked vector that is too short": ("train", vector(lambda masked: masked[1:]), "form"),
    "a masked vector of real numbers": ("train", vector(lambda masked: masked.double()), "form"),
    "a claim of 10^6 more images": (
        "train",
        lambda update: replace(update, examples=update.examples + 10**6),
        "reports 1000006 examples, but registered with 6",
    ),
    "weights beside the mask": (
        "train",
        lambda update: replace(update, weights={"a": torch.zeros(1)}),
        "not masked",
    ),
    "a text beside the mask": (
        "train",
        lambda update: replace(update, extras=Message(update.extras.tensors, {"more": "text"})),
        "something else than was asked for",
    ),
}
"""Step, lie, and what is said of the site: it is found out before its update counts."""

STAYS_IN = {
    "other shares opened than it was given": (
        UNMASK,
        entry("opened", lambda rows: rows ^ 1),
        "opened other shares of clients 0, 1, 2, 3, 4 than it was given",
    ),
    "one other share opened": (
        UNMASK,
        entry("opened", rows_changed([1])),
        "opened other shares of clients 1 than it was given",
    ),
    "too many shares opened": (UNMASK, entry("opened", lambda r: torch.cat([r, r])), "form"),
    "a wrong commitment to its seed": (
        SHARES,
        entry("commitment", lambda proof: proof ^ 1),
        "shared another secret than it committed itself to",
    ),
}
"""The same, found out when its update is in the sum already, which it does not spoil."""


def plain_round(without=()):
    plain = federation(sizes=SIZES, train=TRAIN, freeze=True)
    plain.server.sample = lambda round, attempt=0: [
        id for id in range(len(SIZES)) if id not in without
    ]
    plain.server.round()
    return plain.server.state.weights


def close(found, expected):
    for name, tensor in expected.items():
        if tensor.is_floating_point():
            torch.testing.assert_close(found[name], tensor, rtol=1e-5, atol=2**-25)


def test_a_round_goes_on_without_the_site_that_lied(subtests):
    for name in [*LEFT_OUT, *STAYS_IN]:
        with subtests.test(name=name):
            step, change, words = {**LEFT_OUT, **STAYS_IN}[name]
            lied = Lied()
            lied.changes[LIAR, step] = change
            lied.small.server.round()
            assert [client for _, client, _ in lied.told] == [LIAR]
            assert words in lied.told[0][2]
            assert len(lied.survivors) == 1
            assert (LIAR in lied.survivors[0]) == (name in STAYS_IN)
            close(lied.small.server.state.weights, plain_round([LIAR] if name in LEFT_OUT else []))


def test_two_sites_with_one_key_are_both_left_out():
    lied, sent = Lied(), {}

    def note(reply):
        sent["keys"] = reply.tensors["keys"]
        return reply

    lied.changes[LIAR, KEYS] = note
    lied.changes[3, KEYS] = entry("keys", lambda keys: sent["keys"])
    lied.small.server.round()
    assert {client for _, client, _ in lied.told} == {2, 3}
    assert all("another client sent, too" in reason for _, _, reason in lied.told)


def test_a_share_that_one_client_alone_cannot_open_spoils_nothing():
    lied = Lied()
    lied.changes[LIAR, SHARES] = entry("shares", rows_changed([0]))
    lied.small.server.round()
    assert lied.told == []
    close(lied.small.server.state.weights, plain_round())


def test_with_nobody_to_spare_two_at_odds_are_both_named_and_nobody_else():
    lied = Lied(sizes=SIZES[:3])
    lied.changes[LIAR, SHARES] = entry("shares", rows_changed([0]))
    with pytest.raises(NotEnoughUpdates, match="needs 3 clients, and 1 are left"):
        lied.small.server.round()
    assert {client for _, client, _ in lied.told} == {0, LIAR}
    assert all("which of the two is wrong cannot be told" in reason for *_, reason in lied.told)
    assert lied.survivors == []  # nothing was opened


def other_secret(monkeypatch, which):
    """Has the liar share another secret than the one it uses; all that it says of it fits."""
    split, calls = masking.split, []

    def lying(secret, threshold, holders):
        calls.append(secret)  # a client splits its key, then its seed
        client, what = divmod((len(calls) - 1) % 10, 2)
        wrong = client == LIAR and what == which and len(calls) <= 10
        return split(masking.new_secret() if wrong else secret, threshold, holders)

    monkeypatch.setattr(masking, "split", lying)


def test_another_seed_shared_is_told_and_the_same_clients_are_asked_again(monkeypatch):
    lied = Lied()
    other_secret(monkeypatch, which=1)
    lied.small.server.round()  # the second time it did not lie
    assert lied.survivors == [[0, 1, 2, 3, 4]] * 2
    assert {client for _, client, _ in lied.told} == {LIAR}
    close(lied.small.server.state.weights, plain_round())


def test_another_key_shared_by_one_that_leaves_costs_one_try(monkeypatch, caplog):
    lied = Lied()
    other_secret(monkeypatch, which=0)
    lied.changes[LIAR, "train"] = vector(lambda masked: masked[1:])
    lied.small.server.round()
    assert lied.survivors == [HONEST] * 2
    assert "clients 2 shared another secret" in caplog.text
    assert {client for _, client, _ in lied.told} == {LIAR}
    close(lied.small.server.state.weights, plain_round([LIAR]))


def spike(values):
    values[0] += (1000 * 2**26) * SIZES[LIAR]
    return values


def count(values):
    values[-1] += 10**6
    return values


def far(values):
    values[:-1] += (5 * 2**26) * sum(SIZES)
    return values


UNTOLD = {
    "noise in place of a mask": (
        lambda values: torch.randint_like(values, -(2**62), 2**62),
        "does not count their images",
    ),
    "a count of 10^6 more under the mask": (count, "does not count their images"),
    "a count of nothing": (lambda v: v * 0, "does not count their images"),
    "1000 more on one weight, in round 2": (
        spike,
        "it moved the weights by .*10 times the median change of the last rounds",
    ),
    "5 more on every weight of the mean, in round 2": (
        far,
        "it moved the weights by .*10 times the median change of the last rounds",
    ),
}


@pytest.mark.parametrize("name", UNTOLD)
def test_a_lie_within_the_sum_is_refused_and_nobody_is_named(name):
    change, words = UNTOLD[name]
    lied = Lied()
    rounds = int("round 2" in name)
    for _ in range(rounds):
        lied.small.server.round()
    before = {n: t.clone() for n, t in lied.small.server.state.weights.items()}
    lied.changes[LIAR, "train"] = vector(change)
    lied.survivors.clear()
    with pytest.raises(NotEnoughUpdates, match=words) as raised:
        lied.small.server.round()
    line = str(raised.value)
    assert "clients 0, 1, 2, 3, 4" in line
    assert "cannot be told" in line
    assert "\n" not in line
    assert lied.told == []
    assert same(lied.small.server.state.weights, before)
    assert lied.survivors == [[0, 1, 2, 3, 4]] * 2  # tried again, with the very same clients


def test_beside_clipping_a_longer_change_is_refused_and_nobody_is_named():
    lied = Lied(privacy={"clipping": "fixed", "clipping_norm": 0.5})

    def longer(values):
        values[:1000] += 2**26
        return values

    lied.changes[LIAR, "train"] = vector(longer)
    with pytest.raises(NotEnoughUpdates, match=r"the norm is 0\.5; whose"):
        lied.small.server.round()
    assert lied.told == []


def test_a_negative_variance_of_the_mean_is_refused_and_nobody_is_named():
    """Within what a mean may move: a network on it would predict nothing."""
    lied = Lied()
    at, names = 0, sorted(lied.small.server.state.weights)
    for name in names:
        if name.endswith("running_var"):
            break
        at += lied.small.server.state.weights[name].numel()

    def lower(values):
        values[at] -= 40 * 2**26
        return values

    lied.changes[LIAR, "train"] = vector(lower)
    with pytest.raises(NotEnoughUpdates, match=r"running_var' holds -"):
        lied.small.server.round()
    assert lied.told == []


def test_nothing_is_opened_that_would_not_be_used():
    lied = Lied(server=ServerSettings(min_updates=5))
    lied.changes[LIAR, "train"] = vector(lambda masked: masked[1:])
    with pytest.raises(NotEnoughUpdates, match="needs 5 clients, and 4 are left"):
        lied.small.server.round()
    assert lied.survivors == []


# A coordinator that lies


class Sites:
    """Clients as they are at their sites, and a coordinator that asks them whatever it likes.

    Every message meets what is on disk, as over Flower.

    Attributes:
        opened: the sets whose sums it could open, by round.
        refused: what sites said.
    """

    def __init__(self, folder, count, run="run"):
        self.defence, self.folder, self.count, self.run = SecureAggregation(), folder, count, run
        self.opened, self.refused = {}, []

    def memory(self, site):
        return SiteMemory(self.folder / f"site-{site}", self.run, "site")

    def at(self, site, round, work):
        """Has a site work on a message; None if it refuses."""
        memory = self.memory(site)
        secrets = memory.secrets(round)
        try:
            reply = work(secrets)
        except ClientError as error:
            self.refused.append(str(error))
            return None
        memory.keep_secrets(secrets)
        return reply

    def ask(self, ids, round, step, question, calls=None):
        said = {}
        for id in ids:
            number = (calls or {}).get(id, id)
            said[id] = self.at(
                id,
                round,
                lambda s, number=number: self.defence.answer(number, round, step, question, s),
            )
        return {id: reply for id, reply in said.items() if reply is not None}

    def begin(self, ids, round, calls=None):
        """Keys, shares and masked updates of a try, of whoever takes part."""
        keys = self.ask(ids, round, KEYS, Message(), calls)
        ids = sorted(keys)
        if len(ids) < 3:
            return None
        public = torch.stack([keys[id].tensors["keys"] for id in ids])
        numbers = [(calls or {}).get(id, id) for id in ids]
        told = Message({"ids": torch.tensor(numbers), "keys": public})
        shared = self.ask(ids, round, SHARES, told, calls)
        members = sorted(shared)
        if len(members) < self.defence.needed(len(ids)):
            return None
        said = [(calls or {}).get(id, id) for id in members]
        table = {
            n: torch.stack([shared[id].tensors[n] for id in members])
            for n in ("shares", "commitments")
        }
        question = Message({"members": torch.tensor(said), **table})
        self.ask(members, round, CHECK, question, calls)
        heard, received = Message({"members": torch.tensor(said)}), {"a": torch.zeros(self.count)}
        sent = {}
        for id in members:
            # Its update has a 1 at the site's own place: a sum shows whose it is.
            weights = {"a": torch.eye(self.count)[id]}
            update = Update((calls or {}).get(id, id), 1, weights)
            sent[id] = self.at(
                id, round, lambda s, u=update: self.defence.mask(u, received, heard, s)
            )
        return {"ids": ids, "public": public, "members": members, "sent": sent}

    def unmask(self, begun, round, survivors, asked=None, calls=None):
        """Asks for shares; keeps a sum that they open, as what it really is."""
        if begun is None or any(begun["sent"].get(id) is None for id in survivors):
            return
        numbers = [(calls or {}).get(id, id) for id in survivors]
        question = Message({"survivors": torch.tensor(numbers)})
        replies = self.ask(survivors if asked is None else asked, round, UNMASK, question, calls)
        needed = self.defence.needed(len(begun["ids"]))
        if len(replies) < needed:
            return
        secrets = {
            other: masking.combined(
                {
                    begun["ids"].index(id): bytes(reply.tensors["opened"][row].tolist())
                    for id, reply in replies.items()
                },
                needed,
            )
            for row, other in enumerate(begun["members"])
        }
        lost = [(id, secrets[id]) for id in begun["members"] if id not in survivors]
        public = {id: bytes(begun["public"][k, 0].tolist()) for k, id in enumerate(begun["ids"])}
        sums = [begun["sent"][id].extras.tensors[MASKED].numpy().view("u8") for id in survivors]
        total = unmasked(
            sums, [secrets[id] for id in survivors], lost, [(id, public[id]) for id in survivors]
        )
        found = total.view(numpy.int64)[:-1] / 2.0**26
        assert set(numpy.flatnonzero(found)) == set(survivors)
        self.opened.setdefault(round, []).append(found)

    def attempt(self, ids, survivors, round=1, asked=None, calls=None):
        self.unmask(self.begin(ids, round, calls), round, survivors, asked, calls)


def derivable(sums, count):
    """Clients whose single update is a combination of sums: unit vectors in their span."""
    rows = numpy.array(sums).reshape(-1, count)
    rank = numpy.linalg.matrix_rank(rows) if len(rows) else 0
    return [
        id
        for id in range(count)
        if numpy.linalg.matrix_rank(numpy.vstack([rows, numpy.eye(count)[id]])) == rank
    ]


def most_sums(sums, count):
    """In how many different sums the client is that is in most."""
    different = numpy.unique(numpy.array(sums).reshape(-1, count), axis=0)
    return int(different.sum(0).max()) if len(different) else 0


SEVEN = range(7)
TRIES = {
    "two sets and their union with one more": [
        {"ids": [0, 1, 2], "survivors": [0, 1, 2]},
        {"ids": [3, 4, 5], "survivors": [3, 4, 5]},
        {"ids": [*SEVEN], "survivors": [*SEVEN]},
    ],
    "one client less": [
        {"ids": SEVEN, "survivors": [*SEVEN]},
        {"ids": SEVEN, "survivors": [0, 1, 2, 3, 4, 5]},
    ],
    "one client more": [
        {"ids": SEVEN, "survivors": [0, 1, 2, 3, 4, 5]},
        {"ids": SEVEN, "survivors": [*SEVEN]},
    ],
    "one exchanged": [
        {"ids": SEVEN, "survivors": [0, 1, 2, 3, 4, 5]},
        {"ids": SEVEN, "survivors": [0, 1, 2, 3, 4, 6]},
    ],
    "three less at a time": [
        {"ids": range(9), "survivors": [*range(9)]},
        {"ids": range(6), "survivors": [*range(6)]},
        {"ids": range(3, 9), "survivors": [*range(3, 9)]},
        {"ids": [0, 1, 2, 6, 7], "survivors": [0, 1, 2, 6, 7]},
    ],
    "clients kept from hearing what was opened": [
        {"ids": [0, 1, 2, 6], "survivors": [0, 1, 2, 6], "asked": [0, 1, 2]},
        {"ids": [3, 4, 5, 6], "survivors": [3, 4, 5, 6], "asked": [3, 4, 5]},
        {"ids": [0, 1, 2], "survivors": [0, 1, 2]},
    ],
    "the same set among others": [
        {"ids": [0, 1, 2, 6], "survivors": [0, 1, 2]},
        {"ids": [0, 1, 2, 3, 4, 6], "survivors": [0, 1, 2, 3, 6], "asked": [0, 1, 3, 6]},
    ],
    "a round that was done before, after the next": [
        {"ids": SEVEN, "survivors": [*SEVEN]},
        {"ids": SEVEN, "survivors": [*SEVEN], "round": 2},
        {"ids": SEVEN, "survivors": [0, 1, 2, 3, 4, 5]},
    ],
    "another run of the same experiment": [
        {"ids": SEVEN, "survivors": [*SEVEN]},
        {"ids": SEVEN, "survivors": [0, 1, 2, 3, 4, 5], "run": "another"},
    ],
    "other numbers for the same clients": [
        {"ids": [0, 1, 2, 3, 4], "survivors": [0, 1, 2, 3, 4]},
        {
            "ids": [0, 1, 2, 3, 5],
            "survivors": [0, 1, 2, 3, 5],
            "calls": {0: 1, 1: 0, 2: 2, 3: 3, 5: 4},
        },
    ],
}


@pytest.mark.parametrize("name", TRIES)
def test_no_tries_of_a_round_give_a_single_update_away(tmp_path, name):
    count = 1 + max(max(attempt["ids"]) for attempt in TRIES[name])
    sites = Sites(tmp_path, count)
    for attempt in TRIES[name]:
        sites.run = attempt.get("run", "run")
        sites.attempt(**{k: v for k, v in attempt.items() if k != "run"})
    assert sites.opened  # the first try is an honest one
    for sums in sites.opened.values():
        assert derivable(sums, count) == []
        assert most_sums(sums, count) == 1
    assert sites.refused


def test_the_argument_finds_what_could_be_opened_before():
    ones = numpy.ones
    sums = [[*ones(3), 0, 0, 0, 0], [0, 0, 0, *ones(3), 0], ones(7)]
    assert derivable(sums, 7) == [6]
    assert derivable(sums[:2], 7) == []


def test_the_same_clients_may_be_unmasked_again_and_the_next_round_by_others(tmp_path):
    sites = Sites(tmp_path, 7)
    for round, survivors in ((1, [*SEVEN]), (1, [*SEVEN]), (2, [0, 1, 2, 3, 4]), (3, [*SEVEN])):
        sites.attempt(SEVEN, survivors, round)
    assert {round: len(sums) for round, sums in sites.opened.items()} == {1: 2, 2: 1, 3: 1}
    assert sites.refused == []


def test_a_try_that_lost_a_client_before_it_was_opened_is_done_again(tmp_path):
    sites = Sites(tmp_path, 7)
    sites.begin(SEVEN, 1)  # updates left, and nothing was opened
    sites.attempt([0, 1, 2, 3, 4, 5], [0, 1, 2, 3, 4, 5])
    assert len(sites.opened[1]) == 1
    assert sites.refused == []


def test_two_stories_about_who_is_left_open_neither_sum(tmp_path):
    sites = Sites(tmp_path, 7)
    begun = sites.begin(SEVEN, 1)
    sites.unmask(begun, 1, [*SEVEN], asked=[0, 1, 2, 6])
    sites.unmask(begun, 1, [0, 1, 2, 3, 4, 5], asked=[3, 4, 5])
    assert sites.opened == {}


def test_an_answer_is_given_once_and_of_the_last_try_only(tmp_path):
    sites = Sites(tmp_path, 4)
    first = sites.begin(range(4), 1)
    sites.begin([0, 1, 2], 1)  # these three made new secrets and masked again
    sites.unmask(first, 1, [0, 1, 2, 3])
    assert sites.opened == {}
    again = sites.begin(range(4), 1)
    sites.unmask(again, 1, [0, 1, 2, 3])
    sites.unmask(again, 1, [0, 1, 2, 3])
    assert len(sites.opened[1]) == 1


@pytest.mark.parametrize("survivors", [[0, 1], [0, 1, 1, 2], [0, 1, 2, 9], [1, 2, 3]])
def test_too_few_strange_or_other_survivors_are_not_unmasked(tmp_path, survivors):
    sites = Sites(tmp_path, 4)
    sites.begin(range(4), 1)
    question = Message({"survivors": torch.tensor(survivors)})
    assert sites.ask([0], 1, UNMASK, question) == {}


@pytest.mark.parametrize("members", [[0, 1], [0, 1, 2, 9], [0, 1, 1, 2], [1, 2, 3]])
def test_an_update_is_not_masked_among_too_few_or_strangers(tmp_path, members):
    defence, secrets = SecureAggregation(), {id: {} for id in range(4)}
    keys = [defence.answer(id, 1, KEYS, Message(), secrets[id]).tensors["keys"] for id in secrets]
    told = Message({"ids": torch.arange(4), "keys": torch.stack(keys)})
    replies = [defence.answer(id, 1, SHARES, told, secrets[id]).tensors for id in secrets]
    table = {n: torch.stack([r[n] for r in replies]) for n in ("shares", "commitments")}
    defence.answer(0, 1, CHECK, Message({"members": torch.arange(4), **table}), secrets[0])
    update, received = Update(0, 1, {"a": torch.ones(2)}), {"a": torch.zeros(2)}
    with pytest.raises(ClientError, match="or names strangers"):
        defence.mask(update, received, Message({"members": torch.tensor(members)}), secrets[0])


def test_what_was_opened_outlives_a_site_and_its_damage_is_said(tmp_path):
    sites = Sites(tmp_path, 4)
    sites.attempt(range(4), [0, 1, 2, 3])
    (file,) = (tmp_path / "site-0").rglob("opened_sums.safetensors")
    assert file.stat().st_mode & 0o077 == 0
    assert "run" not in file.parts
    file.write_bytes(b"damaged")
    with pytest.raises(RunError, match=r"is damaged.*another seed"):
        sites.memory(0).secrets(1)


# Restarts of the coordinator

EXPERIMENT = Experiment(
    data={"source": "digits", "image_size": 8, "id_val": 0.0, "id_test": 0.0},
    hold_out="sketch",
    clients={"number": 4, "partition": "iid"},
    model={"backbone": "cnn_gn", "weights": None, "normalization": "frozen"},
    train={"rounds": 1, "local_steps": 1, "batch_size": 8},
    defences=["secure_aggregation"],
    device="cpu",
    precision="float32",
)


def test_what_was_opened_is_on_disk_before_and_holds_after_a_restart(tmp_path, monkeypatch):
    folder, ask, train = tmp_path / EXPERIMENT.label, InProcess.ask, InProcess.train

    def killed(self, clients, broadcast, name, question):
        if name == UNMASK:
            rows = (folder / "opened_sums.jsonl").read_text().splitlines()
            assert [json.loads(row) for row in rows] == [{"round": 1, "clients": [0, 1, 2, 3]}]
            raise KeyboardInterrupt
        return ask(self, clients, broadcast, name, question)

    def loses_one(self, clients, broadcast):
        return train(self, [id for id in clients if id != 3], broadcast)

    def again():
        return run(EXPERIMENT, tmp_path, cache=tmp_path / "cache", report=False)

    monkeypatch.setattr(InProcess, "ask", killed)
    with pytest.raises(KeyboardInterrupt):
        again()
    monkeypatch.setattr(InProcess, "ask", ask)
    monkeypatch.setattr(InProcess, "train", loses_one)
    with pytest.raises(NotEnoughUpdates, match=r"opened before.* and clients 3 make it another"):
        again()
    monkeypatch.setattr(InProcess, "train", train)
    assert again().folder == folder
    assert len((folder / "opened_sums.jsonl").read_text().splitlines()) == 1


def test_a_round_that_was_opened_is_of_the_same_clients_whatever_is_drawn():
    small = Lied(per_round=3).small
    other = next(c for c in ([0, 1, 2], [2, 3, 4]) if c != small.server.sample(1))
    server = small.server
    server.defences.masking.opened = {1: other}
    server.carrier = server.defences.carrier(small.transport, 1)
    row = server.round()
    assert row.clients == other
    assert server.sample(1, attempt=1) == other


@pytest.mark.parametrize("changed", [{}, {"evaluate": {"pictures": False}}])
def test_sites_hold_a_coordinator_that_forgot_to_what_they_opened(tmp_path, changed):
    """Be it that another run trains the very same updates, with other settings for its report."""
    pytest.importorskip("flwr", reason="Flower is an optional extra")
    from flower_grid import Deployment

    sites = {"ink": "ink", "chalk": "chalk", "photo": "photo", "pen": "ink"}
    chosen = EXPERIMENT.model_copy(
        update={"clients": EXPERIMENT.clients.model_copy(update={"partition": "domain"})}
    )

    class FourSites(Deployment):
        def __init__(self, experiment=chosen):
            super().__init__(tmp_path, experiment, **{"min-sites": 3})
            self.config["sites"] = ",".join(sites)
            self.nodes = {
                name: {"images": f"digits:{of}", "cache": str(tmp_path / name), "device": "cpu"}
                for name, of in sites.items()
            }
            self.grid = type(self.grid)(self.nodes, self.grid.app, self.config)

    first = FourSites()
    first.start()
    forgetful = FourSites(Experiment(**chosen.model_dump() | changed))
    shutil.rmtree(first.path)
    forgetful.grid.offline = {"pen"}
    with pytest.raises(NotEnoughUpdates, match="needs 3 clients, and 0 are left") as raised:
        forgetful.start()
    assert "\n" not in str(raised.value)
    assert "before, for clients 0, 1, 2, 3" in str(raised.value)


def test_who_is_away_from_the_start_is_lost_as_well():
    """With seven of ten away at the first step, no sum of three is opened."""
    small = Lied(sizes=(5,) * 10).small
    ask, opened = small.transport.ask, []

    def asked(clients, broadcast, name, question):
        opened.extend([name] * (name == UNMASK))
        for id, reply in ask(clients, broadcast, name, question):
            yield id, Refusal(id, "is away") if name == KEYS and id >= 3 else reply

    small.transport.ask = asked
    with pytest.raises(NotEnoughUpdates, match="needs 7 clients, and 3 are left"):
        small.server.round()
    assert opened == []


def test_a_round_is_tried_again_with_the_clients_that_masked_their_updates():
    small = Lied(sizes=(5,) * 10, per_round=5).small
    train, tried = small.transport.train, []

    def lost_once(clients, broadcast):
        tried.append(clients)
        for place, reply in enumerate(train(clients, broadcast)):
            lost = len(tried) == 1 and place < 2
            yield Refusal(reply.client, "lost") if lost else reply

    small.transport.train = lost_once
    assert small.server.sample(1) != small.server.sample(1, 1)
    row = small.server.round()
    assert tried[0] == tried[1] == row.clients
