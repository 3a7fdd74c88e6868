"""Every attack says what an attacker must know, have and may do for it."""

import pytest

from fedveil.attacks.analytic import Analytic
from fedveil.attacks.dlg import DLG
from fedveil.attacks.idlg import IDLG
from fedveil.attacks.inverting_gradients import InvertingGradients
from fedveil.attacks.link import LinkTest
from fedveil.attacks.threat import ThreatModel
from fedveil.registry import attacks


@pytest.mark.parametrize(
    "attack, words",
    [
        (InvertingGradients(), "labels"),
        (InvertingGradients(labels="recovered"), "reads the labels off the update"),
        (Analytic(), "reads the labels off the update"),
        (IDLG(), "reads the label off the update"),
        (DLG(), "searches for the labels"),
        (LinkTest(), "candidates"),
    ],
    ids=str,
)
def test_what_an_attack_has(attack, words):
    assert attack.threat.words == words
    assert attack.threat.knows == ()  # which is for a role to add


def test_what_an_attack_learns_from_is_named():
    assert ThreatModel.of({"auxiliary", "labels", "batch of one"}).has == ("labels", "auxiliary data")
    assert ThreatModel.of(set()).words == "the update alone"


@pytest.mark.parametrize("name", attacks.entries())
def test_every_registered_attack_has_one_that_fits_its_needs(name):
    made = attacks.build(name)
    assert ("auxiliary data" in made.threat.has) == ("auxiliary" in made.needs)
    assert ("labels" in made.threat.has) == ("labels" in made.needs)
    assert ("candidates" in made.threat.has) == ("candidates" in made.needs)


def test_who_may_choose_has_what_any_of_them_has():
    one = ThreatModel(has=("labels",), knows=("the defense",))
    other = ThreatModel(has=("labels", "auxiliary data"), may=("searches for the labels",))
    both = ThreatModel.union([one, other])
    assert both == ThreatModel(
        has=("labels", "auxiliary data"), knows=("the defense",), may=("searches for the labels",)
    )
    assert both.words == "labels, auxiliary data, knows the defense, searches for the labels"
    assert ThreatModel.union([]) == ThreatModel()
