"""Sites that do not answer: what they cost the others, and how they come back."""

import logging
import math

import pytest

pytest.importorskip("flwr", reason="Flower is an optional extra")

from flwr.app import Error, Message

from feddg.deploy import transport
from feddg.deploy.transport import Policy
from feddg.errors import NotEnoughUpdates, RunError
from feddg.messages import Broadcast
from federations import same
from flower_grid import Deployment, experiment
from hostile_grid import HostileFederation, HostileGrid

REGISTER, TRAIN = "query.register", "train"
NEVER = math.inf


class Clock:
    """Time that passes by sleeping alone."""

    def __init__(self):
        self.now = 0.0

    def monotonic(self):
        return self.now

    time = monotonic

    def sleep(self, seconds):
        self.now += seconds

    def took(self, work):
        """Seconds that some work took, and what it returned."""
        before = self.now
        result = work()
        return self.now - before, result


@pytest.fixture(autouse=True)
def clock(monkeypatch):
    played = Clock()
    monkeypatch.setattr(transport, "time", played)
    SlowGrid.clock = played
    return played


class SlowGrid(HostileGrid):
    """Sites that take their time, or for ever, by site and kind of message; or die on it."""

    clock: Clock

    def __init__(self, *args):
        self.seconds, self.dies, self.offline = {}, set(), set()
        super().__init__(*args)
        self.ready = {}
        self.delivered = []

    def get_node_ids(self):
        return [node for node in super().get_node_ids() if node not in self.offline]

    def answered(self, message):
        node, kind = message.metadata.dst_node_id, message.metadata.message_type
        seconds = self.seconds.get((node - 100, kind), 0)
        self.delivered.append((node - 100, kind))
        if (node - 100, kind) in self.dies:
            self.offline.add(node)
            seconds = NEVER
        if seconds == NEVER:
            return None
        self.ready[message.metadata.message_id] = self.clock.now + seconds
        return super().answered(message)

    def pull_messages(self, ids):
        here, ids = self.get_node_ids(), list(ids)
        asked = {id: self.sent[int(id.removeprefix("message-"))] for id in ids}
        lost = [message for message in asked.values() if message.metadata.dst_node_id not in here]
        errors = [Message(Error(4, "Node Unavailable"), reply_to=message) for message in lost]
        ready = [id for id in ids if self.ready.get(id, NEVER) <= self.clock.now]
        return [*errors, *super().pull_messages(ready)]


def federation(minimum=1, **more):
    policy = Policy(minimum=minimum, wait=300, deadline=3600, poll=0.5)
    return HostileFederation(grid=SlowGrid, policy=policy, **more)


def said(caplog, words):
    return [r.getMessage() for r in caplog.records if words in r.getMessage()]


@pytest.mark.parametrize("silent", [{0}, {0, 2}])
def test_silent_at_the_start_costs_wait_seconds_once(silent, clock, caplog):
    some = federation(minimum=2)
    for site in silent:
        some.grid.seconds[site, REGISTER] = NEVER
    seconds, server = clock.took(lambda: some.run(rounds=3))
    assert seconds < 300 + 30
    assert server.state.round == 3
    (line,) = said(caplog, "round 0 goes on without the sites")
    for site in silent:
        assert f"site-{site} (connected, but it has not registered)" in line
    assert some.grid.kinds.count(TRAIN) == 3 * (4 - len(silent))


def test_all_silent_at_the_start_is_one_line_and_no_round(clock):
    some = federation(minimum=2)
    some.grid.seconds = {(site, REGISTER): NEVER for site in range(4)}
    with pytest.raises(RunError, match=r"0 of 4 sites .* site-0 \(conn"):
        some.run()
    assert clock.now < 301


def test_a_site_that_introduces_itself_late_takes_part_from_then_on(clock):
    some = federation()
    some.grid.seconds = {(0, REGISTER): 400, (1, TRAIN): 150}
    server = some.run()  # 300 s and a round of 150 s
    assert 0 not in {row for site, row in some.grid.delivered if row == TRAIN and site == 0}
    assert len(server.round().clients) == 4
    assert (0, TRAIN) in some.grid.delivered
    assert some.grid.delivered.count((0, REGISTER)) == 1, "its late answer counts"


def test_one_that_never_says_who_it_is_is_asked_again_now_and_then(clock):
    some = federation()
    some.grid.seconds = {(0, REGISTER): NEVER}
    some.run()
    some.grid.seconds = {(0, REGISTER): 10}  # it was restarted, and its message is lost
    for _ in range(40):
        some.server.round()
        clock.sleep(100)
    assert some.grid.delivered.count((0, REGISTER)) == 2
    assert (0, TRAIN) in some.grid.delivered


def test_coming_back_silently_costs_nobody_any_time(clock):
    some = federation()
    server = some.run()
    some.grid.seconds[0, REGISTER] = NEVER
    for _ in range(3):
        some.grid.offline = {100}
        some.transport.registry.online(1)
        some.grid.offline = set()
        assert clock.took(server.round)[0] < 5
    assert some.grid.delivered[-4:] == [(site, TRAIN) for site in range(4)], "it still takes part"


def test_a_silent_site_costs_the_deadline_once(clock):
    some = federation()
    some.grid.seconds = {(0, TRAIN): NEVER, (1, TRAIN): 600}
    assert clock.took(lambda: some.run())[0] == pytest.approx(3600, abs=5)
    for _ in range(3):
        assert clock.took(some.server.round)[0] == pytest.approx(600, abs=5)
    reasons = [reason for _, reason in some.refusals]
    assert reasons[0] == "site-0: no reply within 3600 s"
    assert all("site-0: no reply yet" in said for said in reasons[1:])


def test_a_late_answer_is_taken_for_no_later_one_and_shows_that_the_site_is_there(clock):
    some = federation()
    some.grid.seconds = {(0, TRAIN): 3650}
    server = some.run()
    some.grid.seconds = {(0, TRAIN): 400, (1, TRAIN): 100}
    # Its answer of round 1 comes while round 2 waits for site 1: round 2 waits for its own, too.
    seconds, row = clock.took(server.round)
    assert seconds == pytest.approx(400, abs=5)
    assert len(row.clients) - len(row.refused) == 4
    plain = federation()
    plain.grid.seconds = {(0, TRAIN): 3650}
    plain.run()
    plain.grid.seconds = {}
    plain.grid.ready = {}  # the late answer never comes
    plain.server.round()
    assert same(server.state.weights, plain.server.state.weights)
    late = [row for row in some.rows if row.kind == "message" and row.purpose == "update, late"]
    assert [(row.round, row.client) for row in late] == [(1, 0)]


def test_a_site_slower_than_the_others_after_a_silence_is_not_refused_for_ever(clock):
    some = federation()
    some.grid.seconds = {(0, TRAIN): NEVER}
    server = some.run()
    some.grid.seconds = {(0, TRAIN): 300}
    refused = []
    for _ in range(5):
        refused.append(len(server.round().refused))
        clock.sleep(200)
    assert refused[0] == 1
    assert refused[-2:] == [0, 0]


def test_a_site_that_answers_now_and_then_cannot_have_everybody_wait_an_hour_each_time(clock):
    some = federation()
    costs = []
    for silent in (True, False, True, False, True):
        some.grid.seconds = {(0, TRAIN): NEVER if silent else 1}
        work = some.server.round if costs else some.run
        costs.append(clock.took(work)[0])
    assert costs[0] >= 3600
    assert max(costs[1:]) < 125


def test_all_sites_silent_in_a_round_fail_it_and_it_is_done_again_whole(clock):
    some = federation()
    some.grid.seconds = {(site, TRAIN): NEVER for site in range(4)}
    with pytest.raises(NotEnoughUpdates, match=r"0 good updates of 4.*site-0: no reply"):
        some.run()
    assert some.server.state.round == 0
    # Nobody else waits: all have their full time.
    some.grid.seconds = {(site, TRAIN): 3000 for site in range(4)}
    assert not some.server.round().refused


def test_a_site_that_dies_in_every_turn_costs_no_waiting(clock):
    some = federation(minimum=4)
    some.grid.dies = {(0, TRAIN)}
    costs = [clock.took(some.run)[0]]
    for _ in range(3):
        some.grid.offline = set()  # it is started again
        costs.append(clock.took(some.server.round)[0])
    assert max(costs) < 5
    assert {reason for _, reason in some.refusals} == {"site-0: Node Unavailable"}
    some.grid.dies, some.grid.offline = set(), set()
    assert not some.server.round().refused


def test_a_site_that_stays_away_is_waited_for_once(clock, caplog):
    some = federation(minimum=4)
    server = some.run()
    some.grid.offline = {100}
    costs = [clock.took(server.round)[0] for _ in range(3)]
    assert costs[0] == pytest.approx(300, abs=5)
    assert max(costs[1:]) < 5
    (line,) = said(caplog, "not connected within 300 s")
    assert "site-0" in line
    some.grid.offline = set()
    assert not server.round().refused
    some.grid.offline = {100}
    assert clock.took(server.round)[0] == pytest.approx(300, abs=5), "once more, after it was there"


def test_a_silent_evaluation_site_costs_the_deadline_once(clock):
    some = federation(evaluation_sites=("clinic",))
    some.small.sizes = (*some.small.sizes, 9)
    some.run()
    some.grid.seconds[4, "evaluate"] = NEVER
    broadcast = Broadcast(1, some.server.state.weights)
    costs = [clock.took(lambda: list(some.transport.evaluate(broadcast)))[0] for _ in range(3)]
    assert costs[0] == pytest.approx(3600, abs=5)
    assert max(costs[1:]) < 125


def test_nobody_takes_a_name_while_the_key_that_has_it_is_silent(clock):
    some = federation()
    some.grid.names = (*some.grid.names, "site-0")  # a second key was registered under the name
    some.small.sizes = (*some.small.sizes, 9)
    some.grid.seconds[0, REGISTER] = 1000
    some.run()
    assert (4, TRAIN) not in some.grid.delivered
    clock.sleep(1000)
    some.server.round()
    assert (0, TRAIN) in some.grid.delivered


def test_all_silent_ends_as_failed_and_the_same_line_goes_on(tmp_path, monkeypatch, caplog):
    """Over the whole apps, in real time: bounded waits of a hundredth of a second."""
    monkeypatch.undo()
    train = {"rounds": 1, "local_steps": 1, "batch_size": 16}
    deployment = Deployment(tmp_path, experiment(train=train), **{"round-deadline": 3600.0})
    deployment.grid.mute = {"ink", "chalk", "photo"}
    with pytest.raises(RunError, match="0 of 3 sites connected"), caplog.at_level(logging.INFO):
        deployment.start()
    deployment.grid.mute = {"photo"}
    deployment.config["min-sites"] = 2
    deployment.start()
    first, second = said(caplog, "without the sites that were not connected")
    assert "photo (connected, but" in first
    assert "s: photo (connected, but" in second
