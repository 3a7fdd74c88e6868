"""Guard in a client's training function, and the mod that makes sure it was used."""

from __future__ import annotations

import json

import pytest
import torch
from flwr.app import Context, Message, RecordDict
from torch.nn.functional import cross_entropy

from fedveil.errors import FedveilError
from fedveil.flower import guarded, protect
from fedveil.flower.guarded import STATE
from flower.exchange import arrays_of, asked, context, replied, small_model

CHAIN = "gradient-dropout:keep=0.5,sigma=0.01+clip:norm=0.1,at=upload"


def train(message: Message, held: Context, *, use: bool = True, steps: int = 2) -> Message:
    model = small_model()
    model.load_state_dict(arrays_of(message))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(8, 6, generator=generator), torch.arange(8) % 3
    if use:
        with guarded(model, cross_entropy, held, batch_size=8, dataset_size=16) as guard:
            for _ in range(steps):
                optimizer.zero_grad()
                guard.backward(x, y)
                optimizer.step()
    return replied(message, model.state_dict())


def length(reply: Message) -> float:
    moved, sent = arrays_of(reply), arrays_of(asked())
    names = [name for name, tensor in sent.items() if tensor.is_floating_point()]
    return torch.cat([(moved[name] - sent[name]).flatten() for name in names]).norm().item()


def test_training_and_upload_are_protected_each_by_its_part_of_the_chain() -> None:
    held = context({"defense": CHAIN, "protect-of": "delta"})
    reply = protect()(asked(), held, train)
    assert length(reply) == pytest.approx(0.1, rel=1e-4)


def test_a_round_without_guarded_training_sends_nothing_even_after_one_with() -> None:
    state, mod = RecordDict(), protect(CHAIN)
    assert mod(asked(), context({"defense": CHAIN}, state=state), train).has_content()
    for bare in (lambda m, c: train(m, c, use=False), lambda m, c: train(m, c, steps=0)):
        reply = mod(asked(number=2), context({"defense": CHAIN}, state=state), bare)
        assert "no guarded training was seen" in str(reply.error.reason)


def test_training_under_another_defense_than_the_mod_s_sends_nothing() -> None:
    reply = protect(CHAIN)(asked(), context(), lambda m, c: train(m, context({"defense": "fedem"}, state=c.state)))
    assert "done under fedem" in str(reply.error.reason)


def test_the_ledger_goes_on_over_rounds_and_the_memory_of_a_round_does_not() -> None:
    state, mod = RecordDict(), protect("fedem")
    for number in (1, 2):
        held = context({"defense": "fedem"}, partition=3, state=state)
        assert mod(asked(number=number), held, train).has_content()
    told = json.loads(str(state.config_records[STATE]["state"]))
    assert told["round"] == 2
    assert told["client"] == 3
    assert [line["times"] for line in told["ledger"]["spent"]] == [4]
    assert "fedveil.guard.states" not in state, "FedEM's δ lasts a round"


def test_how_many_examples_were_in_a_batch_stays_with_the_client() -> None:
    def app(message: Message, held: Context) -> Message:
        model = small_model()
        with guarded(model, cross_entropy, held, batch_size=2, dataset_size=400) as guard:
            guard.backward(torch.randn(317, 6), torch.zeros(317, dtype=torch.long))
        raise AssertionError("it was taken")

    told = str(protect("dp-sgd")(asked(), context({"defense": "dp-sgd"}), app).error.reason)
    assert "a batch of … examples is not one that Poisson sampling draws" in told


def test_without_a_defense_nothing_is_trained() -> None:
    with pytest.raises(FedveilError, match="no defense is set"):
        train(asked(), context())
