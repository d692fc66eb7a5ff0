"""A transport over Flower's grid, under the same server loop as in-process.

Flower's node ids are random and change; ours are the positions of the sites' names in the
deployment's list, so sampling, order of aggregation and random streams are those of the in-process
run. Sites that are not connected, fail, or miss the deadline answer with a Refusal.
"""

import hashlib
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from flwr.app import ConfigRecord, RecordDict
from flwr.app import Message as Envelope
from flwr.proto.node_pb2 import NodeInfo
from flwr.serverapp import Grid

from feddg.errors import RunError
from feddg.federation.ledger import Ledger
from feddg.federation.transport import Reply
from feddg.flower.identity import Identities
from feddg.flower.parcels import FIELDS, Parcel, arrays, contents
from feddg.flower.replies import Introduction, read_fields, read_introduction, read_update
from feddg.flower.site import on_device
from feddg.flower.traffic import Traffic, flower_bytes
from feddg.forms import plain_text
from feddg.messages import Broadcast, Message, Refusal, Scalar, Update, Weights
from feddg.rows import Direction

log = logging.getLogger("feddg")

DESCRIBE, TRAIN, ASK, EVALUATE = "query.describe", "train", "query.ask", "evaluate"
INTRODUCE = "query.introduce"
AGREED = "agreed"
MOST_TOLD_AGAIN = 2
"""How often a site may ask in one exchange for what it was already sent."""


@dataclass(frozen=True)
class Policy:
    """How patient the server is.

    Attributes:
        minimum: connected sites it waits for before anything is sent.
        wait: seconds it waits for them.
        deadline: seconds a site has for one message; later replies are dropped.
        poll: seconds between two looks at the mailbox.
        remind: seconds after which the log says who is waited for.
    """

    minimum: int = 1
    wait: float = 300.0
    deadline: float = 3600.0
    poll: float = 0.5
    remind: float = 60.0


@dataclass
class _Exchange:
    """Messages on their way to sites, and what came back.

    Attributes:
        kind: Flower's type of the messages.
        purposes: what the ledger calls them, and the replies.
        round: the round they belong to.
        waiting: who has not replied, by message id.
        replies: what came back, by client or node.
        told_again: who asked for what was agreed.
    """

    kind: str
    purposes: tuple[str, str]
    round: int = 0
    waiting: dict[str, int] = field(default_factory=dict)
    replies: dict[int, Parcel | Refusal] = field(default_factory=dict)
    told_again: list[int] = field(default_factory=list)


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

    Attributes:
        sites: names of all sites, the judges' last.
        fields: sent with every message.
        introductions: what connected sites said about themselves.
        on_introduction: called with each site's id and introduction, late joiners' too.
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
    ) -> None:
        self._grid, self._run, self._policy = grid, run, policy
        self.sites, self._trainers = (*sites, *judges), len(sites)
        self._traffic = traffic or Traffic()
        self._identities = identities or Identities(strict=False)
        self.device = device or torch.device("cpu")
        self.fields: dict[str, Scalar] = {}
        self.memories: dict[int, Weights] = {}
        self.remembered: set[int] = set()
        self._ledger: Ledger | None = None
        self._unentered: list[tuple[Any, ...]] = []
        self._round = 0
        counted = introduced or {}
        self._counts = {id: counted[n] for id, n in enumerate(self.sites) if n in counted}
        self.introduced: Mapping[int, int] = self._counts
        self.introductions: dict[int, Introduction] = {}
        self.on_introduction: Callable[[int, Introduction], None] = lambda id, introduction: None
        self._agreed: Message | None = None
        self._digest = ""
        self._told: set[int] = set()
        self._node_of: dict[int, int] = {}
        self._known: set[int] = set()

    @property
    def ledger(self) -> Ledger:
        """Where every message is entered that was really sent or received."""
        if self._ledger is None:
            raise RuntimeError("nobody has given this transport a ledger yet")
        return self._ledger

    @ledger.setter
    def ledger(self, ledger: Ledger) -> None:
        self._ledger = ledger
        for entry in self._unentered:  # sites introduce themselves before there is a run
            ledger.enter(*entry)
        self._unentered.clear()

    def _enter(self, direction: Direction, key: int, exchange: _Exchange, held: RecordDict) -> None:
        """Enters a message; one that cannot be read is entered by its size."""
        purpose = exchange.purposes[0 if direction == "down" else 1]
        client = key if exchange.kind != INTRODUCE else self._client_of(key)
        size: int | None = None
        try:
            size = flower_bytes(held)
            shapes, scalars = contents(held)
        except Exception:
            shapes, scalars, purpose = [], {}, f"{purpose}, unreadable"
        entry = (exchange.round, direction, client, purpose, shapes, scalars, size)
        if self._ledger is None:
            self._unentered.append(entry)
        else:
            self._ledger.enter(*entry)

    def _client_of(self, node: int) -> int:
        """Returns the number of the site whose place a node has, or -1."""
        return next((id for id, own in self._node_of.items() if own == node), -1)

    # Who is there

    @property
    def clients(self) -> Sequence[int]:
        """Ids of all sites that train, connected or not."""
        return range(self._trainers)

    @property
    def judges(self) -> Sequence[int]:
        """Ids of the sites that only evaluate, connected or not."""
        return range(self._trainers, len(self.sites))

    def gather(self, minimum: int) -> dict[int, Introduction]:
        """Waits until all sites have introduced themselves, or time is up and ``minimum`` have.

        Returns:
            What the sites that train said about themselves; only they count.

        Raises:
            RunError: too few sites; names the missing ones.
        """
        until = time.monotonic() + self._policy.wait
        while len(online := self._online()) < len(self.sites) and time.monotonic() < until:
            time.sleep(self._policy.poll)
        missing = ", ".join(name for id, name in enumerate(self.sites) if id not in online)
        trainers = sorted(online & set(self.clients))
        if len(trainers) < minimum:
            raise RunError(
                f"{len(trainers)} of {self._trainers} sites connected within "
                f"{self._policy.wait:g} s, but at least {minimum} are needed; missing: {missing}"
            )
        if missing:
            log.warning("starting without the sites that are not connected: %s", missing)
        return {id: self.introductions[id] for id in trainers}

    def _online(self) -> set[int]:
        """Returns the ids of the connected sites; asks new nodes which site they are."""
        nodes = set(self._grid.get_node_ids())
        self._known &= nodes
        new = sorted(nodes - self._known)
        if new:
            self._introduce(new)
        return {id for id, node in self._node_of.items() if node in nodes}

    def _introduce(self, nodes: list[int]) -> None:
        infos = {info.node_id: info for info in self._grid.get_nodes()}
        # A name is the key's that was registered first.
        nodes = sorted(nodes, key=lambda n: (infos[n].registered_at if n in infos else "", n))
        exchange = _Exchange(INTRODUCE, ("introduce", "introduce"), self._round)
        for node in nodes:
            self._send(exchange, node, node, Parcel().to_records())
        for node, parcel in self._collect(exchange, nodes):
            self._known.add(node)
            if isinstance(parcel, Refusal):
                log.warning("a node cannot take part: %s", parcel.reason)
                continue
            self._admit(node, parcel, infos.get(node))

    def _admit(self, node: int, parcel: Parcel, info: NodeInfo | None) -> None:
        """Gives a node its site's place, unless the name is not its own."""
        name = str(parcel.fields.get("site", ""))
        try:
            introduction = read_introduction(parcel)
        except ValueError as error:
            log.warning("left out: node %d calls itself %r, but %s", node, name, error)
            return
        objection = self._identities.objection(name, info, self.sites)
        objection = objection or self._changed(name, introduction)
        if objection is not None:
            log.warning("left out: node %d %s", node, objection)
        else:
            id = self.sites.index(name)
            log.info("site %s is connected", name)
            self._node_of[id] = node
            self._told.discard(id)
            self.introductions[id] = introduction
            self._counts.setdefault(id, introduction.images)
            self.on_introduction(id, introduction)

    def _changed(self, name: str, introduction: Introduction) -> str | None:
        """Says so where a site holds other images than it introduced itself with, or None."""
        before = self._counts.get(self.sites.index(name))
        if before is None or before == introduction.images:
            return None
        return (
            f"calls itself {name!r} and has {introduction.images} images, but it joined this run "
            f"with {before}; a run's images stay the same: start a new run for others"
        )

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
        online = self._online() if kind == EVALUATE else self._patiently_online(clients)
        parts = {"weights": Message(broadcast.weights), "extras": broadcast.extras}
        shared = {name: message for name, message in parts.items() if message}
        fields = {**self.fields, **fields, "run": self._run, "round": broadcast.round}
        records = Parcel({**fields, AGREED: self._digest}, shared).to_records()
        exchange = _Exchange(kind, purposes, broadcast.round)
        for id in clients:
            if id in online:
                told = id in self._told or self._agreed is None or kind == EVALUATE
                self._send(exchange, id, self._node_of[id], self._addressed(records, id, told))
            else:
                exchange.replies[id] = Refusal(id, f"{self.sites[id]}: is not connected")

        def tell(id: int) -> None:
            self._told.discard(id)
            self._send(exchange, id, self._node_of[id], self._addressed(records, id, False))

        return self._collect(exchange, clients, tell)

    def _patiently_online(self, clients: Sequence[int]) -> set[int]:
        """Returns the connected sites, after waiting for as many as the policy wants."""
        until = time.monotonic() + self._policy.wait
        wanted = min(self._policy.minimum, len(clients))
        while len(found := self._online() & set(clients)) < wanted and time.monotonic() < until:
            time.sleep(self._policy.poll)
        return found

    def _addressed(self, records: RecordDict, id: int, told: bool) -> RecordDict:
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

    def _send(self, exchange: _Exchange, key: int, node: int, records: RecordDict) -> None:
        deadline, who = self._policy.deadline, self._who(exchange, key)
        envelope = Envelope(records, node, exchange.kind, ttl=deadline)
        crossing = self._traffic.begin(exchange.kind, exchange.round, who, records)
        sent = next(iter(self._grid.push_messages([envelope])), None)
        if not sent:
            exchange.replies[key] = Refusal(key, "the message could not be sent")
        else:
            exchange.waiting[sent] = key
            self._traffic.sent(sent, crossing)
            self._enter("down", key, exchange, records)

    def _collect(
        self,
        exchange: _Exchange,
        keys: Sequence[int],
        tell: Callable[[int], None] = lambda id: None,
    ) -> Iterator[tuple[int, Parcel | Refusal]]:
        until = time.monotonic() + self._policy.deadline
        remind = time.monotonic() + self._policy.remind
        for key in keys:
            while key not in exchange.replies:
                heard = self._pull(exchange, tell)
                # Also while there is always something to hear: nobody may keep a round open.
                if time.monotonic() >= until:
                    self._give_up(exchange)
                elif not heard:
                    self._drop_lost(exchange)
                    time.sleep(self._policy.poll)
                if time.monotonic() >= remind and exchange.waiting:
                    remind = time.monotonic() + self._policy.remind
                    self._say_who_is_waited_for(exchange, until)
            yield key, exchange.replies.pop(key)

    def _say_who_is_waited_for(self, exchange: _Exchange, until: float) -> None:
        late = [self._who(exchange, key) for key in sorted(set(exchange.waiting.values()))]
        left = max(0.0, until - time.monotonic())
        log.info("waiting for %s; %.0f s left", ", ".join(late[:20]), left)

    def _pull(self, exchange: _Exchange, tell: Callable[[int], None]) -> bool:
        """Fetches replies; returns whether there were any."""
        envelopes = list(self._grid.pull_messages(list(exchange.waiting)))
        for envelope in envelopes:
            key = exchange.waiting.pop(envelope.metadata.reply_to_message_id, None)
            if key is None:
                continue
            if not envelope.has_error():
                self._enter("up", key, exchange, envelope.content)
            parcel = self._opened(exchange, key, envelope)
            if isinstance(parcel, Parcel):
                sent = envelope.metadata.reply_to_message_id
                self._traffic.answered(sent, envelope.content, parcel)
            if isinstance(parcel, Parcel) and parcel.fields.get("missing") == AGREED:
                if exchange.told_again.count(key) < MOST_TOLD_AGAIN:
                    exchange.told_again.append(key)
                    tell(key)
                    continue
                reason = "says again and again that it was not told what was agreed"
                parcel = Refusal(key, f"{self._who(exchange, key)}: {reason}")
            exchange.replies[key] = parcel
            if isinstance(parcel, Parcel) and exchange.kind not in (INTRODUCE, EVALUATE):
                self._told.add(key)
        return bool(envelopes)

    def _opened(self, exchange: _Exchange, key: int, envelope: Envelope) -> Parcel | Refusal:
        who = self._who(exchange, key)
        if envelope.has_error():
            lines = (envelope.error.reason or "").strip().splitlines() or ["unknown error"]
            return Refusal(key, f"{who}: {plain_text(lines[-1])}")
        try:
            parcel = Parcel.from_records(envelope.content)
            parcel.fields = read_fields(exchange.kind, parcel)
        except ValueError as error:
            return Refusal(key, f"{who}: its reply cannot be read ({error})")
        except Exception as error:  # whatever a site sends, it ends as a refusal of that site
            log.debug("%s sent what cannot be read", who, exc_info=True)
            return Refusal(key, f"{who}: its reply cannot be read ({type(error).__name__})")
        refusal = parcel.fields.get("refusal")
        return parcel if refusal is None else Refusal(key, f"{who}: {refusal}")

    def _drop_lost(self, exchange: _Exchange) -> None:
        """Gives up on sites that disconnected since their message was sent."""
        nodes = set(self._grid.get_node_ids())
        for sent, key in list(exchange.waiting.items()):
            introducing = exchange.kind == INTRODUCE
            if (key if introducing else self._node_of[key]) not in nodes:
                del exchange.waiting[sent]
                reason = f"{self._who(exchange, key)}: disconnected before it replied"
                exchange.replies[key] = Refusal(key, reason)

    def _give_up(self, exchange: _Exchange) -> None:
        for key in exchange.waiting.values():
            reason = f"{self._who(exchange, key)}: no reply within {self._policy.deadline:g} s"
            exchange.replies[key] = Refusal(key, reason)
        exchange.waiting.clear()

    def _who(self, exchange: _Exchange, key: int) -> str:
        return f"node {key}" if exchange.kind == INTRODUCE else self.sites[key]
