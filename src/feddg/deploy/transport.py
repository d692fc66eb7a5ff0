"""A transport over Flower's grid, under the same server loop as in-process."""

import base64
import hashlib
import json
import logging
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, load_pem_public_key
from flwr.app import ConfigRecord, RecordDict
from flwr.app import Message as Envelope
from flwr.proto.node_pb2 import NodeInfo
from flwr.serverapp import Grid

from feddg.deploy.setup import held_out_among
from feddg.deploy.wire import (
    FIELDS,
    MOST_CHARACTERS,
    MOST_CLASSES,
    MOST_DOMAINS,
    Introduction,
    Parcel,
    Traffic,
    arrays,
    contents,
    flower_bytes,
    read_fields,
    read_introduction,
    read_update,
)
from feddg.errors import RunError
from feddg.federation.transport import Ledger, Reply
from feddg.messages import (
    Broadcast,
    Message,
    Refusal,
    Scalar,
    Update,
    Weights,
    on_device,
    plain_text,
)
from feddg.records import Direction

log = logging.getLogger("feddg")

CONTEXT = "context"
MOST_TOLD_AGAIN = 2
"""How often a site may ask in one exchange for what it was already sent."""
NOBODY = -1
"""The number of a node that is no site."""
INTRODUCE = "query.introduce"
AGAIN = "no reply yet, nor to an earlier message; nobody waits long for it until it answers"
PROMPT = 120.0
"""Seconds that the others wait at most for a site that comes back, or that was silent before."""
LATER = 60.0
"""Seconds by which Flower forgets a message later than we do, so that it is we who say so."""


@dataclass(frozen=True)
class Policy:
    """How patient the server is.

    Attributes:
        minimum: connected sites it waits for before anything is sent.
        wait: seconds it waits for them, until they have introduced themselves.
        deadline: seconds a site has for one message; later replies are dropped.
        poll: seconds between two looks at the mailbox.
        remind: seconds after which the log says who is waited for.
    """

    minimum: int = 1
    wait: float = 300.0
    deadline: float = 3600.0
    poll: float = 0.5
    remind: float = 60.0

    @property
    def prompt(self) -> float:
        """Seconds that the others wait for a site that comes back, or that was silent before."""
        return min(PROMPT, self.wait, self.deadline)


@dataclass(frozen=True)
class Recipient:
    """Who is written to.

    Attributes:
        node: Flower's number of it.
        name: what the log calls it.
        client: its number in the federation.
    """

    node: int
    name: str
    client: int = NOBODY


@dataclass(frozen=True)
class _Missed:
    """A message whose answer is not waited for any more."""

    to: Recipient
    purpose: str
    round: int
    began: float


class Post:
    """Flower's mailbox, with a ledger at its door.

    Args:
        grid: Flower's connection to the nodes.
        policy: patience.
        traffic: is told of every message.

    Attributes:
        limits: seconds that the others wait for a site that was silent once, by its number: twice
            what it has taken for an answer since, however late that came.
    """

    def __init__(self, grid: Grid, policy: Policy, traffic: Traffic) -> None:
        self.grid, self.policy, self.traffic = grid, policy, traffic
        self.limits: dict[int, float] = {}
        self._missed: dict[str, _Missed] = {}
        self._ledger: Ledger | None = None
        self._unentered: list[tuple[Any, ...]] = []

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

    def pull(self, sent: Collection[str]) -> list[Envelope]:
        """Fetches answers to messages that were sent.

        What comes too late, to a message that was given up, is entered and dropped: it says that
        the site is there, and how long it takes, but never answers a later message.
        """
        now = time.monotonic()
        oldest = now - 2 * self.policy.deadline
        self._missed = {id: m for id, m in self._missed.items() if m.began > oldest}
        found = []
        for envelope in self.grid.pull_messages([*sent, *self._missed]):
            missed = self._missed.pop(envelope.metadata.reply_to_message_id, None)
            if missed is None:
                found.append(envelope)
            elif not envelope.has_error():
                to, purpose = missed.to, f"{missed.purpose}, late"
                self.enter(missed.round, "up", to.client, purpose, envelope.content)
                log.info("%s answers a message of round %d: too late", to.name, missed.round)
                self.answered(to, now - missed.began)
        return found

    def miss(self, sent: str, missed: _Missed) -> None:
        """Gives up a message; its site is not waited for at full length before it answers."""
        self._missed[sent] = missed
        self.limits[missed.to.client] = self.policy.prompt

    def answered(self, who: Recipient, seconds: float) -> None:
        """Notes how long a site took; one that was silent has twice that from now on."""
        if who.client in self.limits:
            self.limits[who.client] = max(self.limits[who.client], 2 * seconds)

    def enter(
        self, round: int, direction: Direction, client: int, purpose: str, held: RecordDict
    ) -> None:
        """Enters a message; one that cannot be read is entered by its size."""
        size: int | None = None
        try:
            size = flower_bytes(held)
            shapes, scalars = contents(held)
        except Exception:
            shapes, scalars, purpose = [], {}, f"{purpose}, unreadable"
        entry = (round, direction, client, purpose, shapes, scalars, size)
        if self._ledger is None:
            self._unentered.append(entry)
        else:
            self._ledger.enter(*entry)


class Exchange:
    """Messages of one kind on their way to recipients, and what came back.

    Args:
        post: carries them.
        kind: Flower's type of the messages.
        purposes: what the ledger calls them, and the replies.
        round: the round they belong to.
        tell_again: sends a recipient what was agreed, which it says it was not told.

    Attributes:
        round: the round that further messages belong to.
    """

    def __init__(
        self,
        post: Post,
        kind: str,
        purposes: tuple[str, str],
        round: int,
        tell_again: Callable[[Recipient], None] = lambda to: None,
    ) -> None:
        self._post, self._kind, self._purposes, self.round = post, kind, purposes, round
        self._tell_again = tell_again
        self._waiting: dict[str, Recipient] = {}
        self._replies: dict[Recipient, Parcel | Refusal] = {}
        self._told_again: list[Recipient] = []
        self._began = time.monotonic()

    def send(self, to: Recipient, records: RecordDict) -> None:
        """Sends a message."""
        post, kind = self._post, self._kind
        envelope = Envelope(records, to.node, kind, ttl=post.policy.deadline + LATER)
        crossing = post.traffic.begin(kind, self.round, to.name, records)
        sent = next(iter(post.grid.push_messages([envelope])), None)
        if not sent:
            self._refuse(to, "the message could not be sent")
        else:
            self._waiting[sent] = to
            post.traffic.sent(sent, crossing)
            self._enter("down", to, records)

    def replies(
        self, to: Sequence[Recipient], *, needed: bool = True
    ) -> Iterator[tuple[Recipient, Parcel | Refusal]]:
        """Yields what recipients reply, in their order; each replies, or is refused, in time.

        Args:
            to: everybody who was written to.
            needed: whether nothing goes on without a reply. If so, and if all of them were silent
                before, they have their full time: nobody else waits.
        """
        policy, limits = self._post.policy, self._post.limits
        self._began = time.monotonic()
        remind = self._began + policy.remind
        hurry = not needed or any(recipient.client not in limits for recipient in to)
        for recipient in to:
            while recipient not in self._replies:
                heard = self._pull()
                # Also while there is always something to hear: nobody may keep a round open.
                if time.monotonic() >= self._began + policy.deadline:
                    self._give_up(list(self._waiting))
                elif not heard:
                    self._drop_lost()
                    if hurry:
                        self._leave_behind()
                    time.sleep(policy.poll)
                if time.monotonic() >= remind and self._waiting:
                    remind = time.monotonic() + policy.remind
                    self._say_who_is_waited_for(self._began + policy.deadline)
            yield recipient, self._replies.pop(recipient)

    def heard(self) -> dict[Recipient, Parcel | Refusal]:
        """Returns what has come by now, or that a recipient is gone; waits for nobody."""
        while self._pull():
            pass
        self._drop_lost()
        found, self._replies = self._replies, {}
        return found

    def forget(self, to: Recipient) -> None:
        """Has messages to a recipient count as never sent."""
        self._waiting = {sent: who for sent, who in self._waiting.items() if who != to}

    def _say_who_is_waited_for(self, until: float) -> None:
        late = sorted({to.name for to in self._waiting.values()})
        left = max(0.0, until - time.monotonic())
        log.info("waiting for %s; %.0f s left", ", ".join(late[:20]), left)

    def _pull(self) -> bool:
        """Fetches replies; returns whether there were any."""
        envelopes = self._post.pull(self._waiting)
        for envelope in envelopes:
            sent = envelope.metadata.reply_to_message_id
            sender = self._waiting.pop(sent, None)
            if sender is None:
                continue
            if not envelope.has_error():
                self._enter("up", sender, envelope.content)
                if self._kind != INTRODUCE:  # who says who it is has not worked yet
                    self._post.answered(sender, time.monotonic() - self._began)
            reply = self._opened(sender, envelope)
            if isinstance(reply, Refusal):
                self._replies[sender] = reply
                continue
            self._post.traffic.answered(sent, envelope.content, reply)
            if reply.fields.get("missing") != CONTEXT:
                self._replies[sender] = reply
            elif self._told_again.count(sender) < MOST_TOLD_AGAIN:
                self._told_again.append(sender)
                self._tell_again(sender)
            else:
                self._refuse(sender, "says again and again that it was not told what was agreed")
        return bool(envelopes)

    def _opened(self, sender: Recipient, envelope: Envelope) -> Parcel | Refusal:
        who, number = sender.name, sender.client
        if envelope.has_error():
            lines = (envelope.error.reason or "").strip().splitlines() or ["unknown error"]
            return Refusal(number, f"{who}: {plain_text(lines[-1])}")
        try:
            parcel = Parcel.from_records(envelope.content)
            parcel.fields = read_fields(self._kind, parcel)
        except ValueError as error:
            return Refusal(number, f"{who}: its reply cannot be read ({error})")
        except Exception as error:  # whatever a site sends, it ends as a refusal of that site
            log.debug("%s sent what cannot be read", who, exc_info=True)
            return Refusal(number, f"{who}: its reply cannot be read ({type(error).__name__})")
        refusal = parcel.fields.get("refusal")
        return parcel if refusal is None else Refusal(number, f"{who}: {refusal}")

    def _drop_lost(self) -> None:
        """Gives up on nodes that disconnected since their message was sent."""
        if not self._waiting:
            return
        nodes = set(self._post.grid.get_node_ids())
        for sent, to in list(self._waiting.items()):
            if to.node not in nodes:
                del self._waiting[sent]
                self._refuse(to, "disconnected before it replied")

    def _leave_behind(self) -> None:
        """Gives up sites that were silent before, once only such are waited for."""
        limits = self._post.limits
        if all(to.client in limits for to in self._waiting.values()):
            past = time.monotonic() - self._began
            self._give_up([m for m, to in self._waiting.items() if past >= limits[to.client]])

    def _give_up(self, messages: Sequence[str]) -> None:
        post, waited = self._post, time.monotonic() - self._began
        for sent in messages:
            to = self._waiting.pop(sent)
            full = waited >= post.policy.deadline
            self._refuse(to, f"no reply within {post.policy.deadline:g} s" if full else AGAIN)
            post.miss(sent, _Missed(to, self._purposes[1], self.round, self._began))

    def _refuse(self, to: Recipient, reason: str) -> None:
        self._replies[to] = Refusal(to.client, f"{to.name}: {reason}")

    def _enter(self, direction: Direction, who: Recipient, held: RecordDict) -> None:
        purpose = self._purposes[0 if direction == "down" else 1]
        self._post.enter(self.round, direction, who.client, purpose, held)


# Which key may call itself which site: a name belongs to the first key that had it.


UNNAMED = "its key was registered without a name; register it with `feddg deploy register`"


def fingerprint(public_key: bytes) -> str:
    """Returns a PEM public key's fingerprint as ``ssh-keygen -l`` shows it, ``SHA256:...``.

    Raises:
        ValueError: the bytes are no public key.
    """
    key = load_pem_public_key(public_key)
    shown = key.public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH)  # "type base64"
    digest = hashlib.sha256(base64.b64decode(shown.split()[1])).digest()
    return "SHA256:" + base64.b64encode(digest).decode("ascii").rstrip("=")


@dataclass
class Identities:
    """What is known of the sites' keys.

    Attributes:
        keys: fingerprint of the key that each site's name belongs to; grows.
        strict: whether nodes must have been registered under a name. Without, as where nobody has
            a key, any node is taken for what it says.
    """

    keys: dict[str, str] = field(default_factory=dict)
    strict: bool = True

    def objection(self, name: str, node: NodeInfo | None, sites: Collection[str]) -> str | None:
        """Says why a node may not be a site; without objection the name is its key's from now on.

        Args:
            name: what the node calls itself.
            node: what Flower knows of it; None if it is gone.
            sites: names of all sites of the deployment.
        """
        if name not in sites:
            return f"calls itself {name[:40]!r}, which is no site of this deployment"
        if node is not None and node.name and node.name != name:
            return f"calls itself {name!r}, but its key was registered as {node.name!r}"
        if not self.strict:
            return None
        if node is None or not node.name:
            return f"calls itself {name!r}, but {UNNAMED}"
        return self._other_key(name, node)

    def _other_key(self, name: str, node: NodeInfo) -> str | None:
        try:
            shown = fingerprint(node.public_key)
        except ValueError:
            return f"calls itself {name!r}, but has no key"
        known = self.keys.setdefault(name, shown)
        if known == shown:
            return None
        return (
            f"calls itself {name!r} with the key {shown}, but the name belongs to the key {known}; "
            "if the site has a new key, take the old one out of 'keys' in deployment.json"
        )


# Which node is which site: who may take a site's place, and who is there.


class Roster:
    """The sites of a deployment, and the nodes that have their places.

    Flower's node ids are random and change; a site's number is the position of its name, so
    sampling, order of aggregation and random streams are those of the in-process run.

    Args:
        sites: names of all sites that train, then of those that only evaluate.
        trainers: how many train.
        identities: whose name is whose.
        introduced: how many images sites joined this run with, in an earlier part of it.
        held_out: domains that nobody may train on.

    Attributes:
        sites: names of all sites.
        trainers: how many of them train.
        introductions: what connected sites said about themselves, by their numbers.
        counts: how many images sites introduced themselves with, by their numbers.
        objections: why nobody has a site's place, by its name, where somebody asked for it.
        on_introduction: called with each site's number and introduction, late joiners' too.
    """

    def __init__(
        self,
        sites: Sequence[str],
        trainers: int,
        identities: Identities,
        introduced: Mapping[str, int],
        held_out: Collection[str],
    ) -> None:
        self.sites, self.trainers = tuple(sites), trainers
        self._identities, self._held_out = identities, held_out
        self.counts = {id: introduced[n] for id, n in enumerate(sites) if n in introduced}
        self.introductions: dict[int, Introduction] = {}
        self.objections: dict[str, str] = {}
        self.on_introduction: Callable[[int, Introduction], None] = lambda id, introduction: None
        self._node_of: dict[int, int] = {}

    def recipient(self, id: int) -> Recipient:
        """Returns where to write to a site that has a node."""
        return Recipient(self._node_of[id], self.sites[id], id)

    def stranger(self, node: int, info: NodeInfo | None) -> Recipient:
        """Returns where to write to a node that has not said who it is, or says it again.

        Args:
            node: Flower's number of it.
            info: what Flower knows of it; None if it is gone.
        """
        id = next((id for id, own in self._node_of.items() if own == node), NOBODY)
        registered = f", registered as {info.name!r}" if info is not None and info.name else ""
        return Recipient(node, f"node {node}{registered}", id)

    def among(self, nodes: Collection[int]) -> set[int]:
        """Returns the numbers of the sites whose nodes are among ``nodes``."""
        return {id for id, node in self._node_of.items() if node in nodes}

    def admit(self, node: int, parcel: Parcel, info: NodeInfo | None) -> int | None:
        """Gives a node its site's place; returns the site's number, or None where it may not be.

        What is in its way is logged in one line.

        Args:
            node: Flower's number of it.
            parcel: its introduction, of which the fields were checked.
            info: what Flower knows of it; None if it is gone.
        """
        name = str(parcel.fields.get("site", ""))
        try:
            introduction = read_introduction(parcel)
        except ValueError as error:
            log.warning("left out: node %d calls itself %r, but %s", node, name, error)
            return None
        objection = self._identities.objection(name, info, self.sites)
        if objection is None:
            id = self.sites.index(name)
            objection = (
                self._held_out_fault(id, introduction)
                or self._changed(id, introduction)
                or self._other_files(id, introduction)
                or self._too_many_names(id, introduction)
            )
            if objection is None:
                self._settle(id, node, introduction)
                return id
            # Only now is it the site itself that cannot take part, and nobody in its name.
            self.objections[name] = objection
        log.warning("left out: node %d %s", node, objection)
        return None

    def _settle(self, id: int, node: int, introduction: Introduction) -> None:
        log.info("site %s is connected", self.sites[id])
        self._node_of[id] = node
        self.objections.pop(self.sites[id], None)
        self.introductions[id] = introduction
        self.counts.setdefault(id, introduction.images)
        self.on_introduction(id, introduction)

    def _held_out_fault(self, id: int, introduction: Introduction) -> str | None:
        """Says so where a site would train on domains that the run holds out, or None."""
        if id >= self.trainers:
            return None
        kept = held_out_among(introduction.domains, self._held_out)
        if not kept:
            return None
        name = self.sites[id]
        return (
            f"calls itself {name!r} and would train on {_listed(kept)}, which this run holds out; "
            f"give {name!r} images of other domains, name it in evaluation-sites, or take the "
            "domain out of hold_out"
        )

    def _changed(self, id: int, introduction: Introduction) -> str | None:
        """Says so where a site holds other images than it introduced itself with, or None."""
        before, earlier = self.counts.get(id), self.introductions.get(id)
        if (
            earlier is not None
            and introduction.images == before
            and (introduction.classes, introduction.domains) != (earlier.classes, earlier.domains)
        ):
            return (
                f"calls itself {self.sites[id]!r} and names other classes or domains than when it "
                "joined this run; a run's images stay the same: start a new run for others"
            )
        if before is None or before == introduction.images:
            return None
        return (
            f"calls itself {self.sites[id]!r} and has {introduction.images} images, but it joined "
            f"this run with {before}; a run's images stay the same: start a new run for others"
        )

    def _other_files(self, id: int, introduction: Introduction) -> str | None:
        """Says so where a site's method reads another file than another site's does, or None."""
        trainers = {k: v for k, v in self.introductions.items() if k < self.trainers and k != id}
        for other, known in trainers.items() if id < self.trainers else ():
            both = known.files.keys() & introduction.files.keys()
            unlike = sorted(f for f in both if known.files[f] != introduction.files[f])
            if unlike:
                return (
                    f"calls itself {self.sites[id]!r} and has another file as {unlike[0]} than "
                    f"{self.sites[other]!r}; all sites need the same one"
                )
        return None

    def _too_many_names(self, id: int, introduction: Introduction) -> str | None:
        """Says so where all sites' classes or domains would be too many with a site's, or None."""
        others = {k: v for k, v in self.introductions.items() if k < self.trainers and k != id}
        for what, most in (("classes", MOST_CLASSES), ("domains", MOST_DOMAINS)):
            own = getattr(introduction, what)
            all_ = set(own).union(*(getattr(other, what) for other in others.values()))
            # Every message to a site names all of them, in one text.
            size = len(json.dumps(list(all_)))
            if id < self.trainers and (len(all_) > most or size > MOST_CHARACTERS):
                largest = max(others, key=lambda k: len(getattr(others[k], what)))
                return (
                    f"calls itself {self.sites[id]!r} and names {len(own)} {what}: with those of "
                    f"the other sites, of which {self.sites[largest]!r} names most, "
                    f"{len(getattr(others[largest], what))}, they would be {len(all_)} in "
                    f"{size} characters, more than {most} or {MOST_CHARACTERS}"
                )
        return None

    def said_of(self, ids: Iterable[int], silent: Collection[str] = ()) -> str:
        """Returns the names of sites, each with what is in its way if that is known.

        Args:
            ids: their numbers.
            silent: names of nodes that are connected, but have not said who they are.
        """
        why = {name: "connected, but it has not introduced itself" for name in silent}
        why |= {name: f"it {objection}" for name, objection in self.objections.items()}
        names = [self.sites[id] for id in ids]
        return ", ".join(f"{name} ({why[name]})" if name in why else name for name in names)


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(repr(name) for name in names[:3]) + more


# A transport over Flower's grid, under the same server loop as in-process.
#
# Sites that are not connected, fail, or miss the deadline answer with a Refusal.


STATISTICS, TRAIN, ASK, EVALUATE = "query.statistics", "train", "query.ask", "evaluate"


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
        self._context: Message | None = None
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

    def hand_out(self, context: Message | None, *, again: bool = False) -> None:
        """Has every site sent what was agreed with its next message, once."""
        self._context = context
        content = b"" if context is None else context.to_bytes()
        self._digest = hashlib.blake2b(content, digest_size=8).hexdigest() if content else ""
        self._told = set()

    def client_statistics(self, clients: Sequence[int], broadcast: Broadcast) -> Iterator[Reply]:
        """See :class:`feddg.federation.transport.Transport`."""
        purposes = ("statistics", "statistics")
        return self._messages(self._exchanged(clients, STATISTICS, purposes, broadcast, {}))

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
        records = Parcel({**fields, CONTEXT: self._digest}, shared).to_records()

        def tell_again(to: Recipient) -> None:
            self._told.discard(to.client)
            exchange.send(to, self._addressed(records, to.client, told=False))

        exchange = Exchange(self._post, kind, purposes, broadcast.round, tell_again)
        written_to = {id: self._roster.recipient(id) for id in clients if id in online}
        for id, to in written_to.items():
            told = id in self._told or self._context is None or kind == EVALUATE
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
        if not told and self._context is not None:
            fields["parts"] = ",".join(filter(None, (str(fields["parts"]), CONTEXT)))
            fields |= {f"{CONTEXT}/{name}": s for name, s in self._context.scalars.items()}
            if self._context.tensors:
                own[CONTEXT] = arrays(self._context.tensors)
        own[FIELDS] = ConfigRecord(fields)
        return own
