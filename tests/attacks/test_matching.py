"""The matching engine: independent victims, equal backends, contained failures, restarts, boxes, counters."""

from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from fedveil.attacks import matcher, notes, workload
from fedveil.attacks.candidate import Pixels
from fedveil.attacks.finding import Reconstruction
from fedveil.attacks.iterates import Iterates
from fedveil.attacks.optimizers import Adam
from fedveil.attacks.priors import TotalVariation
from fedveil.attacks.recipe import Objective, Phase, Recipe
from fedveil.attacks.scene import Workbench
from fedveil.attacks.without_dropout import without_dropout
from fedveil.errors import FedveilError
from fedveil.tree import Tree

from .small import Choices, as_double, copies, match, matcher_of, on_the_way, random_problem

SHORT = Choices(steps=6, total_variation=1e-3)
DLG = Choices(cost="l2", optimizer="lbfgs", lr=1.0, steps=3, labels="optimized")


def conv():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(1, 4, 3, stride=2), nn.Sigmoid(), nn.Flatten(), nn.Linear(36, 3))


def batch_norm():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(1, 4, 3, stride=2), nn.BatchNorm2d(4), nn.Sigmoid(), nn.Flatten(), nn.Linear(36, 3))


def image_problem(model=None, **options):
    problem = random_problem(model or conv(), (1, 8, 8), **options)
    return replace(problem, box=(torch.full((1, 1, 1), -1.5), torch.full((1, 1, 1), 2.0)))


def assert_same(left, right, tolerance=1e-5):
    torch.testing.assert_close(on_the_way(left), on_the_way(right), rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(left.inputs, right.inputs, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(left.cost, right.cost, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(left.costs, right.costs, rtol=tolerance, atol=tolerance)
    assert torch.equal(left.labels, right.labels)
    assert left.steps == right.steps


# ---- victims are independent ------------------------------------------------------------------------------

CHOICES = {
    "signed adam": SHORT,
    "plain adam, restarts": replace(SHORT, signed=False, restarts=2),
    "uniform start": replace(SHORT, start="uniform"),
    "joint labels": replace(SHORT, labels="optimized", cost="l2", mean_square=1e-3),
    "recovered labels": replace(SHORT, labels="recovered"),
    "dlg": DLG,
}


@pytest.mark.parametrize("same_weights", [True, False])
@pytest.mark.parametrize("name", CHOICES)
def test_a_victim_alone_is_the_victim_in_the_stack(name, same_weights):
    problem = image_problem(same_weights=same_weights)
    problem = as_double(problem) if name == "dlg" else problem  # L-BFGS amplifies rounding
    whole = match(problem, CHOICES[name], backend="stacked")
    alone = match(problem.rows([3]), CHOICES[name], backend="stacked")
    assert_same(alone, whole.rows(slice(3, 4)))


@pytest.mark.parametrize("chunk", [1, 2, 4])
@pytest.mark.parametrize("name", ["signed adam", "dlg"])
def test_chunks_do_not_matter(name, chunk):
    problem = as_double(image_problem()) if name == "dlg" else image_problem()
    whole = match(problem, CHOICES[name], backend="stacked")
    assert_same(match(problem, CHOICES[name], backend="stacked", chunk=chunk), whole)


def test_the_order_of_victims_does_not_matter():
    problem = image_problem()
    order = torch.tensor([4, 0, 2])
    assert_same(match(problem.rows(order), SHORT, backend="stacked"), match(problem, SHORT).rows(order))


# ---- backends -------------------------------------------------------------------------------------------------

EQUAL = {
    "signed adam": (conv, replace(SHORT, steps=10)),
    "every prior and layer cosine": (conv, replace(SHORT, cost="layer-cosine", mean_square=1e-2, signed=False)),
    "l1 + l2": (conv, replace(SHORT, cost="l1-l2", signed=False)),
    "batch norm": (batch_norm, replace(SHORT, steps=8)),
    "batch norm in eval": (lambda: batch_norm().eval(), replace(SHORT, steps=8)),
    "dlg with joint labels": (conv, DLG),
}


@pytest.mark.parametrize("same_weights", [True, False])
@pytest.mark.parametrize("name", EQUAL)
def test_the_loop_equals_the_stack(name, same_weights):
    """In double precision: signs and L-BFGS amplify rounding."""
    make, choices = EQUAL[name]
    problem = as_double(image_problem(make(), same_weights=same_weights, batch=4))
    found = match(problem, choices, backend="stacked")
    assert found.inputs.dtype == found.cost.dtype == torch.float64
    assert_same(found, match(problem, choices, backend="loop"), 1e-7)


def test_results_are_single_precision_and_need_no_gradient():
    for backend in ("loop", "stacked"):
        found = match(image_problem(), SHORT, backend=backend)
        for tensor in (found.inputs, found.cost, found.costs, found.iterates[0]):
            assert tensor.dtype == torch.float32
            assert not tensor.requires_grad
        assert found.labels.dtype == torch.int64


class Branching(nn.Module):
    """What `vmap` cannot take."""

    def __init__(self):
        super().__init__()
        self.low, self.high = nn.Linear(6, 3), nn.Linear(6, 3)

    def forward(self, x):
        return torch.tanh(self.high(x) if x.mean() > 0 else self.low(x))


def test_a_model_that_cannot_be_stacked_runs_in_a_loop_or_says_why():
    torch.manual_seed(0)
    problem = random_problem(Branching(), (6,))
    assert match(problem, SHORT).inputs.shape == (5, 2, 6)
    with pytest.raises(FedveilError, match=r"cannot run on the backend 'stacked'.*use loop"):
        match(problem, SHORT, backend="stacked")
    with pytest.raises(FedveilError, match="backend"):
        match(problem, SHORT, backend="fast")


@pytest.mark.parametrize("backend", ["loop", "stacked"])
def test_weights_of_a_live_model_carry_no_graph_along(backend):
    problem = as_double(image_problem())
    live = Tree.expand(dict(problem.model.named_parameters()), problem.count)
    found = match(replace(problem, params=live), DLG, backend=backend)
    assert not found.inputs.requires_grad
    assert_same(found, match(problem, DLG, backend=backend))
    assert all(p.grad is None for p in problem.model.parameters())


# ---- failures stay contained ----------------------------------------------------------------------------------


@pytest.mark.parametrize("choices", [SHORT, replace(SHORT, signed=False), DLG], ids=["signed", "plain", "dlg"])
@pytest.mark.parametrize("backend", ["loop", "stacked"])
def test_a_victim_that_is_not_a_number_stays_contained(choices, backend):
    problem = as_double(image_problem()) if choices is DLG else image_problem()
    broken = problem.target.map(lambda tensor: tensor.clone())
    broken["3.bias"][2] = torch.nan
    found = match(replace(problem, target=broken), choices, backend=backend)
    rest = torch.tensor([0, 1, 3, 4])
    assert_same(found.rows(rest), match(problem.rows(rest), choices, backend=backend))
    assert torch.isnan(found.cost[2])
    assert torch.isfinite(found.inputs).all()
    if choices.optimizer == "adam":
        assert torch.equal(found.iterates[0][2], found.iterates[-1][2])


class Cliff(nn.Module):
    """No number for inputs whose mean is above zero."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x):
        return self.layer(x) + torch.where(x.mean() > 0, torch.nan, 0.0)


def test_a_victim_that_breaks_on_its_way_rests_there():
    torch.manual_seed(0)
    problem = random_problem(nn.Linear(4, 3), (4,), victims=8)
    problem = replace(problem, model=Cliff(), params=Tree({f"layer.{n}": t for n, t in problem.params.items()}))
    problem = replace(problem, target=Tree({f"layer.{n}": t for n, t in problem.target.items()}))
    problem = replace(problem, weight=Tree({f"layer.{n}": t for n, t in problem.weight.items()}))
    found = match(problem, Choices(steps=30, signed=False, decay=False, lr=0.3), backend="stacked")
    seen = on_the_way(found)
    over = seen.mean((2, 3)) > 0  # (steps, victims)
    assert over.any()
    assert not over[:, ~over[-1]].any()
    for victim in over[-1].nonzero().flatten():
        first = int(over[:, victim].int().argmax())
        assert (seen[first:, victim] == seen[first, victim]).all()


def result(cost, mark):
    count = len(cost)
    full = torch.full((count, 1, 2), float(mark))
    costs = torch.tensor(cost)
    labels = torch.full((count, 1), mark)
    iterates = Iterates.empty(1, full.shape)
    iterates.put(0, full)
    return Reconstruction(full, labels, costs, 1.0, [1], costs[:, None], iterates)


def test_restarts_take_the_lower_cost_and_never_one_that_is_not_finite():
    nan, inf = float("nan"), float("inf")
    old = result([1.0, 2.0, nan, inf, 1.0, 1.0, 1.0, nan], 0)
    new = result([2.0, 1.0, 5.0, 5.0, nan, inf, -inf, nan], 1)
    best = notes.better(old, new)
    expected = [0, 1, 1, 1, 0, 0, 0, 0]
    assert best.labels.flatten().tolist() == expected
    assert best.inputs[:, 0, 0].tolist() == expected
    assert best.iterates[0][:, 0, 1].tolist() == expected
    assert best.cost[:7].tolist() == [1, 1, 5, 5, 1, 1, 1]
    assert best.costs[:7, 0].tolist() == [1, 1, 5, 5, 1, 1, 1]
    assert best.seconds == 2


def test_restarts_differ_and_the_best_is_kept_by_cost_without_priors():
    problem = image_problem()
    several = replace(SHORT, restarts=3, total_variation=10.0)
    counter = notes.Counter(None, 1)
    made = matcher_of(problem, several, "stacked")
    tries = [made.run(problem, restart, counter) for restart in range(3)]
    assert not torch.equal(tries[0].inputs, tries[1].inputs)
    costs = torch.stack([tried.cost for tried in tries])
    best = match(problem, several, backend="stacked")
    torch.testing.assert_close(best.cost, costs.min(0).values)
    for victim, winner in enumerate(costs.argmin(0).tolist()):
        torch.testing.assert_close(best.inputs[victim], tries[winner].inputs[victim])
        torch.testing.assert_close(on_the_way(best)[:, victim], on_the_way(tries[winner])[:, victim])


def test_the_cost_is_the_cost_of_what_is_returned():
    """Recomputed by hand from the returned images, without priors."""
    problem = image_problem()
    found = match(problem, replace(SHORT, restarts=2, total_variation=1.0), backend="stacked")
    for v in range(problem.count):
        loss = F.cross_entropy(problem.model(found.inputs[v]), problem.labels[v])
        slopes = torch.autograd.grad(loss, list(problem.model.parameters()))
        ours = torch.cat([slope.flatten() for slope in slopes])
        theirs = problem.target.flat()[v]
        expected = 1 - F.cosine_similarity(ours, theirs, dim=0)
        torch.testing.assert_close(found.cost[v], expected, rtol=1e-4, atol=1e-5)


# ---- the box, the rate, what is noted -----------------------------------------------------------------------


def test_pixels_stay_in_the_box():
    problem = image_problem()
    low, high = -1.5, 2.0
    for choices in (replace(SHORT, lr=1.0), replace(SHORT, start="uniform")):
        found = match(problem, choices, backend="stacked")
        assert on_the_way(found).min() >= low
        assert on_the_way(found).max() <= high
    assert found.inputs.min() < -1
    final = match(problem, DLG, backend="stacked").inputs  # boxed at the end only
    assert final.min() >= low
    assert final.max() <= high
    free = match(problem, replace(SHORT, lr=5.0, boxed=False), backend="stacked").inputs
    assert free.max() > high


UNIFORM = Objective("cosine", Pixels("uniform"), ())


def test_a_uniform_start_fills_the_box():
    problem = image_problem(victims=40)
    start = matcher_of(problem, replace(SHORT, start="uniform"), "loop")._start(problem, 0, UNIFORM)["inputs"]
    assert -1.5 <= start.min() < -1.45
    assert 1.95 < start.max() <= 2.0


@pytest.mark.parametrize("decay", [True, False])
def test_the_rate_falls_at_three_eighths_five_eighths_and_seven_eighths(monkeypatch, decay):
    rates = []
    step = torch.optim.Adam.step

    def noting(self, *arguments):
        rates.append(self.param_groups[0]["lr"])
        return step(self, *arguments)

    monkeypatch.setattr(torch.optim.Adam, "step", noting)
    match(image_problem(victims=1), Choices(steps=16, lr=0.2, decay=decay), backend="stacked")
    falls = [0.2] * 6 + [0.02] * 4 + [0.002] * 4 + [0.0002] * 2
    assert rates == pytest.approx(falls if decay else [0.2] * 16)


@pytest.mark.parametrize("steps, noted", [(1, [1]), (7, [1, 2, 3, 4, 5, 6, 7]), (100, None), (1600, None)])
def test_what_is_noted_is_bounded_and_holds_the_thirds(steps, noted):
    found = notes.Notes(steps, (1, 1), None).steps
    assert len(found) <= 30
    assert found[-1] == steps
    if noted:
        assert found == noted
    else:
        assert {round(steps / 3), round(2 * steps / 3)} <= set(found)


def test_iterates_are_kept_apart_and_the_last_is_the_result():
    found = match(image_problem(), replace(SHORT, steps=45, boxed=True), backend="stacked")
    assert on_the_way(found).shape == (30, 5, 2, 1, 8, 8)
    assert found.costs.shape == (5, 30)
    assert torch.equal(found.iterates[-1], found.inputs)
    moved = on_the_way(found).diff(dim=0)[:9].abs().amax((1, 2, 3, 4, 5))
    assert (moved > 0).all()


@pytest.mark.parametrize("optimizer", ["adam", "lbfgs"])
def test_progress_counts_steps_over_chunks_and_restarts(optimizer):
    seen = []
    choices = Choices(steps=2, restarts=2, optimizer=optimizer)
    match(image_problem(), choices, backend="stacked", chunk=2, progress=lambda done, total: seen.append((done, total)))
    assert seen == [(i + 1, 2 * 2 * 3) for i in range(12)]


# ---- labels, dropout, and that nothing given is changed ---------------------------------------------------------


def test_unknown_labels_are_said_in_one_line():
    problem = replace(image_problem(), labels=None)
    with pytest.raises(FedveilError, match=r"labels are not known.*recovered.*optimized") as caught:
        match(problem, SHORT)
    assert "\n" not in str(caught.value)
    with pytest.raises(FedveilError, match="number of classes is not known"):
        match(replace(problem, classes=None), replace(SHORT, labels="optimized"))


def test_optimized_labels_ignore_the_known_ones():
    problem = image_problem()
    hidden = match(replace(problem, labels=None), DLG, backend="stacked")
    assert_same(match(problem, DLG, backend="stacked"), hidden)


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention, self.head = nn.MultiheadAttention(4, 2, dropout=0.5, batch_first=True), nn.Linear(4, 3)

    def forward(self, x):
        return self.head(self.attention(x, x, x, need_weights=False)[0].mean(1))


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm, self.head = nn.LSTM(4, 5, num_layers=2, dropout=0.5, batch_first=True), nn.Linear(5, 3)

    def forward(self, x):
        return self.head(self.lstm(x)[0][:, -1])


DROPPING = {
    "dropout": (
        lambda: nn.Sequential(nn.Flatten(), nn.Linear(12, 8), nn.Dropout(0.5), nn.AlphaDropout(0.5), nn.Linear(8, 3))
    ),
    "attention": Attention,
    "recurrent": Recurrent,
}


@pytest.mark.parametrize("name", DROPPING)
def test_the_attackers_model_has_no_dropout_and_the_given_one_is_left_as_it_is(name):
    torch.manual_seed(0)
    model = DROPPING[name]()
    inputs = torch.randn(4, 3, 4)
    calm = without_dropout(model)
    assert torch.equal(calm(inputs), calm(inputs))
    assert not torch.equal(model(inputs), model(inputs))
    assert all(module.training for module in model.modules())
    problem = random_problem(model, (3, 4))
    generator = torch.get_rng_state()
    first, second = match(problem, SHORT), match(problem, SHORT)
    assert_same(first, second)
    assert torch.equal(generator, torch.get_rng_state())
    assert all(module.training for module in model.modules())


class Functional(nn.Module):
    """Dropout in the model's own code, which no look at its layers finds."""

    def __init__(self, chance):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.head, self.chance = nn.Linear(4, 8), nn.Linear(8, 3), chance

    def forward(self, x):
        attended = F.scaled_dot_product_attention(x, x, x, None, self.chance)
        attended = F.scaled_dot_product_attention(attended, x, x, dropout_p=self.chance)
        hidden = F.dropout(F.selu(self.first(attended)), self.chance, self.training)
        hidden = F.alpha_dropout(F.dropout1d(input=hidden, p=self.chance), self.chance, training=True)
        return self.head(hidden.mean(1))


@pytest.mark.parametrize("backend", ["loop", "stacked", pytest.param("compiled", marks=pytest.mark.slow)])
@pytest.mark.parametrize("labels", ["known", "recovered"])
def test_dropout_in_the_models_own_code_is_switched_off_too(backend, labels):
    dropping, calm = (random_problem(Functional(chance), (3, 4)) for chance in (0.5, 0.0))
    assert not torch.equal(dropping.model(torch.ones(1, 3, 4)), dropping.model(torch.ones(1, 3, 4)))
    dropping = replace(dropping, target=calm.target)
    choices, generator = replace(SHORT, labels=labels), torch.get_rng_state()
    assert_same(match(dropping, choices, backend=backend), match(calm, choices, backend=backend))
    assert torch.equal(generator, torch.get_rng_state())


def test_batch_norm_keeps_its_mode():
    assert all(module.training for module in without_dropout(batch_norm()).modules())
    assert not any(module.training for module in without_dropout(batch_norm().eval()).modules())


@pytest.mark.parametrize("backend", ["loop", "stacked"])
@pytest.mark.parametrize("choices", [replace(SHORT, lr=1.0), DLG], ids=["adam", "dlg"])
@pytest.mark.parametrize("same_weights", [True, False])
def test_nothing_given_is_changed(backend, choices, same_weights):
    model = batch_norm()
    problem = image_problem(model, same_weights=same_weights)
    before, state = copies(problem), {n: t.clone() for n, t in model.state_dict().items()}
    match(problem, choices, backend=backend)
    assert all(torch.equal(a, b) for a, b in zip(before, copies(problem), strict=True))
    assert all(torch.equal(state[n], t) for n, t in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())


def test_weights_leave_entries_out():
    """A target spoilt where the attacker does not trust it is the target that was not spoilt."""
    problem = image_problem()
    weight = problem.weight.map(lambda tensor: tensor.clone())
    weight["0.weight"].zero_()
    spoilt = problem.target.map(lambda tensor: tensor.clone())
    spoilt["0.weight"].normal_()
    clean = match(replace(problem, weight=weight), SHORT, backend="stacked")
    assert_same(clean, match(replace(problem, weight=weight, target=spoilt), SHORT, backend="stacked"))
    assert not torch.allclose(clean.inputs, match(replace(problem, target=spoilt), SHORT, backend="stacked").inputs)


def test_every_try_has_its_own_phases():
    problem = image_problem()
    counter = notes.Counter(None, 1)

    def run(choices, attempt):
        return matcher_of(problem, choices, "stacked").run(problem, attempt, counter)

    mixed = replace(SHORT, restarts=2, alternate=True)
    assert_same(run(mixed, 0), run(replace(SHORT, signed=True, restarts=2), 0))
    assert_same(run(mixed, 1), run(replace(SHORT, signed=False, restarts=2), 1))


def test_a_phase_starts_from_what_the_one_before_it_found():
    """Two phases equal two attacks, the second of which starts where the first ended."""
    problem, bench = image_problem(), Workbench(backend="stacked")
    first, second = Phase(4, Adam(0.1, decay=False)), Phase(5, Adam(0.05, signed=False, decay=False), match="l2")
    whole = matcher.match(problem, Recipe(tries=((first, second),)), bench)
    begun = matcher.match(problem, Recipe(tries=((first,),)), bench)

    class GoneOn(Pixels):
        def start(self, problem, streams, found=None):
            return {"inputs": begun.inputs.clone()}

    rest = matcher.match(problem, Recipe(match="l2", candidate=GoneOn(), tries=((second,),)), bench)
    assert whole.steps == list(range(1, 10))
    torch.testing.assert_close(whole.inputs, rest.inputs)
    torch.testing.assert_close(whole.iterates[3], begun.inputs)
    torch.testing.assert_close(whole.costs[:, 4:], rest.costs)


class Halved:
    """Inputs as twice their variables: a candidate that decodes."""

    def start(self, problem, streams, found=None):
        return {"half": Pixels().start(problem, streams, found)["inputs"] / 2}

    def decode(self, variables, learned):
        return 2 * variables["half"]

    def cost(self, variables):
        return None

    def project(self, variables, problem):
        low, high = problem.box
        variables["half"].clamp_(low / 2, high / 2)


def test_a_candidate_may_be_anything_that_decodes_to_inputs():
    problem, bench = image_problem(), Workbench(backend="stacked")
    priors = (TotalVariation(1e-3),)
    plain = Recipe(priors=priors, tries=((Phase(6, Adam(0.1)),),))
    found = matcher.match(problem, replace(plain, candidate=Halved(), tries=((Phase(6, Adam(0.05)),),)), bench)
    expected = matcher.match(problem, plain, bench)  # signed steps: half the rate moves as far
    torch.testing.assert_close(found.inputs, expected.inputs, rtol=1e-4, atol=1e-4)
    assert torch.equal(found.iterates[-1], found.inputs)


def test_the_choice_of_a_backend_does_not_depend_on_the_clock():
    small, large = image_problem(), image_problem()
    assert matcher_of(small, SHORT, "auto").backend == "stacked"
    assert matcher_of(large, replace(SHORT, steps=10**6), "auto").backend == "compiled"


@pytest.mark.parametrize("cost", ["l2", "cosine", "layer-cosine", "l1-l2"])
@pytest.mark.parametrize("backend", ["stacked", "loop"])
def test_one_number_for_all_entries_weighs_as_much_as_a_full_weight(cost, backend):
    problem = as_double(image_problem(victims=3))
    numbers = torch.tensor([1.0, 0.5, 2.0], dtype=torch.float64)
    one = problem.target.map(lambda t: numbers.reshape(-1, *[1] * (t.dim() - 1)).expand_as(t))
    full = one.map(lambda t: t.contiguous())
    assert all(matcher.is_one_number(tensor) for tensor in one.values())
    assert not any(matcher.is_one_number(tensor) for tensor in full.values())
    choices = replace(SHORT, cost=cost)
    found, expected = (match(replace(problem, weight=weight), choices, backend=backend) for weight in (one, full))
    assert_same(found, expected, 1e-9)


def test_large_models_are_attacked_one_by_one(monkeypatch):
    problem = image_problem(victims=5)
    size = sum(tensor[0].numel() * tensor.element_size() for tensor in problem.target.values())
    for budget, stacked in ((size // 2, 1), (3 * size, 3), (100 * size, 5)):
        monkeypatch.setattr(workload, "MOST_BYTES", budget)
        assert workload.victims_at_a_time(problem) == stacked
    monkeypatch.setattr(workload, "MOST_BYTES", 1)
    alone = match(problem, SHORT, backend="stacked")
    monkeypatch.undo()
    assert_same(alone, match(problem, SHORT, backend="stacked"))
