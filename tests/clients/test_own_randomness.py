"""What a model draws by itself, such as functional dropout, comes from the client's stream on the loop."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from fedveil.clients.draws import generator_state
from fedveil.clients.engine import Engine
from fedveil.streams import Streams
from fedveil.tree import Tree

from .plain import assert_trees_close, make_case


def gradients(case):
    return case.engine("loop").gradient(*case.arguments()).update


def test_functional_dropout_repeats_whatever_the_global_generator_holds():
    case = make_case("functional dropout")
    torch.manual_seed(1)
    first = gradients(case)
    torch.manual_seed(2)
    assert_trees_close(gradients(case), first, 0)


def test_functional_dropout_follows_the_seed():
    case = make_case("functional dropout")
    first = gradients(case)
    case.seed += 1
    assert not torch.equal(gradients(case)["second.weight"], first["second.weight"])


def test_clients_with_equal_data_drop_differently():
    case = make_case("functional dropout")
    case.params = Tree.expand(case.params.row(0), case.clients)
    case.inputs, case.targets = case.inputs[:1].expand_as(case.inputs), case.targets[:1].expand_as(case.targets)
    update = gradients(case)["second.weight"]
    assert not torch.equal(update[0], update[1])
    assert not torch.equal(update[1], update[2])


@pytest.mark.parametrize("kind", ["gradient", "input_gradient", "example_gradients", "loss"])
def test_the_global_generator_is_left_as_it_was(kind):
    case = make_case("functional dropout")
    engine = case.engine("loop")
    for _ in range(2):
        before = torch.get_rng_state()
        getattr(engine, kind)(*case.arguments())
        assert torch.equal(torch.get_rng_state(), before)


def test_the_order_of_clients_does_not_matter():
    case = make_case("functional dropout")
    whole = gradients(case)
    assert_trees_close(gradients(case.rows([2, 0])), whole.rows([2, 0]), 0)


def test_an_engine_first_used_in_eval_mode_draws_from_the_stream_later():
    case = make_case("functional dropout")
    engine = case.engine("loop")
    expected = gradients(case)
    engine.model.eval()
    engine.gradient(*case.arguments())
    engine.model.train()
    before = torch.get_rng_state()
    assert_trees_close(engine.gradient(*case.arguments()).update, expected, 0)
    assert torch.equal(torch.get_rng_state(), before)


class DrawsForSome(nn.Module):
    """Draws for some data only."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 3)

    def forward(self, x):
        return self.layer(F.dropout(x, 0.5) if x.mean() > 0 else x)


def test_a_model_that_draws_for_some_clients_only():
    torch.manual_seed(0)
    model = DrawsForSome()
    params = Tree.expand({n: p.detach() for n, p in model.named_parameters()}, 2)
    inputs = torch.rand(2, 4, 6) + torch.tensor([-2.0, 0.0]).reshape(2, 1, 1)  # the first client draws nothing
    arguments = (params, Tree({}), inputs, torch.zeros(2, 4, dtype=torch.int64))
    engine = Engine(model, F.cross_entropy, backend="loop")
    before = torch.get_rng_state()
    first = engine.gradient(*arguments, Streams.seeded(0, range(2))).update
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(9)
    assert_trees_close(engine.gradient(*arguments, Streams.seeded(0, range(2))).update, first, 0)


def test_a_model_that_fails_leaves_the_generator_alone():
    class Fails(FunctionalLinear):
        def forward(self, x):
            super().forward(x)
            raise ArithmeticError("as it must")

    model = Fails()
    params = Tree.expand({n: p.detach() for n, p in model.named_parameters()}, 1)
    before = torch.get_rng_state()
    with pytest.raises(ArithmeticError):
        Engine(model, F.cross_entropy, backend="loop").gradient(
            params, Tree({}), torch.ones(1, 2, 6), torch.zeros(1, 2, dtype=torch.int64), Streams.seeded(0, [0])
        )
    assert torch.equal(torch.get_rng_state(), before)


class FunctionalLinear(nn.Linear):
    def __init__(self):
        super().__init__(6, 3)

    def forward(self, x):
        return super().forward(F.dropout(x, 0.5))


def test_the_state_given_to_torch_is_wholly_the_clients():
    streams = Streams.seeded(4, [0, 1])
    states = [generator_state(streams.rows([k]).fold("torch")) for k in (0, 1)]
    words = [state[24 : 24 + 8 * 624].view(torch.int64) for state in states]
    assert (words[0] != words[1]).float().mean() > 0.99
    assert all(word.min() >= 0 and word.max() < 2**32 for word in words)
    draws = torch.rand(20_000, generator=torch.Generator().set_state(states[0]))
    assert abs(draws.mean() - 0.5) < 0.01
    assert abs(draws.var() - 1 / 12) < 0.003


def test_models_that_draw_are_refused_by_the_stacked_backend():
    case = make_case("functional dropout")
    with pytest.raises(RuntimeError, match="random"):
        case.engine("stacked").gradient(*case.arguments())
