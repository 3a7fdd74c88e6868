"""`protect`: a mod for a Flower `ClientApp` that lets nothing out but protected updates."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import Any, Literal

from flwr.app import Context, Message, RecordDict
from flwr.clientapp.typing import ClientAppCallable, Mod

from fedveil.defenses.base import Defense
from fedveil.defenses.chain import Chain
from fedveil.errors import FedveilError
from fedveil.flower.guarded import forget, guarded_steps
from fedveil.flower.memory import put_back, remembered
from fedveil.flower.outgoing import Sender, answered, called, protected_content
from fedveil.flower.records import PARTITION, kept
from fedveil.flower.rules import Rules
from fedveil.streams import Streams

log = logging.getLogger(__name__)
WHO = "fedveil"


def protect(
    defense: Defense | Chain | Sequence[Defense] | str | None = None,
    *,
    of: Literal["weights", "delta", "gradient"] | None = None,
    buffers: Literal["withhold", "share"] | None = None,
    buffer_names: Sequence[str] | None = None,
    metrics: Sequence[str] | None = None,
    digits: int | None = None,
    longest: float | None = None,
    seed: int | None = None,
) -> Mod:
    """A mod that protects whatever a client sends, and sends an error in place of what it cannot protect.

    ```python
    app = ClientApp(mods=[fedveil.flower.protect("spm:epsilon=1")])  # first in the list: it acts last on a reply
    ```

    What is left out here is read from the run's settings when a message comes: `defense = "spm:epsilon=1"`,
    `protect-of`, `protect-buffers`, `protect-metrics`. See `Rules` for what each means. A run that contradicts what is
    given here is refused.

    Noise is drawn from the operating system's entropy. `seed` is for experiments only: whoever knows it can remove the
    noise, so it cannot be set by a run.
    """
    given = {
        "of": of,
        "buffers": buffers,
        "buffer_names": None if buffer_names is None else tuple(buffer_names),
        "metrics": None if metrics is None else tuple(metrics),
        "digits": digits,
        "longest": longest,
    }
    fixed: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    if defense is not None:
        fixed["chain"] = Chain.of(defense)
    Rules(**fixed)  # what is wrong with these is told when the app is loaded

    def mod(message: Message, context: Context, call_next: ClientAppCallable) -> Message:
        forget(context.state)

        def answer() -> Message:
            # Before the app is called: it need not train for what cannot be sent, and it may change what it is given.
            rules = Rules.settle(fixed, context.run_config)
            sent, memory = kept(message.content), remembered(context.state)
            began = time.perf_counter()
            reply = called(message, context, call_next, WHO)
            trained = time.perf_counter()
            put_back(context.state, memory)
            if reply.has_error():
                return reply
            sender = _sender(sent, context, seed)
            content = protected_content(rules, sent, reply.content, _category(message), sender)
            own = time.perf_counter() - trained
            share = 100 * own / (trained - began + own)
            log.info("%s took %.3g s to protect the reply, %.3g %% of this message's time", rules.chain, own, share)
            return Message(content, reply_to=message)

        return answered(message, answer, WHO)

    return mod


def _category(message: Message) -> str:
    return message.metadata.message_type.partition(".")[0]


def _sender(asked: RecordDict, context: Context, seed: int | None) -> Sender:
    number = int(context.node_config.get(PARTITION, 0))
    streams = Streams.secure([number])
    if seed is not None:
        streams = Streams.seeded(seed, [number], "round", _round(asked), "upload")
    local = guarded_steps(context.state)
    return Sender(
        number, context.state, streams, seed is not None, local.chain, local.steps, example_rate=local.example_rate
    )


def _round(asked: RecordDict) -> int:
    for record in asked.config_records.values():
        if "server-round" in record:
            return int(str(record["server-round"]))
    raise FedveilError("seeded noise needs the number of the round, and the server's message has no server-round")
