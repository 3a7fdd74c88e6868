"""The law that every random defense states of what it sends, held against what it does send."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import nn

from fedveil.clients.batch import ClientBatch
from fedveil.clients.engine import Engine
from fedveil.clients.sgd import sgd_step
from fedveil.defenses.base import Defense, Facts, SummedStep, has_density
from fedveil.defenses.chain import Chain
from fedveil.defenses.densities import spike
from fedveil.defenses.likelihood import reading, step_gradient
from fedveil.defenses.updates import Updates
from fedveil.registry import defenses
from fedveil.streams import Streams
from fedveil.tree import Tree

from . import laws

ROWS = 20_000
FIRST = (0.9, -0.4, 0.25, -1.2)
SECOND = (0.7, -0.5, 0.35, -1.1)
# Settings at which one update of a small model gives its client away. Every random mechanism on updates needs one.
TELLING = {
    "dp-clip": ["dp-clip:clip=0.5,sigma=0.01", "dp-clip:clip=0.5,sigma=0.01,at=upload"],
    "dp-gaussian": ["dp-gaussian:epsilon=1e5"],
    "dp-laplace": ["dp-laplace:epsilon=1000", "dp-laplace:epsilon=1e4,order=l2"],
    "dp-sgd": ["dp-sgd:noise_multiplier=0.02"],
    "duchi": ["duchi:epsilon=50,bound=0.2"],
    "gaussian-noise": ["gaussian-noise:sigma=0.01"],
    "gradient-dropout": [
        "gradient-dropout:keep=0.2",
        "gradient-dropout:keep=0.2,match_spread=true",
        "gradient-dropout:keep=0.2,sigma=0",
    ],
    "gradient-masking": ["gradient-masking:share=0.9"],
    "laplace-noise": ["laplace-noise:scale=0.01"],
    "ldp-fl": ["ldp-fl:adaptive=true", "ldp-fl:epsilon=50,radius=0.2", "ldp-fl:epsilon=50,radii=[0.2,0.2,0.2,0.2]"],
    "ldpm": ["ldpm:sigma=0.01"],
    "noise-add": ["noise-add:ratio=0.1"],
    "pm": ["pm:epsilon=15,bound=0.2"],
    "pnpm": ["pnpm:epsilon=2"],
    "ppfa": ["ppfa", "ppfa:direction=random", "ppfa:at=gradient,epsilon=0.1"],
    "sign-compression": ["sign-compression:flip=0.2"],
    "spm": ["spm:epsilon=2", "spm:epsilon=2,debias=true", "spm:epsilon=50"],
}


def on_updates(defense: Defense) -> bool:
    return isinstance(defense, SummedStep) or defense.acts_at in ("gradient", "upload")


# ---- all registered defenses ------------------------------------------------------------------------------


@pytest.mark.parametrize("spec", [spec for _, spec in laws.EVERY])
def test_says_whether_what_it_sends_follows_from_what_comes_in(spec: str) -> None:
    defense = defenses.parse(spec)
    if defense.acts_at == "server":
        return  # a client sends as if it were not there
    one, other = (laws.apply(spec, laws.make_batch(seed=seed)) for seed in (0, 1))
    if not defense.random:
        assert laws.equal(one, other)
    elif on_updates(defense) and defense.name != "soteria":  # it looks at the data, which are the same here
        assert not laws.equal(one, other) or "epsilon=50" in spec  # hardly ever does a draw show there
        assert has_density(defense), "a random mechanism needs a log_density, or the link test misses its law"
        assert defense.name in TELLING


@pytest.mark.parametrize("spec", [spec for specs in laws.IDENTITY.values() for spec in specs])
def test_settings_that_change_nothing_are_not_random(spec: str) -> None:
    defense = defenses.parse(spec)
    if on_updates(defense) and defense.name not in ("spm", "pnpm"):  # these draw all the same
        assert not defense.random


def given_to(defense: Defense, batch: ClientBatch) -> Tree:
    """What comes in to a defense that stands alone."""
    if isinstance(defense, SummedStep):
        return Chain((defense,)).part(batch, [{}])[1].update / batch.targets.shape[1]
    return batch.gradient()


@pytest.mark.parametrize("spec", [spec for specs in TELLING.values() for spec in specs])
def test_the_true_input_is_the_likeliest(spec: str) -> None:
    defense, count = defenses.parse(spec), 12
    batch = laws.make_batch(clients=count)
    batch.params = Tree.expand(batch.params.row(0), count)
    observed, given = laws.apply(spec, batch), given_to(defense, laws.make_batch(clients=count))
    facts, found = Facts(batch_size=6), []
    for client in range(count):
        scores = defense.log_density(Tree.expand(observed.row(client), count), given, facts)
        assert scores is not None
        assert (scores.dtype, scores.shape) == (torch.float64, (count,))
        assert scores.isfinite().all()
        found.append(int(scores.argmax()))
    assert sum(found[client] == client for client in range(count)) >= count - 1


@pytest.mark.parametrize("spec", [spec for specs in TELLING.values() for spec in specs])
def test_what_is_sent_anew_without_the_data_is_as_likely_as_what_was_sent(spec: str) -> None:
    defense = defenses.parse(spec)
    batch = laws.make_batch(clients=12)
    given, facts = given_to(defense, laws.make_batch(clients=12)), Facts(batch_size=6)
    again = defense.resent(given, facts, Streams.seeded(7, range(12)))
    ours, theirs = (defense.log_density(sent, given, facts) for sent in (again, laws.apply(spec, batch)))
    assert ours is not None
    assert theirs is not None
    spread = torch.cat([ours, theirs]).std().clamp_min(1e-3)
    assert abs(ours.mean() - theirs.mean()) < 3 * spread


@pytest.mark.parametrize("spec", [spec for _, spec in laws.EVERY])
def test_zeros_and_single_numbers_have_a_likelihood(spec: str) -> None:
    defense = defenses.parse(spec)
    if not (defense.random and has_density(defense)):
        return
    observed = laws.apply(spec, laws.make_batch(scalar=True))
    for one, other in ((observed, observed * 0.0), (observed * 0.0, observed), (observed * 0.0, observed * 0.0)):
        found = defense.log_density(one, other, Facts())
        assert found is not None
        assert found.shape == (4,)
        assert found.isfinite().all()


# ---- one law after another --------------------------------------------------------------------------------


class Dot(nn.Module):
    """A model whose gradient is its input."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(size, dtype=torch.float64))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return inputs @ self.w


def mean(output: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return output.mean()


def entries(values: tuple[float, ...] | torch.Tensor, rows: int = ROWS) -> Tree:
    return Tree.expand({"w": torch.as_tensor(values, dtype=torch.float64)}, rows)


def drawn(spec: str, values: tuple[float, ...], size: int = 1) -> Tree:
    """What many clients send whose gradient has these entries, for each example of their batch."""
    model = Dot(len(values))
    batch = ClientBatch(
        Engine(model, mean, backend="stacked", chunk=ROWS),
        Tree.expand({"w": model.w.detach()}, ROWS),
        Tree({}),
        torch.tensor(values, dtype=torch.float64).expand(ROWS, size, -1),
        torch.zeros(ROWS, size, dtype=torch.int64),
        Streams.seeded(0, range(ROWS), "draws"),
    )
    return laws.apply(spec, batch)


def came_in(spec: str, values: tuple[float, ...]) -> Tree:
    defense, given = defenses.parse(spec), entries(values)
    if isinstance(defense, SummedStep):
        size = torch.tensor(values).norm()
        return given * min(1.0, 1.0 / float(size))  # its own clipping, to 1
    return given


def log_density(spec: str, observed: Tree, given: Tree, size: int = 1) -> torch.Tensor:
    found = defenses.parse(spec).log_density(observed, given, Facts(batch_size=size))
    assert found is not None
    return found


def mean_ratio(spec: str, first: tuple[float, ...], second: tuple[float, ...], size: int = 1) -> tuple[float, float]:
    """E[p(o|second)/p(o|first)] over what is sent for the first, with its standard error."""
    observed = drawn(spec, first, size)
    one, other = (log_density(spec, observed, came_in(spec, values), size) for values in (first, second))
    ratio = (other - one).exp()
    return float(ratio.mean()), float(ratio.std()) / ROWS**0.5


@pytest.mark.parametrize(
    "spec, first, second",
    [
        ("gaussian-noise:sigma=0.4", FIRST, SECOND),
        ("laplace-noise:scale=0.3", FIRST, SECOND),
        ("dp-clip:clip=1,sigma=0.3", FIRST, SECOND),
        ("dp-gaussian:epsilon=8", FIRST, SECOND),
        ("dp-laplace:epsilon=4", FIRST, SECOND),
        ("dp-laplace:epsilon=20,order=l2", FIRST, SECOND),
        ("dp-sgd:noise_multiplier=0.3", FIRST, SECOND),
        ("ldpm:sigma=0.3", FIRST, SECOND),
        ("noise-add:ratio=0.5", FIRST, (0.7, -0.5, 0.35, -0.6)),
        ("duchi:epsilon=1,bound=2", FIRST, SECOND),
        ("duchi:epsilon=1", (0.9, -0.4, 0.25, -3.0), (0.7, -0.5, 0.35, 0.2)),
        ("pm:epsilon=1,bound=2", FIRST, SECOND),
        ("pm:epsilon=3", (0.9, -0.4, 0.25, -3.0), (0.8, -0.4, 0.3, -0.9)),
        ("ldp-fl:epsilon=1,center=0.1,radius=2", FIRST, SECOND),
        ("ldp-fl:epsilon=1,centers=[-0.2],radii=[3.0]", FIRST, SECOND),
        ("ldp-fl:epsilon=1,adaptive=true", (-1.0, 0.3, -0.2, 1.0), (-1.0, -0.5, 0.6, 1.0)),
        ("sign-compression:flip=0.3", FIRST, (0.9, 0.4, -0.25, 1.2)),
        ("spm:epsilon=1", FIRST, (0.9, 0.4, -0.25, 1.2)),
        ("pnpm:epsilon=1", FIRST, (0.9, 0.4, -0.25, 1.2)),
    ],
)
def test_likelihood_ratios_have_the_mean_one(spec: str, first: tuple[float, ...], second: tuple[float, ...]) -> None:
    """Each density is that of the draws, for both inputs: else their ratio has another mean."""
    found, error = mean_ratio(spec, first, second)
    assert 0 < error < 0.03
    assert abs(found - 1) < 4 * error


def test_the_noise_of_dp_sgd_is_that_of_a_mean() -> None:
    found, error = mean_ratio("dp-sgd:noise_multiplier=0.6", FIRST, SECOND, size=3)
    assert abs(found - 1) < 4 * error < 0.1


@pytest.mark.parametrize("spec, divisor", [("spm:epsilon=1", 1.0), ("spm:epsilon=1,debias=true", 0.731), ("pnpm", 1.0)])
def test_a_larger_entry_has_a_wider_and_lower_density(spec: str, divisor: float) -> None:
    """Of draws from U[1, C] the share (C − r)/(C − 1) is possible for an entry r times as large, at 1/r the density."""
    factor, larger = 1 + defenses.parse(spec).stretch, 1.2  # type: ignore[attr-defined]
    found, error = mean_ratio(spec, (0.8,), (larger * 0.8,))
    assert abs(found - (factor - larger) / (factor - 1) / larger) < 4 * error < 0.03
    assert float(drawn(spec, (0.8,))["w"].abs().amax()) <= factor * 0.8 / divisor * 1.001


def test_what_a_mechanism_cannot_have_sent_costs_much_but_not_all() -> None:
    spec = "spm:epsilon=1"
    high = 0.8 * (1 + defenses.parse(spec).stretch)  # type: ignore[attr-defined]
    given, sent = entries((0.8,), 4), torch.tensor([[0.5 * (0.8 + high)], [1.01 * high], [0.79], [0.0]])
    found = log_density(spec, Tree({"w": sent.double()}), given)
    assert found[0] > -5
    assert (found[1:] < -20).all()
    assert (found[1:] > -60).all()
    # A last bit must not do it, at either end of the range.
    ends, off = torch.tensor([[0.8], [high]]), torch.tensor([[0.8 * (1 + 2e-7)], [0.8 * (1 - 2e-7)]])
    assert (log_density(spec, Tree({"w": ends}), Tree({"w": off})) > -5).all()
    # Zero stays zero: the right candidate is not punished for it, and others are.
    zero = entries((0.0,), 2)
    assert log_density(spec, zero, zero).tolist() == [0.0, 0.0]
    assert (log_density(spec, given.rows([0]), entries((0.0,), 1)) < -20).all()


@pytest.mark.parametrize(
    "spec, kept, mass_at_zero",
    [
        ("gradient-dropout:keep=0.3,sigma=0.5", 0.8 / 0.3, 0.0),
        ("gradient-dropout:keep=0.3,match_spread=true", 0.8 / 0.3, 0.0),
        ("gradient-dropout:keep=0.3,sigma=0", 0.8 / 0.3, 0.7),
        ("gradient-masking:share=0.25", 0.8, 0.25),
    ],
)
def test_mixtures_of_kept_entries_and_others_integrate_to_one(spec: str, kept: float, mass_at_zero: float) -> None:
    near = torch.logspace(-17, math.log10(8), 40_000, dtype=torch.float64)
    grid = torch.cat([kept - near.flip(0), kept + near])
    density = log_density(spec, Tree({"w": grid[:, None]}), entries((0.8,), len(grid))).exp()
    assert float(torch.trapezoid(density, grid)) + mass_at_zero == pytest.approx(1, abs=0.04)
    zero = log_density(spec, entries((0.0,), 1), entries((0.8,), 1)).exp()
    if mass_at_zero:
        assert float(zero) == pytest.approx(mass_at_zero)
        assert float(log_density(spec, entries((0.0,), 1), entries((0.0,), 1))) == 0.0


@pytest.mark.parametrize("spec", ["gradient-dropout:keep=0.3,sigma=0.5", "gradient-masking:share=0.25"])
def test_kept_entries_are_found_in_spite_of_rounding(spec: str) -> None:
    sent = drawn(spec, FIRST)
    exact = log_density(spec, sent, entries(FIRST))
    rounded = log_density(spec, sent.map(lambda t: t.float().double() * (1 + 1e-7)), entries(FIRST))
    other = log_density(spec, sent, entries(SECOND))
    some = (sent["w"] == entries(FIRST)["w"] / (0.3 if "dropout" in spec else 1.0)).any(1)  # a kept entry at least
    assert 0.7 < some.double().mean() < 1
    assert (rounded > other)[some].all()
    assert (exact >= rounded - 1e-9)[some].all()


def test_a_spike_is_a_density() -> None:
    r = torch.cat([-torch.logspace(2, -9, 20_000).double(), torch.logspace(-9, 2, 20_000).double()])
    width, reach = torch.tensor(1e-6, dtype=torch.float64), torch.tensor(100.0, dtype=torch.float64)
    assert float(torch.trapezoid(spike(r, width, reach).exp(), r)) == pytest.approx(1, abs=1e-3)


def test_ppfa_knows_the_distance() -> None:
    spec = "ppfa:direction=random,at=gradient"
    sent = drawn(spec, FIRST)
    right, wrong = log_density(spec, sent, entries(FIRST)), log_density(spec, sent, entries(SECOND))
    assert float((right > wrong).double().mean()) > 0.999


# ---- how chains are read ------------------------------------------------------------------------------------


def updates(kind: str = "gradient", steps: int = 1, epochs: int = 1, decay: float = 0.0) -> Updates:
    before = Tree({"w": torch.tensor([[0.5, -0.25, 2.0, 0.0]])})
    message = before - Tree({"w": 0.1 * torch.tensor([[0.3, 0.0, 1.0, -2.0]])}) if kind == "weights" else before * 0.1
    return Updates(kind, before, message, Tree({}), (0.1,) * steps, (1,) * steps, 0.0, decay, epochs)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "spec, sent, rule, replayed, exact",
    [
        ("none", updates(), "cosine", "none", False),
        ("cdp+none", updates(), "cosine", "none", False),
        ("clip", updates(), "distance", "clip", True),
        ("clip+gradient-pruning", updates("weights", 4, 4), "distance", "clip+gradient-pruning", True),
        ("clip", updates("weights", 4, 2), "distance", "clip", False),  # two batches: in which order is not known
        ("clip+gaussian-noise", updates(), "density", "clip", True),
        ("gaussian-noise+clip", updates(), "informed", "none", False),
        ("laplace-noise+gaussian-noise", updates(), "density", "laplace-noise", False),
        ("fedem+gaussian-noise", updates(), "density", "fedem", False),
        ("fedem", updates(), "cosine", "fedem", False),
        ("fedem+gradient-pruning", updates(), "cosine", "fedem+gradient-pruning", False),
        ("fedem+gaussian-noise+sign-compression", updates(), "informed", "fedem", False),
        ("gaussian-noise", updates("weights"), "density", "none", True),
        ("gaussian-noise", updates("weights", 2, 2), "informed", "none", False),
        ("gaussian-noise+clip:at=upload", updates("weights"), "informed", "none", False),
        ("gaussian-noise+spm", updates("weights", 2, 2), "density", "gaussian-noise", False),
        ("clip+spm", updates("weights", 2, 2), "density", "clip", True),
        ("clip+spm", updates("weights", 2, 1), "density", "clip", False),
        ("dp-sgd", updates(), "density", "dp-sgd", True),
        ("gaussian-noise+dp-sgd", updates(), "density", "dp-sgd", False),  # who owns the step comes first
        ("soteria", updates(), "informed", "none", False),
        ("fedbarre", updates(), "cosine", "none", False),
        ("fedbarre+gaussian-noise", updates(), "density", "none", False),
        ("gaussian-noise:sigma=0+clip", updates(), "distance", "gaussian-noise:sigma=0.0+clip", True),
    ],
)
def test_chains_are_replayed_up_to_their_last_random_mechanism(
    spec: str, sent: Updates, rule: str, replayed: str, exact: bool
) -> None:
    how = reading(Chain.of(spec), sent)
    assert (how.rule, how.exact) == (rule, exact)
    assert how.replayed == Chain.of(replayed if replayed != "none" else None)
    assert (how.judge is not None) == (rule == "density")


def test_every_history_of_fedbarre_is_tried() -> None:
    how = reading(Chain.of("fedbarre:models=3,epochs=2,lr=0.2"), updates())
    assert [(each.steps, each.lr) for each in how.histories if each] == [(2, 0.2), (4, 0.2), (6, 0.2)]
    assert reading(Chain.of("fedbarre:lr=0"), updates()).histories == (None,)


@pytest.mark.parametrize("kind", ["weights", "delta"])
@pytest.mark.parametrize("decay", [0.0, 0.3])
def test_the_gradient_of_a_single_step_comes_out_of_the_message(decay: float, kind: str) -> None:
    before = Tree({"w": torch.linspace(-1, 1, 200)[None]})
    gradient = Tree({"w": torch.where(torch.arange(200) % 2 == 0, 0.0, torch.linspace(3, -1, 200))[None]})
    after = Tree(sgd_step(before, gradient, {}, lr=0.1, weight_decay=decay)[0])
    message = after if kind == "weights" else after - before
    found = step_gradient(replace(updates(kind, decay=decay), before=before, message=message))
    torch.testing.assert_close(found["w"], gradient["w"], atol=1e-5, rtol=0)
    assert torch.equal(found["w"] == 0, gradient["w"] == 0)  # for mechanisms that send zeros
