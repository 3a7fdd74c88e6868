"""Poisson batches for a training loop of one's own."""

import pytest
import torch
from scipy import stats
from torch.utils.data import DataLoader, Dataset, TensorDataset

import fedveil as fv
from fedveil.defenses.poisson import PoissonSampler, beyond_chance, poisson_loader
from fedveil.errors import FedveilError


def joined(sampler, epochs=1):
    rows = []
    for _ in range(epochs):
        for places in sampler:
            row = torch.zeros(sampler.count)
            row[places] = 1
            assert len(set(places)) == len(places)
            rows.append(row)
    return torch.stack(rows)


def assert_binomial(found, chance):
    """Sizes follow the binomial law, examples join alike, and no two are tied."""
    steps, count = found.shape
    sizes = torch.bincount(found.sum(1).long(), minlength=count + 1).double()
    expected = steps * torch.tensor(stats.binom(count, chance).pmf(range(count + 1)))
    usual = expected > 5
    observed, law = sizes[usual], expected[usual]
    assert stats.chisquare(observed, law * observed.sum() / law.sum()).pvalue > 1e-4
    assert (found.mean(0) - chance).abs().max() < 4.5 * (chance * (1 - chance) / steps) ** 0.5
    assert (torch.corrcoef(found.T) - torch.eye(count)).abs().max() < 5.5 / steps**0.5


def test_batches_follow_the_binomial_law():
    assert_binomial(joined(PoissonSampler(40, 6, steps=4000, seed=0)), 6 / 40)


def test_epochs_differ_and_so_do_seeds():
    sampler = PoissonSampler(30, 5, seed=1)
    first, second = list(sampler), list(sampler)
    assert len(sampler) == len(first) == 6
    assert first != second
    assert first == list(PoissonSampler(30, 5, seed=1))
    assert first != list(PoissonSampler(30, 5, seed=2))
    assert list(PoissonSampler(300, 50)) != list(PoissonSampler(300, 50))  # no seed: the system's entropy


def test_a_batch_size_of_all_examples_takes_all():
    assert list(PoissonSampler(4, 4, seed=0)) == [[0, 1, 2, 3]]


def test_empty_batches_come_with_the_shapes_of_the_others():
    data = TensorDataset(torch.arange(12.0).reshape(6, 2), torch.arange(6))
    loader = poisson_loader(data, 1, steps=60, seed=0)
    assert isinstance(loader, DataLoader)
    sizes = [len(y) for x, y in loader if x.shape == (len(y), 2) and x.dtype == torch.float32]
    assert len(sizes) == len(loader) == 60
    assert 0 in sizes
    assert max(sizes) > 1


class Named(Dataset):
    def __len__(self):
        return 5

    def __getitem__(self, place):
        return {"ids": torch.full((3,), place)}, place


def test_named_parts_and_workers():
    loader = poisson_loader(Named(), 1, steps=20, seed=0, num_workers=1)
    batches = list(loader)
    assert all(inputs["ids"].shape == (len(y), 3) for inputs, y in batches)
    assert any(len(y) == 0 for _, y in batches)
    assert [y.tolist() for _, y in batches] == list(PoissonSampler(5, 1, steps=20, seed=0))


def test_what_cannot_be_sampled_is_refused():
    for count, size in ((4, 0), (4, 5)):
        with pytest.raises(FedveilError, match="between 1 and the number of examples, 4"):
            PoissonSampler(count, size)
    with pytest.raises(FedveilError, match="steps must be 1 or more"):
        PoissonSampler(4, 2, steps=0)
    with pytest.raises(FedveilError, match="leave out shuffle"):
        poisson_loader(Named(), 2, shuffle=True)
    with pytest.raises(FedveilError, match="no len"):
        poisson_loader(iter([1]), 2)


@pytest.mark.parametrize("planned", [1, 8, 64, 1000])
def test_only_sizes_that_hardly_ever_come_are_beyond_chance(planned):
    """Against the law of the greatest spread, Poisson's own: all that is refused has a chance below 1e-12."""
    border = next(size for size in range(planned, 3 * planned + 100) if beyond_chance(size, planned))
    assert stats.poisson(planned).sf(border - 1) < 1e-12
    assert border < planned + 9 * planned**0.5 + 30
    assert not beyond_chance(0, planned)


# ---- DP-SGD in a loop of one's own --------------------------------------------------------------------------


def guard(batch_size=8, noise=0.5, **options):
    torch.manual_seed(0)
    model = torch.nn.Linear(6, 3)
    spec = fv.defenses.DPSGD(clip=1.0, noise_multiplier=noise)
    return fv.Guard(model, torch.nn.functional.cross_entropy, spec, seed=0, batch_size=batch_size, **options)


def test_the_sum_is_divided_by_the_planned_size():
    x, y = torch.randn(5, 6), torch.tensor([0, 1, 2, 0, 1])
    found = {}
    for planned in (8, 16):
        made = guard(planned)
        made.backward(x, y)
        found[planned] = made.model.weight.grad
    torch.testing.assert_close(found[8], 2 * found[16])


@pytest.mark.parametrize("scope", [False, True])
def test_an_empty_batch_is_answered_by_noise_alone(scope):
    made = guard(noise=2.0)
    nothing = torch.empty(0, 6), torch.empty(0, dtype=torch.int64)
    if scope:
        with made.accumulate():
            pass
    else:
        assert made.backward(*nothing) == 0
    other = guard(noise=2.0)
    other.backward(*nothing)
    assert torch.equal(made.model.weight.grad, other.model.weight.grad)
    assert 0.1 < made.model.weight.grad.std() < 0.5  # 2/8


def test_a_planned_size_is_needed():
    with pytest.raises(FedveilError, match=r"dp-sgd.* divides by the planned batch size.*batch_size="):
        guard(None)
    with pytest.raises(FedveilError, match="batch_size must be 1 or more"):
        guard(0)


@pytest.mark.parametrize("scope", [False, True])
def test_a_batch_that_no_coins_give_is_refused(scope):
    made, x, y = guard(1), torch.randn(64, 6), torch.zeros(64, dtype=torch.int64)

    def run():
        if not scope:
            made.backward(x, y)
        with made.accumulate():
            for part in range(0, 64, 8):
                made.backward(x[part : part + 8], y[part : part + 8])

    with pytest.raises(FedveilError, match=r"\d+ examples is not one that Poisson sampling draws with batch_size=1:"):
        run()
    assert made.model.weight.grad is None


def test_a_loop_over_poisson_batches_trains():
    made = guard(16, noise=0.2)
    torch.manual_seed(1)
    x = torch.randn(200, 6)
    y = (x[:, 0] > 0).long()
    optimizer = torch.optim.SGD(made.model.parameters(), lr=0.5)
    for _ in range(4):
        for inputs, targets in poisson_loader(TensorDataset(x, y), 16, seed=0):
            optimizer.zero_grad()
            made.backward(inputs, targets)
            optimizer.step()
    assert (made.model(x).argmax(1) == y).float().mean() > 0.85
