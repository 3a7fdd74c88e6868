"""GradInversion: searches that are drawn together, what is handed in, and what it recovers."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from fedveil.attacks import matcher
from fedveil.attacks.grad_inversion import GradInversion
from fedveil.attacks.informed import tries_of
from fedveil.attacks.optimizers import LBFGS, Descent
from fedveil.attacks.polish import PATIENCE, STEEPER
from fedveil.attacks.problem import Problem
from fedveil.attacks.scene import Workbench
from fedveil.attacks.together import Together, leading
from fedveil.attacks.workload import MOST_VICTIMS, attack_seconds, steps_in_all, victims_at_a_time
from fedveil.clients.engine import Engine
from fedveil.defenses.fedem import FedEM
from fedveil.defenses.gradient_dropout import GradientDropout
from fedveil.defenses.noise import GaussianNoise
from fedveil.errors import FedveilError
from fedveil.leakage.assignment import assign
from fedveil.leakage.metrics import psnr
from fedveil.streams import Streams

from .small import digits, on_the_way, random_problem, run, scene_of, task_of
from .test_informed import defended, naive, quality
from .test_matching import assert_same, conv, image_problem
from .test_quality import mean_floor

SHORT = GradInversion(steps=8, seeds=3, polish=0)
QUICK = GradInversion(steps=80, seeds=3, polish=10)


# ---- drawn together ---------------------------------------------------------------------------------------------


def valley(at):
    """Searches that do not care where they are: only what draws them moves them."""
    inputs = at["inputs"]
    return {"inputs": torch.zeros_like(inputs)}, torch.arange(float(len(inputs)))


def flat_descent(count=2, evaluate=valley):
    nothing = lambda *_: None  # noqa: E731
    streams, labels = Streams.seeded(1, range(count)), torch.zeros(count, 2).long()
    return Descent(evaluate, nothing, nothing, nothing, nothing, streams, labels)


def spread(rows, seeds):
    """How far the searches of each victim are from their mean."""
    apart = rows.reshape(-1, seeds, *rows.shape[1:])
    return (apart - apart.mean(1, keepdim=True)).square().mean().item()


def test_the_pull_brings_searches_together_and_nothing_else_moves_them():
    start = {"inputs": Streams.seeded(3, range(8)).normal(2, 1, 6, 6)}
    plain = Together(seeds=4, pull=0.0, noise=0.0).minimize({"inputs": start["inputs"].clone()}, 40, flat_descent())
    assert torch.equal(plain["inputs"], start["inputs"])
    drawn = Together(seeds=4, pull=1.0, noise=0.0).minimize({"inputs": start["inputs"].clone()}, 40, flat_descent())
    assert spread(drawn["inputs"], 4) < 0.4 * spread(start["inputs"], 4)


def test_searches_go_alone_first():
    seen = []

    def evaluate(at):
        seen.append(at["inputs"].clone())
        return valley(at)

    start = {"inputs": Streams.seeded(3, range(4)).normal(2, 1, 6, 6)}
    Together(seeds=2, pull=1.0, noise=0.0, alone=0.5, warmup=0).minimize(start, 40, flat_descent(2, evaluate))
    assert torch.equal(seen[20], seen[0])
    assert not torch.equal(seen[21], seen[0])


def test_the_pull_fades_so_that_a_search_ends_where_its_own_slope_leads():
    """Two searches with an aim each: a steady pull of the slopes' own strength would hold them halfway."""
    aims = torch.tensor([-1.0, 1.0]).reshape(2, 1, 1, 1, 1).expand(2, 1, 1, 4, 4)

    def evaluate(at):
        away = at["inputs"] - aims
        return {"inputs": 2 * away / 16}, away.flatten(1).square().mean(1)

    labels = torch.zeros(1, 1).long()
    descent = replace(flat_descent(1, evaluate), labels=labels)
    far = []
    for alone in (0.0, 1.0):
        together = Together(seeds=2, lr=0.1, pull=1.0, alone=alone, noise=0.0, warmup=0)
        found = together.minimize({"inputs": torch.zeros(2, 1, 1, 4, 4)}, 200, descent)["inputs"]
        far.append((found - aims).abs().max().item())
    assert far[1] < 0.02
    assert far[0] < 0.2


def test_in_an_attack_the_searches_stay_nearer_to_each_other(monkeypatch):
    """The law of group consistency, on digits: the more it weighs, the less the searches differ in the end."""
    _, _, problem = digits("lenet", victims=2, batch=3)
    ends = []
    settled = Together.settled

    def noting(self, variables, cost, descent):
        ends.append(spread(variables["inputs"], self.seeds))
        return settled(self, variables, cost, descent)

    monkeypatch.setattr(Together, "settled", noting)
    for group in (0.0, 1e-2, 1e-1):
        attack = GradInversion(steps=80, lr=0.1, polish=0, group=group, noise=0.0, total_variation=0.0)
        run(attack, problem, "stacked")
    assert ends[1] < 0.7 * ends[0]
    assert ends[2] < 0.5 * ends[1]


def test_the_rate_rises_and_falls_as_a_cosine():
    together = Together(lr=0.2, warmup=4)
    assert together.rate(0, 100) == pytest.approx(0.05)
    assert together.rate(1, 100) == pytest.approx(0.1, rel=1e-2)
    assert together.rate(50, 100) == pytest.approx(0.1)
    assert together.rate(99, 100) < 1e-4
    assert Together(lr=0.2, warmup=0).rate(0, 100) == pytest.approx(0.2)


def test_noise_is_added_in_proportion_to_the_rate_and_belongs_to_the_victim():
    start = torch.zeros(6, 2, 1, 6, 6)
    one = Together(seeds=3, lr=0.2, pull=0.0, noise=0.5, warmup=0)
    found = one.minimize({"inputs": start.clone()}, 1, flat_descent())["inputs"]
    assert found.std().item() == pytest.approx(0.5 * 0.2, rel=0.1)
    assert len({row.sum().item() for row in found}) == 6  # every search has its own
    alone = replace(flat_descent(), streams=Streams.seeded(1, [1]))
    assert torch.equal(one.minimize({"inputs": start[:3].clone()}, 1, alone)["inputs"], found[3:])


# ---- what is handed in ------------------------------------------------------------------------------------------


def bowl(aim):
    """The cost is the squared distance to an aim (V, B, ...) of all searches."""

    def evaluate(at):
        away = at["inputs"] - aim.repeat_interleave(len(at["inputs"]) // len(aim), 0)
        return {"inputs": 2 * away}, away.flatten(1).square().sum(1)

    return evaluate


def test_the_best_search_or_their_consensus_is_handed_in_whichever_matches_better():
    aim = torch.zeros(2, 2, 1, 4, 4)
    rows = torch.ones(6, 2, 1, 4, 4)
    rows[1], rows[2] = -1.0, 0.0  # the first victim: the mean is right, and so is the third search
    rows[3:6] = torch.tensor([3.0, 0.5, 2.0]).reshape(3, 1, 1, 1, 1)  # the second: the middle one is best
    rows[2] = 0.2
    descent = flat_descent(2, bowl(aim))
    together = Together(seeds=3)
    found, cost = together.settled({"inputs": rows}, descent.evaluate({"inputs": rows})[1], descent)
    torch.testing.assert_close(found["inputs"][0], torch.full((2, 1, 4, 4), 0.2 / 3))
    torch.testing.assert_close(found["inputs"][1], rows[4])
    torch.testing.assert_close(cost, bowl(aim)({"inputs": found["inputs"]})[1])
    assert leading(torch.tensor([[torch.nan, 2.0, 1.0], [3.0, torch.inf, 4.0]])).tolist() == [2, 0]


def test_the_cost_is_that_of_what_is_handed_in_and_the_last_iterate_is_it():
    problem = image_problem(batch=3)
    found = run(SHORT, problem, "stacked")
    made = matcher.Matcher(problem, SHORT.recipe(), Workbench(backend="loop"))
    single = replace(SHORT, seeds=1).recipe()
    of = single.objective(single.tries[0][0])
    cost = made._evaluate({"inputs": found.inputs}, made._fixed(problem, of), of)[1]
    torch.testing.assert_close(found.cost, cost, rtol=1e-3, atol=1e-6)
    assert torch.equal(found.iterates[-1], found.inputs)
    assert found.costs.shape == (5, 8)
    assert on_the_way(found).shape == (8, 5, 3, 1, 8, 8)
    assert (found.costs[:, -1] < found.costs[:, 0]).all()


# ---- victims are independent, on every backend ------------------------------------------------------------------


@pytest.mark.parametrize("labels", ["known", "recovered", "optimized"])
@pytest.mark.parametrize("same_weights", [True, False])
def test_a_victim_alone_is_the_victim_in_the_stack(same_weights, labels):
    problem = image_problem(same_weights=same_weights, batch=3)
    attack = replace(SHORT, labels=labels)
    whole = run(attack, problem, "stacked")
    assert_same(run(attack, problem.rows([3]), "stacked"), whole.rows(slice(3, 4)), 1e-3)


def test_a_piece_is_bit_for_bit_what_it_is_in_the_whole():
    scene = scene_of(image_problem(batch=2, victims=5), bench=Workbench(backend="stacked", chunk=2))
    pieces = SHORT.pieces(scene)
    assert [piece.count for piece in pieces] == [2, 2, 1]
    whole = SHORT.run(scene)
    for number, piece in enumerate(pieces):
        alone = SHORT.run(piece).inputs
        assert torch.equal(alone, whole.inputs[2 * number : 2 * number + 2])


def test_the_loop_equals_the_stack():
    problem = image_problem(batch=3)
    assert_same(run(SHORT, problem, "loop"), run(SHORT, problem, "stacked"), 1e-3)


@pytest.mark.compiles
def test_compiled_equals_stacked_also_where_the_last_chunk_is_filled(caplog):
    problem = random_problem(nn.Sequential(nn.Flatten(), nn.Linear(16, 6), nn.Sigmoid(), nn.Linear(6, 3)), (1, 4, 4))
    recipe = SHORT.recipe()
    found, expected = (
        matcher.match(problem, recipe, Workbench(backend=name, chunk=2)) for name in ("compiled", "stacked")
    )
    torch.testing.assert_close(found.inputs, expected.inputs, rtol=1e-2, atol=1e-2)
    told = [record for record in caplog.records if record.name == "fedveil"]
    assert [getattr(record, "kind", None) for record in told] in ([], ["note"])  # that it compiles, and no warning


@pytest.mark.parametrize("backend", ["loop", "stacked"])
def test_a_victim_that_is_not_a_number_stays_contained(backend):
    problem = image_problem(batch=2)
    broken = problem.target.map(lambda tensor: tensor.clone())
    broken["3.bias"][2] = torch.nan
    found = run(SHORT, replace(problem, target=broken), backend)
    rest = torch.tensor([0, 1, 3, 4])
    assert_same(found.rows(rest), run(SHORT, problem.rows(rest), backend), 1e-3)
    assert torch.isnan(found.cost[2])
    assert torch.isfinite(found.inputs).all()


def test_a_single_search_is_no_group():
    one = run(replace(SHORT, seeds=1, group=5.0), image_problem(), "stacked")
    assert_same(one, run(replace(SHORT, seeds=1, group=0.0), image_problem(), "stacked"))


def test_progress_counts_steps_and_seeds_share_the_room_of_a_chunk():
    problem = image_problem(victims=5)
    seen = []
    bench = Workbench(backend="stacked", chunk=2, report=lambda done, total: seen.append((done, total)))
    matcher.match(problem, SHORT.recipe(), bench)
    assert seen == [(i + 1, 3 * 8) for i in range(24)]
    many = image_problem(victims=40)
    assert victims_at_a_time(many, 4) == MOST_VICTIMS // 4
    assert victims_at_a_time(many, 100) == 1
    assert steps_in_all(many, replace(SHORT, seeds=4).recipe()) == 5 * 8
    single, several = (attack_seconds(many, replace(SHORT, seeds=seeds).recipe(), 5) for seeds in (1, 8))
    assert single < several <= 8 * single


# ---- what it recovers -------------------------------------------------------------------------------------------


def shown(found, inputs):
    ordered, _ = assign(found.inputs, inputs)
    return psnr(ordered.flatten(0, 1), inputs.flatten(0, 1), task_of("lenet").normalization.std).mean().item()


def test_digits_are_recovered_and_better_with_a_polish():
    inputs, _, problem = digits("lenet", victims=4)
    floor = mean_floor(inputs)
    plain, polished = (shown(run(replace(QUICK, polish=polish), problem, "stacked"), inputs) for polish in (0, 10))
    assert plain > floor + 2, (plain, floor)
    assert polished > floor + 15, (polished, floor)


def test_batches_with_a_label_twice_are_recovered_without_being_told_the_labels():
    made = task_of("lenet")
    inputs, targets = made.test.batch(range(60))
    twice = (targets == targets[0]).nonzero().flatten()[:2].tolist()
    other = int((targets != targets[0]).nonzero()[0])
    chosen = inputs[[*twice, other]][None]
    _, _, like = digits("lenet", victims=1, batch=3)
    labels = targets[[*twice, other]][None]
    engine = Engine(made.model, like.loss, backend="loop")
    update = engine.gradient(like.params, like.buffers, chosen, labels, Streams.seeded(0, range(1))).update
    problem = replace(like, target=update, labels=None)
    found = run(GradInversion(steps=80, seeds=3, polish=20, labels="recovered"), problem, "stacked")
    assert found.labels[0].tolist() == sorted(labels[0].tolist())
    assert shown(found, chosen) > mean_floor(chosen) + 8


def test_noise_in_place_of_an_update_gives_nothing():
    inputs, _, problem = digits("lenet", victims=4)
    noise = problem.target.map(Streams.seeded(9, range(4)).normal_like)
    found = run(QUICK, replace(problem, target=noise * (problem.target.norm() / noise.norm())), "stacked")
    assert shown(found, inputs) < mean_floor(inputs)


# ---- knowing the defense ----------------------------------------------------------------------------------------


def test_knowing_gradient_dropout_undoes_it():
    inputs, scene = defended(GradientDropout(keep=0.6), victims=3)
    aware, blind = quality(QUICK.run(scene), inputs), quality(QUICK.run(naive(scene)), inputs)
    assert aware > blind + 8, (aware, blind)


def test_what_is_tried_against_each_kind_of_defense():
    def tries(defense, attack=QUICK):
        _, scene = defended(defense, victims=2)
        return tries_of(scene, Problem.of(scene), attack.recipe(), attack.under_noise())

    dropout = tries(GradientDropout(keep=0.6)).alike[1].recipe.tries[0]
    assert [phase.seeds for phase in dropout] == [3, 1, 1, 1, 1]
    assert [phase.reweighs for phase in dropout] == [False, True, True, True, True]
    assert {phase.optimizer for phase in dropout[1:]} == {LBFGS(scale=STEEPER, patience=PATIENCE)}
    bare = tries(GradientDropout(keep=0.6), replace(QUICK, polish=0)).alike[1].recipe.tries[0]
    assert [phase.steps for phase in bare] == [60, 5, 5, 5, 5]
    assert tries(FedEM(radius=2.0)).alike[1].undoes
    smoother = tries(GaussianNoise(sigma=0.1)).stronger
    weights = [each.recipe.priors[0].weight for each in smoother]
    assert weights == [0.1, 0.03]
    assert all(len(each.recipe.tries[0]) == 1 for each in smoother)


def test_every_kind_of_knowledge_runs():
    for defense in (FedEM(radius=2.0), GaussianNoise(sigma=0.1)):
        inputs, scene = defended(defense, victims=2)
        found = replace(QUICK, steps=20, polish=2).run(scene)
        assert found.inputs.shape == inputs.shape
        assert found.inputs.isfinite().all()


# ---- its fields -------------------------------------------------------------------------------------------------


def test_published_settings():
    made = GradInversion.published()
    assert (made.steps, made.lr, made.seeds, made.warmup, made.polish) == (20_000, 0.1, 8, 50, 0)
    assert (made.total_variation, made.mean_square, made.group, made.noise) == (1e-4, 1e-6, 0.01, 0.2)
    assert made.recipe().match == "l2"
    assert not made.statistics
    assert len(GradInversion.published(statistics=True).recipe().priors) == 3
    assert len(made.recipe().priors) == 2
    assert len(GradInversion(total_variation=0, mean_square=0).recipe().priors) == 0


@pytest.mark.parametrize(
    "fields, words",
    [
        ({"seeds": 0}, "seeds must be greater than or equal to 1"),
        ({"group": -1}, "group must be greater than or equal to 0"),
        ({"noise": float("nan")}, "noise must be a finite number"),
        ({"labels": "guessed"}, "labels must be 'known'"),
        ({"cost": "l3"}, "cost must be 'l2'"),
        ({"steps": 0, "lr": 0}, "steps must be .*; lr must be"),
    ],
)
def test_bad_fields_are_said_in_one_line(fields, words):
    with pytest.raises(FedveilError, match=words) as caught:
        GradInversion(**fields)
    assert "\n" not in str(caught.value)


def test_unknown_labels_are_said_in_one_line():
    problem = replace(random_problem(conv(), (1, 8, 8)), labels=None)
    with pytest.raises(FedveilError, match="labels are not known here"):
        run(SHORT, problem)
