"""The ledger's sentence and paragraph: what is added up, what is not, and why a promise does not hold."""

import dataclasses
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import fedveil as fv
from federation.small import small_task
from fedveil.defenses.base import Defense
from fedveil.defenses.chain import Chain
from fedveil.defenses.guarantee import Exposure, Guarantee, PureLDP
from fedveil.federation.exposure import exposures
from fedveil.federation.settings import FederationSettings
from fedveil.fields import declared
from fedveil.ledger.accountant import spent
from fedveil.ledger.statement import statement

EXPOSURE = Exposure(parameters=1000, rounds=30, steps_per_round=1, sampling_rate=1.0, example_rate=0.02)
LOW_BITS, SEEDED = "low bits of noisy numbers", "drawn from a seed"


@declared
class Signs(Defense):
    name = "signs"
    place = "upload"

    def guarantee(self, exposure):
        mechanism = PureLDP(2.0, exposure.parameters)
        return Guarantee("Formal guarantee: signs only.", True, "the sign of each entry", mechanism)


@declared
class Curious(Defense):
    """A toy that looks at the data when it protects the gradient."""

    name = "curious"
    needs = frozenset({"batch"})


# ---- nothing formal ----------------------------------------------------------------------------------------


def test_no_defense_promises_nothing():
    found = statement(Chain(), EXPOSURE)
    assert found.sentence == found.paragraph == "Formal guarantee: none."
    assert (found.formal, found.epsilon, found.delta) == (False, None, None)


def test_a_defense_without_a_guarantee_speaks_for_itself():
    found = statement(Chain.of("gradient-dropout"), EXPOSURE)
    assert found.sentence == "Formal guarantee: none; Gradient Dropout is not differentially private."
    assert not found.formal
    assert LOW_BITS not in found.paragraph


def test_several_without_a_guarantee_are_named_one_by_one():
    found = statement(Chain.of("gradient-dropout+gaussian-noise"), EXPOSURE)
    assert found.sentence == "Formal guarantee: none."
    assert found.paragraph == (
        "Formal guarantee: none. gradient-dropout: none; Gradient Dropout is not differentially private. "
        "gaussian-noise: none is claimed; noise without a bound on the gradient has no finite privacy parameter."
    )


def test_clipping_and_noise_as_separate_links_are_not_added_up():
    assert not statement(Chain.of("clip+gaussian-noise"), EXPOSURE).formal


# ---- one formal defense ------------------------------------------------------------------------------------


def test_dp_sgd():
    chain = Chain.of("dp-sgd:noise_multiplier=1")
    found = statement(chain, EXPOSURE)
    assert found.epsilon == spent(chain.defenses[0].guarantee(EXPOSURE).mechanism, 1e-5).epsilon
    assert found.delta == 1e-5
    assert found.sentence == (
        "Formal guarantee: ε = 0.995 at δ = 1e-05 for one training example over 30 rounds (PLD accountant)."
    )
    assert found.paragraph.startswith(found.sentence)
    assert "nothing is promised for what many examples share" in found.paragraph
    assert LOW_BITS in found.paragraph
    assert SEEDED in found.paragraph


def test_one_release_of_a_calibrated_mechanism_is_what_it_was_calibrated_to():
    once = dataclasses.replace(EXPOSURE, rounds=1)
    gaussian = statement(Chain.of("dp-gaussian:epsilon=2"), once)
    assert gaussian.epsilon == pytest.approx(2.0)
    assert gaussian.sentence == (
        "Formal guarantee: ε = 2 at δ = 1e-05 for all data of a client over 1 round (exact Gaussian composition)."
    )
    laplace = statement(Chain.of("dp-laplace:epsilon=2"), once)
    assert laplace.sentence == ("Formal guarantee: ε = 2 for all data of a client over 1 round (basic composition).")
    assert laplace.delta == 0.0


def test_rounds_add_up_and_large_values_are_called_what_they_are():
    laplace = statement(Chain.of("dp-laplace:epsilon=40"), EXPOSURE)
    assert laplace.epsilon == 1200.0
    assert laplace.sentence.endswith("(basic composition), which is no protection.")
    weak = statement(Chain.of("dp-laplace:epsilon=4"), dataclasses.replace(EXPOSURE, rounds=3))
    assert "ε = 12 for all data of a client over 3 rounds (basic composition), which is weak." in weak.sentence


def test_pure_local_privacy_is_stated_per_release_and_composed_side_by_side():
    found = statement(Chain((Signs(),)), EXPOSURE)
    assert found.sentence == (
        "Formal guarantee: ε = 2 per release for the sign of each entry; composed over 1,000 coordinates and 30 rounds "
        "ε = 60,000, which is no protection."
    )
    assert (found.epsilon, found.delta) == (60_000.0, 0.0)
    steps = statement(Chain((Signs(),)), dataclasses.replace(EXPOSURE, steps_per_round=4))
    assert "1,000 coordinates and 120 releases in 30 rounds ε = 240,000" in steps.sentence


@pytest.mark.parametrize("spec", ["spm", "pnpm", "pm", "duchi", "ldp-fl", "ldp-fl:adaptive=true"])
def test_a_paragraph_composes_once_and_says_its_caveat_once(spec):
    found = statement(Chain.of(spec), EXPOSURE)
    caveat = Chain.of(spec).defenses[0].guarantee(EXPOSURE).caveat
    assert found.paragraph.count("composed over") == found.paragraph.count("no protection") == 1
    assert found.paragraph.lower().count(caveat.lower().rstrip(".")) == 1
    # Where it does not hold, it is told what it would cover; beside others, what those do.
    bare = statement(Chain.of(spec), dataclasses.replace(EXPOSURE, bare_rounds=2)).paragraph
    assert caveat.lower().rstrip(".") in bare.lower()
    assert "gaussian-noise: none is claimed" in statement(Chain.of(f"{spec}+gaussian-noise"), EXPOSURE).paragraph


def test_a_trusted_server_is_named_beside_the_number():
    found = statement(Chain.of("cdp:noise_multiplier=20"), EXPOSURE)
    assert "for all data of a client over 30 rounds" in found.sentence
    assert "the server, and who listens in on it, see every update as it is" in found.sentence


def test_clients_of_several_sizes_are_covered_by_the_worst():
    small, large = (dataclasses.replace(EXPOSURE, example_rate=q, steps_per_round=n) for q, n in ((0.3, 4), (0.02, 50)))
    both = statement(Chain.of("dp-sgd"), [large, small])
    assert both.epsilon == statement(Chain.of("dp-sgd"), small).epsilon
    assert both.epsilon > statement(Chain.of("dp-sgd"), large).epsilon


# ---- why a promise does not hold -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "chain, change, why",
    [
        (Chain.of("dp-sgd"), {"bare_rounds": 1}, "the first round runs without it"),
        (Chain.of("dp-sgd"), {"bare_rounds": 5}, "the first 5 rounds run without it"),
        (Chain.of("dp-gaussian"), {"bare_buffers": True}, "buffers (batch norm statistics) are shared beside"),
        (Chain((*Chain.of("dp-clip").defenses, Curious())), {}, "curious behind it may look at the data again"),
        # Written first, but it acts on the gradient that DP-SGD, the owner of the step, has taken.
        (Chain((Curious(), *Chain.of("dp-sgd").defenses)), {}, "curious behind it may look at the data again"),
        (Chain.of("fedem+dp-sgd"), {}, "fedem before it may let one example act on the gradients of others"),
        (Chain.of("ldpm+dp-sgd"), {}, "ldpm before it may let one example act on the gradients of others"),
    ],
)
def test_a_promise_that_does_not_hold_here_is_not_made(chain, change, why):
    found = statement(chain, dataclasses.replace(EXPOSURE, **change))
    assert not found.formal
    assert found.epsilon is None
    assert found.sentence.startswith("Formal guarantee: none. By itself dp-")
    assert why in found.sentence


def test_what_uses_the_update_alone_takes_nothing_away():
    alone = statement(Chain.of("dp-gaussian"), EXPOSURE)
    longer = statement(Chain.of("fedem+dp-gaussian+clip+gradient-dropout"), EXPOSURE)
    assert longer.sentence == alone.sentence
    assert "fedem: " in longer.paragraph
    assert "gradient-dropout: none; Gradient Dropout is not differentially private." in longer.paragraph


def test_noise_on_what_the_owner_of_the_step_gives_stands_behind_it_wherever_it_is_written():
    for spec in ("dp-gaussian+dp-sgd", "dp-sgd+dp-gaussian", "clip+dp-sgd"):
        assert statement(Chain.of(spec), EXPOSURE).formal


def test_several_formal_guarantees_stand_side_by_side_and_are_not_summed():
    found = statement(Chain.of("dp-clip:sigma=10+cdp:noise_multiplier=20"), EXPOSURE)
    assert found.formal
    assert found.epsilon is None
    local, central = (statement(Chain.of(spec), EXPOSURE) for spec in ("dp-clip:sigma=10", "cdp:noise_multiplier=20"))
    assert found.sentence.startswith("Formal guarantees, each by itself, not to be added or combined: dp-clip: ε = ")
    for each in (local, central):
        assert each.sentence.removeprefix("Formal guarantee: ").partition(".")[0] in found.sentence
    assert "cdp: This holds against those who see the models only" in found.sentence


# ---- what a run exposes ----------------------------------------------------------------------------------------


def test_exposure_of_a_run():
    task = small_task(norm=False)  # 13, 8, 3 and 21 examples
    found = exposures(task, FederationSettings(rounds=7, batch_size=5, sampling_rate=0.3, warmup_rounds=2))
    assert [(each.example_rate, each.steps_per_round) for each in found] == [
        (1.0, 1),
        (5 / 8, 2),
        (5 / 13, 3),
        (5 / 21, 5),
    ]
    for each in found:
        assert (each.rounds, each.bare_rounds, each.sampling_rate) == (5, 2, 0.5)  # 2 of 4 clients
        assert each.parameters == sum(p.numel() for p in task.model.parameters())
        assert (each.delta, each.bare_buffers, each.local_steps) == (1e-5, False, 1)
    averaged = exposures(task, FederationSettings(protocol="fedavg", rounds=7, batch_size=5, local_epochs=3))
    assert [(each.steps_per_round, each.local_steps) for each in averaged] == [(1, 3), (1, 6), (1, 9), (1, 15)]


@pytest.mark.parametrize("buffers, bare", [("shared", True), ("local", False)])
def test_buffers_that_travel_are_seen(buffers, bare):
    task = small_task(norm=True, buffers=buffers)
    assert exposures(task, FederationSettings())[0].bare_buffers == bare


def test_an_audit_states_the_epsilon_in_its_verdict():
    task = fv.task("digits", model="mlp:hidden=[16],activation=sigmoid", clients=4)
    found = fv.audit(
        task,
        "dp-sgd:noise_multiplier=2",
        "inverting-gradients:steps=5",
        federation=FederationSettings(rounds=2, batch_size=32),
        settings=fv.AuditSettings(victims=4, rounds=(1, 2)),
        backend="stacked",
    ).result
    sentence = found.verdict.sentences[-1]
    assert sentence.startswith("Formal guarantee: ε = ")
    assert "at δ = 1e-05 for one training example over 2 rounds (PLD accountant)" in sentence
    assert found.defense.formal
    said, _, bound = sentence.partition(" From one update ")
    assert bound == "no attacker at all can pick the right one of 100 more often than 10 % of the time."
    assert found.defense.guarantee.startswith(said)
    assert LOW_BITS in found.defense.guarantee


def test_an_audit_of_a_model_that_shares_batch_norm_claims_nothing():
    torch.manual_seed(0)
    layers = (nn.Flatten(), nn.Linear(64, 8), nn.BatchNorm1d(8), nn.Sigmoid(), nn.Linear(8, 10))
    generator = torch.Generator().manual_seed(0)
    sizes = (40, 10, 200)
    data = tuple((torch.rand(size, 1, 8, 8, generator=generator), torch.arange(size) % 10) for size in sizes)
    task = fv.Task(nn.Sequential(*layers), data, clients=[torch.arange(20), torch.arange(20, 40)])
    found = fv.audit(
        task,
        "dp-gaussian",
        "inverting-gradients:steps=2",
        settings=fv.AuditSettings(victims=2, batch_size=2),
        train=False,
        backend="stacked",
    ).result
    assert not found.defense.formal
    assert "batch norm statistics" in found.verdict.sentences[-1]


def test_the_accountants_library_is_not_imported_before_it_is_needed():
    program = (
        "import sys, fedveil.ledger.statement as ledger; from fedveil.defenses.chain import Chain;"
        "from fedveil.defenses.guarantee import Exposure;"
        "ledger.statement(Chain.of('dp-gaussian+clip'), Exposure(9, 3, 1, 1.0)); print('dp_accounting' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


# ---- what no number covers ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("spec", ["dp-sgd", "dp-gaussian", "dp-laplace", "dp-clip:sigma=10", "cdp", "spm", "pm"])
def test_the_number_of_examples_is_not_covered_and_that_is_said_once(spec):
    assert statement(Chain.of(spec), EXPOSURE).paragraph.count("How many examples a client has is not covered") == 1


def test_it_is_not_said_where_nothing_is_promised():
    assert "How many examples" not in statement(Chain.of("gradient-dropout"), EXPOSURE).paragraph


def test_the_low_bits_are_those_of_every_type_in_the_update():
    task = small_task(norm=False, dtype=torch.bfloat16)
    task.model[2].double()
    (found, *_) = exposures(task, FederationSettings())
    assert found.dtypes == ("bfloat16", "float64")
    assert "in bfloat16 and float64 the low bits" in statement(Chain.of("dp-gaussian"), found).paragraph


def several_labels():
    generator = torch.Generator().manual_seed(0)
    labels = (torch.arange(72) % 2).reshape(24, 3).float()
    parts = tuple((torch.rand(24, 6, generator=generator), labels) for _ in range(3))
    return fv.Task(nn.Linear(6, 3), parts, clients=3)


def running_text():
    """As much of a language model's task as the ledger looks at: it has neither classes nor labels."""
    clients = tuple(torch.arange(24).chunk(3))
    model = nn.Sequential(nn.Embedding(7, 4), nn.Linear(4, 7))
    return SimpleNamespace(model=model, clients=clients, train=range(24), buffers="shared", classes=None)


@pytest.mark.parametrize("make", [several_labels, running_text])
@pytest.mark.parametrize("protocol", ["fedsgd", "fedavg"])
def test_tasks_without_classes_have_a_statement_too(make, protocol):
    task = make()
    assert task.classes is None
    found = statement(
        Chain.of("dp-sgd"), exposures(task, FederationSettings(rounds=3, batch_size=2, protocol=protocol))
    )
    assert found.epsilon > 0
    assert "for one training example over 3 rounds" in found.sentence
