"""What a model draws by itself, such as functional dropout, comes from the client's stream on the loop."""

import threading

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from fedveil.clients.draws import OwnDraws, generator_state
from fedveil.clients.engine import Engine
from fedveil.errors import FedveilError
from fedveil.guard.guard import Guard
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


# ---- other threads, other ways to draw --------------------------------------------------------------------


class Steps(nn.Module):
    """Draws at every step, or at every third only."""

    def __init__(self, always):
        super().__init__()
        self.layer, self.always, self.step = nn.Linear(6, 3), always, 0

    def forward(self, x):
        return self.layer(F.dropout(x, 0.5) if self.always or self.step % 3 == 0 else x)


def guarded_steps(model, count=60):
    guard = Guard(model, F.cross_entropy, "clip", seed=0)
    found = []
    for model.step in range(1, count):
        model.zero_grad()
        guard.backward(torch.ones(4, 6), torch.zeros(4, dtype=torch.int64))
        found.append(model.layer.weight.grad)
    return torch.stack(found)


@pytest.mark.parametrize("always", [True, False])
def test_a_thread_that_draws_beside_gets_no_number_twice(always):
    torch.manual_seed(0)
    model = Steps(always)
    alone = guarded_steps(model)
    seen, stop = [], threading.Event()

    def draw():
        while not stop.is_set():
            seen.append(tuple(torch.rand(4).tolist()))

    beside = threading.Thread(target=draw)
    beside.start()
    try:
        disturbed = guarded_steps(model)
    finally:
        stop.set()
        beside.join()
    assert len(seen) > 20
    assert len(set(seen)) == len(seen)
    assert torch.equal(disturbed, alone)


DRAWS = {
    "dropout": lambda x: F.dropout(x, 0.5),
    "native dropout": lambda x: torch.native_dropout(x, 0.5, True)[0],
    "alpha dropout": lambda x: F.alpha_dropout(x, 0.5, training=True),
    "feature dropout": lambda x: F.dropout1d(x[..., None], 0.5)[..., 0],
    "rand": lambda x: x * torch.rand(x.shape),
    "rand_like": lambda x: x * torch.rand_like(x),
    "randn": lambda x: x + torch.randn(*x.shape),
    "randn_like": lambda x: x + torch.randn_like(x),
    "normal": lambda x: torch.normal(x.detach(), 1.0) + x,
    "normal_": lambda x: x + torch.empty_like(x).normal_(),
    "randint": lambda x: x * torch.randint(0, 5, x.shape),
    "randint_like": lambda x: x * torch.randint_like(x, 1, 5),
    "randperm": lambda x: x[:, torch.randperm(x.shape[1])],
    "bernoulli": lambda x: x * torch.bernoulli(torch.full_like(x, 0.5)),
    "multinomial": lambda x: x[:, torch.multinomial(torch.ones(6), 6)],
    "exponential": lambda x: x * torch.empty_like(x).exponential_(),
    "poisson": lambda x: x * torch.poisson(torch.ones_like(x)),
    "rrelu": lambda x: F.rrelu(x - 2, training=True),
    "gumbel": lambda x: F.gumbel_softmax(x),
    "attention": lambda x: F.scaled_dot_product_attention(x[:, None], x[:, None], x[:, None], dropout_p=0.5)[:, 0],
}


@pytest.mark.parametrize("kind", DRAWS)
def test_every_way_to_draw_takes_the_clients_stream(kind):
    class Draws(nn.Linear):
        def forward(self, x):
            return super().forward(DRAWS[kind](x))

    torch.manual_seed(0)
    model = Draws(6, 3)
    params = Tree.expand({n: p.detach() for n, p in model.named_parameters()}, 2)
    x, y = torch.rand(1, 40, 6).expand(2, 40, 6) + 0.5, torch.zeros(2, 40, dtype=torch.int64)

    def run(engine, seed):
        return engine.gradient(params, Tree({}), x, y, Streams.seeded(seed, range(2))).update["weight"]

    engine = Engine(model, F.cross_entropy, backend="loop")
    before = torch.get_rng_state()
    first = run(engine, 0)
    assert not torch.equal(first[0], first[1])
    assert torch.equal(run(engine, 0), first)
    assert not torch.equal(run(engine, 1), first)
    assert torch.equal(torch.get_rng_state(), before)


def test_numbers_are_those_that_torchs_own_generator_would_give_in_the_clients_state():
    state = generator_state(Streams.seeded(4, [0]))
    with torch.random.fork_rng(devices=[]):
        torch.set_rng_state(state)
        expected = F.dropout(torch.ones(500), 0.3), torch.randn(7), torch.rand(3)
    with OwnDraws(Streams.seeded(4, [0])):
        found = F.dropout(torch.ones(500), 0.3), torch.randn(7), torch.rand(3)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_a_generator_of_the_models_own_is_left_to_it():
    with OwnDraws(Streams.seeded(4, [0])) as own:
        found = torch.rand(5, generator=torch.Generator().manual_seed(1))
    assert torch.equal(found, torch.rand(5, generator=torch.Generator().manual_seed(1)))
    assert not own.drew


@pytest.mark.parametrize("layer", [nn.Dropout(0.5), nn.AlphaDropout(0.5)], ids=["keyed", "drawn"])
def test_checkpointed_layers_that_draw_are_refused(layer):
    """Their pass is repeated on the way back, with other numbers: the gradient would be wrong."""

    class Checkpointed(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.drop, self.second = nn.Linear(6, 6), layer, nn.Linear(6, 3)

        def forward(self, x):
            hidden = checkpoint(lambda x: self.drop(self.first(x)), x, use_reentrant=False, preserve_rng_state=False)
            return self.second(hidden)

    model = Checkpointed()
    guard = Guard(model, F.cross_entropy, "clip", seed=0)
    x, y = torch.randn(4, 6), torch.zeros(4, dtype=torch.int64)
    with pytest.raises(FedveilError, match=r"draws random numbers in its backward pass.*checkpointing"):
        guard.backward(x, y)
    model.eval()
    guard.backward(x, y)
    expected = torch.autograd.grad(F.cross_entropy(model(x), y), model.first.weight)[0]
    assert expected.norm() > 0
    assert F.cosine_similarity(model.first.weight.grad.flatten(), expected.flatten(), dim=0) > 0.999
