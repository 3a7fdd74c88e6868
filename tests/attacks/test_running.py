"""Scenes attacked together: alone equals together to the bit, here or in workers, and when workers are worth it."""

from dataclasses import replace

import pytest
import torch

from fedveil.attacks.inverting_gradients import InvertingGradients
from fedveil.attacks.running import run_each, run_on
from fedveil.attacks.scene import Workbench
from fedveil.defenses.chain import Chain
from fedveil.workers import Workers

from .small import SMOOTH, digits, noise_target, on_the_way, scene_of

QUICK = InvertingGradients(steps=12, restarts=2)


@pytest.fixture(scope="module")
def pool():
    with Workers(2) as workers:
        yield workers


def scenes(victims=3, model="lenet", **options):
    """As an audit has them: the updates themselves, noise in their place, and one who knows a defense."""
    problem = digits(model, victims=victims, **options)[2]
    plain = scene_of(problem)
    return {
        "ceiling": plain,
        "floor": scene_of(noise_target(problem)),
        "adaptive": replace(plain, chain=Chain.of("gradient-dropout:keep=0.6")),
    }


def assert_equal(found, expected):
    assert torch.equal(found.labels, expected.labels)
    assert torch.equal(found.cost, expected.cost)
    assert torch.equal(found.inputs, expected.inputs)
    assert torch.equal(found.costs, expected.costs)
    assert torch.equal(on_the_way(found), on_the_way(expected))


@pytest.mark.parametrize("backend", ["stacked", "loop"])
@pytest.mark.parametrize("chunk", [None, 2])
def test_a_role_alone_equals_the_role_in_a_stack_bit_for_bit(backend, chunk):
    given = scenes(model=SMOOTH)
    bench = Workbench(backend=backend, chunk=chunk)
    together = run_on(QUICK, given, {}, bench)
    for role, scene in given.items():
        assert_equal(run_on(QUICK, {role: scene}, {}, bench)[role], together[role])


@pytest.mark.compiles
def test_compiled_code_that_serves_several_roles_changes_none_of_them():
    given = scenes(model=SMOOTH)
    bench = Workbench(backend="compiled")
    together = run_on(QUICK, given, {}, bench)
    for role, scene in reversed(given.items()):
        assert_equal(run_on(QUICK, {role: scene}, {}, bench)[role], together[role])


def test_workers_find_the_same_to_the_bit(pool):
    given = scenes(victims=5, model=SMOOTH)
    told = []
    bench = Workbench(backend="stacked", chunk=2, workers=pool, report=lambda *step: told.append(step))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as a worker has
    try:
        here = run_on(QUICK, given, {}, replace(bench, workers=None, report=None))
    finally:
        torch.set_num_threads(threads)
    found = run_on(QUICK, given, {}, bench)
    for role in given:
        assert_equal(found[role], here[role])
    total = sum(QUICK.estimate(replace(scene, bench=bench)).steps for scene in given.values())
    assert total > 3 * 3 * 2 * 12  # roles, chunks of two victims, tries, steps; who knows the defense tries more
    assert told[-1] == (total, total)
    assert len(told) == total


@pytest.mark.parametrize("shared", [False, True], ids=["here", "workers"])
def test_each_scene_comes_as_soon_as_it_is_done(pool, shared):
    given, told = scenes(victims=3, model=SMOOTH), []
    bench = Workbench(
        backend="stacked", chunk=2, workers=pool if shared else None, report=lambda *step: told.append(step)
    )
    seen = [(role, len(told)) for role, _ in run_each(QUICK, given, {}, bench)]
    assert [role for role, _ in seen] == list(given)
    own = [QUICK.estimate(replace(scene, bench=bench)).steps for scene in given.values()]
    assert own[0] == 2 * 2 * (12 + 20)  # chunks, tries, steps of Adam and of the polish
    if not shared:  # workers may be at the next one already
        assert [steps for _, steps in seen] == [sum(own[: place + 1]) for place in range(len(own))]
    assert len(told) == sum(own)


def test_short_work_stays_in_this_process(monkeypatch):
    workers = Workers(2, least_seconds=20)
    monkeypatch.setattr(workers, "map", lambda *given: pytest.fail("processes were started"))
    given = scenes(victims=2, model=SMOOTH)
    run_on(InvertingGradients(steps=3, restarts=1), given, {}, Workbench(workers=workers))
    with pytest.raises(pytest.fail.Exception):
        run_on(InvertingGradients(steps=1_000_000, restarts=1), given, {}, Workbench(workers=workers))


def test_iterates_of_several_chunks_and_tries_are_those_of_the_winners():
    scene = scenes(victims=5, model=SMOOTH)["ceiling"]
    found = QUICK.run(replace(scene, bench=Workbench(backend="stacked", chunk=2)))
    assert torch.equal(found.iterates[-1], found.inputs)
