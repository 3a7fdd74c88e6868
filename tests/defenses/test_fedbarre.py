"""FedBARRE: Algorithm 2 in plain torch, the choice among its models, and the randomized ensemble."""

import math

import pytest
import torch
from torch.nn import functional as F

import fedveil as fv
from fedveil.clients.batch import ClientBatch
from fedveil.clients.engine import Engine
from fedveil.defenses.base import Facts, StepsBefore
from fedveil.defenses.chain import Chain
from fedveil.defenses.fedbarre import FedBARRE
from fedveil.defenses.fedem import FedEM
from fedveil.defenses.gradient_dropout import GradientDropout
from fedveil.errors import FedveilError
from fedveil.federation.run import federate
from fedveil.guard.guard import Guard
from fedveil.streams import Streams
from fedveil.tree import Tree

from .laws import call_of, equal
from .perturbing import assert_rows, client_model, images, network, plain_fedbarre

SIZE = 2 * 4 * 4


def step(defense, batch):
    chain = Chain.of(defense)
    return chain.step(batch, chain.new_states())


# ---- Algorithm 2 ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"models": 4, "epochs": 2, "lam": 0.3, "high": 2.0, "low": 1.0, "pgd_lr": 3.0},
        {"models": 2, "high": 1.0, "sigma": 0.05, "lr": 1.5, "pgd_steps": 0},
    ],
)
def test_equals_algorithm_2_in_plain_torch(fields):
    defense = FedBARRE(**fields)
    batch = images(clients=4)
    shared = step(defense, batch)
    ensemble = defense.train_ensemble(batch.at(0, {}))
    places = batch.streams.fold("place", 0)
    chosen = set()
    for k in range(batch.count):
        draws = [
            [
                places.fold("model", m, "epoch", e).normal(*batch.inputs.shape[1:], dtype=torch.float64)[k]
                for e in range(defense.epochs)
            ]
            for m in range(defense.models)
        ]
        gradient, losses, best = plain_fedbarre(
            client_model(batch, k),
            batch.inputs[k],
            batch.targets[k],
            (batch.validation.inputs[k], batch.validation.targets[k]),
            draws,
            epochs=defense.epochs,
            lam=defense.lam,
            sigma=defense.high / math.sqrt(SIZE) if defense.sigma is None else defense.sigma,
            low=defense.low,
            high=defense.high,
            pgd=defense.pgd_steps,
            pgd_lr=defense.pgd_lr,
            lr=defense.lr,
        )
        assert_rows(shared.update, k, gradient)  # at θ_m*, not at w
        torch.testing.assert_close(ensemble.losses[k], torch.tensor(losses, dtype=torch.float64))
        assert ensemble.losses[k].argmin() == best
        chosen.add(best)
    if fields:
        assert len(chosen) > 1  # the clients do not all choose alike, or this test would show little


@pytest.mark.parametrize("models", [1, 3])
def test_without_steps_and_perturbation_it_is_plain_fedsgd(models):
    task = fv.task("digits", model="mlp:hidden=[16],activation=sigmoid", clients=4, limit=160)
    rounds = fv.FederationSettings(rounds=2, batch_size=16)
    plain = federate(task, None, rounds, backend="loop")
    same = federate(task, FedBARRE(models=models, lr=0.0, high=0.0, pgd_steps=1), rounds, backend="loop")
    assert all(torch.equal(plain.params[name], same.params[name]) for name in plain.params)


@pytest.mark.parametrize("curvature", [2.0, 8.0, 15.0, 30.0])
def test_where_the_loss_is_curved_by_more_than_one_over_the_rate_the_update_leads_away(curvature):
    """On a loss h·w²/2, m steps leave (1 − ρh)^m·w: for h > 1/ρ and odd m the shared gradient has the wrong sign."""
    model = torch.nn.Linear(1, 1, bias=False).double()
    torch.nn.init.constant_(model.weight, 3.0)
    engine = Engine(model, lambda output, target: 0.5 * F.mse_loss(output, target), backend="loop")
    inputs, targets = torch.full((1, 4, 1), curvature**0.5, dtype=torch.float64), torch.zeros(1, 4, 1).double()
    for steps in (1, 2, 3):
        params = Tree.expand({"weight": model.weight.detach()}, 1)
        batch = ClientBatch(engine, params, Tree({}), inputs, targets, Streams.seeded(0, [0]))
        shared = FedBARRE(models=1, epochs=steps, high=0.0, lr=0.1).gradient(batch).update["weight"].item()
        assert shared == pytest.approx(curvature * (1 - 0.1 * curvature) ** steps * 3.0)


def test_the_perturbations_stay_in_the_ring_and_lower_the_loss():
    batch = images()
    ensemble = FedBARRE(low=0.5, high=2.0, pgd_lr=20.0).train_ensemble(batch)
    for member in ensemble.members:
        length = member.delta.flatten(2).norm(dim=2)
        assert (length <= 2 + 1e-9).all()
        assert (length >= 0.5 - 1e-9).all()
        assert (batch.loss(batch.inputs + member.delta, member.params) < batch.loss(params=member.params)).all()


def test_what_was_seen_is_the_clean_input_while_it_counts():
    batch = images()
    assert torch.equal(step(FedBARRE(high=1.0, lam=0.01), batch).seen, batch.inputs)
    shared = step(FedBARRE(high=1.0, lam=0.0), batch)
    assert not torch.equal(shared.seen, batch.inputs)
    assert ((shared.seen - batch.inputs).flatten(2).norm(dim=2) <= 1 + 1e-9).all()


def test_the_loss_is_the_total_loss():
    batch, defense = images(), FedBARRE(models=1, high=2.0, lam=0.25)
    (member,) = defense.train_ensemble(batch.at(0, {})).members
    expected = 0.25 * batch.loss(params=member.params) + 0.75 * batch.loss(batch.inputs + member.delta, member.params)
    torch.testing.assert_close(step(defense, batch).loss, expected)


# ---- the choice ---------------------------------------------------------------------------------------------


def test_validation_data_is_asked_for():
    batch = images()
    batch.validation = None
    with pytest.raises(FedveilError, match="validation data of the client's own"):
        step(FedBARRE(), batch)
    assert step(FedBARRE(models=1), batch).update.isfinite().all()


def test_a_model_that_went_astray_is_not_chosen():
    losses = torch.tensor([[1.0, torch.nan], [torch.inf, 2.0]])
    assert FedBARRE()._weights(losses).tolist() == [[1, 0], [0, 1]]
    assert FedBARRE(selection="mixed")._weights(losses).tolist() == [[1, 0], [0, 1]]


def test_mixed_weights_minimize_the_penalized_risk_on_the_simplex():
    losses = torch.tensor([[0.3, 0.5, 0.31]], dtype=torch.float64)
    alpha = FedBARRE(selection="mixed", entropy=0.2)._weights(losses)

    def risk(weights):
        return (weights * losses).sum(1) + 0.2 * (weights * weights.clamp_min(1e-300).log()).sum(1)

    others = torch.distributions.Dirichlet(torch.ones(3, dtype=torch.float64)).sample((5000,))
    assert (risk(alpha) <= risk(others) + 1e-12).all()
    assert alpha.sum().item() == pytest.approx(1)


def test_mixed_shares_the_mean_of_all_gradients_by_their_weights():
    batch, defense = images(), FedBARRE(high=1.0, lr=0.5, selection="mixed", entropy=0.05)
    ensemble = defense.train_ensemble(batch.at(0, {}))
    alpha = torch.softmax(-ensemble.losses / 0.05, dim=1)
    shared = step(defense, batch)
    for k in range(batch.count):
        for name in shared.update:
            each = [
                0.5 * batch.gradient(params=m.params)[name][k]
                + 0.5 * batch.gradient(batch.inputs + m.delta, m.params)[name][k]
                for m in ensemble.members
            ]
            expected = sum(a * g for a, g in zip(alpha[k], each, strict=True))
            torch.testing.assert_close(shared.update[name][k], expected)


# ---- the model around it ----------------------------------------------------------------------------------


@pytest.mark.parametrize("selection", ["best", "mixed"])
def test_buffers_move_once(selection):
    batch = images(norm=True)
    shared = step(FedBARRE(high=1.0, selection=selection), batch)
    assert (shared.buffers["1.num_batches_tracked"] == 1).all()
    assert (batch.buffers["1.num_batches_tracked"] == 0).all()


@pytest.mark.parametrize("norm", [False, True])
def test_backends_agree(norm):
    defense = FedBARRE(high=2.0, lr=0.5)
    loop, stacked = (step(defense, images(norm=norm, backend=backend)) for backend in ("loop", "stacked"))
    torch.testing.assert_close(dict(loop.update), dict(stacked.update), rtol=1e-8, atol=1e-10)
    torch.testing.assert_close(loop.loss, stacked.loss)


def test_in_a_chain_equals_composing_by_hand():
    chain = Chain.of([FedBARRE(high=1.0), GradientDropout(keep=0.5), FedEM(radius=1.0, steps=2)])
    shared = chain.step(images(), chain.new_states())
    names = [defense.name for defense in chain.defenses]
    batch = images()
    batch.inputs = FedEM(radius=1.0, steps=2).perturb(batch.at(names.index("fedem"), {}))
    update = FedBARRE(high=1.0).gradient(batch.at(names.index("fedbarre"), {})).update
    update = GradientDropout(keep=0.5).protect(update, call_of(batch.at(names.index("gradient-dropout"), {})))
    assert equal(shared.update, update)
    assert torch.equal(shared.seen, batch.inputs)


def test_in_guard():
    x, y = torch.randn(4, 2, 4, 4), torch.tensor([0, 1, 2, 0])
    model = network()
    guard = Guard(model, F.cross_entropy, FedBARRE(high=1.0), seed=0, validation=(x + 0.1, y))
    before = {name: p.clone() for name, p in model.named_parameters()}
    guard.backward(x, y)
    assert any(parameter.grad.abs().sum() > 0 for parameter in model.parameters())
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())
    with pytest.raises(FedveilError, match=r"Guard takes validation=\(inputs, targets\)"):
        Guard(model, F.cross_entropy, FedBARRE()).backward(x, y)


# ---- what an attacker makes of it ------------------------------------------------------------


def test_the_attacker_knows_where_the_gradient_was_taken():
    defense, batch = FedBARRE(high=0.4, low=0.2, lam=0.25), images()
    assert defense.knowledge(batch.gradient(), Facts()).reach == pytest.approx(0.3)
    length = (defense.moves(batch.at(0, {})) - batch.inputs).flatten(2).norm(dim=2) / 0.75
    assert (length <= 0.4 + 1e-5).all()
    assert (length >= 0.2 - 1e-5).all()
    for exact in (FedBARRE(high=0.0), FedBARRE(lam=1.0)):
        assert exact.knowledge(batch.gradient(), Facts()).reach == 0


def test_the_informed_attacker_repeats_the_local_steps():
    observed = images().gradient()
    expected = tuple(StepsBefore(steps, 0.3) for steps in (2, 4, 6))
    defense = FedBARRE(models=3, epochs=2, lr=0.3)
    assert defense.knowledge(observed, Facts()).before == expected
    assert FedBARRE(lr=0.0).knowledge(observed, Facts()).before == ()
    for chain in ([defense], [defense, GradientDropout()], [defense, FedEM()], [FedEM(), defense]):
        assert Chain.of(chain).knowledge(observed, Facts()).before == expected


def test_the_ring_must_not_be_empty():
    with pytest.raises(FedveilError, match="low must be at most high"):
        FedBARRE(low=1.0, high=0.5)


def test_a_round_on_digits():
    task = fv.task("digits", model="mlp:hidden=[16],activation=sigmoid", clients=4, limit=160)
    for protocol in ("fedsgd", "fedavg"):
        rounds = fv.FederationSettings(protocol=protocol, rounds=2, warmup_rounds=1, batch_size=16)
        run = federate(task, FedBARRE(pgd_steps=2), rounds, backend="stacked")
        assert run.utility.test > 0.1


def test_an_audit_whose_bound_is_the_clean_input():
    task = fv.task("digits", model="mlp:hidden=[16],activation=sigmoid", clients=4, limit=160)
    outcome = fv.audit(
        task,
        FedBARRE(high=1.0),
        "inverting-gradients:steps=5",
        settings=fv.AuditSettings(victims=2),
        train=False,
        backend="stacked",
    )
    assert outcome.leakage["bound", "mse"].mean == 0


# ---- the validation data -------------------------------------------------------------------------------------------


class Moody(torch.nn.Module):
    """A model whose loss tells the mode it was taken in."""

    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(5, 3)
        self.norm = torch.nn.BatchNorm1d(3)
        self.drop = torch.nn.Dropout(0.5)

    def forward(self, x):
        return self.drop(self.norm(self.linear(x)))


@pytest.mark.parametrize("backend", ["loop", "stacked"])
def test_models_are_validated_in_evaluation_mode(backend):
    torch.manual_seed(0)
    model = Moody().train()
    model.norm.running_mean += 0.3
    params = Tree.expand({n: p.detach() for n, p in model.named_parameters()}, 2)
    buffers = Tree.expand({n: b.detach() for n, b in model.named_buffers()}, 2)
    inputs, targets = torch.randn(2, 8, 5), torch.arange(16).reshape(2, 8) % 3
    engine = Engine(model, F.cross_entropy, backend=backend)
    batch = ClientBatch(engine, params, buffers, inputs, targets, Streams.seeded(0, range(2)))
    batch.validation = ClientBatch(engine, params, buffers, inputs, targets, Streams.seeded(1, range(2)))
    found = FedBARRE(models=1, lr=0, high=0).train_ensemble(batch).losses[:, 0]
    quiet = model.eval()
    expected = torch.stack([F.cross_entropy(quiet(x), y) for x, y in zip(inputs, targets, strict=True)])
    torch.testing.assert_close(found, expected.detach())
    assert all(module.training for module in engine.model.modules())


@pytest.mark.parametrize("asked, own", [(3, 3), (64, 6)])
def test_validation_examples_bounds_what_a_client_validates_on(asked, own, monkeypatch):
    sizes = set()
    kept = ClientBatch.evaluation_loss

    def spy(self, params=None):
        sizes.add(self.targets.shape[1])
        return kept(self, params)

    monkeypatch.setattr(ClientBatch, "evaluation_loss", spy)
    generator = torch.Generator().manual_seed(0)
    data = tuple((torch.rand(12, 6, generator=generator), torch.arange(12) % 3) for _ in range(3))
    task = fv.Task(torch.nn.Linear(6, 3), data, clients=2)
    federate(task, FedBARRE(models=2, validation_examples=asked), fv.FederationSettings(rounds=1))
    assert sizes == {own}
