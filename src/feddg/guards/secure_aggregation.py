"""Secure aggregation: the server sees the sum of a round's updates and no single one.

Bonawitz et al., "Practical Secure Aggregation for Privacy-Preserving Machine Learning" (CCS 2017),
the protocol against a server that follows it and is curious (their section 4 without signatures).

In a round with clients U1, a threshold t above half of them, and all sums modulo 2^64::

    keys      each client makes two key pairs (X25519) and sends the public ones
    shares    each is told all of them; shares its mask key s_k and a fresh seed b_k among all, t of
              which make them again (Shamir); what is for another is sealed for it, and every share
              is committed to
    check     each is sent its shares, and says which open to what was committed to. U2: those left
              without who cannot be opened
    train     each of U2 trains and sends
                  y_k = v_k + PRG(b_k) + sum_(k<j) PRG(s_kj) - sum_(k>j) PRG(s_kj),  j in U2,
              s_kj what its key and j's agree on, v_k its change of the weights. U3: who did
    unmask    each of U3 is told U3, and sends its shares of b_j for j in U3, of s_j for those lost
              sum_(U3) v_k = sum y_k - sum_(U3) PRG(b_k) -+ masks with those lost

    v_k = n_k round(2^26 (w_k - x)), and n_k itself as its last entry; n_k = 1 beside clipping

A client answers each question once, masks one update only, and wipes its secrets when it has
answered the last. An update is part of one sum at most: a round that is done again has new secrets,
and is unmasked for the same clients only, since any other set would give a difference away. For
that a client keeps, from round to round and wherever it keeps anything (names under ``known/``):

    known/id        its number
    known/round     the last round that it helped to unmask; of an earlier one it answers nothing
    known/opened    for which clients it did
    known/tried/R/I the clients that it masked an update of round R among. It masks another only if
                    too few of both tries' clients could have unmasked each without a common one

What it does not do: a server that hands out keys of its own, has the same weights trained again as
another round or experiment, or sees what clients of its own sent, can learn more. And a sum over
few says much about each: at least 3.

Flower's own SecAgg+ lives in its older message interface, which this program's does not carry.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import numpy
import torch
from pydantic import Field
from torch import Tensor

from feddg.errors import ClientError
from feddg.guards import masking
from feddg.guards.compatibility import DESCRIPTIONS, EXTRAS, FUSION
from feddg.guards.guard import Guard, Passage, WeightFacts, register
from feddg.guards.masking import SEALED, SECRET
from feddg.guards.sums import added, encoded
from feddg.messages import Message, Sent, Update, Weights
from feddg.settings import Settings

KEYS, SHARES, CHECK, UNMASK = (
    f"secure_aggregation:{step}" for step in ("keys", "shares", "check", "unmask")
)
MASKED = "secure_aggregation/masked"
FEWEST = 3
"""Clients of a sum: of two, each would know the other's."""
LARGEST_STEP = 10.0
"""The farthest a mean moves an entry, as a multiple of its tensor's largest entry, and 1."""
KNOWN = "known/"
"""Prefix of what a client keeps beyond a round."""


class SecureAggregationSettings(Settings):
    """Settings of secure aggregation."""

    threshold: float = Field(
        0.67, gt=0.5, le=1, description="share of a round's clients that must stay to its end"
    )


@register
class SecureAggregation(Guard):
    """Updates masked so that only their sum can be read."""

    name = "secure_aggregation"
    summary = "the server sees only sums of updates (Bonawitz et al. 2017)"
    Settings = SecureAggregationSettings
    breaks: ClassVar[dict[str, str]] = {
        DESCRIPTIONS: "which the server would see of each client",
        EXTRAS: "which the server would see of each client",
        FUSION: "and the server sees nothing but their sum",
    }
    sums = True

    def __init__(self, settings: Any = None, *, alike: bool = False) -> None:
        super().__init__(settings)
        self.alike = alike
        """Whether all clients count the same, as beside clipping."""

    @property
    def least(self) -> int:
        """Three: of two, each would know the other's."""
        return FEWEST

    @property
    def sends(self) -> dict[str, Sent]:
        """The masked update."""
        form = Sent(
            "its update, masked",
            ("entries",),
            dtype=torch.int64,
            low=-math.inf,
            high=math.inf,
        )
        return {"update/masked": form}

    @property
    def promise(self) -> str:
        """What the server sees."""
        return "updates: the server sees only sums over a round's clients (secure aggregation)"

    def needed(self, clients: int) -> int:
        """Returns t: how many of a round's clients must stay to its end."""
        share = math.ceil(self.settings.threshold * clients - 1e-9)
        return int(max(FEWEST, clients // 2 + 1, share))

    # At the server

    def receive(self, update: Update, passage: Passage) -> Update:
        """Refuses a mean in which an entry moved farther than training moves any."""
        for name in sorted(passage.facts.trained & update.weights.keys()):
            sent = passage.sent[name].double()
            if not sent.numel():
                continue
            moved = float((update.weights[name].to(sent) - sent).abs().max())
            limit = LARGEST_STEP * (1 + float(sent.abs().max()))
            if not moved <= limit:
                raise ClientError(
                    f"it moved an entry of {name!r} by {moved:.3g}, more than training can "
                    f"({limit:.3g})"
                )
        return update

    # At a client

    def answer(
        self, id: int, round: int, name: str, question: Message, secrets: Weights
    ) -> Message:
        """Answers a step of the protocol at client ``id``; ``secrets`` are its own."""
        steps: dict[str, Callable[..., Message]] = {
            KEYS: self._keys,
            SHARES: self._shares,
            CHECK: self._check,
            UNMASK: self._unmask,
        }
        if name not in steps:
            raise ClientError(f"knows no step {name!r} of secure aggregation")
        if name != KEYS and _number(secrets, "round") != round:
            raise ClientError("was asked for a step of secure aggregation out of turn")
        return steps[name](id, round, question, secrets)

    def _keys(self, id: int, round: int, question: Message, secrets: Weights) -> Message:
        before, last = _number(secrets, KNOWN + "id"), _number(secrets, KNOWN + "round")
        if before not in (None, id):
            raise ClientError(
                f"took part in this experiment as client {before}, and is asked as client {id}; "
                "begin a run with another seed"
            )
        if last is not None and round < last:
            raise ClientError(
                f"helped to unmask round {last} of this experiment before, and is asked for round "
                f"{round}: two sums of a round would show single updates; begin a run with another "
                "seed"
            )
        _forget(secrets)  # a round that begins again has keys of its own
        own = [masking.new_secret() for _ in range(2)]
        secrets |= {"own": _rows(own), "round": torch.tensor(round)}
        return Message({"keys": _rows([masking.public_key(key) for key in own])})

    def _shares(self, id: int, round: int, question: Message, secrets: Weights) -> Message:
        if "ids" in secrets:
            raise ClientError("has shared its secrets already")
        ids, keys = question.tensors["ids"].cpu(), question.tensors["keys"].cpu()
        place = self._place(id, ids)
        self._require_one_sum(round, set(ids.tolist()), secrets)
        own = _bytes(secrets["own"])
        public = [_bytes(pair) for pair in keys]
        if public[place] != [masking.public_key(key) for key in own]:
            raise ClientError("was told another key than its own")
        if len({key for pair in public for key in pair}) < 2 * len(public):
            raise ClientError("was told the same key twice")
        needed, seed = self.needed(len(ids)), masking.new_secret()
        of_key, of_seed = (masking.split(s, needed, len(ids)) for s in (own[0], seed))
        pairs = [one + other for one, other in zip(of_key, of_seed)]
        rows = [bytes(SEALED)] * len(ids)
        for other, to in enumerate(ids.tolist()):
            if other != place:
                key = masking.agreed(own[1], public[other][1], "shares")
                rows[other] = masking.sealed(key, pairs[other], (round, id, to))
        secrets |= {"ids": ids.clone(), "keys": keys.clone(), "seed": _row(seed)}
        secrets["kept"] = _row(pairs[place])
        proofs = torch.stack([_commitments(pair) for pair in pairs])
        proof = _row(masking.commitment(seed))
        return Message({"shares": _rows(rows), "commitments": proofs, "commitment": proof})

    def _require_one_sum(self, round: int, ids: set[int], secrets: Weights) -> None:
        """Raises ClientError if an update of this client might become part of a second sum."""
        tried = [set(t.tolist()) for n, t in secrets.items() if n.startswith(_tried(round))]
        needed = self.needed(len(ids))
        if any(self.needed(len(other)) + needed <= len(other | ids) for other in tried):
            raise ClientError(
                "masked its update of this round before, among other clients, who may have "
                "unmasked it without those of now"
            )

    def _check(self, id: int, round: int, question: Message, secrets: Weights) -> Message:
        if "ids" not in secrets or "pairs" in secrets:
            raise ClientError("looks at a round's shares once, after sharing its own secrets")
        ids, keys = secrets["ids"].tolist(), [_bytes(pair) for pair in secrets["keys"]]
        members = question.tensors["members"].cpu()
        table, proofs = (question.tensors[n].cpu() for n in ("shares", "commitments"))
        self._require_members(id, members, ids, self.needed(len(ids)))
        own, me = _bytes(secrets["own"]), ids.index(id)
        pairs, held = [], []
        for row, other in enumerate(members.tolist()):
            pair = bytes(secrets["kept"].tolist())
            if other != id:
                key = masking.agreed(own[1], keys[ids.index(other)][1], "shares")
                content = bytes(table[row, me].tolist())
                pair = masking.opened(key, content, (round, other, id)) or bytes(2 * SECRET)
            pairs.append(pair)
            held.append(bool(torch.equal(_commitments(pair), proofs[row, me])))
        secrets |= {"checked": members.clone(), "pairs": _rows(pairs)}
        return Message({"held": torch.tensor(held)})

    def mask(
        self,
        update: Update,
        received: Weights,
        told: Message,
        facts: WeightFacts,
        secrets: Weights,
    ) -> Update:
        """Returns the update as the server may see it: one vector of masked numbers.

        Raises:
            ClientError: it may not be masked, or was before.
        """
        if "pairs" not in secrets or "members" in secrets:
            raise ClientError("masks one update a round, after sharing its secrets")
        ids, keys = secrets["ids"], [_bytes(pair) for pair in secrets["keys"]]
        members = told.tensors["members"].cpu()
        places = {id: place for place, id in enumerate(ids.tolist())}
        checked = secrets["checked"].tolist()
        self._require_members(update.client, members, checked, self.needed(len(ids)))
        own = _bytes(secrets["own"])
        values = encoded(update, received, 1 if self.alike else update.examples, len(members))
        values = values + masking.mask(bytes(secrets["seed"].tolist()), len(values))
        for id in members.tolist():
            if id != update.client:
                seed = masking.agreed(own[0], keys[places[id]][0], "mask")
                values = added(values, masking.mask(seed, len(values)), update.client < id)
        secrets |= {"members": members.clone(), KNOWN + "id": torch.tensor(update.client)}
        tried = _tried(int(secrets["round"]))
        secrets[f"{tried}{sum(name.startswith(tried) for name in secrets)}"] = ids.clone()
        del secrets["seed"]
        vector = torch.from_numpy(values.view(numpy.int64))
        return Update(
            update.client,
            update.examples,
            {},
            Message(update.extras.tensors | {MASKED: vector}, update.extras.scalars),
            {},
            update.seconds,
            update.images,
        )

    def _unmask(self, id: int, round: int, question: Message, secrets: Weights) -> Message:
        if "members" not in secrets:
            raise ClientError("has nothing to unmask, or did it already")
        members, survivors = secrets["members"].tolist(), question.tensors["survivors"].tolist()
        self._require_members(
            id, question.tensors["survivors"], members, self.needed(len(secrets["ids"]))
        )
        if _number(secrets, KNOWN + "round") == round:
            before = secrets[KNOWN + "opened"].tolist()
            if before != sorted(survivors):
                raise ClientError(
                    f"helped to unmask this round before, for {clients_said(before)}, and does so "
                    "for the same clients only: two sums would show single updates"
                )
        checked = secrets["checked"].tolist()
        pairs = [bytes(secrets["pairs"][checked.index(other)].tolist()) for other in members]
        rows = [
            pair[SECRET:] if other in survivors else pair[:SECRET]
            for other, pair in zip(members, pairs)
        ]
        _forget(secrets)
        for name in [name for name in secrets if name.startswith(_TRIED)]:
            if not name.startswith(_tried(round)):
                del secrets[name]
        secrets |= {"round": torch.tensor(round), KNOWN + "round": torch.tensor(round)}
        secrets[KNOWN + "opened"] = torch.tensor(sorted(survivors))
        return Message({"opened": _rows(rows)})

    def _place(self, id: int, ids: Tensor) -> int:
        listed = ids.tolist()
        if len(set(listed)) < len(listed) or id not in listed or len(listed) < FEWEST:
            raise ClientError(f"masks with at least {FEWEST} clients, itself among them, each once")
        return listed.index(id)

    def _require_members(self, id: int, told: Tensor, among: Sequence[int], least: int) -> None:
        listed = told.tolist()
        known = set(listed) <= set(among) and len(set(listed)) == len(listed)
        if not known or id not in listed or len(listed) < least:
            raise ClientError("was told of too few clients that are left, or of strange ones")


def clients_said(ids: Sequence[int]) -> str:
    """Returns clients as a line names them; of many the first."""
    more = f" and {len(ids) - 20} more" if len(ids) > 20 else ""
    return f"clients {', '.join(map(str, ids[:20]))}{more}"


_TRIED = KNOWN + "tried/"


def _tried(round: int) -> str:
    return f"{_TRIED}{round}/"


def _forget(secrets: Weights) -> None:
    """Wipes all but what is kept beyond a round."""
    for name in [name for name in secrets if not name.startswith(KNOWN)]:
        del secrets[name]


def _commitments(pair: bytes) -> Tensor:
    """Commitments to a share of the mask key and one of the seed, ``(2, 32)`` uint8."""
    return _rows([masking.commitment(share) for share in (pair[:SECRET], pair[SECRET:])])


def _row(content: bytes) -> Tensor:
    return torch.tensor(list(content), dtype=torch.uint8)


def _rows(contents: Sequence[bytes]) -> Tensor:
    return torch.stack([_row(content) for content in contents])


def _bytes(rows: Tensor) -> list[bytes]:
    return [bytes(row.tolist()) for row in rows]


def _number(secrets: Weights, name: str) -> int | None:
    return int(secrets[name]) if name in secrets else None
