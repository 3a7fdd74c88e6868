"""Where the gate stands: in the process of the SuperNode, in which no code of an app ever runs.

Flower has no place for a site's policy, so two private functions of `flwr.supernode.start_client_internal` are wrapped:
the one that pulls a message from the SuperLink and the one that pushes replies to it. `check` looks at start whether
the installed Flower still has them as they are expected, and refuses to start if not. Where the SuperNode is not the
site's own to start, `clientapp` has a second, weaker place for the gate.
"""

from __future__ import annotations

import inspect
import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

from flwr.app import Message
from flwr.supercore.inflatable.inflatable_object import (
    get_all_nested_objects,
    get_object_tree,
    iterate_object_tree,
    no_object_id_recompute,
)
from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents
from flwr.supernode import start_client_internal as flower
from flwr.supernode.nodestate import NodeState

from fedveil.errors import FedveilError
from fedveil.flower.site.gate import Gate
from fedveil.flower.site.installed import check_built

log = logging.getLogger(__name__)
PUSH = {"state", "object_store", "send", "push_object"}
PULL = {"state", "object_store", "receive", "get_run", "get_fab", "pull_object"}
MOST_ASKED = 64  # messages whose replies are awaited
PATIENCE = 600.0  # seconds for an app to hand over all parts of its reply


def check() -> None:
    """Refuse a Flower that is built otherwise than the seam needs."""
    needed = {"_push_messages": PUSH, "_pull_and_store_message": PULL}
    check_built(flower, flower.start_client_internal, needed, _other_names)


def _other_names() -> str | None:
    if not hasattr(flower, "_insert_message"):
        return "it has no _insert_message"
    if "is_reply" not in inspect.signature(NodeState.get_messages_legacy).parameters:
        return "its state does not tell replies apart"
    return None


class _Refused(Exception):
    """A run that may not use this site."""


class Seam:
    """Stands between the SuperNode's state, which the app can write to, and the SuperLink."""

    def __init__(self, gate: Gate) -> None:
        self._gate = gate
        self._asked: dict[str, Message] = {}  # by message id, as the server sent them
        self._answers: dict[str, Message] = {}  # our own to runs that were refused, by their ids
        self._pull = flower._pull_and_store_message
        self._push = flower._push_messages

    def install(self) -> None:
        """Put the gate in place, for as long as the process lives."""
        check()
        flower._pull_and_store_message = self.pull  # type: ignore[assignment]  # Flower names all arguments
        flower._push_messages = self.push

    def pull(self, **given: Any) -> int | None:
        """Pull a message and keep a copy: a reply is measured against what the server sent, not what the app says."""
        received: list[tuple[Message, Any]] = []
        contents: dict[str, bytes] = {}
        receive, pull_object, get_run, get_fab = (
            given[name] for name in ("receive", "pull_object", "get_run", "get_fab")
        )
        runs: list[Any] = []

        def receiving() -> Any:
            found = receive()
            if found is not None:
                received.append(found)
            return found

        def pulling(run_id: int, object_id: str) -> bytes:
            content: bytes = pull_object(run_id, object_id)
            contents[object_id] = content
            return content

        def running(run_id: int) -> Any:
            run = get_run(run_id)
            runs.append(run)
            return run

        def bundle(fab_hash: str, run_id: int) -> Any:
            fab = get_fab(fab_hash, run_id)
            run = runs[-1]
            why = self._gate.refuses(fab.content, run)
            if why:
                raise _Refused(why)
            return fab

        wrapped = {"receive": receiving, "pull_object": pulling, "get_run": running, "get_fab": bundle}
        try:
            run_id = self._pull(**{**given, **wrapped})
        except _Refused as refused:
            message = received[-1][0]
            # As Flower itself answers for an app that it does not trust: the app never starts.
            answer = self._gate.refused(message, str(refused))
            flower._insert_message(answer, given["state"], given["object_store"])
            self._answers[answer.metadata.message_id] = answer
            return int(message.metadata.run_id)
        if run_id is not None and received:
            self._keep(_inflated(received[-1][1], contents, given["object_store"]))
        return run_id

    def _keep(self, message: Message) -> None:
        self._asked[message.metadata.message_id] = message
        while len(self._asked) > MOST_ASKED:
            self._asked.pop(next(iter(self._asked)))

    def push(self, state: Any, object_store: Any, send: Callable[..., Any], push_object: Callable[..., Any]) -> None:
        """Push replies: those of the gate, out of memory that the app has no hand on."""
        while not (replies := state.get_messages_legacy(is_reply=True)):
            time.sleep(0.5)
        leaving = [made for made in (self._made(reply, object_store) for reply in replies) if made is not None]
        for reply in replies:
            state.delete_messages(message_ids=[reply.metadata.message_id])
            object_store.delete(reply.metadata.message_id)
        if leaving:
            held: Any = _Held(leaving, state)
            self._push(state=held, object_store=held, send=held.only(send), push_object=push_object)

    def _made(self, reply: Message, object_store: Any) -> Message | None:
        """What leaves in place of a reply; nothing for a reply to what nobody asked, or for a second one."""
        own = self._answers.pop(reply.metadata.message_id, None)
        if own is not None:
            return own
        asked = self._asked.pop(reply.metadata.reply_to_message_id, None)
        if asked is None:
            log.warning("a reply to no message of the server was dropped")
            return None
        try:
            whole = _whole(reply, object_store)
        except Exception as error:
            log.exception("a reply could not be read")
            return self._gate.refused(asked, f"the reply could not be read ({type(error).__name__})")
        return self._gate.reply(asked, whole)


class _Held:
    """The replies that leave, with all their parts, in the place of the node's state and object store."""

    def __init__(self, messages: Sequence[Message], state: Any) -> None:
        self._state, self._messages = state, list(messages)
        self._trees: dict[str, Any] = {}
        self._contents: dict[str, bytes] = {}
        with no_object_id_recompute():
            for message in self._messages:
                message.metadata.__dict__["_message_id"] = message.object_id
                self._trees[message.object_id] = get_object_tree(message)
                for object_id, part in get_all_nested_objects(message).items():
                    self._contents[object_id] = part.deflate()

    def only(self, send: Callable[..., Any]) -> Callable[..., Any]:
        """The sending function, for these messages and no others."""

        def sending(message: Message, *rest: Any) -> Any:
            if not any(message is each for each in self._messages):
                raise FedveilError("a message that the site's policy has not seen was about to leave")
            return send(message, *rest)

        return sending

    def get_messages_legacy(self, **_: Any) -> Sequence[Message]:
        return self._messages

    def get_message_processing_duration(self, message_id: str) -> float:
        return float(self._state.get_message_processing_duration(message_id=message_id))

    def delete_messages(self, *, message_ids: Sequence[str]) -> None:
        self._state.delete_messages(message_ids=message_ids)

    def get_object_tree(self, object_id: str) -> Any:
        return self._trees[object_id]

    def get(self, object_id: str) -> bytes:
        return self._contents[object_id]

    def delete(self, object_id: str) -> None:
        self._trees.pop(object_id, None)


def _inflated(tree: Any, contents: dict[str, bytes], object_store: Any) -> Message:
    """The server's message with its content."""
    for part in iterate_object_tree(tree):
        if part.object_id not in contents:  # an earlier message had it
            contents[part.object_id] = object_store.get(part.object_id) or b""
    message = inflate_object_from_contents(tree.object_id, contents)
    assert isinstance(message, Message)
    message.metadata.__dict__["_message_id"] = tree.object_id
    return message


def _whole(reply: Message, object_store: Any) -> Message:
    """The app's reply with its content, once the app has handed over all of it."""
    tree, end = object_store.get_object_tree(reply.metadata.message_id), time.monotonic() + PATIENCE
    contents: dict[str, bytes] = {}
    for part in iterate_object_tree(tree):
        while not (content := object_store.get(part.object_id)):
            if time.monotonic() > end:
                raise TimeoutError
            time.sleep(0.2)
        contents[part.object_id] = content
    message = inflate_object_from_contents(tree.object_id, contents)
    assert isinstance(message, Message)
    return message
