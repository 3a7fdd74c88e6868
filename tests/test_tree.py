"""Trees: the arithmetic is that of each client's flat vector, and means do not depend on chunks."""

import copy
import pickle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedveil.errors import FedveilError
from fedveil.tree import RunningMean, Tree, per_client
from fedveil.workers import pack


@st.composite
def trees(draw, count=None, dtype=torch.float64):
    """A pair of trees of the same names and shapes, small whole numbers so that sums are exact."""
    clients = count or draw(st.integers(1, 5))
    shapes = draw(st.dictionaries(st.sampled_from("abcd"), st.lists(st.integers(1, 3), max_size=3), min_size=1))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))

    def tree():
        return Tree({n: torch.randint(-9, 9, (clients, *s), generator=generator).to(dtype) for n, s in shapes.items()})

    return tree(), tree()


def same(left, right):
    return list(left) == list(right) and all(torch.equal(left[name], right[name]) for name in left)


@settings(deadline=None)
@given(trees())
def test_arithmetic_is_that_of_flat_vectors(pair):
    a, b = pair
    assert torch.equal((a + b).flat(), a.flat() + b.flat())
    assert torch.equal((a - b).flat(), a.flat() - b.flat())
    assert torch.equal((-a).flat(), -a.flat())
    assert torch.equal((3 * a).flat(), 3 * a.flat())
    assert torch.equal((a * torch.tensor(2.0)).flat(), 2 * a.flat())
    assert torch.equal((a / 3).flat(), a.flat() / 3)
    assert torch.equal(a.dot(b), (a.flat() * b.flat()).sum(1))
    for order in (1, 2, 3, float("inf")):
        torch.testing.assert_close(a.norm(order), torch.linalg.vector_norm(a.flat(), order, dim=1))


@settings(deadline=None)
@given(trees())
def test_laws(pair):
    a, b = pair
    assert same(a + b, b + a)
    assert same(a - b, a + (-b))
    assert same((a + b) - b, a)
    assert same(2 * (a + b), 2 * a + 2 * b)
    assert torch.equal(a.dot(a), a.flat().square().sum(1))
    assert a.unflat(a.flat()).keys() == a.keys()
    assert same(a.unflat(a.flat()), a)
    assert a.size == a.flat().shape[1]


@settings(deadline=None)
@given(trees(), st.data())
def test_one_factor_per_client(pair, data):
    tree, _ = pair
    factor = torch.tensor(data.draw(st.lists(st.integers(1, 9), min_size=tree.count, max_size=tree.count))).double()
    assert torch.equal((tree * factor).flat(), tree.flat() * factor[:, None])
    assert torch.equal((tree / factor).flat(), tree.flat() / factor[:, None])
    for i in range(tree.count):
        assert same((tree * factor).row(i), (tree.rows([i]) * factor[i]).row(0))


@settings(deadline=None)
@given(trees(), st.data())
def test_taking_apart_and_putting_together(pair, data):
    tree, _ = pair
    assert same(Tree.stack(tree.row(i) for i in range(tree.count)), tree)
    cut = data.draw(st.integers(0, tree.count))
    assert same(Tree.concat([tree.rows(slice(cut)), tree.rows(slice(cut, None))]), tree)
    assert same(Tree.concat([tree]), tree)
    order = data.draw(st.permutations(range(tree.count)))
    for index in (order, tuple(order), torch.tensor(order)):
        assert same(tree.rows(index), Tree.stack([tree.row(i) for i in order]))
    assert same(tree.rows(range(tree.count)), tree)
    assert same(pickle.loads(pickle.dumps(tree)), tree)


# ---- means -------------------------------------------------------------------------------------------


@settings(deadline=None)
@given(st.integers(1, 40), st.integers(0, 2**31), st.booleans(), st.data())
def test_mean_does_not_depend_on_chunks(count, seed, weighted, data):
    generator = torch.Generator().manual_seed(seed)
    # Wild magnitudes: a sum in another order would show.
    scale = torch.exp(6 * torch.randn(count, 1, generator=generator))
    tree = Tree({"w": torch.randn(count, 7, generator=generator) * scale, "b": torch.randn(count, generator=generator)})
    weights = torch.rand(count, generator=generator) + 0.1 if weighted else None
    running, at = RunningMean(), 0
    while at < count:
        chunk = slice(at, at + data.draw(st.integers(1, count - at)))
        running.add(tree.rows(chunk), weights[chunk] if weights is not None else None)
        at = chunk.stop
    assert running.count == count
    assert same(running.result(), tree.mean(weights))


@settings(deadline=None)
@given(trees(dtype=torch.float32))
def test_mean_is_the_mean(pair):
    tree, _ = pair
    weights = torch.arange(1, tree.count + 1).float()
    for name, mean in tree.mean().items():
        torch.testing.assert_close(mean, tree[name].mean(0))
        assert mean.dtype == torch.float32
    for name, mean in tree.mean(weights).items():
        torch.testing.assert_close(mean, torch.tensordot(weights / weights.sum(), tree[name], 1))


def test_mean_of_a_shared_tree_is_the_tree():
    row = {"w": torch.randn(5), "n": torch.tensor(3)}
    assert same(Tree.expand(row, 7).mean(), row)


def test_integers_are_rounded_not_cut():
    tree = Tree({"n": torch.tensor([1, 2, 2]), "w": torch.tensor([1.0, 2.0, 2.0])})
    mean = tree.mean()
    assert mean["n"].dtype == torch.int64
    assert mean["n"].item() == 2
    assert mean["w"].item() == pytest.approx(5 / 3)
    assert tree.mean(torch.tensor([8.0, 1.0, 1.0]))["n"].item() == 1


def test_mean_needs_a_client():
    with pytest.raises(FedveilError, match="no client reported"):
        RunningMean().result()
    with pytest.raises(FedveilError, match="no client reported"):
        Tree({"w": torch.ones(2, 3)}).mean(torch.zeros(2))
    with pytest.raises(FedveilError, match="no client reported"):
        Tree({"w": torch.ones(0, 3)}).mean()


def test_mean_of_a_model_without_such_tensors():
    assert Tree({}).mean() == {}


def test_wrong_number_of_weights():
    with pytest.raises(ValueError, match="zip"):
        Tree({"w": torch.ones(2, 3)}).mean(torch.ones(3))


# ---- the rest ----------------------------------------------------------------------------------------


def test_shared_is_seen_without_looking_at_values():
    row = {"w": torch.randn(5), "n": torch.tensor(3)}
    assert Tree.expand(row, 4).repeated
    assert Tree.expand(row, 4).rows(slice(2)).repeated
    assert not Tree.expand(row, 1).repeated  # one client alone repeats nothing
    assert not Tree.stack([row, row]).repeated
    assert not Tree({**Tree.expand(row, 2), "x": torch.zeros(2, 1)}).repeated
    assert not (Tree.expand(row, 4) + Tree.expand(row, 4)).repeated
    assert Tree.expand(row, 4)["w"].data_ptr() == row["w"].data_ptr()


def test_an_expanded_tree_gives_the_row_it_was_made_of():
    row = {"w": torch.randn(5), "n": torch.tensor(3)}
    tree = Tree.expand(row, 4)
    for client in (0, 3, -4):
        assert tree.row(client)["w"] is row["w"]
        assert same(tree.row(client), row)
    for client in (4, -5):
        with pytest.raises(IndexError):
            tree.row(client)
    with pytest.raises(IndexError):
        Tree.expand(row, 0).row(0)
    tree.row(0)["w"] = torch.zeros(5)  # a dict of the caller's own
    row["w"] = torch.zeros(5)
    assert not torch.equal(tree.row(0)["w"], torch.zeros(5))


def test_an_expanded_tree_can_be_sent_and_copied():
    tree = Tree.expand({"w": torch.randn(5), "n": torch.tensor(3)}, 4)
    for other in (pickle.loads(pickle.dumps(tree)), pickle.loads(pack(tree)), copy.deepcopy(tree)):
        assert same(other, tree)
        assert same(other.row(2), tree.row(2))
        assert other.repeated
    large = {"w": torch.randn(10_000)}
    assert len(pack(Tree.expand(large, 50))) < 1.1 * len(pack(large))


def test_counts_of_empty_trees():
    assert (Tree({}).count, Tree({}).size, len(Tree({}))) == (0, 0, 0)
    assert Tree({"w": torch.ones(0, 3)}).count == 0
    assert Tree({}).isfinite().shape == (0,)


def test_isfinite_names_the_client():
    tree = Tree({"w": torch.ones(3, 2), "b": torch.ones(3), "n": torch.ones(3, dtype=torch.int64)})
    tree["w"][1, 0] = float("nan")
    tree["b"][2] = float("inf")
    assert tree.isfinite().tolist() == [True, False, False]


def test_to_casts_floating_tensors_only():
    tree = Tree({"w": torch.ones(2, 2), "n": torch.ones(2, dtype=torch.int64)}).to(torch.float64, "cpu")
    assert (tree["w"].dtype, tree["n"].dtype) == (torch.float64, torch.int64)


def test_a_tree_keeps_its_own_dict():
    source = {"w": torch.ones(2, 2)}
    tree = Tree(source)
    source["b"] = torch.ones(3)
    assert list(tree) == ["w"]
    assert repr(tree) == "Tree(w: (2, 2))"
    with pytest.raises(TypeError):
        tree["b"] = torch.ones(2)


def test_errors():
    with pytest.raises(ValueError, match=r"share their first axis: w \(2, 3\), b \(3,\)"):
        Tree({"w": torch.ones(2, 3), "b": torch.ones(3)})
    with pytest.raises(ValueError, match="share their first axis"):
        Tree({"w": torch.tensor(1.0)})
    with pytest.raises(ValueError, match="same names: b, c"):
        Tree({"a": torch.ones(1), "b": torch.ones(1)}) + Tree({"a": torch.ones(1), "c": torch.ones(1)})
    with pytest.raises(KeyError):
        Tree({})["w"]
    with pytest.raises(IndexError):
        Tree({"w": torch.ones(2)}).row(2)


def test_per_client():
    assert per_client(torch.arange(3), torch.zeros(3, 4, 5)).shape == (3, 1, 1)
    assert per_client(torch.arange(3), torch.zeros(3)).shape == (3,)


@pytest.mark.parametrize(
    "index", [slice(1, 3), [0, 2, 2], torch.tensor([3, 1]), torch.tensor([True, False, True, True])]
)
def test_rows_of_a_repeated_copy_stay_repeated(index: slice | list[int] | torch.Tensor) -> None:
    shared = Tree.expand({"w": torch.arange(6.0).reshape(2, 3)}, 4)
    plain = Tree({"w": shared["w"].clone()})
    assert torch.equal(shared.rows(index)["w"], plain.rows(index)["w"])
    assert shared.rows(index).repeated


# ---- all entries at once -----------------------------------------------------------------------------


@settings(deadline=None)
@given(trees(), st.integers(1, 40))
def test_entrywise_is_the_same_in_any_blocks(pair, block):
    tree = pair[0]
    kept = tree.map(torch.clone)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fedveil.tree.BLOCK", block)
        assert same(tree.entrywise(lambda x: 2 * x + 1), tree.map(lambda x: 2 * x + 1))
        assert same(tree.entrywise(lambda x: x.mul_(2)), tree.map(lambda x: 2 * x))
    assert same(tree, kept)  # also where the function works in place


def test_entrywise_keeps_types_and_works_on_half_precision_in_float32():
    tree = Tree({"half": torch.ones(2, 3).half(), "full": torch.ones(2), "brain": torch.ones(2, 1).bfloat16()})
    met = []
    found = tree.entrywise(lambda x: met.append(x.dtype) or x + 1)
    assert torch.equal(found["half"], torch.full((2, 3), 2.0, dtype=torch.float16))
    assert torch.equal(found["full"], torch.tensor([2.0, 2.0]))
    assert torch.equal(found["brain"], torch.full((2, 1), 2.0, dtype=torch.bfloat16))
    assert list(found) == list(tree)
    assert set(met) == {torch.float32}


@pytest.mark.parametrize("dtype", [torch.complex64, torch.int64, torch.float8_e5m2])
def test_entrywise_refuses_what_it_would_have_to_skip(dtype):
    tree = Tree({"w": torch.ones(2, 3), "odd": torch.ones(2).to(dtype)})
    with pytest.raises(FedveilError, match=f"'odd' is of type {str(dtype).removeprefix('torch.')}"):
        tree.entrywise(lambda x: x + 1)


def test_infinity_is_seen_in_complex_entries_too():
    tree = Tree({"z": torch.tensor([[1 + 1j], [complex(0, torch.inf)]])})
    assert tree.isfinite().tolist() == [True, False]


@pytest.mark.parametrize("order", [1.0, 2.0])
@pytest.mark.parametrize("scale", [1e-35, 1.0, 1e30])
def test_lengths_are_those_of_double_precision_and_never_below(order, scale):
    tree = Tree({"a": torch.rand(3, 500, 7).mul_(scale), "b": torch.rand(3).bfloat16() * scale})
    exact = torch.linalg.vector_norm(tree.map(torch.Tensor.double).flat(), order, dim=1)
    assert (tree.length(order) >= exact).all()
    torch.testing.assert_close(tree.length(order), exact, rtol=4e-6, atol=0)
    assert len(Tree({}).entrywise(lambda x: x + 1)) == 0
