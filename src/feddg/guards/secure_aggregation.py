"""Secure aggregation: the server sees the sum of a round's updates and no single one.

Bonawitz et al., "Practical Secure Aggregation for Privacy-Preserving Machine Learning" (CCS 2017),
the protocol against a server that follows it and is curious (their section 4 without signatures).

In a round with clients U1, a threshold t above half of them, and all sums modulo 2^64::

    keys      each client makes two key pairs (X25519) and sends the public ones
    shares    each is told all of them; shares its mask key s_k and a fresh seed b_k among all, t of
              which make them again (Shamir); what is for another is sealed for it. U2: who did
    train     each of U2 trains and sends
                  y_k = v_k + PRG(b_k) + sum_(k<j) PRG(s_kj) - sum_(k>j) PRG(s_kj),  j in U2,
              s_kj what its key and j's agree on, v_k its change of the weights. U3: who did
    unmask    each of U3 is told U3, and sends its shares of b_j for j in U3, of s_j for those lost
              sum_(U3) v_k = sum y_k - sum_(U3) PRG(b_k) -+ masks with those lost

    v_k = n_k round(2^26 (w_k - x)), and n_k itself as its last entry; n_k = 1 beside clipping

A client answers each question once, masks one update only, and wipes its secrets when it has
answered the last. A round that is done again has new secrets; its sum is unmasked only if it is of
the same clients, or of at least three others: else the difference of two sums would be an update.

What it does not do: a server that lies about who takes part, hands out keys of its own, or sees
what clients of its own sent, can learn more. And a sum over few says much about each: at least 3.

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
from feddg.forms import Sent
from feddg.guards import masking
from feddg.guards.compatibility import DESCRIPTIONS, EXTRAS, FUSION
from feddg.guards.guard import Guard, WeightFacts, register
from feddg.guards.masking import SEALED, SECRET
from feddg.guards.sums import added, encoded
from feddg.messages import Message, Update, Weights
from feddg.settings import Settings

KEYS, SHARES, UNMASK = (f"secure_aggregation:{step}" for step in ("keys", "shares", "unmask"))
MASKED = "secure_aggregation/masked"
FEWEST = 3
"""Clients of a sum: of two, each would know the other's."""


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

    # At a client

    def answer(
        self, id: int, round: int, name: str, question: Message, secrets: Weights
    ) -> Message:
        """Answers a step of the protocol at client ``id``; ``secrets`` are its own."""
        steps: dict[str, Callable[..., Message]] = {
            KEYS: self._keys,
            SHARES: self._shares,
            UNMASK: self._unmask,
        }
        if name not in steps:
            raise ClientError(f"knows no step {name!r} of secure aggregation")
        if name != KEYS and _number(secrets, "round") != round:
            raise ClientError("was asked for a step of secure aggregation out of turn")
        return steps[name](id, round, question, secrets)

    def _keys(self, id: int, round: int, question: Message, secrets: Weights) -> Message:
        before = secrets.get("opened") if _number(secrets, "round") == round else None
        secrets.clear()  # a round that begins again has keys of its own
        if before is not None:
            secrets["opened"] = before
        own = [masking.new_secret() for _ in range(2)]
        secrets |= {"own": _rows(own), "round": torch.tensor(round)}
        return Message({"keys": _rows([masking.public_key(key) for key in own])})

    def _shares(self, id: int, round: int, question: Message, secrets: Weights) -> Message:
        if "ids" in secrets:
            raise ClientError("has shared its secrets already")
        ids, keys = question.tensors["ids"].cpu(), question.tensors["keys"].cpu()
        place = self._place(id, ids)
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
        proof = _row(masking.commitment(seed))
        return Message({"shares": _rows(rows), "commitment": proof})

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
        if "ids" not in secrets or "members" in secrets:
            raise ClientError("masks one update a round, after sharing its secrets")
        ids, keys = secrets["ids"], [_bytes(pair) for pair in secrets["keys"]]
        members, table = told.tensors["members"].cpu(), told.tensors["shares"].cpu()
        places = {id: place for place, id in enumerate(ids.tolist())}
        self._require_members(update.client, members, places)
        own, me = _bytes(secrets["own"]), places[update.client]
        values = encoded(update, received, 1 if self.alike else update.examples, len(members))
        values = values + masking.mask(bytes(secrets["seed"].tolist()), len(values))
        for id in members.tolist():
            if id != update.client:
                seed = masking.agreed(own[0], keys[places[id]][0], "mask")
                values = added(values, masking.mask(seed, len(values)), update.client < id)
        secrets |= {"members": members.clone(), "table": table[:, me].clone()}
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
        ids = secrets["ids"].tolist()
        known = set(survivors) <= set(members) and len(set(survivors)) == len(survivors)
        if not known or id not in survivors or len(survivors) < self.needed(len(ids)):
            raise ClientError("was told of too few clients that are left, or of strange ones")
        before = set(secrets["opened"].tolist()) if "opened" in secrets else set(survivors)
        if 0 < len(before ^ set(survivors)) < FEWEST:
            raise ClientError(
                "helped to unmask this round before, with nearly the same clients: the difference "
                "of the two sums would show the update of one; begin a new run"
            )
        own, keys = _bytes(secrets["own"]), [_bytes(pair) for pair in secrets["keys"]]
        rows = []
        for row, other in enumerate(members):
            if other == id:
                pair = bytes(secrets["kept"].tolist())
            else:
                key = masking.agreed(own[1], keys[ids.index(other)][1], "shares")
                content = bytes(secrets["table"][row].tolist())
                pair = masking.opened(key, content, (round, other, id))
            rows.append(pair[SECRET:] if other in survivors else pair[:SECRET])
        secrets.clear()
        secrets |= {"round": torch.tensor(round), "opened": torch.tensor(survivors)}
        return Message({"opened": _rows(rows)})

    def _place(self, id: int, ids: Tensor) -> int:
        listed = ids.tolist()
        if len(set(listed)) < len(listed) or id not in listed or len(listed) < FEWEST:
            raise ClientError(f"masks with at least {FEWEST} clients, itself among them, each once")
        return listed.index(id)

    def _require_members(self, id: int, members: Tensor, places: dict[int, int]) -> None:
        listed = members.tolist()
        known = set(listed) <= places.keys() and len(set(listed)) == len(listed)
        if not known or id not in listed or len(listed) < self.needed(len(places)):
            raise ClientError("was told of too few clients to be masked among, or of strange ones")


def _row(content: bytes) -> Tensor:
    return torch.tensor(list(content), dtype=torch.uint8)


def _rows(contents: Sequence[bytes]) -> Tensor:
    return torch.stack([_row(content) for content in contents])


def _bytes(rows: Tensor) -> list[bytes]:
    return [bytes(row.tolist()) for row in rows]


def _number(secrets: Weights, name: str) -> int | None:
    return int(secrets[name]) if name in secrets else None
