"""DLG, TAG and LAMP on sentences of a small transformer."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

import fedveil as fv
from attacks.texts import running_task, same_sentences, text_scene, text_task
from fedveil.attacks import matcher
from fedveil.attacks.dlg_text import DLGText
from fedveil.attacks.embedding_space import FREE
from fedveil.attacks.embeddings import EmbeddingNorm, fitting_text
from fedveil.attacks.lab import Lab
from fedveil.attacks.lamp import LAMP
from fedveil.attacks.language import NGRAM, SMALL, language_of, learned
from fedveil.attacks.match import l1_l2, l1_l2_by_layer
from fedveil.attacks.optimizers import Descent
from fedveil.attacks.rearranging import INPUTS, Rearranging
from fedveil.attacks.scene import Scene, Workbench
from fedveil.attacks.sentence_lengths import read_lengths
from fedveil.attacks.tag import TAG
from fedveil.attacks.text_matching import TextMatching
from fedveil.attacks.undoing import undone_sentences
from fedveil.clients.batch import ClientBatch
from fedveil.defenses.base import Defense
from fedveil.defenses.chain import Chain
from fedveil.errors import FedveilError
from fedveil.fields import declared
from fedveil.streams import Streams
from fedveil.tasks.inputs import Inputs, leaf, with_leaf
from fedveil.tasks.text_form import NO_TOKEN, OFFSET

FROZEN = "tiny-transformer:width=64,embeddings=frozen"
QUICK = LAMP(steps=2, starts=2, moves=0, language="none")


def told(task: fv.Task, batches: list[list[int]]) -> tuple[Scene, Tensor]:
    """A scene whose attacker knows labels and lengths, and the sentences."""
    scene, true = text_scene(task, batches)
    labels = torch.stack([task.train.batch(rows)[1] for rows in batches])
    return replace(scene, labels=labels, lengths=(true != NO_TOKEN).sum(-1)), true


def lab_of(task: fv.Task, scene: Scene, rows: range) -> Lab:
    return Lab(scene.public, scene.updates.rows([0]), task.train.subset(rows), Streams.seeded(0, [0], "lab"))


@pytest.mark.parametrize("model", [FROZEN, "bert:width=48,layers=1,heads=2"])
def test_slopes_in_embeddings_are_those_of_a_plain_loop(tmp_path: Path, model: str) -> None:
    task = text_task(tmp_path, model)
    scene, true = told(task, [[0, 1], [2, 3]])
    problem = QUICK.problem_of(scene)
    recipe = fitting_text(replace(QUICK.recipe(), match="l2"), problem.text)
    engine = matcher.Matcher(problem, recipe, Workbench(backend="stacked"))
    of = recipe.objectives[0]
    at = engine._start(problem, 0, of)
    slopes, _, totals = engine._evaluate(at, engine._fixed(problem, of), of)
    assert problem.text is not None
    for victim in range(2):
        free, table = problem.text.tokens[victim] == FREE, problem.text.table
        moved = at[INPUTS][victim].clone().requires_grad_()
        own = table[problem.text.tokens[victim].clamp_min(0)]
        given = scene.public.layout.inputs(true[victim])
        places = free.shape[1]
        ids, mask = given["input_ids"][:, :places], given["attention_mask"][:, :places]
        offset = torch.where(free[..., None], moved, own) - table[ids]
        params = {name: p for name, p in task.model.named_parameters() if name in problem.target}
        loss = task.loss(task.model(ids, mask, offset), scene.labels[victim])
        found = torch.autograd.grad(loss, list(params.values()), create_graph=True)
        cost = sum((a - problem.target[n][victim]).square().sum() for n, a in zip(params, found, strict=True))
        cost = cost + recipe.priors[0](moved)
        wanted = torch.autograd.grad(cost, moved)[0]
        assert float(totals[victim]) == pytest.approx(float(cost), rel=1e-4)
        assert torch.allclose(slopes[INPUTS][victim], wanted, rtol=1e-3, atol=1e-5 * float(wanted.abs().max()))


def test_many_tries_cost_what_each_costs_alone(tmp_path: Path) -> None:
    scene, _ = told(text_task(tmp_path, FROZEN), [[0], [1]])
    problem = QUICK.problem_of(scene)
    recipe = fitting_text(QUICK.recipe(), problem.text)
    of = recipe.objectives[0]
    made = [matcher.Matcher(problem, recipe, Workbench(backend=backend)) for backend in ("stacked", "loop")]
    each = [made[0]._start(problem.rows([0, 1]), number, of) for number in range(3)]
    many = {name: torch.stack([one[name] for one in each], 1) for name in each[0]}
    fixed = made[0]._fixed(problem, of)
    alone = torch.stack([made[0]._evaluate(one, fixed, of)[2] for one in each], 1)
    assert torch.allclose(made[0]._totals(many, fixed, of), alone, rtol=1e-4)
    assert torch.allclose(made[1]._totals(many, fixed, of), alone, rtol=1e-4)


@pytest.mark.parametrize(
    "attack",
    [
        TAG(steps=60, starts=4, lr=0.03),
        DLGText(steps=100, starts=4, lr=0.03),
        LAMP(steps=60, starts=4, moves=0, language="none", lr=0.03),
    ],
)
def test_tokens_of_single_sentences_are_found(tmp_path: Path, attack: TextMatching) -> None:
    scene, true = told(text_task(tmp_path, FROZEN), [[2]])
    found = attack.run(scene)
    there = true != NO_TOKEN
    assert float((found.inputs == true)[there].float().mean()) > 0.75
    assert bool(((found.inputs == NO_TOKEN) == ~there).all())
    assert torch.isfinite(found.cost).all()


def test_moves_restore_an_order_that_slopes_do_not(tmp_path: Path) -> None:
    """From the right tokens in a wrong order: with slopes that change nothing, only moves can help."""
    scene, true = told(text_task(tmp_path, FROZEN), [[0], [5]])
    still = LAMP(steps=3, lr=1e-9, starts=1, every=1, moves=60, language="none", norm=0)
    problem = still.problem_of(scene)
    assert problem.text is not None
    right = problem.text.table[true[..., : problem.text.tokens.shape[2]].long().clamp_min(0)]
    turned = right.clone()
    for victim, stretch in enumerate(problem.text.stretches()):
        ((start, stop),) = stretch
        turned[victim, 0, start:stop] = right[victim, 0, start:stop].roll(2, 0)

    def after(attack: LAMP) -> float:
        recipe = fitting_text(attack.recipe(), problem.text)
        engine = matcher.Matcher(problem, recipe, Workbench())
        engine._start = lambda *_: {INPUTS: turned.clone()}  # type: ignore[method-assign]
        found = engine.run(problem, 0, matcher.Counter(None, 3))
        return same_sentences(problem.text.read(found.inputs), true)

    assert after(still) == 1
    assert after(replace(still, moves=0)) == 0


def test_language_decides_where_the_match_does_not(tmp_path: Path) -> None:
    task = text_task(tmp_path, FROZEN)
    scene, true = told(task, [[0]])
    fitted = learned(NGRAM, lab_of(task, scene, range(60)))
    problem = LAMP().problem_of(scene, fitted)
    text = problem.text
    assert text is not None
    right = text.table[true[..., : text.tokens.shape[2]].long().clamp_min(0)]
    ((start, stop),) = text.stretches()[0]
    turned = right.clone()
    turned[0, 0, start:stop] = right[0, 0, start:stop].roll(1, 0)

    def after(fluency: float) -> Tensor:
        optimizer = Rearranging(lr=0.0, starts=1, every=1, moves=80, fluency=fluency)

        def evaluate(at: dict[str, Tensor]) -> tuple[dict[str, Tensor], Tensor]:
            return {name: torch.zeros_like(tensor) for name, tensor in at.items()}, torch.zeros(1)

        def alike(at: dict[str, Tensor]) -> Tensor:
            return torch.zeros(at[INPUTS].shape[:2])

        nothing = {"project": lambda _: None, "before": lambda _: None, "after": lambda _: None}
        descent = Descent(
            evaluate, **nothing, total=lambda: torch.zeros(1), streams=scene.streams, totals=alike, text=text
        )
        return text.read(optimizer.minimize({INPUTS: turned.clone()}, 4, descent)[INPUTS])

    assert same_sentences(after(0.2), true) == 1
    assert same_sentences(after(0.0), true) == 0


@pytest.mark.parametrize("name", [NGRAM, SMALL])
def test_language_priors_know_sentences_from_their_words(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fedveil.attacks.language.STEPS", 60)
    task = text_task(tmp_path, FROZEN)
    scene, true = told(task, [[100], [101], [102], [103]])
    language = language_of(name, learned(name, lab_of(task, scene, range(90))), scene.public.layout.text)
    assert language is not None
    mixed = true.clone()
    sizes = (true != NO_TOKEN).sum(-1).flatten().tolist()
    for victim, size in enumerate(sizes):
        mixed[victim, 0, 1 : size - 1] = true[victim, 0, 1 : size - 1].flip(0)
    assert bool((language.nats(true) < language.nats(mixed)).all())
    assert torch.allclose(language.nats(true[:1].repeat(2, 2, 1)), language.nats(true[:1]).repeat(2), rtol=1e-4)


def test_lengths_of_sentences_are_read_off_the_rank(tmp_path: Path) -> None:
    scene, true = told(text_task(tmp_path, FROZEN), [[0], [1], [2]])
    assert torch.equal(read_lengths(scene), (true != NO_TOKEN).sum(-1))
    attack = LAMP(steps=2, starts=1, lengths="read", language="none")
    assert "lengths" not in attack.needs
    assert "reads the number of tokens off the update" in attack.threat.may
    found = attack.run(replace(scene, lengths=None)).inputs
    assert torch.equal(found == NO_TOKEN, true == NO_TOKEN)


def test_special_tokens_are_given_and_never_searched(tmp_path: Path) -> None:
    scene, true = told(text_task(tmp_path, FROZEN), [[0, 1]])
    text = scene.public.layout.text
    assert text is not None
    space = QUICK.problem_of(scene).text
    assert space is not None
    places = space.tokens.shape[2]
    given = space.tokens != FREE
    assert torch.equal(space.tokens[given].float(), true[..., :places][given])
    special = torch.tensor(sorted(text.special))
    read = space.read(space.table[special][:1].expand(1, 2, places, -1))
    assert not torch.isin(read[..., :places][~given], special).any()
    broken = space.read(torch.full((1, 2, places, text.width), torch.nan))
    assert broken.isnan().any()


@declared
class Shift(Defense):
    """Moves every embedding by the same vector."""

    place = "data"

    def perturb(self, batch: ClientBatch) -> Inputs:
        """By a half everywhere: much farther than tokens lie apart."""
        return with_leaf(batch.inputs, OFFSET, leaf(batch.inputs, OFFSET) + 0.5)


def test_a_replayed_perturbation_is_taken_off_before_tokens_are_read(tmp_path: Path) -> None:
    scene, true = told(text_task(tmp_path, FROZEN), [[0], [1]])
    space = QUICK.problem_of(scene).text
    assert space is not None
    moved = space.table[true[..., : space.tokens.shape[2]].long().clamp_min(0)] + 0.5
    scene = replace(scene, chain=Chain((Shift(),)))
    assert same_sentences(space.read(moved), true) == 0
    assert same_sentences(undone_sentences(scene, space, moved, scene.labels), true) == 1


def test_tags_absolute_part_falls_from_layer_to_layer() -> None:
    ones, zeros = {name: torch.ones(2) for name in "abcd"}, {name: torch.zeros(2) for name in "abcd"}
    weight = {name: torch.ones(2) for name in "abcd"}
    assert float(l1_l2_by_layer(ones, zeros, weight)) == pytest.approx(8 + 0.01 * 2 * (1 + 0.75 + 0.5 + 0.25))
    assert float(l1_l2(ones, zeros, weight)) == pytest.approx(8 + 0.01 * 8)


def test_the_norm_prior_is_zero_at_the_vocabularys_mean() -> None:
    embeddings = torch.nn.functional.normalize(torch.randn(2, 5, 8), dim=-1)
    assert float(EmbeddingNorm(3.0, norm=1.0)(embeddings)) == pytest.approx(0, abs=1e-6)
    assert float(EmbeddingNorm(3.0, norm=1.0)(2 * embeddings)) == pytest.approx(3, rel=1e-4)


def test_what_it_cannot_attack_is_refused_in_a_line(tmp_path: Path) -> None:
    scene, _ = text_scene(running_task(tmp_path), [[0]])
    with pytest.raises(FedveilError, match="running text has none"):
        QUICK.check(scene)
    with pytest.raises(FedveilError, match="no causal language model"):
        LAMP(language=str(tmp_path)).problem_of(told(text_task(tmp_path, FROZEN), [[0]])[0])
    with pytest.raises(FedveilError, match="lengths of the sentences are not known"):
        QUICK.run(replace(told(text_task(tmp_path, FROZEN), [[0]])[0], lengths=None))
