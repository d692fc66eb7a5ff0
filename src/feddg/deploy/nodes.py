"""Flower's grid without processes: nodes of this process answer through the ClientApp."""

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any

from flwr.app import Context, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.proto.node_pb2 import NodeInfo
from flwr.serverapp import Grid
from flwr.supercore.task_identity import TaskIdentity

from feddg.deploy.client_app import app


class NodesHere(Grid):
    """A grid of nodes in this process, to try an app out: what crosses is what would cross.

    Args:
        sites: each node's config, by the name of its site.
        app: answers at every node.
        run_config: of the app.

    Attributes:
        nodes: names of the sites by the ids of their nodes.
        contexts: what the nodes keep, by id.
        sent: all that went to nodes.
    """

    def __init__(
        self,
        sites: Mapping[str, Mapping[str, object]],
        app: ClientApp = app,
        run_config: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        TaskIdentity.run_id = TaskIdentity.node_id = TaskIdentity.task_id = 1
        self.app, self.run_config = app, run_config
        self.nodes: dict[int, str] = {}
        self.contexts: dict[int, Context] = {}
        self.sent: list[Message] = []
        self._replies: dict[str, Message] = {}
        for name, config in sites.items():
            self.connect(name, config)

    def connect(self, name: str, config: Mapping[str, Any]) -> int:
        """Adds a node; returns its id."""
        id = 100 + len(self.contexts)  # no place in a list
        node_config = {"site": name, **config}
        self.nodes[id] = name
        self.contexts[id] = Context(1, id, node_config, RecordDict(), dict(self.run_config))
        return id

    def get_node_ids(self) -> Iterable[int]:
        """Returns the ids of the nodes."""
        return list(self.nodes)

    def get_nodes(self) -> Iterable[NodeInfo]:
        """Returns the nodes, each registered under its site's name."""
        return [NodeInfo(node_id=id, name=self.nodes[id]) for id in self.get_node_ids()]

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Has nodes answer; returns the messages' ids."""
        ids = []
        for message in messages:
            ids.append(f"message-{len(self.sent)}")
            message.metadata.__dict__["_message_id"] = ids[-1]
            self.sent.append(message)
            reply = self.answered(message)
            if reply is not None:
                self._replies[ids[-1]] = reply
        return ids

    def answered(self, message: Message) -> Message | None:
        """Returns a node's answer, or None where none comes."""
        return self.app(message, self.contexts[message.metadata.dst_node_id])

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """Returns the answers that have come."""
        return [self._replies.pop(id) for id in message_ids if id in self._replies]

    # What a transport does not need.

    set_run = run = create_message = send_and_receive = None  # type: ignore[assignment]
