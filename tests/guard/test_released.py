"""What Guard says of its releases: the ε that they spent, and what a server sees of the last one."""

import copy
import json
import math

import dp_accounting
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from fedveil.defenses.dp_gaussian import gaussian_delta, gaussian_multiplier
from fedveil.errors import FedveilError
from fedveil.federation.capture import Capture, capture, pseudo_gradient
from fedveil.guard.guard import Guard

SIGMA = gaussian_multiplier(1.0, 1e-5)


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(6, 5), nn.Sigmoid(), nn.Linear(5, 3))


def data(seed=0, size=4):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(size, 6, generator=generator), torch.randint(0, 3, (size,), generator=generator)


def steps(guard, count, lr=0.1):
    for number in range(count):
        guard.model.zero_grad()
        guard.backward(*data(number))
        with torch.no_grad():
            for parameter in guard.model.parameters():
                parameter -= lr * parameter.grad


# ---- ε -----------------------------------------------------------------------------------------------------


def test_every_gradient_counts():
    guard = Guard(network(), F.cross_entropy, "dp-gaussian:epsilon=1,delta=1e-5")
    assert guard.spent().sentence == "Formal guarantee: nothing was released yet."
    for count in (1, 4):
        steps(guard, count)
    found = guard.spent()
    assert gaussian_delta(found.epsilon, SIGMA / math.sqrt(5)) == pytest.approx(1e-5, rel=1e-4)
    assert "for all data of a client over 5 releases" in found.sentence
    assert "seed" not in found.paragraph  # noise comes from the operating system
    assert "drawn from a seed" in _spent_of(Guard(network(), F.cross_entropy, "dp-gaussian", seed=1)).paragraph
    assert guard.spent(1e-7).delta == 1e-7


def _spent_of(guard):
    steps(guard, 1)
    return guard.spent()


def test_a_scope_of_micro_batches_is_one_release():
    guard = Guard(network(), F.cross_entropy, "dp-gaussian")
    with guard.accumulate():
        for number in range(3):
            guard.backward(*data(number))
    assert guard.ledger.count(0) == 1


def test_what_failed_was_not_released():
    guard = Guard(network(), F.cross_entropy, "dp-gaussian")
    x, y = data()
    x[0, 0] = math.nan
    with pytest.raises(FedveilError, match=r"the loss is not finite \(NaN or infinity\): check"):
        guard.backward(x, y)
    with pytest.raises(FedveilError), guard.accumulate():
        guard.backward(x, y)
    assert guard.ledger.count(0) == 0


def test_dp_sgd_spends_what_dp_accounting_says():
    guard = Guard(network(), F.cross_entropy, "dp-sgd:noise_multiplier=1.2", batch_size=4, dataset_size=80)
    steps(guard, 30)
    guard.upload()  # what is made of protected gradients costs nothing more
    accountant = dp_accounting.pld.PLDAccountant()
    accountant.compose(dp_accounting.PoissonSampledDpEvent(0.05, dp_accounting.GaussianDpEvent(1.2)), 30)
    assert guard.spent().epsilon == pytest.approx(accountant.get_epsilon(1e-5), rel=1e-3)
    assert "for one training example over 30 releases (PLD accountant)" in guard.spent().sentence
    large = Guard(network(), F.cross_entropy, "dp-sgd", batch_size=4, dataset_size=2_000_000)
    steps(large, 1)
    assert large.spent().delta == 5e-7


def test_what_a_statement_needs_is_asked_for():
    guard = Guard(network(), F.cross_entropy, "dp-sgd", batch_size=4)
    steps(guard, 2)
    with pytest.raises(FedveilError, match="give Guard dataset_size=, the number of examples") as caught:
        guard.spent()
    assert "\n" not in str(caught.value)
    for size in (0, 3):
        with pytest.raises(FedveilError, match="dataset_size must be at least 4"):
            Guard(network(), F.cross_entropy, "dp-sgd", batch_size=4, dataset_size=size)


def test_nothing_formal_is_not_dressed_up():
    guard = Guard(network(), F.cross_entropy, "gradient-dropout")
    steps(guard, 2)
    assert (guard.spent().formal, guard.spent().epsilon) == (False, None)
    bare = Guard(network(), F.cross_entropy, None)
    steps(bare, 2)
    assert bare.spent().sentence == "Formal guarantee: none."


def test_uploads_count_for_the_defenses_of_the_upload():
    guard = Guard(network(), F.cross_entropy, "dp-gaussian:epsilon=1,delta=1e-5,at=upload")
    for _ in range(3):
        guard.new_round()
        guard.upload(of="delta")
    assert gaussian_delta(guard.spent().epsilon, SIGMA / math.sqrt(3)) == pytest.approx(1e-5, rel=1e-4)


def test_training_past_the_guard_is_noticed_at_the_upload():
    guard = Guard(network(), F.cross_entropy, "dp-gaussian")
    steps(guard, 2)
    guard.upload()
    assert guard.spent().formal
    guard.new_round()
    guard.upload()  # the server's weights, as they came
    assert guard.spent().formal
    guard.new_round()
    F.cross_entropy(guard.model(data()[0]), data()[1]).backward()
    with torch.no_grad():
        guard.model[1].weight += 0.1
    guard.upload()
    assert not guard.spent().formal
    assert "but 1 message went out without it" in guard.spent().sentence


def test_a_resumed_guard_has_spent_as_much_as_one_that_was_never_stopped():
    spec = {"defense": "dp-sgd:noise_multiplier=2", "batch_size": 4, "dataset_size": 40}
    whole, first, second = (Guard(network(), F.cross_entropy, **spec) for _ in range(3))
    steps(whole, 9)
    steps(first, 5)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    second.model.load_state_dict(first.model.state_dict())
    assert second.spent() == first.spent()
    second.upload()  # not taken for training past the guard
    steps(second, 4)
    whole.upload()
    assert second.spent() == whole.spent()
    assert second.spent().formal


# ---- what a server sees -----------------------------------------------------------------------------------------


def test_a_gradient_as_the_server_sees_it(tmp_path):
    model = network()
    guard = Guard(model, F.cross_entropy, "clip:norm=0.1+gaussian-noise:sigma=0.01", seed=0, client=3)
    with pytest.raises(FedveilError, match="nothing was released yet"):
        guard.capture()
    guard.backward(*data())
    before = copy.deepcopy(dict(model.named_parameters()))
    seen = guard.capture(facts={"shape": [6], "classes": 3})
    assert (seen.kind, seen.client, seen.round, seen.batch_sizes) == ("gradient", 3, 1, (4,))
    assert seen.public.defense == "clip:norm=0.1+gaussian-noise:sigma=0.01"
    assert seen.public.classes == 3
    for name, parameter in model.named_parameters():
        assert torch.equal(seen.shared[name], parameter.grad)
        assert torch.equal(seen.before[name], before[name])
    with torch.no_grad():
        model[1].weight += 1
    assert torch.equal(seen.before["1.weight"], before["1.weight"])  # copies
    seen.check(model)
    seen.save(tmp_path / "seen")
    told = (tmp_path / "seen").read_bytes()
    assert all(value.numpy().tobytes() not in told for value in data())
    assert torch.equal(Capture.load(tmp_path / "seen").shared["3.bias"], seen.shared["3.bias"])
    with pytest.raises(FedveilError, match=r"before optimizer.step\(\)"):
        guard.capture()


def test_the_size_of_a_random_batch_is_not_told():
    guard = Guard(network(), F.cross_entropy, "dp-sgd", batch_size=4)
    guard.backward(*data(size=7))
    assert guard.capture().batch_sizes == (4,)


def test_an_upload_as_the_server_sees_it():
    model = network()
    start = copy.deepcopy(model.state_dict())
    guard = Guard(model, F.cross_entropy, "clip:norm=1e6")
    steps(guard, 3, lr=0.2)
    sent = guard.upload(of="delta")
    with pytest.raises(FedveilError, match="a capture of kind 'delta' needs lr="):
        guard.capture()
    seen = guard.capture(lr=0.2)
    assert (seen.kind, seen.steps, seen.lr, seen.batch_sizes) == ("delta", 3, (0.2,) * 3, (4, 4, 4))
    for name in sent:
        assert torch.equal(seen.before[name], start[name])
        assert torch.equal(seen.shared[name], sent[name])
    torch.testing.assert_close(pseudo_gradient(seen)["3.bias"], -sent["3.bias"] / 0.6)


def test_an_upload_of_a_loop_that_trains_by_itself():
    guard = Guard(network(), F.cross_entropy, "gaussian-noise:at=upload")
    guard.upload()
    with pytest.raises(FedveilError, match="give batch_sizes="):
        guard.capture(lr=0.1)
    assert guard.capture(lr=(0.1, 0.2), batch_sizes=(4, 2)).lr == (0.1, 0.2)


# ---- from any loop ----------------------------------------------------------------------------------------------


def test_any_update_can_be_captured():
    model = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Linear(4, 3))
    start = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
    for number in range(2):
        optimizer.zero_grad()
        F.cross_entropy(model(data(number)[0]), data(number)[1]).backward()
        optimizer.step()
    seen = capture(start, model.state_dict(), kind="weights", batch_sizes=(4, 4), lr=0.1, momentum=0.5)
    assert (seen.kind, seen.steps, seen.momentum) == ("weights", 2, 0.5)
    assert seen.shared.keys() == dict(model.named_parameters()).keys()
    assert torch.equal(seen.buffers["1.running_mean"], model[1].running_mean)
    assert torch.equal(seen.buffers_before["1.running_mean"], start[1].running_mean)
    alone = capture(dict(start.named_parameters()), dict(model.named_parameters()), kind="weights", batch_sizes=8, lr=1)
    assert alone.buffers is None
    assert torch.equal(alone.before["0.weight"], start[0].weight)
    assert not alone.before["0.weight"].requires_grad


@pytest.mark.parametrize(
    "given, said",
    [
        ({"update": {"weight": torch.ones(3, 6)}}, "shared has no bias"),
        ({"update": {"weight": None, "bias": None}}, "shared has weight, which is not a tensor"),
        ({"kind": "weights"}, "needs lr="),
        ({"batch_sizes": ()}, "steps 0"),
        ({"facts": {"classes": "many"}}, "among its facts, classes"),
    ],
    ids=str,
)
def test_what_no_server_could_have_seen_is_refused(given, said):
    update = {"weight": torch.ones(3, 6), "bias": torch.ones(3)}
    with pytest.raises(FedveilError, match=said):
        capture(nn.Linear(6, 3), **({"update": update, "batch_sizes": 2} | given))
