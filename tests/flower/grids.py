"""A grid whose nodes are functions: Flower's interface without its engine."""

from __future__ import annotations

import copy
import uuid
from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any

from flwr.app import Context, Error, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.common.constant import ErrorCode
from flwr.serverapp import Grid

from flower.exchange import context

Answer = Callable[[Message, Context], Message | None]  # None: it never answers


class Clock:
    """A clock that moves only when somebody sleeps."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


class FakeGrid(Grid):
    """Nodes by their ids; each has a partition and a client app. Replies come when they are pulled."""

    def __init__(self, apps: dict[int, ClientApp | Answer], run: dict[str, Any] | None = None) -> None:
        self.nodes = {1000 + 7 * (partition * 5 % 11): partition for partition in apps}
        self.apps = apps
        self.contexts = {partition: context(run, partition, RecordDict()) for partition in apps}
        self.waiting: dict[str, Message] = {}
        self.gone: set[int] = set()  # partitions whose nodes were killed
        self.sent: list[tuple[int, Message]] = []

    def get_node_ids(self) -> Iterable[int]:
        return [node for node, partition in self.nodes.items() if partition not in self.gone]

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        ids = []
        for message in messages:
            message.metadata.__dict__["_message_id"] = str(uuid.uuid4())
            self.sent.append((self.nodes[message.metadata.dst_node_id], message))
            self.waiting[message.metadata.message_id] = copy.deepcopy(message)  # apps may change what they are given
            ids.append(message.metadata.message_id)
        return ids

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        found = []
        for ident in list(message_ids):
            message = self.waiting.get(ident)
            if message is None:
                continue
            reply = self._answer(message)
            if reply is not None:
                del self.waiting[ident]
                reply.metadata.__dict__["_reply_to_message_id"] = ident
                found.append(reply)
        return found

    def _answer(self, message: Message) -> Message | None:
        partition = self.nodes[message.metadata.dst_node_id]
        if partition in self.gone:
            reply = Message(Error(ErrorCode.NODE_UNAVAILABLE, "the node is gone"), reply_to=message)
            reply.metadata.__dict__["_src_node_id"] = 1  # as Flower does: the node is not named
            return reply
        try:
            return self.apps[partition](message, self.contexts[partition])
        except ValueError as error:
            return Message(Error(ErrorCode.CLIENT_APP_RAISED_EXCEPTION, str(error)), reply_to=message)

    def set_run(self, run: Any) -> None: ...

    @property
    def run(self) -> Any:
        return SimpleNamespace(run_id=1)

    def create_message(self, *_: Any, **__: Any) -> Message:
        raise NotImplementedError

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        return self.pull_messages(self.push_messages(messages))
