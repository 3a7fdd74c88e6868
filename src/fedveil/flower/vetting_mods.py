"""Two more mods: one looks at the model that the server sent, one attacks an update before it goes."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from flwr.app import Context, Message, RecordDict
from flwr.clientapp.typing import ClientAppCallable, Mod
from torch import Tensor, nn

from fedveil.clients.engine import Loss
from fedveil.errors import FedveilError
from fedveil.federation.capture import Capture
from fedveil.flower.outgoing import answered, refusal
from fedveil.flower.records import kept, the_arrays, to_tensors, told_apart
from fedveil.flower.rules import Rules
from fedveil.flower.settings import LocalSteps
from fedveil.tasks.normalization import Normalization
from fedveil.vetting.received import inspect_model
from fedveil.vetting.release import Batch, ReleaseGate

log = logging.getLogger(__name__)
LAST = "fedveil.received"  # in a client's state: the model of the round before
WHO = "fedveil"


def inspect(expected: nn.Module | Mapping[str, Tensor] | None = None) -> Mod:
    """A mod that looks for signs of a malicious server in every model that is sent to be trained.

    ```python
    app = ClientApp(mods=[fedveil.flower.inspect(), fedveil.flower.protect("spm:epsilon=1")])
    ```

    expected: a model of the agreed architecture. Without it, the first round's stands for it. A model with signs is not
    trained on: the reply is an error that names the first of them. See `fedveil.inspect_model`.
    """

    def mod(message: Message, context: Context, call_next: ClientAppCallable) -> Message:
        if message.metadata.message_type.partition(".")[0] != "train":
            return call_next(message, context)
        try:
            arrays = the_arrays(message.content, "the server's message")[1]
            last = context.state.array_records.get(LAST)
            inspect_model(to_tensors(arrays), to_tensors(last) if last is not None else None, expected).require()
        except FedveilError as error:
            return refusal(message, f"{WHO}: {error}")
        except Exception as error:
            return refusal(message, f"{WHO}: the server's model could not be inspected ({type(error).__name__})")
        context.state[LAST] = arrays.copy()
        return call_next(message, context)

    return mod


@dataclass(frozen=True, eq=False)
class Behind:
    """What is behind a client's update: only the client has it."""

    model: nn.Module
    batch: Batch  # inputs and targets, as the model takes them; over local steps, those of one epoch
    others: Batch  # other examples of the same kind, which are not behind it
    normalization: Normalization | None = None


def release(
    gate: ReleaseGate,
    loss: Loss,
    behind: Callable[[Context], Behind],
    local: LocalSteps,
    rules: Rules | None = None,
) -> Mod:
    """A mod that attacks an update, protected as it is, before it is sent, and withholds it where too much leaks.

    ```python
    mods = [fedveil.flower.release(ReleaseGate(), loss, behind, LocalSteps(batch_size=8, lr=0.1)), protect()]
    ```

    It stands before `protect` in the list, so it sees what that mod lets out. behind: gives what the client trained on
    in this round. rules: those of `protect`; by default the run's own.
    """

    def mod(message: Message, context: Context, call_next: ClientAppCallable) -> Message:
        def answer() -> Message:
            settled = rules or Rules.settle({}, context.run_config)
            sent = kept(message.content)
            reply = call_next(message, context)
            if reply.has_error() or message.metadata.message_type.partition(".")[0] != "train":
                return reply
            known = behind(context)
            seen = _capture(sent, reply.content, settled, local, len(known.batch[1]))
            found = gate.decide(seen, known.model, loss, known.batch, known.others, settled.chain, known.normalization)
            if not found.send:
                # How much was found would tell the server what it could find itself.
                log.warning("the update is withheld: %s", found.reason)
                raise FedveilError("the update is withheld: the client's own log says why")
            return reply

        return answered(message, answer, WHO)

    return mod


def _capture(asked: RecordDict, reply: RecordDict, rules: Rules, local: LocalSteps, examples: int) -> Capture:
    """The update as the server will see it."""
    before = told_apart(to_tensors(the_arrays(asked, "the server's message")[1]), rules)
    sent = told_apart(to_tensors(the_arrays(reply, "the reply")[1]), rules)
    sizes = local.sizes(examples, rules.kind)
    change = {name: tensor - before.weights[name] for name, tensor in sent.weights.items()}
    return Capture(
        kind=rules.kind,
        before=before.weights,
        shared=change if rules.kind == "delta" else sent.weights,
        client=0,
        round=1,
        steps=len(sizes),
        lr=(local.lr,) * len(sizes),
        momentum=0.0 if rules.kind == "gradient" else local.momentum,
        batch_sizes=sizes,
        facts={"defense": str(rules.chain), "local_epochs": 1 if rules.kind == "gradient" else local.local_epochs},
    )
