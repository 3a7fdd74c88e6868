"""What becomes of a client's reply before it leaves: the core of the client mod and of a site's policy."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from flwr.app import Context, Error, Message, RecordDict
from flwr.clientapp.typing import ClientAppCallable
from flwr.common.constant import ErrorCode
from torch import Tensor

from fedveil.clients.engine import Tensors
from fedveil.defenses.chain import Chain, States
from fedveil.defenses.guarantee import exposure_of
from fedveil.errors import FedveilError
from fedveil.flower.memory import Memory
from fedveil.flower.records import (
    PARTITION,
    Parts,
    check_configs,
    is_old,
    limited,
    rebuilt,
    the_arrays,
    to_tensors,
    told_apart,
)
from fedveil.flower.rules import Rules
from fedveil.intake import Intake
from fedveil.ledger.ledger import Release
from fedveil.streams import Streams
from fedveil.tree import Tree

log = logging.getLogger(__name__)
REFUSED = int(ErrorCode.MOD_FAILED_PRECONDITION)
CODES = {value for name, value in vars(ErrorCode).items() if name.isupper()}
# Rooms whose errors name settings, counts and what the server sent. Others may name a path, or quote a line of data.
IN_TRAINING = ("defenses", "flower", "guard", "intake")
IN_SENDING = (*IN_TRAINING, "clients", "federation", "fields", "ledger", "registry")
# Of these, rooms whose errors count in settings. The numbers of others may be those of the data, or of an update.
OF_SETTINGS = ("fields", "flower", "ledger", "registry")
_NUMBER = re.compile(r"(?<![\w.])\d+(?:[.,]\d+)*(?:e[+-]?\d+)?%?(?![\w.]*\w)")


@dataclass
class Sender:
    """One client, as far as its replies are concerned."""

    number: int
    state: RecordDict  # where its memory is kept
    streams: Streams
    seeded: bool = False
    local: Chain = field(default_factory=Chain)  # what protected the training behind this reply
    local_steps: int = 0
    example_rate: float = 1.0
    # Of fedveil's own training, which applied the whole chain and has seen the data where need was: what the defenses
    # remember after it.
    whole: States | None = None


def protected_content(rules: Rules, asked: RecordDict, reply: RecordDict, category: str, sender: Sender) -> RecordDict:
    """The reply as it may leave. Whatever cannot be protected is refused with a `FedveilError`."""
    old = is_old(asked)
    check_configs(reply, old=old)
    metrics = limited(reply, rules, also=(PARTITION,) if category == "query" else (), old=old)
    if category != "train":
        if reply.array_records:
            raise FedveilError(f"the reply to a message of type {category} holds arrays, which only training sends")
        return RecordDict({"metrics": metrics})
    name, sent = the_arrays(asked, "the server's message")
    before = told_apart(to_tensors(sent), rules)
    made = the_arrays(reply, "the reply")[1]
    # First: names and shapes are the app's own words. No error may repeat them, for it goes to the server.
    if not made.keys() <= sent.keys():
        raise FedveilError("the update has an array that is not in the model")
    update = told_apart(to_tensors(made), rules)
    memory = Memory.load(
        sender.state,
        rules.chain,
        before.weights,
        exposure_of(before.weights, seeded=sender.seeded, bare_buffers=rules.buffers == "share"),
    )
    arrays = _protected(rules, before, update, memory, sender)
    # Spend first: nothing may go out uncounted.
    memory.ledger.spend(
        sender.number, Release(rules.chain, gradients=sender.local_steps or 1, example_rate=sender.example_rate)
    )
    memory.sent += 1
    memory.save(sender.state, rules.chain)
    return rebuilt(name, arrays, metrics, old=old)


def _protected(rules: Rules, before: Parts, update: Parts, memory: Memory, sender: Sender) -> dict[str, Tensor]:
    """All arrays that go out, in the server's order."""
    _check_shapes(before.weights, update.weights)
    _check("the update", Intake(before.weights), update.weights)
    rules.chain.check_parameters(before.weights)
    given = Tree.expand({name: update.weights[name] for name in before.weights}, 1)  # noise is drawn in this order
    start = Tree.expand(before.weights, 1)
    shown = _defended(rules, given - start if rules.kind == "delta" else given, memory, sender)
    _check("the protected update", Intake(before.weights, longest=rules.longest), shown.row(0))
    out = shown + start if rules.kind == "delta" else shown
    return {**out.row(0), **_buffers(rules, before.buffers, update.buffers)}


def _defended(rules: Rules, update: Tree, memory: Memory, sender: Sender) -> Tree:
    chain, early = rules.chain, rules.early
    if chain.aggregates:
        raise FedveilError(f"{chain} acts on the server: there is nothing for a client to protect with it")
    if sender.whole is not None:
        memory.states = sender.whole
        return update
    if not early:
        return chain.protect_message(update, rules.kind, sender.streams, memory.states)
    # Defenses come in the order of their places, so those that acted in training are the first ones.
    if chain.defenses[: len(early)] != sender.local.defenses or not sender.local_steps:
        acted = f"it was done under {sender.local}" if sender.local_steps else "no guarded training was seen"
        raise FedveilError(
            f"{early[0].name} acts before there is an update, in training, and {acted}: train with "
            "fedveil.flower.guarded, or use a defense with at=upload"
        )
    chain.check_message(rules.kind)
    return chain.upload_alone(update, sender.streams, memory.states)


def _buffers(rules: Rules, before: Tensors, after: Tensors) -> Tensors:
    """The server's own, or what the client has, where that is allowed."""
    if rules.buffers == "withhold" or (rules.kind == "gradient" and not after):
        return {} if rules.kind == "gradient" else before
    _check_shapes(before, after)
    _check("the buffers", Intake(before), after)
    return {name: after[name] for name in before}


def _check_shapes(like: Tensors, tensors: Tensors) -> None:
    for name, tensor in tensors.items():
        if name in like and tensor.shape != like[name].shape:
            log.warning("%s has the shape %s, not %s", name, tuple(tensor.shape), tuple(like[name].shape))
            raise FedveilError(f"the update has {name} of another shape than the server sent")


def _check(what: str, intake: Intake, tensors: Tensors) -> None:
    wrong = intake.refuse(tensors)
    if wrong:
        log.warning("%s %s", what, wrong)
        raise FedveilError(f"{what} {without_numbers(wrong)}")


def refusal(asked: Message, reason: str, code: int = REFUSED) -> Message:
    """An error reply, as Flower wants it: a mod that raises loses its state, one that returns nothing stops a round."""
    return Message(Error(code=code, reason=reason), reply_to=asked)


def called(message: Message, context: Context, call_next: ClientAppCallable, who: str) -> Message:
    """What the app replies. An error of it is told without its text, which may quote the data."""
    about = dict(vars(message.metadata))
    try:
        reply = call_next(message, context)
        failed = reported(reply.error) if reply.has_error() else None
    except FedveilError as error:
        log.warning("%s", error)
        failed = told_of(error, "the client app failed", IN_TRAINING), REFUSED
    except (Exception, SystemExit) as error:
        log.exception("the client app failed")
        failed = f"the client app failed ({type(error).__name__})", REFUSED
    vars(message.metadata).update(about)  # what an app wrote there would go along with the reply
    return reply if failed is None else refusal(message, f"{who}: {failed[0]}", failed[1])


def answered(asked: Message, answer: Callable[[], Message], who: str) -> Message:
    """That reply; where it fails, an error reply that gives neither data nor paths away."""
    try:
        return answer()
    except FedveilError as error:
        log.warning("%s: an update was not sent: %s", who, error)
        return refusal(asked, f"{who}: {told_of(error, 'the update could not be protected')}")
    except (Exception, SystemExit) as error:
        # The text of somebody else's error may quote the data, so only its type is told.
        log.exception("%s: an update was not sent", who)
        return refusal(asked, f"{who}: the update could not be protected ({type(error).__name__})")


def told_of(error: FedveilError, otherwise: str, rooms: Sequence[str] = IN_SENDING) -> str:
    """What the server is told of an error of ours: its words, where it comes from one of these rooms."""
    place = error.__traceback__
    while place is not None and place.tb_next is not None:
        place = place.tb_next
    module = "" if place is None else str(place.tb_frame.f_globals.get("__name__"))
    room = module.split(".")[1] if module.startswith("fedveil.") else ""
    if room not in rooms or error.__cause__ is not None:  # it may quote somebody else's error
        return f"{otherwise}: the client's own log says why"
    return str(error) if room in OF_SETTINGS else without_numbers(str(error))


def without_numbers(text: str) -> str:
    """A text without the numbers that stand alone in it: a norm, or the size of a batch.

    >>> without_numbers("has a norm of 3.2e+20, above 1e+15, and is not finite in 0.bias")
    'has a norm of …, above …, and is not finite in 0.bias'
    """
    return _NUMBER.sub("…", text)


def reported(error: Error) -> tuple[str, int]:
    """An app's own error without its text, and its code. A number that Flower does not know could hold anything."""
    if error.code not in CODES:
        return "the client app reported an error", REFUSED
    return f"the client app reported error {error.code:d}", int(error.code)
