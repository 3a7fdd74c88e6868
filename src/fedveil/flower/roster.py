"""Which node holds which partition. Node ids are drawn anew for every run; a partition is a client's lasting number."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping

from flwr.app import ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from fedveil.errors import FedveilError
from fedveil.flower.exchange import Exchange
from fedveil.flower.records import PARTITION

log = logging.getLogger(__name__)
ACTION = "fedveil"  # of the message that asks a node for its partition


def introduce(app: ClientApp) -> None:
    """Let a client app answer the server's question for its partition (`--node-config "partition-id=3"`)."""

    @app.query(ACTION)
    def answer(message: Message, context: Context) -> Message:
        told = MetricRecord({PARTITION: int(context.node_config.get(PARTITION, -1))})
        return Message(RecordDict({"metrics": told}), reply_to=message)


class Roster:
    """The nodes that are there, by their partitions."""

    def __init__(self, exchange: Exchange, clock: Callable[[], float] = time.monotonic) -> None:
        self._exchange, self._clock = exchange, clock
        self._partitions: dict[int, int | None] = {}  # by node; None: it does not tell

    def present(self, limit: float) -> dict[int, int]:
        """The nodes by partition, after new ones were asked.

        Nodes that do not tell their partition (an app without `introduce`) are numbered by their ids.
        """
        grid = self._exchange.grid
        nodes = sorted(grid.get_node_ids())
        known = self._partitions = {node: self._partitions[node] for node in nodes if node in self._partitions}
        nodes.sort(key=lambda node: node not in known)  # whoever had a partition first keeps it
        self._ask([node for node in nodes if node not in known], limit)
        told = {node: self._partitions.get(node) for node in nodes}
        if nodes and all(partition is None for partition in told.values()):
            return dict(enumerate(nodes))
        found: dict[int, int] = {}
        for node, partition in told.items():
            if partition is None:
                continue
            if partition in found:
                log.warning(
                    "node %d claims partition %d, which node %d has: it is left out", node, partition, found[partition]
                )
                continue
            found[partition] = node
        return dict(sorted(found.items()))

    def wait(self, minimum: int, seconds: float, pause: float = 1.0) -> dict[int, int]:
        """The nodes by partition, as soon as there are so many; after so many seconds this is an error."""
        end = self._clock() + seconds
        while True:
            found = self.present(max(1.0, min(60.0, end - self._clock())))
            if len(found) >= minimum:
                return found
            if self._clock() >= end:
                raise FedveilError(
                    f"{len(found)} nodes were there after {seconds:g} s, and {minimum} are needed: start more "
                    "SuperNodes, or ask for fewer"
                )
            time.sleep(min(pause, max(0.0, end - self._clock())))

    def _ask(self, nodes: list[int], limit: float) -> None:
        if not nodes:
            return
        asked = {
            node: Message(RecordDict({"config": ConfigRecord()}), dst_node_id=node, message_type=f"query.{ACTION}")
            for node in nodes
        }
        done = self._exchange.run(asked, limit, training=False)
        for node, reply in done.replies.items():
            self._partitions[node] = _partition(reply)


def _partition(reply: Message) -> int | None:
    """What a node says; None where it says nothing that can be used."""
    if reply.has_error():
        return None
    for record in reply.content.metric_records.values():
        told = record.get(PARTITION)
        if isinstance(told, int) and 0 <= told < 2**31:
            return told
    return None


def missing(wanted: Iterable[int], there: Mapping[int, int]) -> dict[int, str]:
    """Clients of a round that are not there."""
    return {partition: "not connected" for partition in wanted if partition not in there}
