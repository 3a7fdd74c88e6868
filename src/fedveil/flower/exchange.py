"""Messages out, replies in, within a time limit. Who is lost is told by the message that was not answered."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from flwr.app import Message
from flwr.serverapp import Grid


@dataclass
class Exchanged:
    """What came of some messages, by whatever they were given by: a node or a client."""

    replies: dict[int, Message] = field(default_factory=dict)
    lost: dict[int, str] = field(default_factory=dict)  # nothing came in time


class Exchange:
    """Sends messages over a grid and waits for their replies, but not for ever.

    Flower's error reply for a node that is gone names no node, so replies are told apart by the message they answer.
    """

    def __init__(
        self,
        grid: Grid,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.grid = grid
        self._clock, self._sleep = clock, sleep
        self._late: dict[str, tuple[int, float]] = {}  # messages without a reply: to whom, and until when it may come

    def busy(self) -> dict[int, float]:
        """Those who still work on a message of an earlier exchange. Replies that came late are thrown away."""
        if self._late:
            for reply in self.grid.pull_messages(list(self._late)):
                self._late.pop(reply.metadata.reply_to_message_id, None)
        now = self._clock()
        self._late = {ident: late for ident, late in self._late.items() if late[1] > now}
        return dict(self._late.values())

    def run(self, messages: Mapping[int, Message], limit: float, *, training: bool = True) -> Exchanged:
        """Send messages and take the replies that come within `limit` seconds.

        training: whoever does not reply in time is `busy` for as long again.
        """
        done, waiting = Exchanged(), self._pushed(messages)
        for receiver in messages.keys() - set(waiting.values()):
            done.lost[receiver] = "the SuperLink did not take the message"
        end, pause = self._clock() + limit, 0.05
        while waiting:
            for reply in self._pulled(waiting):
                receiver = waiting.pop(reply.metadata.reply_to_message_id)
                done.replies[receiver] = reply
            left = end - self._clock()
            if not waiting or left <= 0:
                break
            self._sleep(min(pause, left))
            pause = min(pause * 1.5, 2.0)
        for ident, receiver in waiting.items():
            done.lost[receiver] = f"no reply within {limit:g} s"
            if training:
                self._late[ident] = (receiver, self._clock() + limit)
        done.replies = dict(sorted(done.replies.items()))
        return done

    def _pushed(self, messages: Mapping[int, Message]) -> dict[str, int]:
        """The receivers by the ids of their messages."""
        listed = list(messages.items())
        ids = list(self.grid.push_messages([message for _, message in listed]))
        if len(ids) != len(listed):  # some were left out, and which ones is not told
            kept = set(ids)
            named = [(message.metadata.message_id, receiver) for receiver, message in listed]
            return {ident: receiver for ident, receiver in named if ident in kept}
        return {ident: receiver for ident, (receiver, _) in zip(ids, listed, strict=True) if ident}

    def _pulled(self, waiting: Mapping[str, int]) -> Iterable[Message]:
        replies = self.grid.pull_messages(list(waiting))
        seen: set[str] = set()
        for reply in replies:
            ident = reply.metadata.reply_to_message_id
            if ident in waiting and ident not in seen:
                seen.add(ident)
                yield reply
