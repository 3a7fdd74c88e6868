"""FedCRAP: FedEM's loop with a mask, in plain torch, and equal to FedEM where the mask is everything."""

import itertools

import pytest
import torch
from torch.nn import functional as F

import fedveil as fv
from fedveil.clients.engine import Engine
from fedveil.defenses.ball import top_share
from fedveil.defenses.chain import Chain
from fedveil.defenses.fedcrap import FedCRAP
from fedveil.defenses.fedem import FedEM
from fedveil.defenses.gradient_dropout import GradientDropout
from fedveil.federation.run import federate
from fedveil.guard.guard import Guard

from .laws import call_of, equal
from .perturbing import assert_rows, client_model, drawn_start, images, network, plain_fedem

SIZE = 2 * 4 * 4


def step(defense, batch):
    chain = Chain.of(defense)
    return chain.step(batch, chain.new_states())


def inputs_on_the_way(defense, batch, monkeypatch):
    """What the inner loop evaluated, step by step, and the end: perturbations (steps + 1, K, B, ...)."""
    noted, plain = [], Engine.input_gradient

    def note(self, params, buffers, inputs, *rest):
        noted.append(inputs)
        return plain(self, params, buffers, inputs, *rest)

    monkeypatch.setattr(Engine, "input_gradient", note)
    seen = step(defense, batch).seen
    return torch.stack([*noted, seen]) - batch.inputs


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"radius": 1024 / 255, "min_radius": 1.0, "alpha": 0.3},
        {"radius": 4.0, "norm": "linf", "step": "relative"},
        {"radius": 2.0, "freeze": True, "std": (0.5, 0.2)},
    ],
)
@pytest.mark.parametrize("way", [{}, {"projection": "masked"}, {"channels_together": True}])
def test_with_all_pixels_it_is_fedem_to_the_bit(fields, way):
    fields = {"steps": 4, **fields}
    mine, plain = Chain.of(FedCRAP(share=1.0, **fields, **way)), Chain.of(FedEM(**fields))
    states = [{}], [{}]
    for number, size in enumerate((4, 3)):
        one = mine.step(images(size=size, step=number, dtype=torch.float32), states[0])
        other = plain.step(images(size=size, step=number, dtype=torch.float32), states[1])
        assert torch.equal(one.seen, other.seen)
        assert equal(one.update, other.update)
        assert torch.equal(states[0][0]["delta"], states[1][0]["delta"])


@pytest.mark.parametrize(
    "fields",
    [
        {"steps": 5},
        {"radius": 1024 / 255, "share": 0.25, "alpha": 0.3, "steps": 6},
        {"radius": 4.0, "min_radius": 1.0, "share": 0.5, "freeze": True, "steps": 4},
    ],
)
def test_equals_the_masked_loop_in_plain_torch(fields):
    defense = FedCRAP(**fields)
    chain, states, kept = Chain.of(defense), [{}], {}
    for number, size in enumerate((3, 2)):
        batch = images(size=size, step=number)
        shared = chain.step(batch, states)
        for k in range(batch.count):
            fresh = k not in kept
            if fresh:
                kept[k] = drawn_start(batch.streams, k, size, defense.min_radius, defense.radius)
            delta, gradient = plain_fedem(
                client_model(batch, k),
                batch.inputs[k],
                batch.targets[k],
                kept[k][:size],
                fresh=fresh,
                steps=defense.steps,
                alpha=defense.alpha,
                eta=defense.inner_lr,
                low=defense.min_radius,
                high=defense.radius,
                share=defense.share,
                freeze=defense.freeze,
            )
            kept[k] = torch.cat([delta, kept[k][size:]])
            torch.testing.assert_close(shared.seen[k], batch.inputs[k] + delta, rtol=1e-9, atol=1e-12)
            assert_rows(shared.update, k, gradient)


@pytest.mark.parametrize("share", [0.1, 0.3, 0.9])
@pytest.mark.parametrize("together", [False, True])
def test_a_step_moves_at_most_that_share_of_the_pixels(share, together, monkeypatch):
    # The ball is far larger than the steps, so that no projection scales all entries.
    defense = FedCRAP(radius=1000.0, alpha=0.01, steps=5, share=share, channels_together=together)
    deltas = inputs_on_the_way(defense, images(), monkeypatch)
    most = max(1, int(share * (SIZE // 2 if together else SIZE))) * (2 if together else 1)
    assert ((deltas[1].abs() > 1e-12).flatten(2).sum(2) <= most).all()  # the start is masked too
    for before, after in itertools.pairwise(deltas[1:]):
        moved = (after - before).abs() > 1e-12
        assert (moved.flatten(2).sum(2) <= most).all()
        assert moved.any()


def test_masks():
    values = torch.randn(2, 3, 2, 4, 4)
    for share, count in ((0.1, 3), (0.29, 9), (0.01, 1), (1.0, 32)):
        mask = top_share(values, share)
        assert (mask.flatten(2).sum(2) == count).all()
        kept, left = values.abs()[mask].reshape(2, 3, -1), values.abs().masked_fill(mask, 0)
        assert (kept.amin(2) >= left.flatten(2).amax(2)).all()
    mask = top_share(values, 0.25, channels_together=True)
    assert torch.equal(mask[:, :, 0], mask[:, :, 1])
    assert (mask.flatten(2).sum(2) == 8).all()
    assert torch.equal(top_share(torch.arange(100.0).reshape(1, 1, 100), 0.29).sum(), torch.tensor(29))


def test_the_papers_projection_bounds_the_masked_part_only():
    whole, masked = (
        step(FedCRAP(radius=0.5, share=0.2, steps=8, projection=way), images()).seen - images().inputs
        for way in ("delta", "masked")
    )
    assert (whole.flatten(2).norm(dim=2) <= 0.5 + 1e-9).all()
    assert (masked.flatten(2).norm(dim=2) > 0.5).any()
    last = top_share(masked, 0.2)
    assert ((masked != 0).flatten(2).sum(2) > last.flatten(2).sum(2)).any()  # earlier regions stay


@pytest.mark.parametrize("radius", [1.0, 1024 / 255])
def test_the_loss_gets_lower(radius):
    batch = images(clients=4, size=6)
    assert (batch.loss(step(FedCRAP(radius=radius, share=0.3), batch).seen) < batch.loss()).all()


@pytest.mark.parametrize("together", [False, True])
def test_backends_agree(together):
    defense = FedCRAP(radius=2.0, steps=3, share=0.3, channels_together=together)
    loop, stacked = (step(defense, images(backend=backend)) for backend in ("loop", "stacked"))
    torch.testing.assert_close(loop.seen, stacked.seen, rtol=1e-9, atol=1e-10)
    torch.testing.assert_close(dict(loop.update), dict(stacked.update), rtol=1e-8, atol=1e-10)


def test_buffers_move_once():
    shared = step(FedCRAP(radius=1.0, steps=3), images(norm=True))
    assert (shared.buffers["1.num_batches_tracked"] == 1).all()
    assert equal(shared.buffers, images(norm=True).share(shared.seen).buffers)


def test_with_gradient_dropout_equals_composing_by_hand():
    chain = Chain.of([FedCRAP(radius=1.0, steps=3), GradientDropout(keep=0.5)])
    shared = chain.step(images(), chain.new_states())
    batch = images()
    moved = FedCRAP(radius=1.0, steps=3).perturb(batch.at(0, {}))
    update = GradientDropout(keep=0.5).protect(batch.share(moved).update, call_of(batch.at(1, {})))
    assert equal(shared.update, update)


def test_in_guard():
    model = network()
    guard = Guard(model, F.cross_entropy, FedCRAP(radius=1.0, steps=2))
    guard.backward(torch.randn(4, 2, 4, 4), torch.tensor([0, 1, 2, 0]))
    assert any(parameter.grad.abs().sum() > 0 for parameter in model.parameters())
    assert guard._states[0]["delta"].shape == (1, 4, 2, 4, 4)


def test_a_round_on_digits():
    task = fv.task("digits", model="mlp:hidden=[16],activation=sigmoid", clients=4, limit=240)
    run = federate(
        task, FedCRAP(steps=3, radius=1.0), fv.FederationSettings(rounds=1, batch_size=16), backend="stacked"
    )
    assert run.utility.test > 0.1
