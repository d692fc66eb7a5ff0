"""A real transport and server over sites of which some lie: what they send is changed."""

from collections.abc import Callable, Iterable
from typing import Any

from flwr.app import Message as Envelope
from flwr.app import RecordDict

from feddg.deploy.nodes import NodesHere
from feddg.deploy.transport import DeploymentFile, FlowerTransport, Policy
from feddg.deploy.wire import (
    ASK,
    REGISTER,
    STATISTICS,
    TRAIN,
    Payload,
    Registration,
    flower_bytes,
)
from feddg.federation.server import Phase, Server
from feddg.federation.transport import Ledger
from feddg.messages import Broadcast, Message
from federations import SmallFederation, federation

Change = Callable[[RecordDict], RecordDict]
"""What a hostile site makes of its reply."""


class HostileGrid(NodesHere):
    """Nodes that answer at once: honestly, or what ``change`` makes of it.

    Attributes:
        change: by site and kind of message, what becomes of the reply.
        kinds: of all messages sent.
        wire: (direction, bytes as Flower counts them) of all that crossed.
    """

    def __init__(self, small: SmallFederation, names: tuple[str, ...]) -> None:
        super().__init__({name: {} for name in names})
        self.small, self.names = small, names
        self.change: dict[tuple[int, str], Change] = {}
        self.wire: list[tuple[str, int]] = []

    @property
    def kinds(self) -> list[str]:
        return [message.metadata.message_type for message in self.sent]

    def answered(self, message: Envelope) -> Envelope | None:
        kind, site = message.metadata.message_type, message.metadata.dst_node_id - 100
        self.wire.append(("down", flower_bytes(message.content)))
        records = self._honest(kind, site, Payload.from_records(message.content)).to_records()
        change = self.change.get((site, kind), lambda honest: honest)
        return Envelope(change(records), reply_to=message)

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Envelope]:
        found = list(super().pull_messages(message_ids))
        self.wire += [("up", flower_bytes(envelope.content)) for envelope in found]
        return found

    def _honest(self, kind: str, site: int, asked: Payload) -> Payload:
        if kind == REGISTER:
            count = self.small.sizes[site]
            counts = {"classes": {"a": count}, "domains": {f"domain {site}": count}}
            registration = Registration(**counts).message
            return Payload({"site": self.names[site], "busy": 0.1}, {"registration": registration})
        there = self.small.transport
        if "context" in asked.parts:
            there.hand_out(asked.parts["context"], again=True)
        extras = asked.part("extras")
        round = int(asked.fields["round"])
        broadcast = Broadcast(round, asked.part("weights").tensors, extras)
        if kind == TRAIN:
            (reply,) = (Payload.of_update(update) for update in there.train([site], broadcast))
            return reply
        if kind == STATISTICS:
            replies = there.client_statistics([site], broadcast)
        else:
            assert kind == ASK, kind
            replies = there.ask([site], broadcast, str(asked.fields["question"]), extras)
        ((_, message),) = replies
        assert isinstance(message, Message), message
        return Payload(parts={"reply": message})


class HostileFederation:
    """Four sites, a transport and a server; ``lie`` makes a site hostile before ``run``."""

    def __init__(
        self,
        method: str = "fedavg",
        sites: int = 4,
        *,
        grid: type[HostileGrid] = HostileGrid,
        policy: Policy | None = None,
        evaluation_sites: tuple[str, ...] = (),
        **options: Any,
    ) -> None:
        sizes = tuple(4 + site for site in range(sites))
        self.small = federation(method, sizes=sizes, **options)
        names = tuple(f"site-{site}" for site in range(sites))
        self.grid = grid(self.small, (*names, *evaluation_sites))
        policy = policy or Policy(minimum=1, wait=0.01, deadline=5.0, poll=0.001)
        known = DeploymentFile(run="run-1", sites=list(names), classes=[], domains=[])
        self.transport = FlowerTransport(
            self.grid, known, policy, evaluation_sites=evaluation_sites
        )
        self.minimum = policy.minimum
        self.rows: list[Any] = []

    def lie(self, site: int, kind: str, change: Change) -> None:
        """Has ``change`` make of every reply of a kind what it likes."""
        self.grid.change[site, kind] = change

    def run(self, rounds: int = 1) -> Server:
        """Gathers the sites, sets up, runs rounds; returns the server."""
        small = self.small
        self.transport.gather(self.minimum)
        defences = small.built_defences(small.settings)
        phase = Phase(small.method, small.network, small.settings, defences)
        ledger = Ledger(self.rows.append)
        self.server = Server(phase, self.transport, small.server.state, ledger)
        self.server.setup()
        for _ in range(rounds):
            self.row = self.server.round()
        return self.server

    @property
    def refusals(self) -> list[tuple[int, str]]:
        """(client, reason) of every refusal in the ledger."""
        return [(row.client, row.reason) for row in self.rows if row.kind == "refusal"]
