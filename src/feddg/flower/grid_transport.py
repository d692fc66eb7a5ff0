"""A transport over Flower's grid, under the same server loop as in-process.

Sites that are not connected, fail, or miss the deadline answer with a Refusal.
"""

import hashlib
import logging
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from flwr.app import ConfigRecord, RecordDict
from flwr.proto.node_pb2 import NodeInfo
from flwr.serverapp import Grid

from feddg.errors import RunError
from feddg.federation.transport import Ledger, Reply
from feddg.flower.exchange import AGREED, INTRODUCE, Exchange, Policy, Post, Recipient
from feddg.flower.identity import Identities
from feddg.flower.parcels import FIELDS, Parcel, arrays
from feddg.flower.replies import Introduction, read_update
from feddg.flower.roster import Roster
from feddg.flower.traffic import Traffic
from feddg.messages import Broadcast, Message, Refusal, Scalar, Update, Weights, on_device

log = logging.getLogger("feddg")

DESCRIBE, TRAIN, ASK, EVALUATE = "query.describe", "train", "query.ask", "evaluate"


@dataclass
class Stranger:
    """A connected node that was asked which site it is.

    Attributes:
        info: what Flower knows of it; None if it is gone.
        asked: when, by a clock that only runs forwards.
        reply: what it said, or why it cannot take part; None before that is known.
    """

    info: NodeInfo | None
    asked: float
    reply: Parcel | Refusal | None = None

    @property
    def name(self) -> str:
        """The name that its key was registered under, if it has one."""
        return self.info.name if self.info is not None else ""


class FlowerTransport:
    """Carries messages to sites by name; see :class:`feddg.federation.transport.Transport`.

    Args:
        grid: Flower's connection to the nodes.
        sites: names of all sites that train; a site's position is its client id.
        run: key under which sites keep their memory of this run.
        policy: patience.
        device: where the server computes.
        judges: names of sites that only evaluate; their ids follow the others'.
        traffic: is told of every message.
        identities: whose name is whose; by default any node is what it says, as in a simulation.
        introduced: how many images sites joined this run with, in an earlier part of it.
        held_out: domains that nobody may train on; judges may hold them.

    Attributes:
        sites: names of all sites, the judges' last.
        fields: sent with every message.
        introduced: how many images sites introduced themselves with, by their numbers.
    """

    def __init__(
        self,
        grid: Grid,
        sites: Sequence[str],
        run: str,
        policy: Policy,
        device: torch.device | None = None,
        *,
        judges: Sequence[str] = (),
        traffic: Traffic | None = None,
        identities: Identities | None = None,
        introduced: Mapping[str, int] | None = None,
        held_out: Collection[str] = (),
    ) -> None:
        self._grid, self._run, self._policy = grid, run, policy
        self.sites, self._trainers = (*sites, *judges), len(sites)
        self._post = Post(grid, policy, traffic or Traffic())
        identities = identities or Identities(strict=False)
        self._roster = Roster(self.sites, len(sites), identities, introduced or {}, held_out)
        self.introduced: Mapping[int, int] = self._roster.counts
        self.device = device or torch.device("cpu")
        self.fields: dict[str, Scalar] = {}
        self.memories: dict[int, Weights] = {}
        self.remembered: set[int] = set()
        self._round = 0
        self._agreed: Message | None = None
        self._digest = ""
        self._told: set[int] = set()
        self._asked: set[int] = set()
        self._introductions = Exchange(self._post, INTRODUCE, ("introduce", "introduce"), 0)
        self._strangers: dict[Recipient, Stranger] = {}
        self._unheard: set[str] = set()
        self._missing: set[int] = set()

    @property
    def ledger(self) -> Ledger:
        """Where every message is entered that was really sent or received."""
        return self._post.ledger

    @ledger.setter
    def ledger(self, ledger: Ledger) -> None:
        self._post.ledger = ledger

    # Who is there

    @property
    def clients(self) -> Sequence[int]:
        """Ids of all sites that train, connected or not."""
        return range(self._trainers)

    @property
    def judges(self) -> Sequence[int]:
        """Ids of the sites that only evaluate, connected or not."""
        return range(self._trainers, len(self.sites))

    @property
    def introductions(self) -> Mapping[int, Introduction]:
        """What connected sites said about themselves, the judges, too, by their numbers."""
        return self._roster.introductions

    def on_introduction(self, told: Callable[[int, Introduction], None]) -> None:
        """Has ``told`` called with the id and the introduction of every site from now on."""
        self._roster.on_introduction = told

    def gather(self, minimum: int) -> dict[int, Introduction]:
        """Waits until all sites have introduced themselves, or the policy's ``wait`` is over.

        Returns:
            What the sites that train said about themselves; only they count.

        Raises:
            RunError: fewer than ``minimum``; names the missing ones.
        """
        until = time.monotonic() + self._policy.wait
        while len(online := self._online()) < len(self.sites) and time.monotonic() < until:
            time.sleep(self._policy.poll)
        silent = {self._called(to) for to in self._strangers}
        self._unheard |= silent
        absent = [id for id in range(len(self.sites)) if id not in online]
        missing = self._roster.said_of(absent, silent)
        trainers = sorted(online & set(self.clients))
        if len(trainers) < minimum:
            raise RunError(
                f"{len(trainers)} of {self._trainers} sites connected within "
                f"{self._policy.wait:g} s, but at least {minimum} are needed; missing: {missing}"
            )
        if missing:
            log.warning("starting without the sites that are not connected: %s", missing)
        self._missing = set(absent)
        return {id: self._roster.introductions[id] for id in trainers}

    def _online(self) -> set[int]:
        """Returns the ids of the connected sites; asks new nodes which site they are.

        Waits for nobody: what a node says of itself counts whenever it comes.
        """
        nodes = set(self._grid.get_node_ids())
        self._asked &= nodes
        self._ask_again()
        new = sorted(nodes - self._asked)
        if new:
            self._introduce(new)
        self._admit()
        return self._roster.among(nodes)

    def _introduce(self, nodes: list[int]) -> None:
        infos = {info.node_id: info for info in self._grid.get_nodes()}
        # A name is the key's that was registered first.
        nodes = sorted(nodes, key=lambda n: (infos[n].registered_at if n in infos else "", n))
        self._introductions.round = self._round
        for node in nodes:
            self._asked.add(node)
            recipient = self._roster.stranger(node, infos.get(node))
            self._introductions.forget(recipient)
            self._strangers[recipient] = Stranger(infos.get(node), time.monotonic())
            self._introductions.send(recipient, Parcel({"run": self._run}).to_records())

    def _ask_again(self) -> None:
        """Has nodes asked anew that never said who they are: a message may be lost with a site."""
        oldest = time.monotonic() - self._policy.deadline
        for to, stranger in list(self._strangers.items()):
            if stranger.reply is None and stranger.asked < oldest:
                self._introductions.forget(to)
                del self._strangers[to]
                self._asked.discard(to.node)

    def _admit(self) -> None:
        """Gives nodes that have introduced themselves their sites' places."""
        for to, reply in self._introductions.heard().items():
            if to in self._strangers:
                self._strangers[to].reply = reply
        before: set[str] = set()
        for to, stranger in list(self._strangers.items()):
            # While the key that was registered first is silent, nobody takes its name.
            if stranger.reply is None or stranger.name in before:
                before |= {stranger.name} - {""}
                continue
            del self._strangers[to]
            if isinstance(stranger.reply, Refusal):
                log.warning("a node cannot take part: %s", stranger.reply.reason)
                continue
            id = self._roster.admit(to.node, stranger.reply, stranger.info)
            if id is not None:
                self._told.discard(id)

    def _called(self, to: Recipient) -> str:
        """Returns what a node that has not introduced itself is called."""
        return self._strangers[to].name or to.name

    def _awaited(self) -> list[Recipient]:
        """Returns the nodes to introduce themselves; none that once kept the others waiting."""
        return [to for to in self._strangers if self._called(to) not in self._unheard]

    # Transport

    def hand_out(self, agreed: Message | None, *, again: bool = False) -> None:
        """Has every site sent what was agreed with its next message, once."""
        self._agreed = agreed
        content = b"" if agreed is None else agreed.to_bytes()
        self._digest = hashlib.blake2b(content, digest_size=8).hexdigest() if content else ""
        self._told = set()

    def descriptions(self, clients: Sequence[int], broadcast: Broadcast) -> Iterator[Reply]:
        """See :class:`feddg.federation.transport.Transport`."""
        purposes = ("describe", "describe")
        return self._messages(self._exchanged(clients, DESCRIBE, purposes, broadcast, {}))

    def ask(
        self, clients: Sequence[int], broadcast: Broadcast, name: str, question: Message
    ) -> Iterator[Reply]:
        """See :class:`feddg.federation.transport.Transport`."""
        fields: dict[str, Scalar] = {"question": name}
        purposes = (f"ask:{name}", f"answer:{name}")
        return self._messages(self._exchanged(clients, ASK, purposes, broadcast, fields))

    def train(self, clients: Sequence[int], broadcast: Broadcast) -> Iterator[Update | Refusal]:
        """See :class:`feddg.federation.transport.Transport`."""
        for id, reply in self._exchanged(clients, TRAIN, ("train", "update"), broadcast, {}):
            yield reply if isinstance(reply, Refusal) else self._update(id, reply)

    def evaluate(self, broadcast: Broadcast) -> Iterator[Reply]:
        """Asks the sites that only evaluate how good the broadcast's weights are on their images.

        Nobody is waited for: a site that is not connected answers with a Refusal.
        """
        purposes = ("evaluate", "scores")
        replies = self._exchanged(self.judges, EVALUATE, purposes, broadcast, {})
        for id, reply in replies:
            yield id, reply if isinstance(reply, Refusal) else reply.part("scores")

    def _update(self, id: int, parcel: Parcel) -> Update | Refusal:
        try:
            update = read_update(id, parcel)
        except ValueError as error:
            return Refusal(id, f"{self.sites[id]}: {error}")
        update.weights = on_device(update.weights, self.device)
        update.extras.tensors = on_device(update.extras.tensors, self.device)
        return update

    def _messages(self, replies: Iterator[tuple[int, Parcel | Refusal]]) -> Iterator[Reply]:
        for id, reply in replies:
            yield id, reply if isinstance(reply, Refusal) else reply.part("reply")

    # Sending and receiving

    def _exchanged(
        self,
        clients: Sequence[int],
        kind: str,
        purposes: tuple[str, str],
        broadcast: Broadcast,
        fields: dict[str, Scalar],
    ) -> Iterator[tuple[int, Parcel | Refusal]]:
        """Sends a broadcast to sites and yields their replies in the order of ``clients``."""
        self._round = broadcast.round
        needed = kind != EVALUATE
        online = self._patiently_online(clients, self._policy.minimum if needed else 0)
        parts = {"weights": Message(broadcast.weights), "extras": broadcast.extras}
        shared = {name: message for name, message in parts.items() if message}
        fields = {**self.fields, **fields, "run": self._run, "round": broadcast.round}
        records = Parcel({**fields, AGREED: self._digest}, shared).to_records()

        def tell_again(to: Recipient) -> None:
            self._told.discard(to.client)
            exchange.send(to, self._addressed(records, to.client, told=False))

        exchange = Exchange(self._post, kind, purposes, broadcast.round, tell_again)
        written_to = {id: self._roster.recipient(id) for id in clients if id in online}
        for id, to in written_to.items():
            told = id in self._told or self._agreed is None or kind == EVALUATE
            exchange.send(to, self._addressed(records, id, told=told))
        return self._in_order(clients, kind, exchange, written_to)

    def _in_order(
        self,
        clients: Sequence[int],
        kind: str,
        exchange: Exchange,
        written_to: Mapping[int, Recipient],
    ) -> Iterator[tuple[int, Parcel | Refusal]]:
        replies = exchange.replies(list(written_to.values()), needed=kind != EVALUATE)
        for id in clients:
            if id not in written_to:
                yield id, Refusal(id, f"{self.sites[id]}: is not connected")
                continue
            _, reply = next(replies)
            if isinstance(reply, Parcel) and kind != EVALUATE:
                self._told.add(id)
            yield id, reply

    def _patiently_online(self, clients: Sequence[int], minimum: int) -> set[int]:
        """Returns the connected sites among some, after waiting for those that may come back.

        Nobody is waited for twice: a site that was waited for in vain, or a node that does not say
        who it is, takes part from when it is there.

        Args:
            clients: the sites.
            minimum: how many are waited for.
        """
        policy, began = self._policy, time.monotonic()
        while True:
            found = self._online() & set(clients)
            self._missing -= found
            waited = time.monotonic() - began
            # Without any site there is no round, and nobody whom waiting would hold up.
            hoped_for = max(1, len(set(clients) - self._missing))
            enough = len(found) >= min(minimum, hoped_for)
            awaited = self._awaited() if waited < policy.prompt else []
            if waited >= policy.wait or (enough and not awaited):
                break
            time.sleep(policy.poll)
        for to in self._awaited():
            self._unheard.add(self._called(to))
            log.warning(
                "round %d goes on without %s, which is connected, but has not said who it is "
                "within %.0f s; it takes part once it has",
                *(self._round, self._called(to), waited),
            )
        if not enough:
            silent = {self._called(to) for to in self._strangers}
            gone = sorted(set(clients) - found - self._missing)
            self._missing |= set(gone)
            log.warning(
                "round %d goes on without the sites that were not connected within %g s: %s; they "
                "take part once they are there",
                *(self._round, policy.wait, self._roster.said_of(gone, silent)),
            )
        return found

    def _addressed(self, records: RecordDict, id: int, *, told: bool) -> RecordDict:
        """Returns a site's own copy of records; adds what was agreed if it was not told yet."""
        fields = dict(records.config_records[FIELDS]) | {"client": id}
        own = RecordDict(dict(records))
        if not told and self._agreed is not None:
            fields["parts"] = ",".join(filter(None, (str(fields["parts"]), AGREED)))
            fields |= {f"{AGREED}/{name}": s for name, s in self._agreed.scalars.items()}
            if self._agreed.tensors:
                own[AGREED] = arrays(self._agreed.tensors)
        own[FIELDS] = ConfigRecord(fields)
        return own
