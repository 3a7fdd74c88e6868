"""FedEM: Algorithm 1 in plain torch, the ring, the memory of a round, and the whole way to an audit."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

import fedveil as fv
from fedveil.clients.batch import ClientBatch
from fedveil.clients.engine import Engine
from fedveil.defenses.ball import Ring
from fedveil.defenses.base import Facts
from fedveil.defenses.chain import Chain, ClientStates
from fedveil.defenses.fedcrap import FedCRAP
from fedveil.defenses.fedem import FedEM
from fedveil.defenses.gradient_dropout import GradientDropout
from fedveil.defenses.noise import GaussianNoise
from fedveil.errors import FedveilError
from fedveil.federation.run import federate
from fedveil.guard.guard import Guard
from fedveil.streams import Streams
from fedveil.tree import Tree

from .laws import call_of, equal
from .perturbing import assert_rows, client_model, drawn_start, images, network, plain_fedem

RELATIVE = {"step": "relative", "freeze": True}


def lengths(delta, norm="l2"):
    return torch.linalg.vector_norm(delta.flatten(2), 2 if norm == "l2" else math.inf, dim=2)


def step(defense, batch, states=None):
    chain = Chain.of(defense)
    return chain.step(batch, chain.new_states() if states is None else states)


# ---- the ring ---------------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(["l2", "linf"]),
    st.sampled_from([(1,), (7,), (1, 3, 3)]),
    st.just(0.0) | st.floats(1e-6, 2),
    st.just(0.0) | st.floats(1e-3, 1),
    st.floats(-6, 6),
    st.sampled_from([torch.float32, torch.float64]),
)
def test_projection_ends_in_the_ring(norm, shape, high, share, size, dtype):
    ring = Ring(share * high, high, norm)
    generator = torch.Generator().manual_seed(3)
    delta = (10**size * torch.randn(2, 3, *shape, generator=generator)).to(dtype)
    delta[0, 0] = 0
    found = ring.project(delta, lambda: torch.randn(delta.shape, generator=generator))
    assert found.dtype == dtype
    assert (lengths(found, norm) <= high * (1 + 1e-6)).all()
    assert (lengths(found, norm) >= ring.low * (1 - 1e-6)).all()
    inside = (lengths(delta, norm) <= high) & (lengths(delta, norm) >= ring.low)
    assert torch.equal(found[inside], delta[inside])  # what is in the ring stays
    start = ring.start(Streams.seeded(0, range(2)), delta)
    assert (lengths(start, norm) <= high * (1 + 1e-6)).all()
    assert (lengths(start, norm) >= ring.low * (1 - 1e-6)).all()


def test_a_zero_perturbation_that_must_grow_takes_the_random_direction():
    ring, direction = Ring(1.0, 2.0), torch.tensor([[[3.0, 4.0], [1.0, 0.0]]])
    delta = torch.tensor([[[0.0, 0.0], [0.0, 0.5]]])
    assert torch.allclose(ring.project(delta, lambda: direction), torch.tensor([[[0.6, 0.8], [0.0, 1.0]]]))


@pytest.mark.parametrize("norm", ["l2", "linf"])
def test_the_start_is_spread_over_the_ring(norm):
    ring = Ring(0.5, 2.0, norm)
    found = ring.start(Streams.seeded(0, range(2)), torch.zeros(2, 4000, 3, dtype=torch.float64))
    assert abs(found.mean()) < 0.03
    if norm == "l2":  # uniform lengths
        assert lengths(found).mean() == pytest.approx(1.25, abs=0.02)


@pytest.mark.parametrize("norm", ["l2", "linf"])
@pytest.mark.parametrize("low, high", [(0.0, 8 / 255), (0.02, 8 / 255), (0.5, 0.5), (1.0, 4.0)])
@pytest.mark.parametrize("way", [{}, RELATIVE], ids=["sign", "relative"])
def test_the_perturbation_stays_in_the_ring(norm, low, high, way):
    batch = images(dtype=torch.float32)
    seen = step(FedEM(radius=high, min_radius=low, norm=norm, steps=4, **way), batch).seen
    found = lengths(seen.double() - batch.inputs.double(), norm)
    assert (found <= high + 1e-5).all()
    assert (found >= low - 1e-5).all()


@pytest.mark.parametrize("norm", ["l2", "linf"])
def test_it_stays_there_from_step_to_step_and_over_batches(norm, monkeypatch):
    noted, plain = [], Engine.input_gradient

    def note(self, params, buffers, inputs, *rest):
        noted.append(inputs)
        return plain(self, params, buffers, inputs, *rest)

    monkeypatch.setattr(Engine, "input_gradient", note)
    defense, states = FedEM(radius=0.5, min_radius=0.3, norm=norm, steps=4), [{}]
    for number in range(3):
        batch = images(step=number)
        noted.clear()
        seen = Chain.of(defense).step(batch, states).seen
        assert len(noted) == 4
        for inputs in (*noted, seen):
            found = lengths(inputs - batch.inputs, norm)
            assert ((found >= 0.3 - 1e-9) & (found <= 0.5 + 1e-9)).all()


def test_the_ring_must_not_be_empty():
    with pytest.raises(FedveilError, match=r"min_radius must be at most the radius, 0\.1 \(got 0\.2\)"):
        FedEM(radius=0.1, min_radius=0.2)


# ---- Algorithm 1 ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "fields",
    [
        {},  # the paper's
        {"radius": 1024 / 255, "min_radius": 2.0, "alpha": 0.05, "steps": 6},
        {"radius": 3.0, "freeze": True, "steps": 5},
        {"radius": 2.0, "inner_lr": 0.7, "steps": 1},
    ],
)
def test_equals_algorithm_1_in_plain_torch_over_the_batches_of_a_round(fields):
    defense = FedEM(**fields)
    chain, states, kept = Chain.of(defense), [{}], {}
    for number, size in enumerate((4, 4, 3)):  # the last batch is short
        batch = images(size=size, step=number)
        shared = chain.step(batch, states)
        for k in range(batch.count):
            fresh = k not in kept
            own = kept.get(k)
            if fresh:
                own = drawn_start(batch.streams, k, size, defense.min_radius, defense.radius)
            delta, gradient = plain_fedem(
                client_model(batch, k),
                batch.inputs[k],
                batch.targets[k],
                own[:size],
                fresh=fresh,
                steps=defense.steps,
                alpha=defense.alpha,
                eta=defense.inner_lr,
                low=defense.min_radius,
                high=defense.radius,
                freeze=defense.freeze,
            )
            kept[k] = torch.cat([delta, own[size:]])
            torch.testing.assert_close(states[0]["delta"][k], kept[k], rtol=1e-9, atol=1e-12)
            torch.testing.assert_close(shared.seen[k], batch.inputs[k] + delta, rtol=1e-9, atol=1e-12)
            assert_rows(shared.update, k, gradient)  # at the global model


def losses_on_the_way(defense, batch, monkeypatch):
    noted, plain = [], Engine.input_gradient

    def note(self, *arguments):
        noted.append(plain(self, *arguments)[1])
        return plain(self, *arguments)

    monkeypatch.setattr(Engine, "input_gradient", note)
    seen = step(defense, batch).seen
    return torch.stack([*noted, batch.loss(seen)])


@pytest.mark.parametrize("norm, radius", [("l2", 0.5), ("l2", 4.0), ("linf", 0.1), ("linf", 0.5)])
def test_with_a_frozen_model_and_relative_steps_the_loss_falls(norm, radius, monkeypatch):
    batch = images(clients=4, size=6)
    losses = losses_on_the_way(FedEM(radius=radius, norm=norm, **RELATIVE), batch, monkeypatch)
    assert (losses[1:7] < losses[:6]).all()
    assert (losses[-1] <= losses[6] + 1e-3).all()  # from here on it may turn at the edge of the ball
    assert (losses[-1] < batch.loss()).all()


@pytest.mark.parametrize("radius", [0.3, 1.0, 1024 / 255])
def test_the_loss_at_the_global_model_is_lower(radius):
    batch = images(clients=4, size=6)
    assert (batch.loss(step(FedEM(radius=radius), batch).seen) < batch.loss()).all()


def test_relative_steps_have_their_length_in_the_norm_of_the_ball():
    for norm in ("l2", "linf"):
        defense = FedEM(radius=4.0, steps=10, norm=norm, step="relative")
        moved = defense._move(torch.randn(2, 3, 5))
        assert torch.allclose(lengths(moved, norm), torch.tensor(1.0))
        assert not defense._move(torch.zeros(2, 3, 5)).any()


# ---- memory -----------------------------------------------------------------------------------------------


def test_the_perturbation_is_carried_over_batches_and_set_anew_in_a_round():
    defense = FedEM(radius=50.0, alpha=0.01, steps=2)  # steps far shorter than the ball: nothing is overwritten
    chain, memory = Chain.of(defense), ClientStates()

    def run(number):
        states = memory.gather([0, 1, 2], chain)
        batch = images(step=number)
        seen = chain.step(batch, states).seen
        memory.scatter([0, 1, 2], states)
        return seen - batch.inputs

    first, second = run(0), run(1)
    assert (second - first).abs().max() <= 2 * 0.01 + 1e-9
    memory.new_round(chain)
    assert (run(2) - second).abs().max() > 1


def test_a_short_batch_uses_the_first_rows_and_keeps_the_others():
    defense, states = FedEM(radius=50.0, alpha=0.01, steps=2), [{}]
    chain = Chain.of(defense)
    for number, size in enumerate((4, 3, 4, 6)):
        before = states[0].get("delta", torch.zeros(3, 0, 2, 4, 4))
        chain.step(images(size=size, step=number), states)
        after = states[0]["delta"]
        assert after.shape[1] == max(size, before.shape[1])
        both = min(size, before.shape[1])
        assert (after[:, :both] - before[:, :both]).abs().max() <= 0.02 + 1e-9 if both else True
        assert torch.equal(after[:, size:], before[:, size:])
        assert (lengths(after) <= 50 + 1e-9).all()


def test_guard_carries_it_and_forgets_it_with_the_round():
    model = network()
    guard = Guard(model, F.cross_entropy, FedEM(radius=1.0, steps=2), seed=0)
    x, y = torch.randn(4, 2, 4, 4), torch.tensor([0, 1, 2, 0])
    guard.backward(x, y)
    first = guard._states[0]["delta"].clone()
    assert any(p.grad.abs().sum() > 0 for p in model.parameters())
    guard.backward(x[:2], y[:2])
    assert torch.equal(guard._states[0]["delta"][:, 2:], first[:, 2:])
    guard.new_round()
    assert guard._states == [{}]
    plain = network()
    F.cross_entropy(plain(x), y).backward()
    off = network()
    Guard(off, F.cross_entropy, FedEM(radius=0.0), seed=0).backward(x, y)
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(off.parameters(), plain.parameters(), strict=True))


# ---- the model around it ----------------------------------------------------------------------------------


def test_buffers_move_once():
    batch = images(norm=True)
    shared = step(FedEM(radius=1.0, steps=3), batch)
    assert (shared.buffers["1.num_batches_tracked"] == 1).all()
    assert (batch.buffers["1.num_batches_tracked"] == 0).all()
    expected = images(norm=True).share(shared.seen)
    assert equal(shared.buffers, expected.buffers)
    assert equal(shared.update, expected.update)
    for k, seen in enumerate(shared.seen):  # one plain pass, at the shared inputs
        model = client_model(batch, k).train()
        model(seen)
        torch.testing.assert_close(shared.buffers.row(k), dict(model.named_buffers()))


@pytest.mark.parametrize("norm", [False, True])
def test_backends_agree(norm):
    defense = FedEM(radius=2.0, steps=4)
    loop, stacked = (step(defense, images(norm=norm, backend=backend)) for backend in ("loop", "stacked"))
    torch.testing.assert_close(loop.seen, stacked.seen, rtol=1e-9, atol=1e-10)
    torch.testing.assert_close(dict(loop.update), dict(stacked.update), rtol=1e-8, atol=1e-10)


def test_with_gradient_dropout_equals_composing_by_hand():
    chain = Chain.of([GradientDropout(keep=0.5), FedEM(radius=1.0, steps=3)])
    shared = chain.step(images(), chain.new_states())
    batch = images()
    moved = FedEM(radius=1.0, steps=3).perturb(batch.at(0, {}))
    update = GradientDropout(keep=0.5).protect(batch.share(moved).update, call_of(batch.at(1, {})))
    assert torch.equal(shared.seen, moved)
    assert equal(shared.update, update)


def test_in_pixel_space_the_radius_is_in_pixels():
    batch = images()
    defense = FedEM(radius=0.1, min_radius=0.1, std=(0.5, 0.25), steps=3)
    pixels = (step(defense, batch).seen - batch.inputs) * torch.tensor([0.5, 0.25]).reshape(2, 1, 1)
    torch.testing.assert_close(lengths(pixels), torch.full((3, 4), 0.1, dtype=torch.float64))
    whole = step(FedEM(radius=0.2, std=(0.5, 0.5), alpha=0.1, steps=3), images()).seen
    half = step(FedEM(radius=0.4, alpha=0.2, steps=3), images()).seen  # the same in units twice as small
    torch.testing.assert_close(whole, half)
    for bad in (FedEM(std=(0.3,)), FedEM(std=(0.3, 0.3, 0.3))):
        with pytest.raises(FedveilError, match="one number per channel"):
            step(bad, images())


class Reader(nn.Module):
    """The mean of the embeddings that are not padding, if it looks at the mask at all."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.head = nn.Linear(4, 3)

    def forward(self, embeddings, attention_mask):
        return self.head(embeddings.tanh()).mean(1) + 0 * attention_mask.sum(1, keepdim=True)


def test_padding_is_not_perturbed():
    mask = torch.ones(2, 3, 5, dtype=torch.int64)
    mask[:, 1, 3:] = 0
    mask[:, 2] = 0  # nothing but padding
    inputs = {"embeddings": torch.randn(2, 3, 5, 4), "attention_mask": mask}
    model = Reader()
    params = Tree.expand({n: p.detach() for n, p in model.named_parameters()}, 2)
    engine = Engine(model, F.cross_entropy, backend="loop", perturb="embeddings")
    targets = torch.randint(0, 3, (2, 3))
    batch = ClientBatch(engine, params, Tree({}), inputs, targets, Streams.seeded(0, range(2)))
    seen = step(FedEM(radius=2.0, min_radius=1.0, steps=3), batch).seen
    delta = seen["embeddings"] - inputs["embeddings"]
    assert not delta[~mask.bool()].any()
    assert (lengths(delta)[:, :2] >= 1 - 1e-5).all()
    assert seen["embeddings"].isfinite().all()
    assert seen["attention_mask"] is mask


# ---- what an attacker who knows it does ---------------------------------------------------------------------


@pytest.mark.parametrize(
    "defense, most",
    [
        (FedEM(radius=0.3), 0.3),
        (FedEM(radius=0.3, norm="linf"), 0.3),
        (FedEM(radius=9.0, alpha=0.1, steps=5), 0.5),  # five sign steps of 0.1
        (FedEM(radius=9.0, alpha=0.1, steps=5, step="relative"), 9.0),
        (FedEM(radius=0.2, std=(0.5, 0.25)), 0.8),
        (FedEM(radius=0.0), 0.0),
    ],
)
def test_the_attacker_knows_how_far_an_entry_may_move(defense, most):
    known = defense.knowledge(images().gradient(), Facts())
    assert known.reach == pytest.approx(most)
    assert known.reweight is None


def test_no_entry_moves_farther_than_the_attacker_supposes():
    """But for the random start, which is a hundredth of the way here."""
    defense = FedEM(radius=2.0, alpha=0.05, steps=6)
    batch = images()
    moved = (defense.moves(batch.at(0, {})) - batch.inputs).abs().amax()
    assert moved <= defense.knowledge(batch.gradient(), Facts()).reach + 2.0


@pytest.mark.parametrize(
    "defense",
    [FedEM(radius=4.0), FedEM(radius=4.0, step="relative"), FedCRAP(radius=4.0), FedCRAP(radius=4.0, share=0.5)],
)
def test_hardly_an_entry_moves_farther_than_by_an_even_spread(defense):
    """Attackers widen the valid range by twice that."""
    batch = images()
    moved = (defense.moves(batch.at(0, {})) - batch.inputs).abs()
    known = defense.knowledge(batch.gradient(), Facts())
    even = known.length / math.prod(batch.inputs.shape[2:]) ** 0.5
    assert (moved > 2 * even).double().mean() < 0.02
    assert moved.amax() > 0.3 * even  # else the attacker would know less than could be known


def test_lengths_add_up_where_they_are_known():
    once, other = FedEM(radius=2.0), FedCRAP(radius=1.0, share=0.25)
    observed, facts = images().gradient(), Facts()
    assert Chain.of([once, other]).knowledge(observed, facts).length == pytest.approx(2.0 + 2.0)
    assert Chain.of([once, GaussianNoise(sigma=0.1)]).knowledge(observed, facts).length == pytest.approx(2.0)
    assert FedEM(radius=2.0, norm="linf").knowledge(observed, facts).length == math.inf


# ---- in a federation and an audit ----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def digits():
    return fv.task("digits", model="mlp:hidden=[16],activation=sigmoid", clients=4, limit=240)


@pytest.mark.parametrize("protocol", ["fedsgd", "fedavg"])
def test_a_round_on_digits(digits, protocol):
    rounds = fv.FederationSettings(protocol=protocol, rounds=1, batch_size=16)
    run = federate(digits, FedEM(steps=3, radius=1.0), rounds, backend="stacked")
    plain = federate(digits, None, rounds, backend="stacked")
    assert run.utility.test > 0.1
    assert any(not torch.equal(run.params[name], plain.params[name]) for name in run.params)


def test_an_audit_shows_the_perturbed_input(digits):
    outcome = fv.audit(
        digits,
        FedEM(steps=4, radius=1.0, min_radius=0.9),
        "inverting-gradients:steps=10",
        settings=fv.AuditSettings(victims=3, batch_size=2, link=False),
        train=False,
        backend="stacked",
    )
    roles = [row.role for row in outcome.result.rows]
    assert sorted(roles) == sorted(["ceiling", "naive", "adaptive", "noise-floor", "mean-floor", "bound"])
    bound = outcome.leakage["bound", "mse"].mean  # of x+δ against x: ‖δ‖²/64 in normalized space
    assert 0.9**2 / 64 - 1e-6 <= bound <= 1 / 64 + 1e-6
