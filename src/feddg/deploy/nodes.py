"""Flower's grid without processes: nodes of this process answer through the ClientApp."""

from collections.abc import Iterable, Mapping
from typing import Any

from flwr.app import Context, Message, RecordDict
from flwr.proto.node_pb2 import NodeInfo
from flwr.serverapp import Grid
from flwr.supercore.task_identity import TaskIdentity

from feddg.deploy.client_app import app


class NodesHere(Grid):
    """A grid of nodes in this process, to try an app out: what crosses is what would cross.

    Args:
        sites: each node's config, by the name of its site.
    """

    def __init__(self, sites: Mapping[str, Mapping[str, Any]]) -> None:
        TaskIdentity.run_id = TaskIdentity.node_id = TaskIdentity.task_id = 1
        self._names = list(sites)
        configs = [{"site": name, **config} for name, config in sites.items()]
        self._contexts = [Context(1, id, own, RecordDict(), {}) for id, own in enumerate(configs)]
        self._replies: dict[str, Message] = {}

    def get_node_ids(self) -> Iterable[int]:
        """Returns the ids of the nodes."""
        return range(len(self._names))

    def get_nodes(self) -> Iterable[NodeInfo]:
        """Returns the nodes, each registered under its site's name."""
        return [NodeInfo(node_id=id, name=name) for id, name in enumerate(self._names)]

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Has nodes answer; returns the messages' ids."""
        for message in messages:
            id = f"message-{len(self._replies)}"
            message.metadata.__dict__["_message_id"] = id
            self._replies[id] = app(message, self._contexts[message.metadata.dst_node_id])
            yield id

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """Returns the answers."""
        return [self._replies[id] for id in message_ids]

    # What a transport does not need.

    def set_run(self, run: Any) -> None:
        """Not needed."""

    @property
    def run(self) -> Any:
        """Not needed."""

    def create_message(self, *args: Any, **kwargs: Any) -> Message:
        """Not needed."""
        raise NotImplementedError

    def send_and_receive(self, messages: Any, *, timeout: float | None = None) -> Any:
        """Not needed."""
        raise NotImplementedError
