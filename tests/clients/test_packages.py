"""Compiled code that is kept: equal to the loop, bound by name, refused where it is not one's own or not whole."""

import json
import logging
import os
import shutil
import stat
import subprocess
import sys
import textwrap

import pytest
import torch
from torch import nn

from fedveil.clients import packages
from fedveil.clients.engine import Engine
from fedveil.clients.packages import Wanted, packaged
from fedveil.tree import Tree

from .plain import assert_trees_close, make_case


def doubled(params, inputs):
    return {name: 2 * tensor + inputs.sum() for name, tensor in params.items()}, inputs.relu()


ARGUMENTS = ({"b": torch.ones(3), "a": torch.arange(4.0)}, torch.tensor([[1.0, -2.0, 4.0], [0.5, 3.0, -1.0]]))


def wanted(arguments=ARGUMENTS, function=doubled, expected=None, **given):
    told = {"name": "test", "identity": "doubled", "expected": expected or (lambda: function(*arguments)), **given}
    return Wanted(function=function, arguments=arguments, **told)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A package that was made once: the compiler takes seconds."""
    folder = tmp_path_factory.mktemp("made")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FEDVEIL_CACHE", str(folder))
        assert packaged(wanted()) is not None
    return folder / "packages"


@pytest.fixture
def kept(made, tmp_path, monkeypatch):
    """A copy of it, which a test may spoil, and which cannot be made again."""
    monkeypatch.setenv("FEDVEIL_CACHE", str(tmp_path))
    monkeypatch.setattr(packages, "_made", lambda *_: pytest.fail("made again"))
    shutil.copytree(made, tmp_path / "packages")
    (code,) = (tmp_path / "packages").glob("*.so")
    return code


def loaded(**given):
    return packaged(wanted(**given), make=False)


def written_anew(path, content):
    """As another file: what is loaded stays as it is."""
    path.unlink()
    path.write_bytes(content)


# ---- what is kept --------------------------------------------------------------------------------------------


@pytest.mark.compiles
def test_a_later_run_loads_it_and_nobody_else_may_write_there(kept):
    found, relu = loaded()(*ARGUMENTS)
    assert stat.S_IMODE(kept.parent.stat().st_mode) == 0o700
    assert not list(kept.parent.glob(".making-*")), "the compiler's files are gone"
    assert list(found) == ["b", "a"]
    torch.testing.assert_close(found, doubled(*ARGUMENTS)[0])
    torch.testing.assert_close(relu, ARGUMENTS[1].relu())


@pytest.mark.compiles
def test_tensors_are_bound_by_name_and_come_in_the_order_of_the_arguments(kept):
    params, inputs = ARGUMENTS
    in_order, _ = loaded()({"a": params["a"], "b": params["b"]}, inputs)
    assert list(in_order) == ["a", "b"]
    torch.testing.assert_close(in_order, doubled(params, inputs)[0])


@pytest.mark.compiles
def test_other_strides_and_gradients_are_handled_and_other_shapes_and_types_refused(kept):
    params, inputs = ARGUMENTS
    package = loaded()
    odd = inputs.T.contiguous().T
    assert not odd.is_contiguous()
    live = {name: tensor.clone().requires_grad_() for name, tensor in params.items()}
    found, relu = package(live, odd)
    torch.testing.assert_close(found, doubled(params, inputs)[0])
    assert not relu.requires_grad
    for wrong in (inputs[:1], inputs.double(), inputs.reshape(3, 2)):
        with pytest.raises(RuntimeError):
            package(params, wrong)


@pytest.mark.compiles
@pytest.mark.parametrize(
    "spoil",
    [
        lambda code: written_anew(code, code.read_bytes()[:-1] + bytes([code.read_bytes()[-1] ^ 1])),
        lambda code: written_anew(code, code.read_bytes()[:1000]),
        lambda code: code.unlink(),
        lambda code: code.with_suffix(".json").unlink(),
        lambda code: code.with_suffix(".json").write_text("[" * 10_000),
        lambda code: code.with_suffix(".json").write_text("{}"),
        lambda code: code.with_suffix(".json").write_text(
            json.dumps(json.loads(code.with_suffix(".json").read_text()) | {"format": packages.FORMAT + 1})
        ),
        lambda code: code.chmod(0o666),
        lambda code: code.replace(code.with_name("elsewhere")) and code.symlink_to(code.with_name("elsewhere")),
    ],
    ids=["tampered", "cut", "gone", "no header", "deep", "empty", "other format", "writable by all", "a link"],
)
def test_what_is_not_whole_or_not_ones_own_is_not_loaded(kept, spoil):
    assert loaded() is not None
    spoil(kept)
    assert loaded() is None


@pytest.mark.compiles
def test_a_folder_that_others_may_write_to_is_not_used(kept):
    kept.parent.chmod(0o770)
    assert loaded() is None


@pytest.mark.compiles
def test_nor_is_another_users(kept, monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    assert loaded() is None


@pytest.mark.compiles
def test_one_that_gives_something_else_is_not_used(kept, caplog):
    params, inputs = ARGUMENTS
    off = ({name: tensor * 1.1 for name, tensor in doubled(params, inputs)[0].items()}, inputs.relu())
    with caplog.at_level(logging.WARNING, logger="fedveil"):
        assert loaded(expected=lambda: off) is None
    assert "does not give what the model gives" in caplog.text


@pytest.mark.compiles
def test_loading_imports_no_compiler(kept):
    code = """
        import sys
        from tests.clients.test_packages import ARGUMENTS, doubled, packaged, wanted
        found, _ = packaged(wanted(), make=False)(*ARGUMENTS)
        assert found["a"].equal(doubled(*ARGUMENTS)[0]["a"])
        sys.exit("torch._dynamo" in sys.modules or "torch._inductor" in sys.modules)
    """
    assert subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=False).returncode == 0


def test_the_key_changes_with_all_that_the_code_depends_on(monkeypatch):
    def key(leaves="(3,) float32", **given):
        return packages._key(wanted(**given), [leaves])

    assert key() == key()
    keys = {key(), key("(4,) float32"), key(identity="another"), key(options={"a": 1}), key(name="other")}
    keys.add(key(rewritten=lambda graph: graph))
    monkeypatch.setattr(torch, "get_num_threads", lambda: 77)
    keys.add(key())
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "none")
    keys.add(key())
    monkeypatch.setattr(torch, "__version__", "0.0")
    keys.add(key())
    monkeypatch.setattr(packages, "FORMAT", 0)
    keys.add(key())
    assert len(keys) == 10


@pytest.mark.parametrize("arguments", [(torch.ones(2), "text"), (torch.ones(2, device="meta"),)], ids=["text", "meta"])
def test_what_cannot_be_packaged_is_left_to_others(arguments, monkeypatch):
    monkeypatch.setattr(packages, "_made", lambda *_: pytest.fail("made"))
    assert packaged(wanted(arguments)) is None


def test_what_the_compiler_refuses_is_left_to_others(tmp_path, monkeypatch):
    monkeypatch.setenv("FEDVEIL_CACHE", str(tmp_path))

    def refuse(*_):
        raise RuntimeError("no such operation")

    monkeypatch.setattr(packages, "_traced", refuse)
    assert packaged(wanted()) is None
    assert not list((tmp_path / "packages").iterdir())


def test_those_not_used_for_longest_go(tmp_path, monkeypatch):
    monkeypatch.setattr(packages, "MOST_KEPT", 2)
    for age, name in enumerate("abc"):
        for suffix in (".so", ".json"):
            path = tmp_path / f"{name}{suffix}"
            path.touch()
            os.utime(path, (1e9 - age, 1e9 - age))
    (tmp_path / ".making-left").mkdir()
    os.utime(tmp_path / ".making-left", (1e9, 1e9))
    packages._prune(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.json", "a.so", "b.json", "b.so"]


# ---- the engine ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def case():
    found = make_case("small of everything", clients=3)
    assert found.buffers, "statistics of batch norm"
    return found


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("gradients")


@pytest.mark.compiles
def test_gradients_equal_the_loop_and_the_next_run_to_the_last_bit(case, cache, monkeypatch, caplog):
    monkeypatch.setenv("FEDVEIL_CACHE", str(cache))
    monkeypatch.setattr("fedveil.clients.engine.compile_once", lambda *_: pytest.fail("compiled by torch.compile"))
    with caplog.at_level(logging.WARNING, logger="fedveil"):
        first = case.engine("compiled", chunk=2).gradient(*case.arguments())
    (line,) = [record.getMessage() for record in caplog.records if record.name == "fedveil"]
    assert line.startswith("compiling the gradient of this model, which takes about")
    expected = case.engine("loop").gradient(*case.arguments())
    assert_trees_close(first.update, expected.update)
    assert_trees_close(first.buffers, expected.buffers)
    torch.testing.assert_close(first.loss, expected.loss)
    monkeypatch.setattr(packages, "_made", lambda *_: pytest.fail("made again"))
    params = Tree({name: case.params[name] for name in sorted(case.params)})  # as a file gives them
    engine = case.engine("compiled", chunk=2)
    assert engine.keeps_gradient(params, *case.arguments()[1:])
    again = engine.gradient(params, *case.arguments()[1:])
    assert list(again.update) == sorted(case.params)
    for name, tensor in first.update.items():
        assert torch.equal(again.update[name], tensor)


def test_without_one_the_gradient_is_not_kept(case, tmp_path, monkeypatch):
    monkeypatch.setenv("FEDVEIL_CACHE", str(tmp_path))
    assert not case.engine("compiled", chunk=2).keeps_gradient(*case.arguments())


def test_a_model_that_cannot_be_told_from_others_is_compiled_by_torch(tmp_path, monkeypatch):
    monkeypatch.setenv("FEDVEIL_CACHE", str(tmp_path))
    compiled = []
    monkeypatch.setattr("fedveil.clients.engine.compile_once", lambda function, name: compiled.append(name) or function)
    monkeypatch.setattr("fedveil.clients.engine.compiler_found", lambda: True)
    model = nn.Linear(3, 2)
    engine = Engine(model, lambda output, targets: (output.sum(1) - targets).square().mean(), backend="compiled")
    found = make_case("small of everything", clients=2)
    params = Tree.expand({name: parameter.detach() for name, parameter in model.named_parameters()}, 2)
    engine.gradient(params, Tree({}), torch.ones(2, 4, 3), torch.ones(2, 4), found.streams())
    assert compiled == ["gradient"]
