"""The mods that look at the server's model, and at an update before it goes."""

from __future__ import annotations

import torch
from flwr.app import Context, Message, RecordDict
from torch import nn
from torch.nn.functional import cross_entropy

from fedveil.flower import Behind, LocalSteps, inspect, protect, release
from fedveil.vetting.release import ReleaseGate
from flower.exchange import arrays_of, asked, context, replied


def model(seed: int = 0) -> nn.Sequential:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Sequential(nn.Flatten(), nn.Linear(64, 12), nn.ReLU(), nn.Linear(12, 4))


def echo(message: Message, _: Context) -> Message:
    return replied(message, arrays_of(message))


def test_an_honest_model_is_trained_on_and_a_malicious_one_is_not() -> None:
    state, mod = RecordDict(), inspect(model())
    honest = {name: tensor + 0.01 for name, tensor in model().state_dict().items()}
    for number, arrays in enumerate((model().state_dict(), honest), 1):
        assert mod(asked(arrays, number=number), context(state=state), echo).has_content()
    imprint = {**honest, "1.weight": honest["1.weight"][:1].repeat(12, 1)}
    reply = mod(asked(imprint, number=3), context(state=state), echo)
    assert "looks malicious" in str(reply.error.reason)
    assert mod(asked(honest, number=4), context(state=state), echo).has_content(), "the last good model is remembered"


def test_without_an_expected_model_the_last_round_s_stands_for_it() -> None:
    state, mod = RecordDict(), inspect()
    assert mod(asked(model().state_dict()), context(state=state), echo).has_content()
    other = {**model().state_dict(), "extra": torch.zeros(3)}
    assert "changed architecture" in str(mod(asked(other), context(state=state), echo).error.reason)


X, Y = torch.rand(1, 1, 8, 8, generator=torch.Generator().manual_seed(1)), torch.tensor([2])
OTHERS = torch.rand(40, 1, 8, 8, generator=torch.Generator().manual_seed(2)), torch.arange(40) % 4


def step(message: Message, _: Context) -> Message:
    net = model()
    net.load_state_dict(arrays_of(message))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    cross_entropy(net(X), Y).backward()
    optimizer.step()
    return replied(message, net.state_dict())


def protected_step(message: Message, held: Context) -> Message:
    return protect()(message, held, step)


def test_an_update_that_gives_its_batch_away_is_withheld_and_one_that_is_drowned_is_sent() -> None:
    gate = ReleaseGate(attack=None, candidates=20, most_linked=0.99)
    local = LocalSteps(batch_size=1, lr=0.1)
    mod = release(gate, cross_entropy, lambda _: Behind(model(), (X, Y), OTHERS), local)
    sent = {}
    for defense in ("none", "clip:norm=1e-9,at=upload+gaussian-noise:sigma=10,at=upload"):
        held = context({"defense": defense, "protect-of": "delta"})
        tries = [mod(asked(model().state_dict()), held, protected_step) for _ in range(4)]
        sent[defense] = [reply.has_content() for reply in tries]
        if defense == "none":
            assert str(tries[0].error.reason) == "fedveil: the update is withheld: the client's own log says why"
    assert not any(sent["none"])
    assert any(sent["clip:norm=1e-9,at=upload+gaussian-noise:sigma=10,at=upload"])


def test_a_gate_that_cannot_decide_withholds() -> None:
    def nothing(_: Context) -> Behind:
        raise KeyError("patient 0017")

    mod = release(ReleaseGate(), cross_entropy, nothing, LocalSteps(batch_size=1, lr=0.1))
    reply = mod(asked(model().state_dict()), context({"defense": "none"}), step)
    assert "0017" not in str(reply.error.reason)
    assert "KeyError" in str(reply.error.reason)


def test_an_app_that_fails_behind_the_gate_is_answered_for_without_its_text() -> None:
    def fails(_: Message, __: Context) -> Message:
        raise ValueError("patient 0017")

    mod = release(
        ReleaseGate(), cross_entropy, lambda _: Behind(model(), (X, Y), OTHERS), LocalSteps(batch_size=1, lr=1)
    )
    told = str(mod(asked(model().state_dict()), context({"defense": "none"}), fails).error.reason)
    assert "ValueError" in told
    assert "0017" not in told
