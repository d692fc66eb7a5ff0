"""Flower without processes, ports or Ray: a grid that hands messages to the ClientApp itself."""

import json
from collections.abc import Callable, Iterable
from functools import cache
from itertools import count
from typing import Any

from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from flwr.app import Context, Error, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.proto.node_pb2 import NodeInfo
from flwr.serverapp import Grid
from flwr.supercore.task_identity import TaskIdentity
from safetensors.torch import load_file

from feddg.deploy import client_app, server_app
from feddg.experiment import Experiment
from feddg.runs.reading import read_rows

Fault = Callable[[str, Message], bool]


@cache
def public_key(owner: str) -> bytes:
    """The public key of somebody, in PEM."""
    key = ec.generate_private_key(ec.SECP384R1()).public_key()
    return key.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)


class LocalGrid(Grid):
    """Nodes that live in this process, each with its own context.

    Attributes:
        offline: names of sites that are not connected.
        silent: names of sites that never reply to a training message.
        mute: names of sites that never reply to anything.
        fail: decides by site and message whether the node's process dies on it.
        received: (site, message type) of every message delivered.
        registered: name of a node's key by what the node calls itself, where they differ.
        keys: public key of every node, PEM.
    """

    def __init__(self, app: ClientApp, sites: dict[str, dict[str, Any]], run_config: Any) -> None:
        TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 1, 1, 1
        self._app, self._run_config = app, run_config
        self._ids = count(100)
        self.nodes: dict[int, str] = {}
        self.contexts: dict[int, Context] = {}
        self._replies: dict[str, Message] = {}
        self.offline: set[str] = set()
        self.silent: set[str] = set()
        self.mute: set[str] = set()
        self.fail: Fault = lambda site, message: False
        self.received: list[tuple[str, str]] = []
        self.sent: list[Message] = []
        self.registered: dict[str, str] = {}
        self.keys: dict[int, bytes] = {}
        for name, config in reversed(list(sites.items())):  # ids in another order than names
            self.connect(name, config)

    def connect(self, name: str, config: dict[str, Any], key: bytes = b"") -> None:
        node = next(self._ids)
        self.nodes[node] = name
        self.keys[node] = key or public_key(name)
        node_config = {"site": name, **config}
        self.contexts[node] = Context(1, node, node_config, RecordDict(), self._run_config)

    def set_run(self, run: Any) -> None:
        """Not needed."""

    @property
    def run(self) -> Any:
        raise NotImplementedError

    def create_message(self, *args: Any, **kwargs: Any) -> Message:
        raise NotImplementedError

    def get_node_ids(self) -> Iterable[int]:
        return [node for node, name in self.nodes.items() if name not in self.offline]

    def get_nodes(self) -> Iterable[NodeInfo]:
        return [
            NodeInfo(
                node_id=node,
                name=self.registered.get(self.nodes[node], self.nodes[node]),
                public_key=self.keys[node],
                registered_at=f"{node:09}",
            )
            for node in self.get_node_ids()
        ]

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        ids = []
        for message in messages:
            message.metadata.__dict__["_message_id"] = f"message-{len(self.sent)}"
            self.sent.append(message)
            ids.append(message.metadata.message_id)
            self._deliver(message)
        return ids

    def _deliver(self, message: Message) -> None:
        node = message.metadata.dst_node_id
        site = self.nodes[node]
        self.received.append((site, message.metadata.message_type))
        if site in self.mute or (site in self.silent and message.metadata.message_type == "train"):
            return
        try:
            if self.fail(site, message):
                raise RuntimeError("the process died")
            reply = self._app(message, self.contexts[node])
        except Exception as error:
            reply = Message(Error(0, f"Traceback ...\n{error}"), reply_to=message)
        self._replies[message.metadata.message_id] = reply

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        # The last one first: replies must not be believed to arrive in order.
        found = [id for id in reversed(list(message_ids)) if id in self._replies]
        return [self._replies.pop(id) for id in found[:1]]

    def send_and_receive(self, messages: Any, *, timeout: float | None = None) -> Any:
        raise NotImplementedError


SITES = ("ink", "chalk", "photo")
SMALL = {
    "data": {"source": "digits", "image_size": 16, "id_val": 0.0, "id_test": 0.0},
    "hold_out": "sketch",
    "clients": {"number": 3, "partition": "domain"},
    "train": {"rounds": 2, "local_epochs": 1, "batch_size": 64},
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
        self.grid = LocalGrid(client_app.app, nodes, self.config)

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
