"""The transport over Flower's grid, for the same server loop as in process."""

import base64
import hashlib
import json
import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import load_pem_public_key, ssh_key_fingerprint
from flwr.app import ArrayRecord, RecordDict
from flwr.app import Message as Envelope
from flwr.proto.node_pb2 import NodeInfo
from flwr.serverapp import Grid
from pydantic import Field, NonNegativeInt

from feddg.deploy.site import objection_to
from feddg.deploy.wire import (
    ASK,
    CONTEXT,
    EVALUATE,
    KINDS,
    MOST_CHARACTERS,
    MOST_CLASSES,
    MOST_DOMAINS,
    REGISTER,
    STATISTICS,
    TARGETS,
    TRAIN,
    Payload,
    Registration,
    RunKey,
    arrays,
    contents,
    flower_bytes,
    read_reply,
)
from feddg.errors import RunError, first_names
from feddg.federation.transport import Ledger, Reply
from feddg.messages import Broadcast, Message, Refusal, Update, Weights, on_device, plain_text
from feddg.records import Direction, JsonFile, TrafficRow
from feddg.storage import append_text

log = logging.getLogger("feddg")

MOST_SENT_AGAIN = 2
"""How often a site may ask again, in one exchange, for what it was already sent."""
NOBODY = -1
"""The number of a node that is not a site."""
COUNTED = "counted"
"""The name, in checkpoints, of the last round of a site that counted."""
PROMPT = 120.0
"""Longest time in seconds to wait for a site that was silent before."""
REMIND = 60.0
"""Seconds after which the log names the sites being waited for."""
LATER = 60.0
"""Seconds by which Flower's time limit exceeds ours, so that our message is the one shown."""


class DeploymentFile(JsonFile):
    """A deployment and its registered sites, kept across restarts; it grows while they register.

    Attributes:
        run: key under which sites store their memory of the run.
        sites: names of the training sites; a site's position is its number.
        classes: the federation's classes, in the order of their numbers; none before they are
            fixed.
        domains: domains of the training sites, in the order of their numbers.
        keys: fingerprint of each site's key, by name.
        images: number of images each site registered with, by name.
        features: columns of the sites' tables of features, in order, as the first one named them.
    """

    run: RunKey
    sites: list[str]
    classes: list[str]
    domains: list[str]
    keys: dict[str, str] = Field(default_factory=dict)
    images: dict[str, NonNegativeInt] = Field(default_factory=dict)
    features: list[str] = Field(default_factory=list)


@dataclass(frozen=True)
class Policy:
    """The server's waiting times.

    Attributes:
        minimum: number of connected sites before anything is sent.
        wait: seconds to wait for sites to register.
        deadline: seconds that a site has to answer a message; later replies are dropped.
        poll: seconds between checks of the mailbox.
    """

    minimum: int = 1
    wait: float = 300.0
    deadline: float = 3600.0
    poll: float = 0.5


@dataclass
class PendingRequest:
    """A message sent to a node.

    Attributes:
        node: Flower's id of the node.
        site: its name in the log.
        client: its number in the federation.
        kind: the kind of request.
        round: the round it belongs to.
        purpose: the ledger's name of the reply.
        bytes: its size.
        at: time of sending, seconds since 1970.
        began: time of sending by a monotonic clock.
        reply: the reply, or why nothing is waited for any more; None until known.
    """

    node: int
    site: str
    client: int
    kind: str
    round: int
    purpose: str
    bytes: int
    at: float
    began: float
    reply: Payload | Refusal | None = None

    def refuse(self, reason: str, diverged: bool = False) -> None:
        """Marks the request as refused, so that it is not waited for any more."""
        self.reply = Refusal(self.client, f"{self.site}: {reason}", diverged)


class Mailbox:
    """Sends and receives messages over Flower's grid, and records them in the ledger.

    Args:
        grid: Flower's connection to the nodes.
        policy: waiting times.
        traffic: file that gets a row for every answered message.

    Attributes:
        limits: seconds to wait for a site that was silent once, by number: twice the time of its
            last answer, however late.
        ledger: the record of all messages; None before there is a run.
        unentered: enter in a ledger what sites sent to register before.
    """

    def __init__(self, grid: Grid, policy: Policy, traffic: Path | None) -> None:
        self.grid, self.policy, self._traffic = grid, policy, traffic
        self.limits: dict[int, float] = {}
        self.ledger: Ledger | None = None
        self.unentered: list[Callable[[Ledger], None]] = []
        self._sent: dict[str, PendingRequest] = {}

    def send(
        self,
        records: RecordDict,
        node: int,
        site: str,
        client: int,
        kind: str,
        round: int,
        question: str = "",
    ) -> PendingRequest:
        """Sends a message; ``question`` is the method's, and goes into the ledger."""
        more = f":{question}" if question else ""
        answer = KINDS[kind].answered + more
        size, at, began = flower_bytes(records), time.time(), time.monotonic()
        sent = PendingRequest(node, site, client, kind, round, answer, size, at, began)
        envelope = Envelope(records, node, kind, ttl=self.policy.deadline + LATER)
        id = next(iter(self.grid.push_messages([envelope])), None)
        if id:
            self._sent[id] = sent
            self._enter(sent, "down", kind.removeprefix("query.") + more, records)
        else:
            sent.refuse("the message could not be sent")
        return sent

    def pull(self) -> bool:
        """Fetches replies; returns whether there were any.

        To a message whose node has disconnected, Flower replies with an error. A late reply to a
        message that was given up is recorded and dropped. It shows that the site is alive and how
        long it takes, but it never answers a later message.
        """
        envelopes = list(self.grid.pull_messages(list(self._sent)))
        for envelope in envelopes:
            sent = self._sent.pop(envelope.metadata.reply_to_message_id, None)
            if sent is not None:
                self._receive(sent, envelope)
        return bool(envelopes)

    def _receive(self, sent: PendingRequest, envelope: Envelope) -> None:
        late, seconds = sent.reply is not None, time.monotonic() - sent.began
        if envelope.has_error():
            lines = (envelope.error.reason or "").strip().splitlines() or ["unknown error"]
            if not late:
                sent.refuse(plain_text(lines[-1]))
            return
        purpose = f"{sent.purpose}, late" if late else sent.purpose
        self._enter(sent, "up", purpose, envelope.content)
        # Time to register says nothing of the time to train.
        if sent.client in self.limits and sent.kind != REGISTER:
            self.limits[sent.client] = max(self.limits[sent.client], 2 * seconds)
        if late:
            log.info("%s answers a message of round %d: too late", sent.site, sent.round)
            return
        try:
            reply = read_reply(sent.kind, envelope.content)
        except Exception as error:  # whatever a site sends, it ends as a refusal of that site
            log.debug("%s sent what cannot be read", sent.site, exc_info=True)
            sent.refuse(f"its reply cannot be read ({plain_text(error, 300)})")
        else:
            for name in reply.fields.keys() & {"busy", "seconds"}:  # nobody works longer than that
                reply.fields[name] = min(reply.fields[name], seconds)
            if "refusal" in reply.fields:
                sent.refuse(reply.fields["refusal"], reply.fields.get("diverged", False))
            else:
                sent.reply = reply
                self._enter_traffic(sent, seconds, envelope.content, reply)

    def replies(
        self,
        waiting: deque[PendingRequest],
        again: Callable[[PendingRequest], PendingRequest],
        *,
        needed: bool = True,
    ) -> Iterator[Payload | Refusal]:
        """Yields the replies in the order of the messages; a late reply becomes a refusal.

        Args:
            waiting: all messages that were sent; emptied as replies are yielded.
            again: sends a message again, with the shared context, to a site that lacks it.
            needed: whether the server cannot continue without a reply. Then, if all sites were
                silent before, they get the full deadline.
        """
        policy, began, sent_again = self.policy, time.monotonic(), Counter[int]()
        remind = began + REMIND
        hurry = not needed or any(sent.client not in self.limits for sent in waiting)
        while waiting:
            for place, sent in enumerate(waiting):
                if isinstance(sent.reply, Payload) and "missing" in sent.reply.fields:
                    sent_again[sent.client] += 1
                    if sent_again[sent.client] <= MOST_SENT_AGAIN:
                        waiting[place] = again(sent)
                    else:
                        sent.refuse("keeps saying that it did not receive the shared context")
            if (reply := waiting[0].reply) is not None:
                waiting.popleft()
                yield reply
                continue
            heard, waited = self.pull(), time.monotonic() - began
            silent = [sent for sent in waiting if sent.reply is None]
            # Also while there is always something to hear: nobody may keep a round open.
            if waited >= policy.deadline:
                self._give_up(silent, f"no reply within {policy.deadline:g} s")
            elif not heard:
                if hurry and all(sent.client in self.limits for sent in silent):
                    late = [sent for sent in silent if waited >= self.limits[sent.client]]
                    reason = "nobody waits long for it until it answers"
                    self._give_up(late, f"no reply yet, nor to an earlier message; {reason}")
                time.sleep(policy.poll)
            if time.monotonic() >= remind and silent:
                remind = time.monotonic() + REMIND
                names = first_names(sorted({sent.site for sent in silent}), 20)
                log.info("waiting for %s; %.0f s left", names, policy.deadline - waited)

    def _give_up(self, messages: Iterable[PendingRequest], reason: str) -> None:
        """Refuses messages; their sites get a short deadline until they answer again."""
        for sent in messages:
            sent.refuse(reason)
            self.limits[sent.client] = min(PROMPT, self.policy.wait, self.policy.deadline)

    def _enter(
        self, sent: PendingRequest, direction: Direction, purpose: str, records: RecordDict
    ) -> None:
        """Records a message in the ledger; an unreadable one by its size."""
        size: int | None = None
        try:
            size = flower_bytes(records)
            shapes, scalars = contents(records)
        except Exception:
            shapes, scalars, purpose = [], {}, f"{purpose}, unreadable"

        def enter(ledger: Ledger) -> None:  # of a site, once it is known which one a node is
            ledger.enter(sent.round, direction, [sent.client], purpose, shapes, scalars, size)

        if self.ledger is None:
            self.unentered.append(enter)
        else:
            enter(self.ledger)

    def _enter_traffic(
        self, sent: PendingRequest, seconds: float, records: RecordDict, reply: Payload
    ) -> None:
        if self._traffic is None:
            return
        row = TrafficRow(
            **vars(sent),
            bytes_down=sent.bytes,
            bytes_up=flower_bytes(records),
            seconds=seconds,
            busy=reply.fields["busy"],
            train=reply.fields.get("seconds", 0.0),
        )
        append_text(self._traffic, row.to_json() + "\n")


def fingerprint(public_key: bytes) -> str:
    """Returns a PEM public key's fingerprint as shown by ``ssh-keygen -l``, ``SHA256:...``.

    Raises:
        ValueError: the bytes are not a public key.
    """
    digest = ssh_key_fingerprint(load_pem_public_key(public_key), SHA256())  # type: ignore[arg-type]
    return "SHA256:" + base64.b64encode(digest).decode("ascii").rstrip("=")


@dataclass
class AskedNode:
    """A connected node that was asked which site it is.

    Attributes:
        info: Flower's information on it.
        question: the message to it.
        judged: whether it was accepted as a site, or refused, by its answer.
    """

    info: NodeInfo
    question: PendingRequest
    judged: bool = False

    @property
    def name(self) -> str:
        """The name under which its key was registered, or its name in the log."""
        return self.info.name or self.question.site


class NodeRegistry:
    """The sites of a deployment, and the node of each site.

    Flower's node ids are random and change. A site's number is the position of its name, so
    sampling, aggregation order and random streams equal those in process. A name belongs to the
    first key that used it.

    Args:
        mailbox: sends questions to nodes.
        known: the deployment, with the sites of an earlier part of the run.
        evaluation_sites: names of sites that only evaluate.
        keys: fingerprint of each site's key, by name; grows. None trusts the name that any node
            gives, if there are no keys.
        held_out: domains that must not be trained on.

    Attributes:
        registrations: registrations of connected sites, by number.
        counts: number of images each site registered with, by number.
        objections: why a site's name was refused to a node, by name.
        asked: connected nodes that were asked which site they are, by id; the first registered
            first.
        on_registration: called with each site's number and registration, also for late joiners.
    """

    def __init__(
        self,
        mailbox: Mailbox,
        known: DeploymentFile,
        evaluation_sites: Sequence[str],
        keys: dict[str, str] | None,
        held_out: Collection[str],
    ) -> None:
        self._mailbox, self._known = mailbox, known
        self._sites, self._trainers = (*known.sites, *evaluation_sites), len(known.sites)
        self._keys, self._held_out = keys, held_out
        images = known.images
        self.counts = {id: images[n] for id, n in enumerate(self._sites) if n in images}
        self.registrations: dict[int, Registration] = {}
        self.objections: dict[str, str] = {}
        self.asked: dict[int, AskedNode] = {}
        self.on_registration: Callable[[int, Registration], None] = lambda id, registration: None
        self.node_of: dict[int, int] = {}

    def online(self, round: int) -> set[int]:
        """Returns the numbers of the connected sites; asks new nodes which site they are.

        Does not wait; a node's answer counts whenever it arrives.
        """
        oldest = time.monotonic() - self._mailbox.policy.deadline
        before, self.asked = self.asked, {}
        # A name is the key's that was registered first.
        nodes = self._mailbox.grid.get_nodes()
        for info in sorted(nodes, key=lambda info: (info.registered_at, info.node_id)):
            node = before.get(info.node_id)
            if (
                node is None
                # A node keeps its id when it comes back, perhaps mended.
                or node.info.last_activated_at != info.last_activated_at
                # A message may be lost with a site: who was silent for long is asked anew.
                or (node.question.reply is None and node.question.began < oldest)
            ):
                node = AskedNode(info, self._ask(info, round))
            self.asked[info.node_id] = node
        while self._mailbox.pull():
            pass
        self._admit()
        return {id for id, node in self.node_of.items() if node in self.asked}

    def _ask(self, info: NodeInfo, round: int) -> PendingRequest:
        question, node = Payload({"run": self._known.run}).to_records(), info.node_id
        name = f"node {node}" + (f", registered as {info.name!r}" if info.name else "")
        id = next((id for id, number in self.node_of.items() if number == node), NOBODY)
        return self._mailbox.send(question, node, name, id, REGISTER, round)

    def _admit(self) -> None:
        """Assigns registered nodes to their sites."""
        silent: set[str] = set()
        for node, asked in self.asked.items():
            if asked.judged:
                continue
            reply = asked.question.reply
            # While the key that was registered first is silent, nobody takes its name.
            if reply is None or asked.name in silent:
                silent.add(asked.name)
                continue
            asked.judged = True
            if isinstance(reply, Refusal):
                log.warning("a node cannot take part: %s", reply.reason)
                continue
            name, registration = reply.fields.get("site", ""), reply.fields.get("registration")
            objection: str | None
            if registration is None:
                objection = "sent no registration"
            elif (objection := self._name_objection(name, asked.info)) is None:
                id = self._sites.index(name)
                objection = self._objection(id, registration)
                if objection is None:
                    asked.question.client = id
                    self._settle(node, id, registration)
                    continue
                # Only now is it the site itself that cannot take part, and nobody in its name.
                self.objections[name] = f"calls itself {name!r} and {objection}"
            self.node_of = {k: other for k, other in self.node_of.items() if other != node}
            log.warning("left out: node %d calls itself %r and %s", node, name[:40], objection)

    def _settle(self, node: int, id: int, registration: Registration) -> None:
        name = self._sites[id]
        log.info("site %s is connected", name)
        self.node_of[id] = node
        self.objections.pop(name, None)
        self.registrations[id] = registration
        if id < self._trainers and not self._known.features:
            self._known.features.extend(registration.features)
            for other in [k for k in self.node_of if k >= self._trainers]:  # came before a trainer
                objection = self._objection(other, self.registrations[other])
                if objection is not None:
                    del self.node_of[other]
                    self.objections[self._sites[other]] = objection
                    log.warning("left out: site %s %s", self._sites[other], objection)
        self._known.images[name] = self.counts.setdefault(id, registration.images)
        self.on_registration(id, registration)

    def _name_objection(self, name: str, info: NodeInfo) -> str | None:
        """Returns why a node may not use a name; if it may, the name is its key's from now on."""
        if name not in self._sites:
            return "is no site of this deployment"
        if info.name not in ("", name):
            return f"its key was registered as {info.name!r}"
        if self._keys is None:
            return None
        if not info.name:
            return "its key was registered without a name; register it with `feddg deploy register`"
        key = fingerprint(info.public_key)
        owner = self._keys.setdefault(name, key)
        if owner == key:
            return None
        return (
            f"has the key {key}, but the name belongs to the key {owner}; "
            "if the site has a new key, take the old one out of 'keys' in deployment.json"
        )

    def _objection(self, id: int, new: Registration) -> str | None:
        """Returns why a site may not take part with its images and classes, or None."""
        before, first = self.registrations.get(id), self.counts.get(id)
        remedy = "a run's images stay the same: start a new run for others"
        others = {k: v for k, v in self.registrations.items() if k < self._trainers and k != id}
        trains = id < self._trainers
        # Whoever joined before the classes were fixed has them, or is a program that names none.
        classes = () if before else self._known.classes
        held_out = self._held_out if trains else None
        if objection := objection_to(new, classes, self._known.features, held_out):
            return objection
        if first not in (None, new.images):
            return f"has {new.images} images, but it joined this run with {first}; {remedy}"
        if before and (new.classes, new.domains) != (before.classes, before.domains):
            return f"names other classes or domains than when it joined this run; {remedy}"
        if not trains:
            return None
        for other, theirs in others.items():
            for setting in sorted(theirs.files.keys() & new.files.keys()):
                if theirs.files[setting] != new.files[setting]:
                    site = self._sites[other]
                    return (
                        f"has another file as {setting} than {site!r}; all sites need the same one"
                    )
        for what, most in (("classes", MOST_CLASSES), ("domains", MOST_DOMAINS)):
            own = getattr(new, what).keys()
            together = set(own).union(*(getattr(each, what) for each in others.values()))
            # Every message to a site names all of them, in one text.
            if len(together) > most or len(json.dumps(list(together))) > MOST_CHARACTERS:
                return f"names {len(own)} {what}, too many with those of the other sites"
        return None

    def names_of(self, ids: Iterable[int]) -> str:
        """Returns the names of sites, each with the reason for its absence, if known."""
        silent = (asked.name for asked in self.asked.values() if not asked.judged)
        reasons = dict.fromkeys(silent, "connected, but it has not registered")
        reasons |= {name: f"it {objection}" for name, objection in self.objections.items()}
        names = [self._sites[id] for id in ids]
        return ", ".join(f"{name} ({reasons[name]})" if name in reasons else name for name in names)


class FlowerTransport:
    """Carries messages to sites by name; see :class:`feddg.federation.transport.Transport`.

    Sites that are not connected, fail, or miss the deadline answer with a Refusal.

    Args:
        grid: Flower's connection to the nodes.
        known: the deployment, whose training sites' positions are their client ids; it grows.
        policy: waiting times.
        device: the server's device.
        evaluation_sites: names of sites that only evaluate; their ids follow the others'.
        traffic: file that gets a row for every answered message.
        keys: fingerprint of each site's key, by name; grows. None trusts the name that any node
            gives, as in a simulation.
        held_out: domains that must not be trained on; evaluation sites may hold them.

    Attributes:
        sites: names of all sites, the evaluation_sites' last.
        clients: ids of all sites that train, connected or not.
        evaluation_sites: ids of the sites that only evaluate, connected or not.
        registry: maps nodes to sites.
        registered: how many images sites registered with, by their numbers.
        domains: of how many domains these are; empty if whoever gathers the sites does not say.
    """

    def __init__(
        self,
        grid: Grid,
        known: DeploymentFile,
        policy: Policy,
        device: torch.device | None = None,
        *,
        evaluation_sites: Sequence[str] = (),
        traffic: Path | None = None,
        keys: dict[str, str] | None = None,
        held_out: Collection[str] = (),
    ) -> None:
        self._known, self._policy = known, policy
        self.sites, trainers = (*known.sites, *evaluation_sites), len(known.sites)
        self.clients: Sequence[int] = range(trainers)
        self.evaluation_sites: Sequence[int] = range(trainers, len(self.sites))
        self._mailbox = Mailbox(grid, policy, traffic)
        self.registry = NodeRegistry(self._mailbox, known, evaluation_sites, keys, held_out)
        self.registered: Mapping[int, int] = self.registry.counts
        self.domains: Mapping[int, int] = {}
        self.device = device or torch.device("cpu")
        self.remembered: set[int] = set()
        self.processes = 1
        self._context: Message | None = None
        self._context_arrays: dict[str, ArrayRecord] = {}
        self._digest = ""
        self._has_context: set[int] = set()
        self._counted, self._counted_before = dict[int, int](), dict[int, int]()
        self._trained = 0
        self._missing: set[int] = set()

    @property
    def memories(self) -> dict[int, Weights]:
        """The last round that counted of each site, for the checkpoint; all else is the site's."""
        return {id: {COUNTED: torch.tensor(round)} for id, round in self._counted.items()}

    @memories.setter
    def memories(self, kept: dict[int, Weights]) -> None:
        self._counted = {id: int(memory[COUNTED]) for id, memory in kept.items()}

    @property
    def class_names(self) -> tuple[str, ...]:
        """The classes in the order of their numbers, as sites are told; none without names."""
        return () if self._known.classes == [TARGETS] else tuple(self._known.classes)

    @class_names.setter
    def class_names(self, names: Sequence[str]) -> None:
        self._known.classes[:] = names

    @property
    def ledger(self) -> Ledger:
        """The record of every message that was really sent or received."""
        return self._ledger

    @ledger.setter
    def ledger(self, ledger: Ledger) -> None:
        self._ledger = self._mailbox.ledger = ledger
        for enter in self._mailbox.unentered:
            enter(ledger)
        self._mailbox.unentered.clear()

    def gather(self, minimum: int) -> dict[int, Registration]:
        """Waits until all sites have registered, at most the policy's ``wait``.

        Returns:
            The registrations of the training sites; only these count.

        Raises:
            RunError: fewer than ``minimum``; names the missing ones.
        """
        online = self._connected(range(len(self.sites)), len(self.sites), 0)
        trainers = sorted(online & set(self.clients))
        if len(trainers) < minimum:
            raise RunError(
                f"{len(trainers)} of {len(self.clients)} sites connected within "
                f"{self._policy.wait:g} s, but at least {minimum} are needed; missing: "
                + self.registry.names_of(sorted(self._missing & set(self.clients)))
            )
        return {id: self.registry.registrations[id] for id in trainers}

    def hand_out(self, context: Message | None, *, again: bool = False) -> None:
        """Sends every site the shared context once, with its next message."""
        self._context = context
        self._context_arrays, self._digest = {}, ""
        if context is not None:
            self._context_arrays = {CONTEXT: arrays(context.tensors)}
            self._digest = hashlib.blake2b(context.to_bytes(), digest_size=8).hexdigest()
        self._has_context = set()

    def client_statistics(self, clients: Sequence[int], broadcast: Broadcast) -> Iterator[Reply]:
        """See :class:`feddg.federation.transport.Transport`."""
        return self._messages(clients, STATISTICS, broadcast)

    def ask(
        self, clients: Sequence[int], broadcast: Broadcast, name: str, question: Message
    ) -> Iterator[Reply]:
        """See :class:`feddg.federation.transport.Transport`."""
        return self._messages(clients, ASK, broadcast, name)

    def evaluate(self, broadcast: Broadcast) -> Iterator[Reply]:
        """Asks the evaluation sites for the accuracy of the broadcast's weights on their images.

        Does not wait: a site that is not connected gives a Refusal.
        """
        return self._messages(self.evaluation_sites, EVALUATE, broadcast)

    def _messages(
        self, clients: Sequence[int], kind: str, broadcast: Broadcast, question: str = ""
    ) -> Iterator[Reply]:
        """Exchanges messages; yields the one part of every reply, or the refusal."""
        (part,) = KINDS[kind].parts
        for id, reply in self._exchange(clients, kind, broadcast, question):
            yield id, reply if isinstance(reply, Refusal) else reply.part(part)

    def train(self, clients: Sequence[int], broadcast: Broadcast) -> Iterator[Update | Refusal]:
        """See :class:`feddg.federation.transport.Transport`."""
        if broadcast.round == self._trained:  # what its first attempt left does not count
            self._counted = dict(self._counted_before)
        for id in clients:  # what it files in this round counts only if its reply does
            self._counted.setdefault(id, max(0, broadcast.round - 1))
            self.remembered.add(id)
        self._counted_before, self._trained = dict(self._counted), broadcast.round
        for id, reply in self._exchange(clients, TRAIN, broadcast):
            if isinstance(reply, Refusal):
                yield reply
                continue
            self._counted[id] = broadcast.round
            try:
                update = reply.to_update(id)
            except ValueError as error:
                yield Refusal(id, f"{self.sites[id]}: {error}")
                continue
            update.weights = on_device(update.weights, self.device)
            update.extras.tensors = on_device(update.extras.tensors, self.device)
            yield update

    def _exchange(
        self, clients: Sequence[int], kind: str, broadcast: Broadcast, question: str = ""
    ) -> Iterator[tuple[int, Payload | Refusal]]:
        """Sends a broadcast to sites and yields their replies in the order of ``clients``."""
        if not clients:  # a secret draw may be of nobody, for whom nobody waits
            return
        needed = kind != EVALUATE
        online = self._connected(clients, self._policy.minimum if needed else 0, broadcast.round)
        parts = {"weights": Message(broadcast.weights), "extras": broadcast.extras}
        parts = {name: message for name, message in parts.items() if message}
        # What all sites are sent is made once.
        ready = {name: arrays(message.tensors) for name, message in parts.items()}
        known = self._known
        told = {"classes": json.dumps(known.classes), "domains": json.dumps(known.domains)}
        fields = {**told, "run": known.run, "round": broadcast.round, CONTEXT: self._digest}
        if question:
            fields["question"] = question

        def send(id: int) -> PendingRequest:
            to_one = Payload({**fields, "client": id}, dict(parts))
            if id in self._counted:
                to_one.fields["counted"] = self._counted[id]
            if needed and self._context is not None and id not in self._has_context:
                to_one.parts[CONTEXT] = self._context
            records = to_one.to_records(ready | self._context_arrays)
            node, round = self.registry.node_of[id], broadcast.round
            return self._mailbox.send(records, node, self.sites[id], id, kind, round, question)

        def tell_again(sent: PendingRequest) -> PendingRequest:
            self._has_context.discard(sent.client)
            return send(sent.client)

        sent = deque(send(id) for id in clients if id in online)
        replies = self._mailbox.replies(sent, tell_again, needed=needed)
        for id in clients:
            if id not in online:
                yield id, Refusal(id, f"{self.sites[id]}: is not connected")
                continue
            reply = next(replies)
            if needed and isinstance(reply, Payload):
                self._has_context.add(id)
            yield id, reply

    def _connected(self, clients: Sequence[int], minimum: int, round: int) -> set[int]:
        """Returns which sites are connected, after waiting for those that may return.

        A site is not waited for twice: one that did not return in time takes part as soon as it is
        there.

        Args:
            clients: the sites.
            minimum: number of sites to wait for.
            round: the round that needs them.
        """
        policy, began, registry = self._policy, time.monotonic(), self.registry
        while True:
            connected = registry.online(round) & set(clients)
            self._missing -= connected
            # Without any site there is no round, and nobody whom waiting would hold up.
            hoped_for = max(1, len(set(clients) - self._missing))
            enough = len(connected) >= min(minimum, hoped_for)
            if enough or time.monotonic() - began >= policy.wait:
                break
            time.sleep(policy.poll)
        if not enough:
            gone = sorted(set(clients) - connected - self._missing)
            self._missing |= set(gone)
            log.warning(
                "round %d goes on without the sites that were not connected within %g s: %s; they "
                "take part once they are there",
                *(round, policy.wait, registry.names_of(gone)),
            )
        return connected
