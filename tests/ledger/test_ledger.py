"""The ledger: what happened is what is composed, also in another process, over chains, and in a federation's run."""

import dataclasses
import json
import math

import dp_accounting
import pytest

from federation.small import small_task
from fedveil.defenses.chain import Chain
from fedveil.defenses.dp_gaussian import gaussian_delta, gaussian_multiplier
from fedveil.defenses.guarantee import Exposure, GaussianRelease
from fedveil.errors import FedveilError
from fedveil.federation.exposure import exposures, ledger_of
from fedveil.federation.history import RoundRecord, Utility
from fedveil.federation.run import federate
from fedveil.federation.settings import FederationSettings
from fedveil.ledger.accountant import spent
from fedveil.ledger.ledger import EVERYONE, Ledger, Release
from fedveil.ledger.statement import statement

COMMON = Exposure(parameters=1000, rounds=0, steps_per_round=1, sampling_rate=1.0)
GAUSSIAN = Chain.of("dp-gaussian:epsilon=1,delta=1e-5")
SIGMA = gaussian_multiplier(1.0, 1e-5)
DPSGD = Chain.of("dp-sgd:noise_multiplier=1.1")


def filled(*releases):
    ledger = Ledger(COMMON)
    for client, release, times in releases:
        ledger.spend(client, release, times)
    return ledger


@pytest.mark.parametrize("releases", [1, 7, 100])
def test_gaussian_releases_compose_exactly(releases):
    found = filled((0, Release(GAUSSIAN), releases)).statement()
    assert gaussian_delta(found.epsilon, SIGMA / math.sqrt(releases)) == pytest.approx(1e-5, rel=1e-4)
    assert found.formal
    assert f"over {releases} release" in found.sentence
    if releases == 1:
        assert found.epsilon == pytest.approx(1.0, rel=1e-4)  # what the mechanism was calibrated to


def test_one_by_one_is_the_same_as_at_once():
    ledger = Ledger(COMMON)
    for _ in range(40):
        ledger.spend(3, Release(DPSGD, example_rate=0.05))
    assert ledger.count(3) == 40
    assert ledger.statement() == filled((3, Release(DPSGD, example_rate=0.05), 40)).statement()


def test_sampled_releases_are_those_of_dp_accounting():
    accountant = dp_accounting.pld.PLDAccountant()
    for rate, times in ((0.02, 300), (0.1, 20)):  # a data set that shrank
        event = dp_accounting.PoissonSampledDpEvent(rate, dp_accounting.GaussianDpEvent(1.1))
        accountant.compose(event, times)
    parts = [(0, Release(DPSGD, example_rate=rate), times) for rate, times in ((0.02, 300), (0.1, 20))]
    found = filled(*parts).statement()
    assert found.epsilon == pytest.approx(accountant.get_epsilon(1e-5), rel=1e-3)
    assert found.epsilon > filled(parts[0]).statement().epsilon


def test_noise_of_two_strengths_composes_exactly():
    together = [GaussianRelease(2.0, 3), GaussianRelease(5.0, 10)]
    whole = 1 / math.sqrt(3 / 4 + 10 / 25)
    assert gaussian_delta(spent(together, 1e-5).epsilon, whole) == pytest.approx(1e-5, rel=1e-4)
    fixed = [GaussianRelease(2.0, 3, 0.1, "fixed"), GaussianRelease(5.0, 10)]
    assert spent(fixed[1:], 1e-5).epsilon < spent(fixed, 1e-5).epsilon < spent(together, 1e-5).epsilon


def test_the_worst_off_client_counts_and_each_by_itself():
    most = filled((0, Release(GAUSSIAN), 9)).statement()
    several = filled((1, Release(GAUSSIAN), 4), (0, Release(GAUSSIAN), 9), (2, Release(GAUSSIAN), 9))
    assert several.statement() == most
    assert len(several.exposures(GAUSSIAN)) == 1  # who sent less need not be accounted for


def test_gradients_and_uploads_are_counted_apart():
    both = Chain.of("dp-gaussian:epsilon=1+dp-laplace:epsilon=0.1,at=upload")
    ledger = filled((0, Release(both, uploads=0), 5), (0, Release(both, gradients=0), 2))
    (parts,) = ledger.exposures(both)
    assert [sum(part.uses(place) for part in parts) for place in ("gradient", "upload", "server")] == [5, 2, 0]
    uploads = statement(Chain.of("dp-laplace:epsilon=0.1"), dataclasses.replace(COMMON, rounds=2))
    assert uploads.epsilon == pytest.approx(0.2)
    assert "ε = 0.2 for all data of a client over 2 releases" in ledger.statement().sentence


def test_what_went_out_bare_is_told():
    found = filled((0, Release(GAUSSIAN), 3), (1, Release(Chain()), 2)).statement()
    assert not found.formal
    assert "but 2 messages went out without it" in found.sentence
    assert filled((0, Release(Chain()), 2)).statement().sentence == "Formal guarantee: none."
    assert Ledger(COMMON).statement().sentence == "Formal guarantee: nothing was released yet."


def test_a_chain_that_promises_nothing_says_so():
    found = filled((0, Release(Chain.of("gradient-dropout")), 3)).statement()
    assert found.sentence == "Formal guarantee: none; Gradient Dropout is not differentially private."


def test_several_chains_add_up():
    strong, weak = Chain.of("dp-gaussian:epsilon=0.5"), Chain.of("dp-laplace:epsilon=0.01")
    one, two = filled((0, Release(strong), 4)).statement(), filled((0, Release(weak), 3)).statement()
    found = filled((0, Release(strong), 4), (0, Release(weak), 3)).statement()
    assert found.epsilon == pytest.approx(one.epsilon + two.epsilon)
    assert found.delta == pytest.approx(1e-5)
    assert "for all data of a client over 2 chains of defenses (basic composition)" in found.sentence
    mixed = filled((0, Release(strong), 4), (0, Release(DPSGD), 3)).statement()  # one client, or one example?
    assert not mixed.formal
    assert "none that covers all 2 chains" in mixed.sentence
    partly = filled((0, Release(strong), 4), (0, Release(Chain.of("clip")), 3)).statement()
    assert (partly.formal, partly.epsilon) == (False, None)


def test_at_another_delta():
    ledger = filled((0, Release(GAUSSIAN), 4))
    found = ledger.statement(1e-7)
    assert gaussian_delta(found.epsilon, SIGMA / 2) == pytest.approx(1e-7, rel=1e-4)
    assert ledger.statement().delta == 1e-5


# ---- memory ---------------------------------------------------------------------------------------------------


def test_a_resumed_ledger_equals_one_that_was_never_interrupted():
    steps = [(client, Release(DPSGD, example_rate=0.1), 3 + client) for client in (0, 7)]
    steps += [(EVERYONE, Release(Chain.of("cdp"), 0, 0, means=1, client_rate=0.5), 4), (7, Release(Chain()), 1)]
    whole, first = filled(*steps, *steps), filled(*steps)
    resumed = Ledger(COMMON)
    resumed.load_state_dict(json.loads(json.dumps(first.state_dict())))
    for step in steps:
        resumed.spend(*step)
    assert resumed.state_dict() == whole.state_dict()
    assert resumed.statement() == whole.statement()


@pytest.mark.parametrize(
    "change, said",
    [
        ({"version": 2}, "kept in version 2"),
        ({"parameters": 5}, "a model with 5 parameters, not 1,000"),
        ({"spent": [{"client": 0}]}, "not the state of a ledger: spent.0.times is required"),
        ({"more": 1}, "no field 'more'"),
    ],
)
def test_states_of_something_else_are_refused(change, said):
    ledger = filled((0, Release(GAUSSIAN), 1))
    before = ledger.state_dict()
    with pytest.raises(FedveilError, match=said):
        ledger.load_state_dict({**before, **change})
    assert ledger.state_dict() == before
    for field, value in (("times", -3), ("example_rate", 1.5), ("chain", "no-such")):
        with pytest.raises(FedveilError):
            ledger.load_state_dict({**before, "spent": [{**before["spent"][0], field: value}]})


# ---- what a run spent -------------------------------------------------------------------------------------------


def record(number, clients, refused=()):
    told = dict.fromkeys(refused, "broken")
    return RoundRecord(
        round=number,
        utility=Utility(),
        train_loss=0.0,
        seconds=0.0,
        bytes_up=0,
        bytes_down=0,
        clients=list(clients),
        refused=told,
    )


@pytest.mark.parametrize("protocol", ["fedsgd", "fedavg"])
@pytest.mark.parametrize("spec", ["dp-sgd:noise_multiplier=2", "dp-gaussian:at=gradient", "cdp:noise_multiplier=9"])
def test_where_all_went_as_planned_it_states_what_was_planned(protocol, spec):
    task, settings = small_task(norm=False), FederationSettings(protocol=protocol, rounds=4, batch_size=5)
    history = [record(number, range(4)) for number in range(1, 5)]
    found = ledger_of(task, settings, Chain.of(spec), history).statement()
    planned = statement(Chain.of(spec), exposures(task, settings))
    assert (found.sentence, found.epsilon) == (planned.sentence, planned.epsilon)


def test_early_stopping_sampling_and_refused_clients():
    task = small_task(norm=False)  # 13, 8, 3 and 21 examples: 3, 2, 1 and 5 batches of up to 5
    settings = FederationSettings(rounds=50, batch_size=5, sampling_rate=0.5, patience=2)
    chain = Chain.of("dp-gaussian")
    history = [record(1, [0, 2]), record(2, [0, 3], refused=[3]), record(3, [1, 2])]
    ledger = ledger_of(task, settings, chain, history)
    # What was refused was sent all the same.
    assert [ledger.count(client) for client in range(4)] == [6, 2, 2, 5]
    expected = spent(GaussianRelease(gaussian_multiplier(8.0, 1e-5), 6), 1e-5)
    assert ledger.statement().epsilon == expected.epsilon
    assert "over 3 rounds" in ledger.statement().sentence
    assert "ε is that of the client that took part most" in ledger.statement().paragraph


def test_who_was_drawn_is_not_used_where_the_server_hides_it():
    task, settings = (
        small_task(norm=False),
        FederationSettings(protocol="fedavg", rounds=9, batch_size=5, sampling_rate=0.5),
    )
    chain = Chain.of("cdp:noise_multiplier=6")
    history = [record(number, [0, 1]) for number in (1, 2, 3)]  # clients 2 and 3 never were
    found = ledger_of(task, settings, chain, history).statement()
    assert found.epsilon == spent(GaussianRelease(3.0, 3, 0.5, "fixed"), 1e-5).epsilon


def test_the_clients_of_a_round_are_drawn_once_for_all_its_steps():
    task, settings = small_task(norm=False), FederationSettings(rounds=9, batch_size=5, sampling_rate=0.25)
    history = [record(number, [3]) for number in (1, 2, 3)]
    found = ledger_of(task, settings, Chain.of("cdp:noise_multiplier=60"), history).statement()
    assert found.epsilon == spent(GaussianRelease(30.0, 3 * 5), 1e-5).epsilon  # whoever was drawn was in all five
    assert found.epsilon > spent(GaussianRelease(30.0, 3 * 5, 0.25, "fixed"), 1e-5).epsilon


def test_warm_up_rounds_went_out_bare():
    task, settings = small_task(norm=False), FederationSettings(rounds=3, batch_size=5, warmup_rounds=1)
    history = [record(number, range(4)) for number in (1, 2, 3)]
    found = ledger_of(task, settings, Chain.of("dp-gaussian"), history).statement()
    assert not found.formal
    assert "but the first round runs without it" in found.sentence


def test_of_a_run_that_was_trained():
    task = small_task(norm=False)
    settings = FederationSettings(rounds=3, batch_size=5, sampling_rate=0.5)
    run = federate(task, "dp-sgd:noise_multiplier=3", settings, backend="loop", seed=1)
    ledger = ledger_of(task, settings, Chain.of("dp-sgd:noise_multiplier=3"), run.history)
    often = [sum(client in each.clients for each in run.history) for client in range(4)]
    assert [ledger.count(client) for client in range(4)] == [n * b for n, b in zip(often, (3, 2, 1, 5), strict=True)]
    planned = statement(Chain.of("dp-sgd:noise_multiplier=3"), exposures(task, settings))
    assert 0 < ledger.statement().epsilon <= planned.epsilon
