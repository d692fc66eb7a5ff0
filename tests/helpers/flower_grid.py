"""Flower without processes, ports or Ray: a grid that hands messages to the ClientApp itself."""

import json
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from typing import Any

from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from flwr.app import Context, Error, Message, RecordDict
from flwr.proto.node_pb2 import NodeInfo
from safetensors.torch import load_file

from feddg.deploy import client_app, server_app
from feddg.deploy.nodes import NodesHere
from feddg.experiment import Experiment
from feddg.runs.reading import read_rows

Fault = Callable[[str, Message], bool]


@cache
def public_key(owner: str) -> bytes:
    """The public key of somebody, in PEM."""
    key = ec.generate_private_key(ec.SECP384R1()).public_key()
    return key.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)


class LocalGrid(NodesHere):
    """Nodes of which some do not answer as they should.

    Attributes:
        offline: names of sites that are not connected.
        silent: names of sites that never reply to a training message.
        mute: names of sites that never reply to anything.
        fail: decides by site and message whether the node's process dies on it.
        received: (site, message type) of every message delivered.
        registered: name of a node's key by what the node calls itself, where they differ.
        keys: public key of every node, PEM.
    """

    def __init__(self, sites: dict[str, dict[str, Any]], *app: Any) -> None:
        self.offline: set[str] = set()
        self.silent: set[str] = set()
        self.mute: set[str] = set()
        self.fail: Fault = lambda site, message: False
        self.received: list[tuple[str, str]] = []
        self.registered: dict[str, str] = {}
        self.keys: dict[int, bytes] = {}
        super().__init__(dict(reversed(sites.items())), *app)  # ids in another order than names

    def connect(self, name: str, config: Mapping[str, Any], key: bytes = b"") -> int:
        node = super().connect(name, config)
        self.keys[node] = key or public_key(name)
        return node

    def get_node_ids(self) -> Iterable[int]:
        return [node for node, name in self.nodes.items() if name not in self.offline]

    def get_nodes(self) -> Iterable[NodeInfo]:
        return [
            NodeInfo(
                node_id=node.node_id,
                name=self.registered.get(node.name, node.name),
                public_key=self.keys[node.node_id],
                registered_at=f"{node.node_id:09}",
            )
            for node in super().get_nodes()
        ]

    def answered(self, message: Message) -> Message | None:
        site, kind = self.nodes[message.metadata.dst_node_id], message.metadata.message_type
        self.received.append((site, kind))
        if site in self.mute or (site in self.silent and kind == "train"):
            return None
        try:
            if self.fail(site, message):
                raise RuntimeError("the process died")
            return super().answered(message)
        except Exception as error:
            return Message(Error(0, f"Traceback ...\n{error}"), reply_to=message)

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        # The last one first: replies must not be believed to arrive in order.
        found = [id for id in reversed(list(message_ids)) if id in self._replies]
        return super().pull_messages(found[:1])


SITES = ("ink", "chalk", "photo")
SMALL = {
    "data": {"source": "digits", "image_size": 8, "id_val": 0.0, "id_test": 0.0},
    "hold_out": "sketch",
    "clients": {"number": 3, "partition": "domain"},
    "train": {"rounds": 2, "local_steps": 2, "batch_size": 16},
    "device": "cpu",
    "precision": "float32",
}


def experiment(**change) -> Experiment:
    return Experiment(**{**SMALL, **change})


class Deployment:
    """Three sites with one domain of digits each, and their coordinator."""

    def __init__(self, folder, chosen: Experiment, **config) -> None:
        self.folder, self.chosen = folder, chosen
        self.path = folder / "runs" / chosen.label
        self.config = {
            "experiment": chosen.to_yaml(),
            "sites": ",".join(SITES),
            "out": str(folder / "runs"),
            "test": "digits:sketch",
            "cache": str(folder / "coordinator"),
            "poll-seconds": 0.001,
            "wait-seconds": 0.01,
            **config,
        }
        nodes = {
            name: {"images": f"digits:{name}", "cache": str(folder / name), "device": "cpu"}
            for name in SITES
        }
        self.nodes = nodes
        self.grid = LocalGrid(nodes, client_app.app, self.config)

    def start(self):
        """Starts the ServerApp as Flower does."""
        server_app.app(self.grid, Context(1, 1, {}, RecordDict(), self.config))
        return self.weights()

    def weights(self):
        return weights(self.path)


def weights(path):
    index = json.loads((path / "checkpoint/checkpoint.json").read_text())
    tensors = load_file(path / "checkpoint" / index["state"])
    return {name: tensor for name, tensor in tensors.items() if name.startswith("weights/")}


def ledger(path):
    """(round, direction, client, purpose, names of what left or reached the method) by message."""
    rows = read_rows(path / "ledger.jsonl")
    layouts = {row["id"]: row for row in rows if row["kind"] == "layout"}
    found = []
    for row in rows:
        if row["kind"] == "message":
            held = layouts[row["layout"]]
            names = [*(tensor["name"] for tensor in held["tensors"]), *held["scalars"]]
            shown = sorted(n for n in names if not n.startswith(("fields/", "context/")))
            key = (row["round"], row["direction"], row["client"], row["purpose"])
            found.append((*key, tuple(shown)))
    return found


def refusals(deployment):
    rows = read_rows(deployment.path / "ledger.jsonl")
    found = [row for row in rows if row["kind"] == "refusal"]
    return [(row["round"], row["client"], row["reason"]) for row in found]
