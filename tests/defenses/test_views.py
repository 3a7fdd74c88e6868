"""Several messages about one batch: what each defense's knowledge of them comes to."""

from __future__ import annotations

import math
from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as some
from torch import Tensor

from fedveil.defenses.base import Call, Defense, Facts, Knowledge, combined, mean_tree, trusting
from fedveil.defenses.chain import Chain
from fedveil.defenses.gradient_dropout import GradientDropout, most_agreed
from fedveil.defenses.masking import GradientMasking
from fedveil.defenses.sign import SignCompression
from fedveil.defenses.spm import SPM
from fedveil.errors import FedveilError
from fedveil.registry import defenses
from fedveil.streams import Streams
from fedveil.tree import Tree

FACTS = Facts()
NAMES = [name for name in defenses.entries() if not name.startswith("test-")]


def gradients(clients: int = 2) -> Tree:
    draw = Streams.seeded(3, range(clients))
    return Tree({"w": 0.02 * draw.normal(20, 15), "b": 0.1 * draw.normal(40)})


def sent(defense: Defense, count: int, true: Tree | None = None) -> list[Tree]:
    """Messages about the same gradients, each with random numbers of its own."""
    true = gradients() if true is None else true
    return [defense.protect(true, Call(Streams.seeded(7, range(true.count), "view", view))) for view in range(count)]


def cosine(left: Tree, right: Tree, weight: Tree | None = None) -> Tensor:
    if weight is not None:
        root = weight.map(torch.sqrt)
        left, right = left.combine(root, torch.mul), right.combine(root, torch.mul)
    return left.dot(right) / (left.norm() * right.norm())


def known(target: list[float], weight: list[float]) -> Knowledge:
    return Knowledge(Tree({"w": torch.tensor([target])}), Tree({"w": torch.tensor([weight])}))


# ---- in general ---------------------------------------------------------------------------------------------


def test_entries_are_averaged_by_their_trust() -> None:
    found = combined([known([1.0, 2.0, 5.0], [1.0, 0.0, 0.0]), known([3.0, 4.0, 7.0], [3.0, 1.0, 0.0])])
    assert found.target["w"].tolist() == [[2.5, 4.0, 6.0]]  # the plain mean where nothing is trusted
    assert found.weight["w"].tolist() == [[2.0, 0.5, 0.0]]


@given(some.lists(some.tuples(some.floats(-9, 9), some.floats(0.01, 4)), min_size=1, max_size=6), some.randoms())
def test_the_order_of_messages_does_not_matter_and_one_message_is_itself(pairs: list[tuple[float, float]], by) -> None:
    each = [known([value], [weight]) for value, weight in pairs]
    assert float(combined(each[:1]).target["w"]) == pytest.approx(pairs[0][0], rel=1e-5, abs=1e-5)
    shuffled = by.sample(each, len(each))
    for part in ("target", "weight"):
        one, other = (getattr(combined(order), part)["w"] for order in (each, shuffled))
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)
    values = [value for value, _ in pairs]
    assert min(values) - 1e-4 <= float(combined(each).target["w"]) <= max(values) + 1e-4


def test_what_is_right_in_any_message_is_trusted() -> None:
    """A defense of a stranger's that estimates trust anew."""

    def reweight(target: Tree, made: Tree) -> Tree:
        return target.combine(made, lambda aim, own: torch.where(aim == own, 0.5, 0.0))

    views = [
        Knowledge(Tree({"w": torch.tensor([row])}), Tree({"w": torch.ones(1, 3)}), reweight=reweight)
        for row in ([1.0, 9.0, 9.0], [1.0, 2.0, 8.0])
    ]
    found = combined(views)
    assert found.rejoin is not None
    target, weight = found.rejoin(found.views, Tree({"w": torch.tensor([[1.0, 2.0, 3.0]])}))
    assert target["w"].tolist() == [[1.0, 2.0, 8.5]]
    assert weight["w"].tolist() == [[0.75, 0.5, 0.0]]


@pytest.mark.parametrize("name", NAMES)
def test_one_message_says_what_it_says_alone(name: str) -> None:
    chain, true = Chain.of(name), gradients()
    try:
        observed = chain.protect_message(true, "gradient", Streams.seeded(1, range(2)), chain.new_states())
    except FedveilError:  # it acts on data, or on weights alone
        observed = true
    alone, one = chain.knowledge(observed, FACTS), chain.knowledge_of([observed], FACTS)
    assert (one.reach, one.before, one.reweight is None) == (alone.reach, alone.before, alone.reweight is None)
    assert (one.rejoin is None) == (one.reweight is None)
    assert float(cosine(one.target, alone.target).min()) > 0.9999
    assert float(cosine(one.weight, alone.weight).min()) > 0.9999


@pytest.mark.parametrize("spec", ["gaussian-noise:sigma=0.05", "laplace-noise:scale=0.04", "duchi:epsilon=4,bound=0.1"])
def test_noise_averages_out(spec: str) -> None:
    chain, true = Chain.of(spec), gradients()
    views = sent(chain.defenses[0], 16)
    far = [float(cosine(chain.knowledge_of(views[:count], FACTS).target, true).mean()) for count in (1, 4, 16)]
    assert far[0] < far[1] - 0.05, far
    assert far[1] < far[2] - 0.05, far


def test_under_plain_noise_the_mean_is_matched_as_it_is() -> None:
    """Bit for bit, so that an attacker who knows the noise does not make the naive match twice."""
    views = sent(defenses.parse("gaussian-noise"), 5)
    found = Chain.of("gaussian-noise").knowledge_of(views, FACTS)
    assert all(torch.equal(found.target[name], tensor) for name, tensor in mean_tree(views).items())
    assert all(bool((tensor == 1).all()) for tensor in found.weight.values())


# ---- gradient dropout ---------------------------------------------------------------------------------------


@given(some.lists(some.lists(some.sampled_from([0.0, 1.0, 2.5, -3.0]), min_size=4, max_size=4), min_size=1, max_size=7))
def test_the_value_that_occurs_most_often(views: list[list[float]]) -> None:
    values, times = most_agreed(torch.tensor(views)[:, None])
    for place, column in enumerate(zip(*views, strict=True)):
        counted = Counter(column)
        assert int(times[0, place]) == max(counted.values())
        assert counted[float(values[0, place])] == max(counted.values())


@pytest.mark.parametrize("match_spread", [False, True])
def test_entries_that_agree_were_kept(match_spread: bool) -> None:
    defense, true = GradientDropout(keep=0.5, sigma=0.02, match_spread=match_spread), gradients()
    views = sent(defense, 4)
    found = Chain.of(defense).knowledge_of(views, FACTS)
    kept = sum(
        (true.combine(view, lambda g, v: (v == g / defense.keep).int()) for view in views[1:]),
        start=Tree(true.combine(views[0], lambda g, v: (v == g / defense.keep).int())),
    )
    for name, times in kept.items():
        twice = times > 1
        assert bool(twice.any())
        torch.testing.assert_close(found.target[name][twice], true[name][twice])
        assert bool((found.weight[name][twice] == 1).all())
        assert bool((found.weight[name][times == 0] < 0.9).all())
    alone = Chain.of(defense).knowledge(views[0], FACTS)
    errors = [
        float((each.target - true).combine(each.weight, torch.mul).norm().mean() / each.weight.norm().mean())
        for each in (found, alone)
    ]
    assert errors[0] < errors[1] / 2, errors


def test_a_candidate_tells_which_of_the_messages_kept_an_entry() -> None:
    defense, true = GradientDropout(keep=0.3, sigma=0.02), gradients()
    views = sent(defense, 3)
    found = Chain.of(defense).knowledge_of(views, FACTS)
    assert found.rejoin is not None
    near = true.map(lambda g: g + 1e-4 * torch.sign(g))
    target, weight = found.rejoin(found.views, near)
    for name, g in true.items():
        kept = torch.stack([view[name] == g / defense.keep for view in views]).any(0)
        right = torch.isclose(target[name], g, rtol=1e-4, atol=0)
        assert float(right[kept].double().mean()) > 0.97
        assert float(weight[name][kept].mean()) > 0.9
        assert float(weight[name][~kept].mean()) < 0.1


def test_silent_decoys_say_nothing_however_often_they_agree() -> None:
    defense = GradientDropout(keep=0.4, sigma=0.0)
    true = gradients().map(lambda g: torch.where(g > 0.1, torch.zeros_like(g), g))  # some entries are zero themselves
    views = sent(defense, 3, true)
    found = Chain.of(defense).knowledge_of(views, FACTS)
    for name, g in true.items():
        shown = torch.stack([view[name] != 0 for view in views]).any(0)
        torch.testing.assert_close(found.target[name][shown], g[shown])
        assert bool((found.weight[name][shown] == 1).all())
        hidden = found.weight[name][~shown & (g != 0)]
        assert bool(len(hidden))
        assert float(hidden.max()) < 0.5


@pytest.mark.parametrize(
    "spec, facts",
    [
        ("gradient-dropout:keep=0.6+gaussian-noise:sigma=0.001", FACTS),
        ("gradient-dropout:keep=0.6+gradient-pruning", FACTS),
        ("gradient-dropout:keep=0.6", Facts(kind="delta", steps=3)),
    ],
)
def test_where_kept_entries_need_not_agree_every_message_is_weighed_by_itself(spec: str, facts: Facts) -> None:
    chain, views = Chain.of(spec), sent(GradientDropout(keep=0.6), 3)
    found = chain.knowledge_of(views, facts)
    each = combined([chain.knowledge(view, facts) for view in views])
    for name in found.target:
        torch.testing.assert_close(found.target[name], each.target[name])
        torch.testing.assert_close(found.weight[name], each.weight[name])
    assert found.rejoin is not None


# ---- others -------------------------------------------------------------------------------------------------


def test_masked_messages_fill_each_others_gaps() -> None:
    defense, true = GradientMasking(share=0.5), gradients()
    views = sent(defense, 3)
    found = Chain.of(defense).knowledge_of(views, FACTS)
    for name, g in true.items():
        shown = torch.stack([view[name] != 0 for view in views]).any(0)
        torch.testing.assert_close(found.target[name][shown], g[shown])
        assert torch.equal(found.weight[name] == 1, shown)
        assert torch.equal(found.weight[name] == 0, ~shown)


def test_signs_vote() -> None:
    defense = SignCompression(scale=2.0, flip=0.2)
    rows = [[2.0, 2.0, 0.0], [2.0, -2.0, 0.0], [2.0, 2.0, 0.0]]
    found = Chain.of(defense).knowledge_of([Tree({"w": torch.tensor([row])}) for row in rows], FACTS)
    right = [0.8**3 / (0.8**3 + 0.2**3), 0.8 / (0.8 + 0.2)]
    expected = [2.0 * (2 * chance - 1) for chance in right] + [0.0]
    torch.testing.assert_close(found.target["w"], torch.tensor([expected]))
    true, views = gradients(), sent(SignCompression(flip=0.3), 9)
    voted = Chain.of(SignCompression(flip=0.3)).knowledge_of(views, FACTS)
    assert float(cosine(voted.target, true).min()) > float(cosine(mean_tree(views), true).max())


def test_the_ranges_of_spm_narrow_and_its_signs_vote() -> None:
    defense, true = SPM(epsilon=1.0), gradients()
    views = sent(defense, 12)
    found = Chain.of(defense).knowledge_of(views, FACTS)
    mean = combined([trusting(view) for view in views])
    assert float(cosine(found.target, true, found.weight).min()) > float(cosine(mean.target, true).max()) + 0.05
    size, stretch = true.map(torch.abs), 1 + defense.stretch
    for name, g in size.items():
        assert bool((found.target[name].abs() <= g * (1 + stretch) / 2 * (1 + 1e-5)).all())
    one = [Tree({"w": torch.tensor([[1.0, 0.0]])}), Tree({"w": torch.tensor([[-1.0, 0.0]])})]
    assert Chain.of(defense).knowledge_of(one, FACTS).weight["w"].tolist() == [[0.0, 1.0]]  # a tie; and a sure zero
    agreed = Chain.of(defense).knowledge_of(one[:1] * 3, FACTS).weight["w"]
    assert float(agreed[0, 0]) == pytest.approx(math.tanh(1.5))
