"""The dry step: what would fail or not repeat says so before any training."""

import random

import numpy as np
import pytest
import torch
from torch import nn

from fedveil.defenses.base import Defense
from fedveil.errors import FedveilError
from fedveil.federation.run import federate
from fedveil.federation.settings import FederationSettings
from fedveil.fields import declared
from fedveil.tasks.task import Task
from fedveil.tree import Tree

from .small import small_task

FEDSGD, FEDAVG = FederationSettings(rounds=1), FederationSettings(rounds=1, protocol="fedavg")
DRAWS = {
    "torch's global generator": torch.randn_like,
    "NumPy's global generator": lambda tensor: torch.from_numpy(np.random.normal(size=tensor.shape)).to(tensor),
    "Python's module random": lambda tensor: tensor * random.random(),
}
SOURCES = pytest.mark.parametrize("source", list(DRAWS))


@declared
class Careless(Defense):
    """Adds noise that no seed of a run repeats."""

    name = "test-careless"
    source: str = ""
    at: str = "gradient"

    def protect(self, update, call):
        return update.map(lambda tensor: tensor + 0.1 * DRAWS[self.source](tensor))

    def perturb(self, batch):
        return batch.inputs + DRAWS[self.source](batch.inputs)

    def aggregate(self, updates, weights, streams):
        return updates.map(lambda tensor: tensor + DRAWS[self.source](tensor))

    def sample(self, labels, size, streams):
        if self.at == "sample":
            DRAWS[self.source](torch.ones(2))
        return


@SOURCES
@pytest.mark.parametrize("at", ["sample", "data", "gradient", "upload", "server"])
@pytest.mark.parametrize("settings", [FEDSGD, FEDAVG], ids=["fedsgd", "fedavg"])
@pytest.mark.parametrize("backend", ["loop", "stacked"])
def test_a_draw_from_a_global_generator_is_refused(source, at, settings, backend):
    chain = [Careless(source=source, at=at)]
    with pytest.raises(FedveilError, match=f"test-careless draws from {source}.*: draw from batch.streams"):
        federate(small_task(norm=False), chain, settings, backend=backend)


def test_a_generator_made_anew_each_time_is_noticed_too():
    @declared
    class Fresh(Defense):
        name = "test-fresh"

        def protect(self, update, call):
            return update.map(lambda t: t + torch.from_numpy(np.random.default_rng().normal(size=t.shape)).to(t))

    with pytest.raises(FedveilError, match="test-fresh gives another result each time from equal streams"):
        federate(small_task(norm=False), Fresh(), FEDSGD, backend="loop")


class Drawing(nn.Module):
    """A model that draws in its forward pass, from any generator."""

    def __init__(self, source):
        super().__init__()
        self.linear, self.source = nn.Linear(6, 3), source

    def forward(self, x):
        return self.linear(x) + 0.01 * DRAWS[self.source](x[:, :3])


@SOURCES
def test_a_model_that_draws_is_not_taken_for_the_defense(source):
    plain = small_task(norm=False)
    parts = tuple(part.batch(torch.arange(len(part))) for part in (plain.train, plain.validation, plain.test))
    task = Task(Drawing(source), parts, clients=plain.clients)
    federate(task, "gaussian-noise", FEDSGD, backend="loop")


def test_the_process_generators_stay_where_they_are():
    states = torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()
    with pytest.raises(FedveilError):
        federate(small_task(norm=False), Careless(source="Python's module random"), FEDSGD)
    assert torch.equal(states[0], torch.get_rng_state())
    assert states[1:] == (np.random.get_state()[1].tolist(), random.getstate())


def test_an_upload_that_fails_does_so_before_training():
    @declared
    class Picky(Defense):
        name = "test-picky"
        place = "upload"

        def protect(self, update: Tree, call):
            raise FedveilError("not like this")

    seen = []

    class Watch:
        def __getattr__(self, hook):
            return lambda *arguments: seen.append(hook)

    with pytest.raises(FedveilError, match="not like this"):
        federate(small_task(norm=False), Picky(), FEDAVG, observers=[Watch()])
    assert not seen
