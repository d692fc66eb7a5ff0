"""Messages to sites and their replies: what goes out, what comes back, who is waited for.

Whatever a site sends ends as a parcel of the declared form or as a refusal of that site; nobody can
keep an exchange open beyond its deadline, and who let one go by cannot do so again in every round.
Every message is entered in the ledger as it crosses.
"""

import logging
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from flwr.app import Message as Envelope
from flwr.app import RecordDict
from flwr.serverapp import Grid

from feddg.federation.transport import Ledger
from feddg.flower.parcels import Parcel, contents
from feddg.flower.replies import read_fields
from feddg.flower.traffic import Traffic, flower_bytes
from feddg.messages import Refusal, plain_text
from feddg.records import Direction

log = logging.getLogger("feddg")

AGREED = "agreed"
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
            if reply.fields.get("missing") != AGREED:
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
