"""Each original stands among others of its class, at a drawn place."""

from __future__ import annotations

import torch

from fedveil.attacks.scene import Public, Workbench
from fedveil.auditing.candidates import HeldOut, Originals, truth_of
from fedveil.auditing.case import Case
from fedveil.auditing.settings import AuditSettings
from fedveil.auditing.store import Store
from fedveil.leakage.pictures import Pictures
from fedveil.tasks.examples import ArrayExamples
from fedveil.tasks.models.mlp import MLP
from fedveil.tasks.normalization import Normalization

SHAPE = (1, 4, 4)
VICTIMS, SIZE, AMONG = 12, 3, 10


def case(seed: int = 0) -> Case:
    model, kind = MLP(hidden=(3,)).build(SHAPE, 2).double(), Pictures(Normalization((0.0,), (1.0,)))
    public = Public(model, torch.nn.functional.cross_entropy, kind.layout(SHAPE), 2)
    return Case("test", public, kind, AuditSettings(candidates=AMONG), Store(), Workbench(), seed)


def batches(count: int, first: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Pictures of one number each, and two classes."""
    values = torch.arange(first, first + count) / 1000
    return values[:, None, None, None].expand(-1, *SHAPE).clone(), torch.arange(count) % 2


def originals() -> Originals:
    inputs, labels = batches(VICTIMS * SIZE)
    inputs = inputs.reshape(VICTIMS, SIZE, *SHAPE)
    return Originals(inputs, labels.reshape(VICTIMS, SIZE), inputs)


def held_out(*, gives: bool = False, taken: int = 0) -> HeldOut:
    examples = ArrayExamples(*batches(200, first=500))
    return HeldOut.of(case().modality, examples, examples, gives=gives, taken=taken)


def test_the_original_is_at_its_place_and_nowhere_else() -> None:
    true = truth_of(case(), originals(), held_out(), one_example=False)
    assert true.truths.place is not None
    places, inputs, labels = true.truths.place, true.candidates.inputs, true.candidates.labels
    assert isinstance(inputs, torch.Tensor)
    assert inputs.shape == (VICTIMS, AMONG, SIZE, *SHAPE)
    assert inputs.dtype == torch.float64  # as the model takes them
    rows = torch.arange(VICTIMS)
    assert torch.equal(inputs[rows, places].float(), originals().inputs)
    same = (inputs == originals().inputs[:, None]).flatten(2).all(2)
    assert same.sum(1).tolist() == [1] * VICTIMS
    assert (labels == originals().labels[:, None]).all()  # others are of the same class
    assert len(set(places.tolist())) > 3
    other = truth_of(case(seed=1), originals(), held_out(), one_example=False)
    assert other.truths.place is not None
    assert not torch.equal(other.truths.place, places)


def test_candidates_may_differ_in_one_example_alone() -> None:
    inputs = truth_of(case(), originals(), held_out(), one_example=True).candidates.inputs
    assert isinstance(inputs, torch.Tensor)
    rest = originals().inputs[:, None, 1:].expand(-1, AMONG, -1, *SHAPE)
    assert torch.equal(inputs[:, :, 1:].float(), rest)
    assert len(inputs[0, :, 0].unique(dim=0)) == AMONG


def test_attackers_who_learn_and_judges_share_no_example() -> None:
    plain, shared = held_out(taken=20), held_out(taken=20, gives=True)
    assert (len(plain.labels), plain.given) == (180, None)
    assert shared.given is not None
    learned, _ = shared.given.batch(range(len(shared.given)))
    assert isinstance(learned, torch.Tensor)
    both = torch.cat([shared.inputs, learned]).flatten(1)[:, 0]
    assert sorted(both.tolist()) == plain.inputs.flatten(1)[:, 0].tolist()
    assert torch.allclose(plain.mean_input, torch.full(SHAPE, 0.5995))
