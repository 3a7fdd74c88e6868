"""The batch-norm prior: zero at the statistics it is given, its slope that of plain autograd, on every backend."""

from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.func import functional_call, grad, vmap

from fedveil.attacks.batch_norm import BatchNormStatistics, batch_statistics, require_statistics
from fedveil.attacks.grad_inversion import GradInversion
from fedveil.auditing.threat_model import Attempted, Situation, assumptions
from fedveil.defenses.chain import Chain
from fedveil.errors import FedveilError
from fedveil.tasks.models.convnet import ConvNet
from fedveil.tasks.models.resnet18 import ResNet18

from .small import random_problem, run, scene_of


def small(momentum=0.1):
    torch.manual_seed(0)
    layers = [nn.Conv2d(1, 4, 3, stride=2), nn.BatchNorm2d(4, momentum=momentum), nn.Sigmoid(), nn.Conv2d(4, 5, 2)]
    return nn.Sequential(*layers, nn.BatchNorm2d(5, momentum=momentum), nn.Flatten(), nn.Linear(20, 3))


def draws(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def state(model):
    return {n: p.detach() for n, p in model.named_parameters()}, {n: b.clone() for n, b in model.named_buffers()}


def test_it_is_zero_at_the_statistics_of_the_batch_and_only_there():
    model, inputs = small(momentum=1.0), draws(6, 1, 8, 8)
    model(inputs)  # torch's own running statistics are now those of this batch
    params, buffers = state(model)
    prior = BatchNormStatistics(2.0)
    assert prior(model, params, buffers, inputs) < 1e-9
    other = prior(model, params, buffers, 1.5 * inputs + 0.5)
    assert other > 0.05
    torch.testing.assert_close(other, 2 * BatchNormStatistics(1.0)(model, params, buffers, 1.5 * inputs + 0.5))


def test_the_value_is_that_of_plain_sums():
    model = small(momentum=0.5)
    model(draws(6, 1, 8, 8))
    params, buffers = state(model)
    inputs = draws(4, 1, 8, 8, seed=3)
    first = model[0](inputs)
    second = model[3](model[2](nn.functional.batch_norm(first, None, None, *model[1].parameters(), training=True)))
    expected = 0.0
    for name, features in (("1", first), ("4", second)):
        columns = features.permute(1, 0, 2, 3).reshape(features.shape[1], -1).double()
        mean, variance = buffers[f"{name}.running_mean"], buffers[f"{name}.running_var"]
        off = (columns.mean(1) - mean) ** 2 / (variance + 1e-5)
        off = off + ((columns.var(1, unbiased=True) - variance) / (variance + 1e-5)) ** 2
        expected += off.mean().item() / 2
    assert BatchNormStatistics(0.3)(model, params, buffers, inputs).item() == pytest.approx(0.3 * expected, rel=1e-4)


def test_its_slope_under_vmap_is_that_of_plain_autograd_and_nothing_moves():
    model = small(momentum=0.5)
    model(draws(6, 1, 8, 8))
    params, buffers = state(model)
    before = {name: buffer.clone() for name, buffer in buffers.items()}
    prior, inputs = BatchNormStatistics(1.0), draws(3, 4, 1, 8, 8, seed=2)
    stacked = {name: buffer.expand(3, *buffer.shape) for name, buffer in buffers.items()}
    found = vmap(grad(lambda x, b: prior(model, params, b, x)))(inputs, stacked)
    for row, slope in zip(inputs, found, strict=True):
        live = row.clone().requires_grad_()
        expected = torch.autograd.grad(prior(model, params, buffers, live), live)[0]
        torch.testing.assert_close(slope, expected, rtol=1e-3, atol=1e-6)
    assert all(torch.equal(buffers[name], kept) for name, kept in before.items())
    assert all(torch.equal(buffer, before[name]) for name, buffer in model.named_buffers())
    assert not any(module._forward_pre_hooks for module in model.modules())


@pytest.mark.parametrize("spec, layers", [(ConvNet(width=2), 8), (ResNet18(width=4), 20)], ids=["convnet", "resnet18"])
def test_the_models_of_the_literature_have_all_their_layers_looked_at(spec, layers):
    torch.manual_seed(0)
    model = spec.build((3, 16, 16), 10)
    inputs = draws(2, 3, 16, 16)
    for _ in range(2):
        model(inputs)
    params, buffers = state(model)
    assert len(batch_statistics(model, params, buffers, inputs)) == layers
    prior = BatchNormStatistics(1.0)
    two = {name: torch.stack([buffer, buffer]) for name, buffer in buffers.items()}
    slopes = vmap(grad(lambda x, b: prior(model, params, b, x)))(torch.stack([inputs, -inputs]), two)
    assert slopes.isfinite().all()
    assert (slopes.flatten(1).norm(dim=1) > 0).all()


def test_statistics_that_were_never_taken_tell_nothing():
    model = small()
    params, buffers = state(model)
    assert BatchNormStatistics(1.0)(model, params, buffers, draws(4, 1, 8, 8)) == 0


# ---- in the attack --------------------------------------------------------------------------------------------

KNOWING = GradInversion(statistics=True, batch_norm=1.0, steps=12, seeds=2, polish=0)


def trained():
    """A model whose statistics are those of one batch, and the problem of that batch."""
    model = small(momentum=1.0)
    problem = random_problem(model, (1, 8, 8), victims=2, batch=4)
    torch.manual_seed(7)
    model(torch.randn(2, 4, 1, 8, 8)[0])
    return replace(problem, buffers=random_problem(model, (1, 8, 8), victims=2, batch=4).buffers)


def off(problem, found):
    prior, row = BatchNormStatistics(1.0), problem.buffers.row(0)
    return prior(problem.model, problem.params.row(0), row, found.inputs[0]).item()


def test_the_attack_comes_nearer_to_the_statistics_on_every_backend():
    problem = trained()
    without = run(replace(KNOWING, statistics=False), problem, "stacked")
    found = [run(KNOWING, problem, backend) for backend in ("stacked", "loop")]
    assert off(problem, found[0]) < 0.7 * off(problem, without)
    torch.testing.assert_close(found[0].inputs, found[1].inputs, rtol=1e-2, atol=1e-2)


@pytest.mark.slow
@pytest.mark.compiles
def test_compiled_too(caplog):
    problem = trained()
    found, expected = (run(KNOWING, problem, backend) for backend in ("compiled", "stacked"))
    torch.testing.assert_close(found.inputs, expected.inputs, rtol=1e-2, atol=1e-2)
    told = [record for record in caplog.records if record.name == "fedveil"]
    assert [getattr(record, "kind", None) for record in told] in ([], ["note"])  # that it compiles, and no warning


def test_a_model_without_statistics_is_refused_in_one_line():
    bare = nn.Sequential(nn.Flatten(), nn.Linear(64, 3))
    without = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2, track_running_stats=False), nn.Flatten())
    for model in (bare, without, nn.GroupNorm(1, 2)):
        with pytest.raises(FedveilError, match=r"needs a model whose batch norms.*leave statistics off") as caught:
            require_statistics(model)
        assert "\n" not in str(caught.value)
    scene = scene_of(random_problem(bare, (1, 8, 8)))
    with pytest.raises(FedveilError, match="batch norms"):
        KNOWING.check(scene)
    GradInversion().check(scene)


def test_the_threat_model_says_that_the_statistics_are_used():
    assert KNOWING.threat.words == "labels, knows the batch-norm statistics"
    assert GradInversion().threat.words == "labels"

    def said(*attacks):
        situation = Situation(small(), Chain(), updates=2, examples=4, rounds=(1,))
        found = {each.switch: each for each in assumptions(situation, Attempted.of(attacks, 10))}
        return found["batch-norm statistics"]

    assert said(GradInversion()).setting == "not known"
    assert said(KNOWING).setting == "those of the global model, to grad-inversion"
    assert "grad-inversion takes" in said(KNOWING, GradInversion()).words


def test_a_forward_pass_beside_it_sees_the_same_model():
    """The prior looks at the model through hooks, which it leaves nowhere."""
    model = small()
    params, buffers = state(model)
    inputs = draws(4, 1, 8, 8)
    expected = functional_call(model, (params, dict(buffers)), (inputs,))
    batch_statistics(model, params, buffers, inputs)
    torch.testing.assert_close(functional_call(model, (params, dict(buffers)), (inputs,)), expected)
