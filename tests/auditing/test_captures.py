"""Updates of one's own are attacked, scored and judged like an audit's; what cannot be is refused in one line."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

import fedveil as fv
from fedveil.attacks.base import Attack
from fedveil.attacks.finding import Links, Reconstruction
from fedveil.attacks.lab import Lab
from fedveil.attacks.scene import Scene
from fedveil.auditing.audit_result import AuditResult
from fedveil.auditing.capture_checks import CaptureSetting, check_captures, epochs_alike
from fedveil.auditing.result import load_result
from fedveil.auditing.store import Store
from fedveil.defenses.chain import Chain
from fedveil.errors import FedveilError
from fedveil.federation.capture import Capture, Truth
from fedveil.fields import declared
from fedveil.registry import models
from fedveil.tasks.models.mlp import MLP

LOSS = nn.functional.cross_entropy
QUICK = fv.AuditSettings(reference="none")
SHORT = fv.attacks.InvertingGradients(steps=3, restarts=1)
Batch = tuple[Tensor, Tensor]


def pixels(first: int, count: int) -> Batch:
    """Digits as a loop of one's own may take them: pixels between 0 and 1."""
    task = fv.task("digits", model="mlp:hidden=[4]")
    assert task.normalization is not None
    inputs, labels = task.train.batch(range(first, first + count))
    assert isinstance(inputs, Tensor)
    return task.normalization.pixels(inputs).clamp(0, 1), labels


@pytest.fixture(scope="module")
def model() -> nn.Module:
    torch.manual_seed(0)
    return MLP(hidden=(48,)).build((1, 8, 8), 10)


@pytest.fixture(scope="module")
def others() -> Batch:
    return pixels(100, 300)


@pytest.fixture(scope="module")
def batches() -> list[Batch]:
    inputs, labels = pixels(0, 8)
    return [(inputs[k : k + 1], labels[k : k + 1]) for k in range(8)]


def guarded(model: nn.Module, batches: list[Batch], defense: str | None = None, **facts: Any) -> list[Capture]:
    """What a server sees of each batch's gradient, from a plain loop."""
    guard, seen = fv.Guard(model, LOSS, defense, seed=1), []
    for x, y in batches:
        model.zero_grad()
        guard.backward(x, y)
        seen.append(guard.capture(facts={"shape": [1, 8, 8], **facts}))
    model.zero_grad()
    return seen


def told(result: AuditResult, tmp_path: Path) -> str:
    """All that a reader meets: table, verdict and report."""
    page = result.report(tmp_path / "report.html").read_text(encoding="utf-8")
    return f"{result.leakage}\n{result.verdict}\n{page[page.index('<main>') :]}"


# ---- from one's own loop to a verdict --------------------------------------------------------------------------


def test_an_undefended_loop_is_exposed(model: nn.Module, batches: list[Batch], others: Batch, tmp_path: Path) -> None:
    result = fv.attack(guarded(model, batches), "analytic", model=model, truth=batches, data=others, settings=QUICK)
    found = result.result
    assert {answer.question: answer.status for answer in found.verdict.answers} == {
        "reconstruct": "exposed",
        "link": "exposed",
        "member": "not judged",
    }
    assert [(row.question, row.role) for row in found.rows] == [
        ("reconstruct", "naive"),
        ("reconstruct", "noise-floor"),
        ("link", "naive"),
        ("link", "noise-floor"),
        ("reconstruct", "mean-floor"),
    ]
    assert result.leakage["naive", "psnr"].low >= 80
    assert result.leakage["naive", "linked"].mean == result.leakage["naive", "identified"].mean == 1
    assert result.leakage["noise-floor", "linked"].mean < 0.3
    assert found.candidates == 100
    assert found.attacked == "8 updates of one image each, captured in round 1 of client 0"
    assert found.protocol == "captured gradients"
    assert found.verdict.sentences[0].startswith("An attacker who takes the updates as they are picks the right image")
    assert "Cost: not measured" in result.verdict
    said = told(result, tmp_path)
    assert "updates as they are *" in said
    assert "Takes updates as they are" in said
    for words in ("ceiling", "defended, naive", "Undefended:", "not know the defense", "knows the defense"):
        assert words not in said, words
    assert "under the defense" not in said
    assert found.provenance.hashes.keys() == {"captures", "data"}
    assert [each["sha256"] for each in found.provenance.config["captures"]] == [
        capture.content for capture in guarded(model, batches)
    ]


def test_findings_are_there_by_attack_and_role(model: nn.Module, batches: list[Batch], others: Batch) -> None:
    result = fv.attack(guarded(model, batches), "analytic", model=model, truth=batches, data=others, settings=QUICK)
    assert {name: list(roles) for name, roles in result.findings.items()} == {
        "analytic": ["naive", "noise-floor"],
        "link": ["naive", "noise-floor"],
    }
    rebuilt, linked = result.findings["analytic"]["naive"], result.findings["link"]["naive"]
    assert isinstance(rebuilt, Reconstruction)
    assert isinstance(linked, Links)
    assert torch.allclose(rebuilt.inputs[:, 0], torch.cat([x for x, _ in batches]), atol=1e-4)
    assert rebuilt.labels[:, 0].tolist() == [int(y) for _, y in batches]
    assert linked.scores.shape == (8, 100)


def test_what_the_attacker_finds_does_not_depend_on_the_truth(
    model: nn.Module, batches: list[Batch], others: Batch
) -> None:
    captures = guarded(model, batches)
    swapped = [batches[-1], *batches[:-1]]
    given: list[dict[str, Any]] = [{}, {"truth": batches}, {"truth": swapped, "data": others}]
    found = [fv.attack(captures, "analytic", model=model, settings=QUICK, **each) for each in given]
    first, *rest = (each.findings["analytic"]["naive"] for each in found)
    for other in rest:
        assert torch.equal(first.inputs, other.inputs)  # type: ignore[union-attr]
    assert found[2].leakage["naive", "identified"].mean < 0.5  # of other images, none was found


def test_a_defense_is_known_from_the_capture_or_stated(
    model: nn.Module, batches: list[Batch], others: Batch, tmp_path: Path
) -> None:
    captures = guarded(model, batches, "gradient-dropout:keep=0.6")
    given: dict[str, Any] = {"model": model, "truth": batches, "data": others, "settings": QUICK}
    result = fv.attack(captures, "analytic", **given)
    roles = ["naive", "adaptive", "noise-floor"]
    assert [row.role for row in result.result.rows if row.question == "link"] == roles
    assert result.result.defense.spelled == "gradient-dropout:keep=0.6"
    said = told(result, tmp_path)
    assert "Knows the defense" in said
    assert "Does not know the defense" in said
    assert "takes updates as they are" not in said.lower()
    bare = [replace(each, facts={**each.facts, "defense": None}) for each in captures]
    stated = fv.attack(bare, "analytic", defense="gradient-dropout:keep=0.6", **given)
    assert stated.leakage["adaptive", "psnr"] == result.leakage["adaptive", "psnr"]
    unknown = fv.attack(bare, "analytic", **given)
    assert [row.role for row in unknown.result.rows if row.question == "link"] == ["naive", "noise-floor"]
    assert unknown.leakage["naive", "psnr"] == result.leakage["naive", "psnr"]
    settings = {each.switch: each.words for each in unknown.result.assumptions}
    assert "is not known" in settings["knowledge of the defense"]
    assert unknown.result.defense.name == "none stated"
    denied = fv.attack(captures, "analytic", defense="none", **given)
    assert (
        "no defense to know"
        in {each.switch: each.words for each in denied.result.assumptions}["knowledge of the defense"]
    )


def test_a_formal_guarantee_is_of_what_was_captured(model: nn.Module, batches: list[Batch], others: Batch) -> None:
    given: dict[str, Any] = {"model": model, "data": others, "settings": QUICK}
    one = guarded(model, batches[:1], "dp-gaussian:epsilon=1,clip=1")
    result = fv.attack(one, "analytic", truth=batches[0], **given)
    assert "ε = 1 at δ = 1e-05" in result.verdict
    assert "over 1 release" in result.verdict
    assert "drawn from a seed" not in result.result.defense.guarantee
    row = result.result.row("adaptive", "link", question="link")
    assert row is not None
    assert row.bound is not None
    assert 0.01 < row.bound < 0.2
    several = fv.attack(guarded(model, batches, "dp-gaussian:epsilon=1,clip=1"), "analytic", truth=batches, **given)
    assert "over 8 releases" in several.verdict
    assert several.result.verdict.status != "exposed"


def test_weights_after_local_steps(model: nn.Module, others: Batch) -> None:
    """As another framework sends them: nothing but the weights before and after."""
    sent = {name: p.detach().clone() for name, p in model.named_parameters()}
    captures, truths = [], []
    for client in range(8):
        x, y = pixels(2 * client, 2)
        own = MLP(hidden=(48,)).build((1, 8, 8), 10)
        own.load_state_dict(model.state_dict())
        optimizer = torch.optim.SGD(own.parameters(), lr=0.05)
        for part in (slice(0, 1), slice(1, 2)):
            optimizer.zero_grad()
            LOSS(own(x[part]), y[part]).backward()
            optimizer.step()
        captures.append(fv.capture(sent, own.state_dict(), kind="weights", batch_sizes=[1, 1], lr=0.05))
        truths.append((x, y))
    given: dict[str, Any] = {"model": model, "shape": (1, 8, 8), "truth": truths, "data": others, "settings": QUICK}
    result = fv.attack(captures, SHORT, **given)
    assert result.result.protocol == "captured weights after 2 local steps"
    assert result.leakage["naive", "linked"].mean == 1
    assert {each.switch: each.setting for each in result.result.assumptions}["local steps"] == "unrolled"
    uneven = [replace(each, lr=(0.05, 0.1)) for each in captures]
    result = fv.attack(uneven, SHORT, **given)
    words = {each.switch: each.setting for each in result.result.assumptions}
    assert (words["local steps"], words["order of the examples"]) == ("unrolled", "searched")


def test_captures_of_a_task_carry_all_that_is_needed(tmp_path: Path) -> None:
    task = fv.task("digits", model="mlp:hidden=[48]", clients=4, limit=200)
    run = fv.federate(task, None, fv.FederationSettings(rounds=1, batch_size=1, record_rounds=(1,)))
    for each in run.captured:
        each.saved(tmp_path / f"{each.client}.safetensors", tmp_path / f"{each.client}.truth")
    truths = [tmp_path / f"{client}.truth" for client in range(4)]
    result = fv.attack(tmp_path, "analytic", truth=truths, data=task, settings=QUICK)
    assert result.leakage["naive", "identified"].mean == 1
    assert result.result.data == "digits"
    assert result.result.model == "mlp"
    assert result.result.attacked == "4 updates of one image each, captured in round 1 of 4 clients"
    by_name = fv.attack(tmp_path, "analytic", truth=truths, data="digits", settings=QUICK)
    assert by_name.leakage["naive", "psnr"] == result.leakage["naive", "psnr"]
    assert by_name.result.verdict.status == result.result.verdict.status


def test_inputs_are_normalized_as_is_said_or_as_the_task_says(model: nn.Module) -> None:
    task = fv.task("digits", model=model)
    x, y = task.train.batch(range(4))
    assert isinstance(x, Tensor)
    normalized = [(x[k : k + 1], y[k : k + 1]) for k in range(4)]
    captures = guarded(model, normalized)
    with pytest.raises(FedveilError, match="instead of 0 to 1: say how the inputs were normalized"):
        fv.attack(captures, "analytic", model=model, truth=normalized)
    given: list[dict[str, Any]] = [{"data": task}, {"data": "digits", "normalization": task.normalization}]
    found = [
        fv.attack(captures, "analytic", model=model, truth=normalized, settings=QUICK, **each).leakage for each in given
    ]
    assert found[0]["naive", "identified"].mean == found[1]["naive", "identified"].mean == 1
    plain = [pixels(k, 1) for k in range(4)]
    taken = fv.attack(guarded(model, plain), "analytic", model=model, truth=plain, data="digits", settings=QUICK)
    for metric in ("psnr_pixel", "ssim"):  # the data set's images went through the same as the truth
        means = [each["mean-floor", metric].mean for each in (*found, taken.leakage)]
        assert means == pytest.approx([means[0]] * 3, rel=1e-3)


# ---- where something is missing ----------------------------------------------------------------------------------


def test_without_the_truth_nothing_is_judged_and_it_says_so(
    model: nn.Module, batches: list[Batch], others: Batch, tmp_path: Path
) -> None:
    captures = guarded(model, batches)
    result = fv.attack(captures, SHORT, model=model, data=others)
    verdict = result.result.verdict
    assert verdict.status == "not judged"
    assert "not known which images were behind the updates" in verdict.why
    assert "(`truth`)" in verdict.next_step
    assert "(`data`)" in verdict.next_step
    assert all(answer.status == "not judged" for answer in verdict.answers)
    assert [(row.role, list(row.metrics)) for row in result.result.rows] == [
        ("naive", ["attack_loss"]),
        ("noise-floor", ["attack_loss"]),
    ]
    run = result.result.attacks[0]
    assert (run.victims, run.batch_size, run.label_recovery) == (8, 1, None)
    assert "updates as they are" in str(result.leakage)
    assert "[" in str(result.leakage).splitlines()[2]  # the matching cost, with its interval
    settings = {each.switch: each.setting for each in result.result.assumptions}
    assert settings["labels"] == "recovered"  # it had been told to use known ones
    assert any(line.startswith("the attack link: ") for line in result.result.not_tried)
    assert not any("dlg, idlg, link" in line for line in result.result.not_tried)
    assert (result.images.originals.shape, len(result.images.labels)) == ((0, 1, 8, 8), 0)
    said = told(result, tmp_path)
    assert said.count("<img ") >= 16  # of eight updates, what was made of each and of noise
    assert "What the attack made of 8 images that are not known here" in said
    for words in ("leaks most", "most leaked", "labels were given", "No reconstructions to show for", "chance"):
        assert words not in said, words
    again, images = load_result(result.save(tmp_path / "saved"))
    assert (again.verdict, again.rows) == (verdict, result.result.rows)
    assert images.reconstructions.keys() == {(SHORT.name, "naive"), (SHORT.name, "noise-floor")}


def test_without_others_pictures_are_scored_but_not_judged(model: nn.Module, batches: list[Batch]) -> None:
    result = fv.attack(guarded(model, batches), "analytic", model=model, truth=batches)
    verdict = result.result.verdict
    assert result.leakage["naive", "psnr"].low >= 80
    assert "identified" not in result.result.rows[0].metrics
    assert verdict.status == "not judged"
    assert "no other images to tell the right ones from" in verdict.why
    assert "(`data`)" in verdict.next_step
    assert "(`truth`)" not in verdict.next_step


@declared
class Learning(Attack):
    """Guesses the mean of its auxiliary data."""

    name = "test-learning"
    needs = frozenset({"auxiliary"})  # type: ignore[assignment]

    def fit(self, lab: Lab) -> dict[str, Tensor]:
        assert lab.auxiliary is not None
        inputs, _ = lab.auxiliary.batch(range(len(lab.auxiliary)))
        assert isinstance(inputs, Tensor)
        return {"mean": inputs.mean(0), "count": torch.tensor(len(inputs))}

    def run(self, scene: Scene, fitted: Any = None) -> Reconstruction:
        guess = fitted["mean"].expand(scene.count, scene.batch_size, *scene.public.layout.shape)
        labels = torch.zeros(scene.count, scene.batch_size, dtype=torch.int64)
        return Reconstruction(guess, labels, torch.full((scene.count,), torch.nan), 0.0)


def test_attacks_that_learn_get_half_of_the_others(model: nn.Module, batches: list[Batch], others: Batch) -> None:
    captures = guarded(model, batches[:2])
    result = fv.attack(captures, Learning(), model=model, data=others)
    guess = result.findings["test-learning"]["naive"]
    assert torch.allclose(guess.inputs[0, 0], others[0][1::2].mean(0), atol=1e-6)  # type: ignore[union-attr]
    with pytest.raises(FedveilError, match="test-learning cannot be run: there are no auxiliary data"):
        fv.attack(captures, Learning(), model=model, settings=replace(QUICK, link=False))


@declared
class Shown(Attack):
    """Remembers what it was shown, and picks the first candidate."""

    name = "test-shown"
    question = "link"
    needs = frozenset({"candidates"})  # type: ignore[assignment]
    scenes: ClassVar[list[Scene]] = []

    def run(self, scene: Scene, fitted: Any = None) -> Links:
        self.scenes.append(scene)
        assert scene.candidates is not None
        scores = torch.zeros(scene.count, scene.candidates.count)
        scores[:, 0] = 1
        return Links(scores, torch.zeros(scene.count, dtype=torch.bool), 0.0)


@pytest.mark.parametrize("defense, one", [("dp-sgd:noise_multiplier=1,clip=1", True), ("clip", False)])
def test_candidates_fit_what_the_guarantee_protects(model: nn.Module, others: Batch, defense: str, one: bool) -> None:
    """Where one example is protected, the rest of its batch counts as known."""
    batch = pixels(0, 2)
    captures = guarded(model, [batch], None)
    Shown.scenes.clear()
    fv.attack(captures, Shown(), model=model, truth=batch, data=others, settings=QUICK, defense=defense)
    assert Shown.scenes[0].candidates is not None
    inputs = Shown.scenes[0].candidates.inputs
    assert isinstance(inputs, Tensor)
    assert bool((inputs[0, :, 1] == batch[0][1]).all()) is one
    assert len(inputs[0, :, 0].unique(dim=0)) == 100


# ---- what is kept ----------------------------------------------------------------------------------------------


def test_nothing_is_computed_twice(model: nn.Module, batches: list[Batch], others: Batch, tmp_path: Path) -> None:
    captures = guarded(model, batches)

    def made(**changed: Any) -> list[str]:
        store = Store(tmp_path / "store")
        given: dict[str, Any] = {"model": model, "truth": batches, "data": others, "settings": QUICK, **changed}
        fv.attack(given.pop("captures", captures), "analytic", store=store, **given)
        return sorted({stage for stage, _ in store.made})

    assert made() == ["attack", "score"]
    assert made() == []
    assert made(settings=replace(QUICK, exposed_above=0.9)) == []
    assert made(truth=[batches[-1], *batches[:-1]]) == ["attack", "score"]  # who links is shown other candidates
    assert made(truth=[batches[-1], *batches[:-1]], settings=replace(QUICK, link=False)) == []
    assert made(captures=guarded(model, batches, "clip:norm=0.1"), defense="none") == ["attack", "score"]
    assert made(loss=lambda output, targets: 2 * LOSS(output, targets)) == ["attack", "score"]


# ---- what is refused -------------------------------------------------------------------------------------------

FACTS = {"model": "mlp:hidden=[3]", "shape": [1, 4, 4], "classes": 3, "mean": [0.5], "std": [0.2], "local_epochs": 1}


def captured(facts: dict[str, object] | None = None, **changed: Any) -> Capture:
    model = MLP(hidden=(3,)).build((1, 4, 4), 3)
    row = {name: parameter.detach() for name, parameter in model.named_parameters()}
    fields: dict[str, Any] = {"kind": "gradient", "before": row, "shared": row, "lr": (0.1,), "batch_sizes": (2,)}
    return Capture(**{**fields, **changed}, client=0, round=1, facts={**FACTS, **(facts or {})})


def local(sizes: tuple[int, ...], lr: float = 0.1, **facts: object) -> Capture:
    """The update after local steps of these sizes."""
    return captured(facts, kind="weights", steps=len(sizes), lr=(lr,) * len(sizes), batch_sizes=sizes)


@pytest.mark.parametrize(
    "facts, line",
    [
        ({"shape": [1, 2**19, 2**20]}, "does not fit the model"),  # would take terabytes
        ({"shape": [1, 4, 4, 1, 1]}, "not inputs of \\(1, 4, 4, 1, 1\\)"),
        ({"shape": [16], "mean": None, "std": None}, "shape \\(channels, height, width\\), not inputs of \\(16,\\)"),
        ({"shape": None}, "does not tell the shape of an input"),
        ({"classes": None}, "does not tell the number of classes"),
        ({"model": None}, "does not name its model"),
        ({"model": {"hidden": [3]}}, "does not name its model"),
        ({"model": {"name": "mlp", "hiden": [3]}}, "no field 'hiden'"),
        ({"model": "mlp:hidden=[2000000000]"}, "does not fit the model"),
        ({"model": "bert"}, "bert"),
        ({"model": "theirs.py:Net"}, "out of a Python file, theirs.py:Net: give that file with --model"),
        ({"loss": "mse_loss"}, "made under the loss 'mse_loss', not cross-entropy"),
        ({"defense": "dropout"}, "unknown defense 'dropout'"),
        ({"defense": "ldp-fl"}, "ldp-fl protects weights or a change of weights, but here it would meet a gradient"),
    ],
    ids=str,
)
def test_what_a_capture_says_of_itself_is_not_trusted(facts: dict[str, object], line: str) -> None:
    check_captures([captured()], CaptureSetting())
    with pytest.raises(FedveilError, match=line) as caught:
        check_captures([captured(facts)], CaptureSetting())
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 500


def test_what_an_attack_would_need_is_told_before_it_starts() -> None:
    many = captured(batch_sizes=(10**6,))
    with pytest.raises(
        FedveilError, match=r"50,000 x 1,000,000 examples of shape \(1, 4, 4\) needs .* GiB or more"
    ) as caught:
        check_captures([many] * 50_000, CaptureSetting())
    assert "this machine has" in str(caught.value)


def test_an_input_of_another_shape_does_not_go_through_the_model() -> None:
    """A convolution fits any picture; what follows it does not."""
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(2 * 2 * 2, 3))
    row = {name: parameter.detach() for name, parameter in model.named_parameters()}
    capture = captured(before=row, shared=row)
    assert check_captures([capture], CaptureSetting(model=model)).classes == 3
    for shape in ((1, 5, 4), (1, 2, 2)):
        with pytest.raises(FedveilError, match="does not take inputs of shape"):
            check_captures([capture], CaptureSetting(model=model, shape=shape))
    with pytest.raises(FedveilError, match=r"normalization is of 1 channels, an input's shape is \(2, 4, 4\)"):
        check_captures([capture], CaptureSetting(model=model, shape=(2, 4, 4)))
    with pytest.raises(FedveilError, match="tells 3 classes apart, not 5"):
        check_captures([capture], CaptureSetting(model=model, classes=5))
    with pytest.raises(FedveilError, match=r"0.weight is torch.float32 in the update and torch.float64"):
        check_captures([capture], CaptureSetting(model=model.double()))


@pytest.mark.parametrize("name", ["mlp:hidden=[3]", "lenet", "lenet5", "cnn", "convnet", "resnet18"])
def test_every_model_can_be_checked(name: str) -> None:
    row = {key: tensor.detach() for key, tensor in models.parse(name).build((1, 32, 32), 10).named_parameters()}
    facts = {"model": name, "shape": [1, 32, 32], "classes": 10}
    known = check_captures([captured(facts, before=row, shared=row)], CaptureSetting())
    assert known.classes == 10
    assert known.model_name == name.partition(":")[0]


def test_local_epochs_that_differ_are_known_as_such() -> None:
    for capture in (local((2,)), local((4, 2, 4)), local((4, 2, 4, 2), local_epochs=2), local((2, 4), lr=0.2)):
        assert epochs_alike(capture)
    for capture in (local((4, 2, 4, 1), local_epochs=2), local((3, 2), local_epochs=2)):
        assert not epochs_alike(capture)
        check_captures([capture], CaptureSetting())
    with pytest.raises(FedveilError, match="is not finite: the learning rates"):
        check_captures([captured(kind="delta", lr=(1e-300,))], CaptureSetting())


def test_captures_attacked_together_must_agree() -> None:
    with pytest.raises(FedveilError, match="must agree in batch_sizes"):
        check_captures([captured(), captured(batch_sizes=(3,))], CaptureSetting())
    with pytest.raises(FedveilError, match="in batch_sizes: 19 × 4, 2 and 19 × 4, 3; attack them one by one"):
        check_captures([local((*[4] * 19, last)) for last in (2, 3)], CaptureSetting())
    with pytest.raises(FedveilError, match=r"must agree in mean: \[0.5\] and \[0.4\]"):
        check_captures([captured(), captured({"mean": [0.4]})], CaptureSetting())
    with pytest.raises(FedveilError, match="there is no captured update"):
        check_captures([], CaptureSetting())


PIXELS = torch.rand(2, 1, 4, 4, generator=torch.Generator().manual_seed(0))
INPUTS, TARGETS = (PIXELS - 0.5) / 0.2, torch.tensor([0, 2])


@pytest.mark.parametrize(
    "truth, line",
    [
        ((INPUTS, torch.tensor([0, 3])), "between 0 and 2"),
        ((INPUTS, torch.tensor([-1, 0])), "between 0 and 2"),
        ((INPUTS, torch.zeros(2)), "whole numbers, one per example: not torch.float32"),
        ((INPUTS, torch.zeros(2, 2).long()), "whole numbers, one per example"),
        ((INPUTS[:1], TARGETS[:1]), "a truth holds 1 examples, its capture is of 2"),
        ((INPUTS, TARGETS[:1]), "differ in their number of examples"),
        ((INPUTS[:, :, :3], TARGETS), r"images of shape \(1, 3, 4\), its capture is of inputs of \(1, 4, 4\)"),
        ((INPUTS.flatten(1), TARGETS), "only images can be scored"),
        ((PIXELS.mul(255).byte(), TARGETS), "not torch.uint8"),
        ((4 * INPUTS, TARGETS), "range from .* instead of 0 to 1: say how the inputs were normalized"),
        ([(INPUTS, TARGETS)] * 2, "1 captures but 2 truths"),
        ([3], "a truth is .inputs, targets., a Truth or its file, not int"),
        ("nowhere", "there is no fedveil truth at nowhere"),
    ],
)
def test_a_truth_must_fit_its_capture(truth: Any, line: str) -> None:
    with pytest.raises(FedveilError, match=line):
        fv.attack(captured(), SHORT, truth=truth)


def test_a_truth_may_be_given_in_several_forms() -> None:
    capture = captured()

    def measured(truth: Any) -> Any:
        return fv.attack(capture, SHORT, truth=truth).leakage["naive", "mse"]

    pair = (INPUTS, TARGETS)
    assert measured(pair) == measured([pair]) == measured(Truth(INPUTS, TARGETS, seen=INPUTS))


def test_other_examples_must_be_of_the_same_kind() -> None:
    def refused(data: Any, line: str, **changed: Any) -> None:
        with pytest.raises(FedveilError, match=line):
            fv.attack(captured(), SHORT, truth=(INPUTS, TARGETS), data=data, **changed)

    task = fv.Task(MLP(hidden=(3,)).build((1, 4, 4), 3), (torch.rand(40, 1, 4, 4), torch.arange(40) % 3))
    refused("digits", r"digits has images of shape \(1, 8, 8\), the captures of \(1, 4, 4\)")
    refused("digts", "did you mean 'digits'")
    refused(3, "data must be a data set's name, tensors .inputs, labels. or a Task, not int")
    refused(task, "the task's pixels as they are and the captures' .* differ")
    refused((torch.rand(9, 1, 5, 4), torch.zeros(9).long()), r"data holds images of shape \(1, 5, 4\), the captures")
    refused((torch.rand(9, 1, 4, 4), torch.zeros(9).long()), "data must be inputs as the model takes them.* not normal")
    refused((INPUTS, torch.tensor([0, 7])), "data must be inputs as the model takes them, with their labels: .*7")


def test_what_else_is_refused() -> None:
    capture = captured()
    with pytest.raises(FedveilError, match="captures must be Capture objects or their files, not int"):
        fv.attack([3])  # type: ignore[list-item]
    with pytest.raises(FedveilError, match="link cannot be run: it needs what was behind the updates"):
        fv.attack(capture, "link")
    with pytest.raises(FedveilError, match="reads the label of a single example, and this update is of 2"):
        fv.attack(capture, "idlg")
    with pytest.raises(FedveilError, match="did you mean 'dlg'"):
        fv.attack(capture, "dgl")
    with pytest.raises(FedveilError, match="unknown backend"):
        fv.attack(capture, SHORT, backend="fats")  # type: ignore[arg-type]
    with pytest.raises(FedveilError, match="unknown defense"):
        fv.attack(capture, SHORT, defense="nonsense")
    with pytest.raises(FedveilError, match="1 candidate"):
        fv.attack(capture, SHORT, settings=fv.AuditSettings(candidates=1))
    assert Chain.of("clip").states_knowledge
    with pytest.raises(FedveilError, match="there is no fedveil capture at nowhere"):
        fv.attack("nowhere")
