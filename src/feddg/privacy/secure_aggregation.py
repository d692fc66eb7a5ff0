"""Secure aggregation: the server sees only the sum of a round's updates.

The server asks its questions over any transport, which enters each of them, with keys and shares,
in the ledger. The server loop gets one update, the mean over the clients that stayed, and a refusal
for each client that dropped out. If a sum is missing or implausible, the error says whose fault it
is, if that is known.
"""

import hashlib
import math
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from secrets import randbelow
from typing import Any, ClassVar

import numpy
import torch
from pydantic import Field
from torch import Tensor

from feddg.diagnostics import Diagnostic, note
from feddg.errors import ClientError, Diverged, NotEnoughUpdates
from feddg.messages import Broadcast, EntrySchema, Message, Refusal, Update, Weights, joined
from feddg.methods.base import Method, name_clients
from feddg.privacy.defence import (
    AGGREGATION,
    CLIENT_STATISTICS,
    EXTRAS,
    Defence,
    register,
)
from feddg.records import OPENED_SUM_ROWS, OPENED_SUMS, OpenedSumRow
from feddg.settings import PrivacySettings, Settings

# The cryptography of masked sums: keys, masks, shares of secrets.
#
# X25519, HKDF, ChaCha20 and its authenticated form are ``cryptography``'s. A secret is 32 bytes, a
# number below PRIME; all randomness is the operating system's.


SECRET = 32
"""Bytes of a key, seed or share."""
SEALED = 12 + 2 * SECRET + 16
"""Bytes of two encrypted shares: nonce, content, tag."""
PRIME = 2**256 - 189
"""The largest prime that 32 bytes hold; secrets are shared in its field."""
_SCALE = 2.0**26
_LARGEST = 2.0**62
MASKED = "secure_aggregation/masked"
FEWEST = 3
"""Minimum number of clients in a sum; with two, each would learn the other's update."""
KNOWN = "known/"
"""Prefix of what a client stores beyond a round."""
OTHER = "begin a run with another seed (ridge's sums are the same under every seed)"
"""What to do about a sum that may not be opened."""
_TRIED = KNOWN + "tried/"


def new_secret() -> bytes:
    """Returns 32 random bytes: a seed, or a private key."""
    return randbelow(PRIME).to_bytes(SECRET, "big")


def public_key(private: bytes) -> bytes:
    """Returns the X25519 public key, 32 bytes, of a private one."""
    from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

    return X25519PrivateKey.from_private_bytes(private).public_key().public_bytes_raw()


def shared_key(private: bytes, public: bytes, purpose: str) -> bytes:
    """Returns the 32 bytes shared by two key holders and nobody else (RFC 7748, 5869).

    Args:
        private: one's private key.
        public: the other's public key.
        purpose: what the bytes are for; another purpose gives other bytes.

    Raises:
        ClientError: the public key is invalid.
    """
    from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
    from cryptography.hazmat.primitives.hashes import SHA256
    from cryptography.hazmat.primitives.kdf.hkdf import HKDF

    try:
        other = X25519PublicKey.from_public_bytes(public)
        shared = X25519PrivateKey.from_private_bytes(private).exchange(other)
    except ValueError:
        raise ClientError("was given an invalid public key") from None
    return HKDF(SHA256(), SECRET, None, f"feddg {purpose}".encode()).derive(shared)


def is_public_key(public: bytes) -> bool:
    """Whether a public key is valid; zero and points of low order are not."""
    try:
        shared_key(new_secret(), public, "trial")
    except ClientError:
        return False
    return True


def mask(seed: bytes, length: int) -> numpy.ndarray:
    """Returns the mask of a seed: ``length`` pseudo-random uint64.

    It is ChaCha20's key stream; use a seed for one mask only.
    """
    from cryptography.hazmat.primitives.ciphers import Cipher
    from cryptography.hazmat.primitives.ciphers.algorithms import ChaCha20

    stream = Cipher(ChaCha20(seed, bytes(16)), None).encryptor()
    return numpy.frombuffer(stream.update(bytes(8 * length)), "<u8")


def commitment(seed: bytes) -> bytes:
    """Returns a commitment of 32 bytes: it identifies a seed or share without revealing it."""
    return hashlib.blake2b(seed, digest_size=SECRET, person=b"feddg seed").digest()


def split(secret: bytes, threshold: int, holders: int) -> list[bytes]:
    """Splits a secret into one share per holder; any ``threshold`` of them recover it.

    The secret is the value at 0 of a polynomial of degree ``threshold - 1`` whose other
    coefficients are random; the share of holder ``i``, from 0, is its value at ``i + 1``. Fewer
    shares reveal nothing (Shamir, "How to Share a Secret", 1979).

    Args:
        secret: of :func:`new_secret`.
        threshold: how many shares recover it.
        holders: number of shares.
    """
    value = int.from_bytes(secret, "big")
    coefficients = [value, *(randbelow(PRIME) for _ in range(threshold - 1))]
    shares = []
    for place in range(1, holders + 1):
        at_place = 0
        for coefficient in reversed(coefficients):
            at_place = (at_place * place + coefficient) % PRIME
        shares.append(at_place.to_bytes(SECRET, "big"))
    return shares


def combined(shares: Mapping[int, bytes], threshold: int) -> bytes:
    """Recovers the secret from shares, given by index of their holder from 0.

    Args:
        shares: at least ``threshold`` shares; more are not used.
        threshold: the threshold used to split it.
    """
    used = {place + 1: share for place, share in sorted(shares.items())[:threshold]}
    secret = 0
    for place, share in used.items():  # Lagrange's interpolation at 0
        others = [other for other in used if other != place]
        above = math.prod(others)
        below = math.prod(other - place for other in others)
        secret += int.from_bytes(share, "big") * above * pow(below, -1, PRIME)
    return (secret % PRIME).to_bytes(SECRET, "big")


def sealed(key: bytes, content: bytes, way: Sequence[int]) -> bytes:
    """Encrypts content with a key; ``way`` (round, from, to) is authenticated with it."""
    from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305

    nonce = os.urandom(12)
    return nonce + ChaCha20Poly1305(key).encrypt(nonce, content, _label(way))


def opened(key: bytes, content: bytes, way: Sequence[int]) -> bytes | None:
    """Decrypts :func:`sealed` content; None if it was changed or belongs to another message."""
    from cryptography.exceptions import InvalidTag
    from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305

    try:
        return ChaCha20Poly1305(key).decrypt(content[:12], content[12:], _label(way))
    except InvalidTag:
        return None


def _label(way: Sequence[int]) -> bytes:
    return "/".join(map(str, way)).encode()


def encoded(update: Update, received: Weights, count: int, clients: int) -> numpy.ndarray:
    """Returns an update's change as integers modulo 2^64, uint64, with its weight at the end.

    Args:
        update: the trained update.
        received: the weights the client was sent.
        count: the update's weight in the sum.
        clients: number of summed updates.

    Raises:
        ClientError: the change is too large for the sum, or not finite.
    """
    parts = [
        ((update.weights[n].double() - received[n].to(update.weights[n]).double()) * _SCALE).round()
        for n in sorted(update.weights)
    ]
    flat = torch.cat([part.flatten().cpu() for part in parts]) if parts else torch.zeros(0)
    largest = float(flat.abs().max()) * count if len(flat) else 0.0
    if not largest <= _LARGEST / clients:
        raise Diverged(
            "its change is not finite, or too large to be summed: lower train.lr, or divide a "
            "table's features by one number, the same at all sites"
        )
    values = torch.cat([flat.to(torch.int64) * count, torch.tensor([count])])
    return values.numpy().view(numpy.uint64)


def decoded(total: numpy.ndarray, received: Weights) -> tuple[Weights, int]:
    """Returns the mean of the weights from the sum of changes, and their total weight.

    If the total weight is not what it must be, neither is the mean.

    Args:
        total: uint64, the sum of :func:`encoded` updates.
        received: the weights the clients were sent.
    """
    values, at, weights = torch.from_numpy(total.view(numpy.int64).copy()), 0, {}
    count = int(values[-1])
    for name in sorted(received):
        tensor = received[name]
        change = values[at : at + tensor.numel()].double().reshape(tensor.shape) / (_SCALE * count)
        at += tensor.numel()
        mean = tensor.double() + change.to(tensor.device)
        weights[name] = (mean if tensor.is_floating_point() else mean.round()).to(tensor.dtype)
    return {name: weights[name] for name in received}, count


def unmasked(
    sums: Sequence[numpy.ndarray],
    seeds: Sequence[bytes],
    lost: Sequence[tuple[int, bytes]],
    left: Sequence[tuple[int, bytes]],
) -> numpy.ndarray:
    """Returns the sum of the survivors' updates, with all masks removed.

    Args:
        sums: their masked vectors, uint64.
        seeds: seeds of their own masks.
        lost: id and private mask key of each client that sent nothing after masks were agreed.
        left: id and public mask key of each survivor.
    """
    total = sums[0].copy()
    for more in sums[1:]:
        total += more
    for seed in seeds:
        total -= mask(seed, len(total))
    for gone, private in lost:
        for id, public in left:
            more = mask(shared_key(private, public, "mask"), len(total))
            total = total + more if id > gone else total - more
    return total


KEYS, SHARES, CHECK, UNMASK = (
    f"secure_aggregation:{step}" for step in ("keys", "shares", "check", "unmask")
)


class SecureAggregationSettings(Settings):
    """Settings of secure aggregation."""

    threshold: float = Field(
        0.67, gt=0.5, le=1, description="share of a round's clients that must stay to its end"
    )


@register
class SecureAggregation(Defence):
    """Masks updates so that only their sum can be read."""

    name = "secure_aggregation"
    Settings = SecureAggregationSettings
    breaks: ClassVar[dict[str, str]] = {
        CLIENT_STATISTICS: "which the server would see of each client",
        EXTRAS: "which the server would see of each client",
        AGGREGATION: "and the server sees nothing but their sum",
    }
    sums = True
    extra = "secure"

    def __init__(self, settings: Any = None) -> None:
        super().__init__(settings)
        self.alike = False
        """Whether all clients have the same weight, as with clipping."""
        self.opened: dict[int, list[int]] = {}
        """The clients, ascending, whose sum in a round may have been opened, by round."""
        self.masked: tuple[int, list[int]] = 0, []
        """The round whose updates were asked for last, and of whom."""
        self._store: Callable[[OpenedSumRow], None] = lambda row: None

    @property
    def least(self) -> int:
        """Three: with two, each would learn the other's update."""
        return FEWEST

    @property
    def sends(self) -> dict[str, EntrySchema]:
        """The schema of the masked update."""
        schema = EntrySchema(
            "its update, masked", ("entries",), dtype=torch.int64, low=-math.inf, high=math.inf
        )
        return {"update/masked": schema}

    @property
    def diagnostic(self) -> Diagnostic:
        """A note on what the server sees."""
        text = "Updates: the server sees only sums over a round's clients (secure aggregation)."
        return note("secure-aggregation", text)

    def needed(self, clients: int) -> int:
        """Returns t: how many of a round's clients must stay until its end."""
        share = math.ceil(self.settings.threshold * clients - 1e-9)
        return int(max(FEWEST, clients // 2 + 1, share))

    def keep_in(self, folder: Any) -> None:
        """Goes on from the sums that the run has opened."""
        rows = OPENED_SUM_ROWS.read(folder.path / OPENED_SUMS)
        if rows:
            folder.replace_rows(OPENED_SUMS, rows)  # without a line that was cut off
        self.opened = {row.round: row.clients for row in rows}
        self._store = lambda row: folder.append(OPENED_SUMS, [row])

    def keep_opened(self, round: int, clients: list[int]) -> None:
        """Stores, before clients are asked to unmask, whose sum is about to be opened."""
        if round not in self.opened:
            self._store(OpenedSumRow(round=round, clients=clients))
            self.opened[round] = clients

    def fit(self, privacy: PrivacySettings, method: Method) -> None:
        """See :class:`Defence`."""
        self.alike = privacy.clipping != "none"

    # At the server

    def carrier(self, transport: object, fewest: int) -> "MaskedRounds":
        """Returns the rounds whose updates arrive as one sum."""
        return MaskedRounds(transport, self, fewest)

    def bound_to(self, round: int) -> Sequence[int] | None:
        """A round whose sum was opened is repeated with the same clients, and a masked one, too.

        Who masked its update once does not do it again among too many others.
        """
        of_round, clients = self.masked
        return self.opened.get(round, clients if clients and of_round == round else None)

    # At a client

    def answer(
        self, id: int, round: int, name: str, question: Message, secrets: Weights
    ) -> Message:
        """At client ``id``: answers a step of the protocol; ``secrets`` belong to this client."""
        steps = {KEYS: self._keys, SHARES: self._shares, CHECK: self._check, UNMASK: self._unmask}
        if name not in steps:
            raise ClientError(f"knows no step {name!r} of secure aggregation")
        if name != KEYS and _number(secrets, "round") != round:
            raise ClientError("was asked for a step of secure aggregation out of turn")
        return steps[name](id, round, question, secrets)

    def _keys(self, id: int, round: int, question: Message, secrets: Weights) -> Message:
        before, last = _number(secrets, KNOWN + "id"), _number(secrets, KNOWN + "round")
        if before not in (None, id):
            raise ClientError(
                f"took part with this seed as client {before}, and is asked as client {id}; {OTHER}"
            )
        if last is not None and round < last:
            raise ClientError(
                f"helped to unmask round {last} with this seed before, and is asked for round "
                f"{round}: two sums of a round would show single updates; {OTHER}"
            )
        _forget(secrets)  # a round that begins again has keys of its own
        keys = [new_secret() for _ in range(2)]
        secrets |= {"own": _rows(keys), "round": torch.tensor(round)}
        return Message({"keys": _rows([public_key(key) for key in keys])})

    def _shares(self, id: int, round: int, question: Message, secrets: Weights) -> Message:
        if "ids" in secrets:
            raise ClientError("has shared its secrets already")
        ids, keys = question.tensors["ids"].cpu(), question.tensors["keys"].cpu()
        listed = ids.tolist()
        self._require_members(id, ids, listed, FEWEST)
        place = listed.index(id)
        self._require_one_sum(round, set(listed), secrets)
        mine = _bytes(secrets["own"])
        public = [_bytes(pair) for pair in keys]
        if public[place] != [public_key(key) for key in mine]:
            raise ClientError("was told another key than its own")
        if len({key for pair in public for key in pair}) < 2 * len(public):
            raise ClientError("was told the same key twice")
        needed, seed = self.needed(len(ids)), new_secret()
        of_key, of_seed = (split(s, needed, len(ids)) for s in (mine[0], seed))
        pairs = [one + other for one, other in zip(of_key, of_seed)]
        rows = [bytes(SEALED)] * len(ids)
        for other, to in enumerate(listed):
            if other != place:
                key = shared_key(mine[1], public[other][1], "shares")
                rows[other] = sealed(key, pairs[other], (round, id, to))
        secrets |= {"ids": ids.clone(), "keys": keys.clone(), "seed": _row(seed)}
        secrets["kept"] = _row(pairs[place])
        proofs = torch.stack([_commitments(pair) for pair in pairs])
        proof = _row(commitment(seed))
        return Message({"shares": _rows(rows), "commitments": proofs, "commitment": proof})

    def _require_one_sum(self, round: int, ids: set[int], secrets: Weights) -> None:
        """Raises ClientError if an update of this client could become part of a second sum."""
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
        mine, me = _bytes(secrets["own"]), ids.index(id)
        pairs, valid = [], []
        for row, other in enumerate(members.tolist()):
            pair = bytes(secrets["kept"].tolist())
            if other != id:
                key = shared_key(mine[1], keys[ids.index(other)][1], "shares")
                content = bytes(table[row, me].tolist())
                pair = opened(key, content, (round, other, id)) or bytes(2 * SECRET)
            pairs.append(pair)
            valid.append(bool(torch.equal(_commitments(pair), proofs[row, me])))
        secrets |= {"checked": members.clone(), "pairs": _rows(pairs)}
        return Message({"held": torch.tensor(valid)})

    def mask(self, update: Update, received: Weights, message: Message, secrets: Weights) -> Update:
        """Returns the update as the server may see it: one vector of masked numbers.

        Raises:
            ClientError: it must not be masked, or was masked before.
        """
        if "pairs" not in secrets or "members" in secrets:
            raise ClientError("masks one update a round, after sharing its secrets")
        ids, keys = secrets["ids"], [_bytes(pair) for pair in secrets["keys"]]
        members = message.tensors["members"].cpu()
        places = {id: place for place, id in enumerate(ids.tolist())}
        checked = secrets["checked"].tolist()
        self._require_members(update.client, members, checked, self.needed(len(ids)))
        mine = _bytes(secrets["own"])
        values = encoded(update, received, 1 if self.alike else update.examples, len(members))
        values = values + mask(bytes(secrets["seed"].tolist()), len(values))
        for id in members.tolist():
            if id != update.client:
                more = mask(shared_key(mine[0], keys[places[id]][0], "mask"), len(values))
                values = values + more if update.client < id else values - more
        secrets |= {"members": members.clone(), KNOWN + "id": torch.tensor(update.client)}
        tried = _tried(int(secrets["round"]))
        secrets[f"{tried}{sum(name.startswith(tried) for name in secrets)}"] = ids.clone()
        del secrets["seed"]
        vector = torch.from_numpy(values.view(numpy.int64))
        extras = Message(update.extras.tensors | {MASKED: vector}, update.extras.scalars)
        return replace(update, weights={}, extras=extras, terms={}, moved=None)

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
                    f"helped to unmask this round before, for {name_clients(before)}, and does so "
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

    def _require_members(self, id: int, message: Tensor, among: Sequence[int], least: int) -> None:
        listed = message.tolist()
        ours = set(listed) <= set(among) and len(set(listed)) == len(listed)
        if not ours or id not in listed or len(listed) < least:
            raise ClientError(
                "was given a list of clients that is too short, lacks this one, or names strangers "
                "or one twice"
            )


def _tried(round: int) -> str:
    return f"{_TRIED}{round}/"


def _forget(secrets: Weights) -> None:
    """Deletes all secrets except those stored beyond a round."""
    for name in [name for name in secrets if not name.startswith(KNOWN)]:
        del secrets[name]


def _commitments(pair: bytes) -> Tensor:
    """Returns commitments to a share of the mask key and one of the seed, ``(2, 32)`` uint8."""
    return _rows([commitment(share) for share in (pair[:SECRET], pair[SECRET:])])


def _row(content: bytes) -> Tensor:
    return torch.tensor(list(content), dtype=torch.uint8)


def _rows(contents: Sequence[bytes]) -> Tensor:
    return torch.stack([_row(content) for content in contents])


def _bytes(rows: Tensor) -> list[bytes]:
    return [bytes(row.tolist()) for row in rows]


def _number(secrets: Weights, name: str) -> int | None:
    return int(secrets[name]) if name in secrets else None


_Schema = tuple[tuple[int, ...], torch.dtype]


class MaskedRounds:
    """Trains clients so that only the sum of their updates can be read.

    Args:
        transport: see :class:`feddg.federation.transport.Transport`.
        defence: the clients' secure aggregation, with the sums that were opened before.
        fewest: minimum number of updates; with fewer no sum is opened.
    """

    def __init__(self, transport: Any, defence: SecureAggregation, fewest: int = 1) -> None:
        self.transport, self.defence, self.fewest = transport, defence, fewest

    def train(self, clients: Sequence[int], broadcast: Broadcast) -> Iterator[Update | Refusal]:
        """Yields a refusal for every client that drops out, then the mean of the others.

        Raises:
            NotEnoughUpdates: there is no usable mean; the message says why.
        """
        round = _Round(self, broadcast)
        try:
            mean = round.mean(list(clients))
        except _NoSum as error:
            yield from round.refusals
            raise NotEnoughUpdates(f"round {broadcast.round}: no update is used; {error}") from None
        yield from round.refusals
        yield mean


class _NoSum(Exception):
    """Raised if there is no usable sum; says why, and whose fault it is if that is known."""


class _Round:
    """One round of the protocol, at the server."""

    def __init__(self, rounds: MaskedRounds, broadcast: Broadcast) -> None:
        self._transport, self._defence = rounds.transport, rounds.defence
        self._fewest = rounds.fewest
        self._broadcast, self._needed = broadcast, 0
        self._held: Mapping[int, Mapping[int, bool]] = {}
        self.refusals: list[Refusal] = []

    def mean(self, clients: list[int]) -> Update:
        """Returns the mean of the updates of all clients that stay to the end.

        Raises:
            _NoSum: there is no usable mean.
        """
        ids, keys = self._keys(clients)
        shared = self._shared(ids, keys)
        members = self._checked(sorted(shared), shared)
        self._defence.masked = self._broadcast.round, clients
        updates = self._trained(members)
        survivors = self._enough(updates)
        self._defence.keep_opened(self._broadcast.round, survivors)
        opened = self._unmasked(members, survivors, shared, ids)
        secrets = {id: combined(shares, self._needed) for id, shares in opened.items()}
        seeds = {id: secrets.pop(id) for id in survivors}  # of the others it is the private key
        promised = {id: bytes(shared[id].tensors["commitment"].tolist()) for id in survivors}
        public = dict(zip(ids, _bytes(keys[:, 0])))
        liars = [id for id, seed in seeds.items() if commitment(seed) != promised[id]]
        liars += [id for id, private in secrets.items() if public_key(private) != public[id]]
        for id in liars:
            self._refuse(id, "shared another secret than it committed itself to")
        masked = [updates[id].extras.tensors[MASKED] for id in survivors]
        sums = [tensor.numpy().view(numpy.uint64) for tensor in masked]
        left = [(id, public[id]) for id in survivors]
        total = unmasked(sums, [*seeds.values()], [*secrets.items()], left)
        return self._update(total, [updates[id] for id in survivors], liars)

    def _keys(self, clients: list[int]) -> tuple[list[int], Tensor]:
        """Returns the ids of clients with valid keys, ascending, and the keys ``(n, 2, 32)``."""
        replies = self._asked(clients, KEYS, Message(), {"keys": ((2, SECRET), torch.uint8)})
        pairs = {id: _bytes(reply.tensors["keys"]) for id, reply in replies.items()}
        times = Counter(key for pair in pairs.values() for key in set(pair))
        for id, pair in pairs.items():
            if len(set(pair)) < 2:
                self._refuse(id, "sent one public key twice")
            elif not all(map(is_public_key, pair)):
                self._refuse(id, "sent an invalid public key")
            elif max(times[key] for key in pair) > 1:
                self._refuse(id, "sent a public key that another client sent, too")
            else:
                continue
            del replies[id]
        # Who is away counts as lost, who lies here as if it had not been asked.
        round = len(clients) - (len(pairs) - len(replies))
        self._fewest = max(self._fewest, self._defence.needed(round))
        ids = self._enough(replies, self._defence.needed(len(replies)))
        return ids, torch.stack([replies[id].tensors["keys"] for id in ids])

    def _shared(self, ids: list[int], keys: Tensor) -> dict[int, Message]:
        """Returns the messages that clients encrypted for each other, by client."""
        question = Message({"ids": torch.tensor(ids), "keys": keys})
        schemas: dict[str, _Schema] = {
            "shares": ((len(ids), SEALED), torch.uint8),
            "commitments": ((len(ids), 2, SECRET), torch.uint8),
            "commitment": ((SECRET,), torch.uint8),
        }
        shared = self._asked(ids, SHARES, question, schemas)
        self._enough(shared)
        return shared

    def _checked(self, members: list[int], shared: Mapping[int, Message]) -> list[int]:
        """Returns the clients whose secrets can be recovered from others' shares, ascending.

        If two clients contradict each other, one is wrong, but not which one is known. A client
        that contradicts more clients than may drop out must be wrong; otherwise the round fails
        anyway.
        """
        question = {
            "members": torch.tensor(members),
            "shares": torch.stack([shared[id].tensors["shares"] for id in members]),
            "commitments": torch.stack([shared[id].tensors["commitments"] for id in members]),
        }
        schemas: dict[str, _Schema] = {"held": ((len(members),), torch.bool)}
        replies = self._asked(members, CHECK, Message(question), schemas)
        right = {
            id: dict(zip(members, reply.tensors["held"].tolist())) for id, reply in replies.items()
        }
        self._held, left = right, set(right)
        while self._enough(left):
            at_odds = {
                id: [k for k in sorted(left) if k != id and not (right[id][k] and right[k][id])]
                for id in sorted(left)
            }
            most = max(map(len, at_odds.values()))
            if most <= len(left) - self._needed:
                break
            for id, others in at_odds.items():
                if len(others) == most:
                    self._refuse(
                        id,
                        f"its shares and those of {name_clients(others)} do not fit"
                        + ("; which of the two is wrong cannot be told" if most == 1 else ""),
                    )
                    left.remove(id)
        return sorted(left)

    def _unmasked(
        self,
        members: list[int],
        survivors: list[int],
        shared: Mapping[int, Message],
        ids: list[int],
    ) -> dict[int, dict[int, bytes]]:
        """Returns enough shares of each member's secret, by member and index of the holder."""
        question = Message({"survivors": torch.tensor(survivors)})
        schemas: dict[str, _Schema] = {"opened": ((len(members), SECRET), torch.uint8)}
        shares: dict[int, dict[int, bytes]] = {id: {} for id in members}
        replies = self._asked(survivors, UNMASK, question, schemas)
        if len(replies) < self._needed:
            raise self._too_few(self._needed, len(replies))
        for id, reply in replies.items():
            place, wrong = ids.index(id), []
            for other, share in zip(members, _bytes(reply.tensors["opened"])):
                of_key, of_seed = _bytes(shared[other].tensors["commitments"][place])
                proof = of_seed if other in survivors else of_key
                if self._held[id][other] and commitment(share) == proof:
                    shares[other][place] = share
                elif self._held[id][other]:
                    wrong.append(other)
            if wrong:
                self._refuse(id, f"opened other shares of {name_clients(wrong)} than it was given")
        for id, left in shares.items():
            if len(left) < self._needed:
                raise _NoSum(
                    f"secure aggregation needs {self._needed} shares of client {id}'s secret, and "
                    f"{len(left)} are left"
                )
        return shares

    def _update(self, total: numpy.ndarray, updates: list[Update], liars: list[int]) -> Update:
        ids = [update.client for update in updates]
        expected = len(ids) if self._defence.alike else sum(update.examples for update in updates)
        weights, count = decoded(total, self._broadcast.weights)
        if count != expected:
            whose = (
                f"{name_clients(liars)} shared another secret than was committed to"
                if liars
                else "whose update is wrong cannot be told, since only their sum can be read"
            )
            raise _NoSum(f"the sum of {name_clients(ids)} does not count their images; {whose}")
        return Update(
            updates[0].client,
            count,
            weights,
            seconds=sum(update.seconds for update in updates),
            images=sum(update.images for update in updates),
            members=tuple(ids),
        )

    def _trained(self, members: list[int]) -> dict[int, Update]:
        told = Message({f"{self._defence.name}/members": torch.tensor(members)})
        broadcast = replace(self._broadcast, extras=joined(self._broadcast.extras, told))
        length = 1 + sum(tensor.numel() for tensor in broadcast.weights.values())
        updates: dict[int, Update] = {}
        for reply in self._transport.train(members, broadcast):
            if isinstance(reply, Update):
                fault = _fault(reply.extras, {MASKED: ((length,), torch.int64)})
                fault = fault or ("sent weights that are not masked" if reply.weights else None)
                registered = self._transport.registered.get(reply.client, reply.examples)
                if not fault and reply.examples != registered:
                    fault = f"reports {reply.examples} examples, but registered with {registered}"
                if fault is None:
                    masked = Message({MASKED: reply.extras.tensors[MASKED].cpu().clone()})
                    updates[reply.client] = replace(reply, extras=masked, terms={})
                    continue
                reply = Refusal(reply.client, f"update refused: {fault}")
            self.refusals.append(reply)
        return updates

    def _asked(
        self, ids: list[int], name: str, question: Message, schemas: Mapping[str, _Schema]
    ) -> dict[int, Message]:
        """Returns the valid answers to a protocol step, by client."""
        answers: dict[int, Message] = {}
        broadcast = Broadcast(self._broadcast.round, {}, question)
        for id, reply in self._transport.ask(ids, broadcast, name, question):
            if isinstance(reply, Message):
                fault = _fault(reply, schemas)
                if fault is None:
                    answers[id] = Message({n: t.cpu() for n, t in reply.tensors.items()})
                    continue
                reply = Refusal(id, f"{name} refused: {fault}")
            self._refuse(id, reply.reason)
        return answers

    def _refuse(self, id: int, reason: str) -> None:
        if all(refusal.client != id for refusal in self.refusals):
            self.refusals.append(Refusal(id, reason))

    def _enough(self, left: Iterable[int], needed: int | None = None) -> list[int]:
        """Returns the remaining clients, ascending, if their sum may be opened and used."""
        ids = sorted(left)
        self._needed = self._needed if needed is None else needed
        least = max(self._needed, self._fewest)
        before = self._defence.opened.get(self._broadcast.round)
        if before is not None and ids != before:
            other = sorted(set(before) ^ set(ids))
            raise _NoSum(
                f"its sum of {name_clients(before)} was opened before, which may be done again for "
                f"the same clients only, and {name_clients(other)} make it another; if that stays "
                "so, begin a new run with another seed"
            )
        if len(ids) < least:
            raise self._too_few(least, len(ids))
        return ids

    def _too_few(self, least: int, left: int) -> _NoSum:
        refused = [f"client {refusal.client}: {refusal.reason}" for refusal in self.refusals[:3]]
        why = f"secure aggregation needs {least} clients, and {left} are left"
        return _NoSum("; ".join([why, *refused]))


def _fault(message: Message, schemas: Mapping[str, _Schema]) -> str | None:
    """Returns how a message differs from its schema, or None."""
    if message.scalars or message.tensors.keys() != schemas.keys():
        return "it holds something else than was asked for"
    for name, (shape, dtype) in schemas.items():
        tensor = message.tensors[name]
        if tuple(tensor.shape) != shape or tensor.dtype != dtype:
            return f"its {name!r} has another form than was asked for"
    return None
