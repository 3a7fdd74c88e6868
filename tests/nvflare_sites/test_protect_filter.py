"""`ProtectFilter`: nothing passes it but protected updates, and numbers that are allowed."""

import json
import math

import numpy as np
import pytest
import torch

pytest.importorskip("nvflare")
from nvflare.apis.dxo import DXO, DataKind, from_shareable
from nvflare.apis.filter import ContentBlockedException
from nvflare.apis.fl_constant import ReturnCode
from nvflare.apis.fl_context import FLContext
from nvflare.apis.shareable import Shareable, make_reply

from fedveil.defenses.chain import Chain
from fedveil.errors import FedveilError
from fedveil.federation.capture import Capture
from fedveil.nvflare import ProtectFilter, ReceiveFilter
from fedveil.registry import defenses

CANARY = "canary of the patient"


def model(value=0.0):
    return {
        "fc.weight": np.full((4, 5), value, dtype=np.float32),
        "fc.bias": np.full((4,), value, dtype=np.float32),
    }


def running(value=0.0):
    return {
        "bn.running_mean": np.full((4,), value, dtype=np.float32),
        "bn.num_batches_tracked": np.asarray(int(value), dtype=np.int64),
    }


def result(data, kind=DataKind.WEIGHTS, **meta):
    return DXO(kind, data, {"NUM_STEPS_CURRENT_ROUND": 3, **meta}).to_shareable()


def context(received=None):
    fl_ctx = FLContext()
    if received is not None:
        task = DXO(DataKind.WEIGHTS, received).to_shareable()
        assert ReceiveFilter().process(task, fl_ctx) is task
    return fl_ctx


def sent(made, shareable, fl_ctx=None):
    return from_shareable(made.process(shareable, fl_ctx or context()))


def change(before, after):
    return math.hypot(*[float(np.linalg.norm(after[name] - before[name])) for name in model()])


# ---- what is protected --------------------------------------------------------------------------------------


def test_the_change_of_weights_is_protected_where_weights_are_sent():
    made = ProtectFilter("clip:norm=0.5,at=upload")
    out = sent(made, result(model(3.0)), context(model(1.0)))
    assert out.data_kind == DataKind.WEIGHTS
    assert change(model(1.0), out.data) == pytest.approx(0.5, rel=1e-5)
    assert {type(array) for array in out.data.values()} == {np.ndarray}
    assert {array.dtype for array in out.data.values()} == {np.dtype("float32")}


def test_a_change_that_is_sent_is_protected_as_it_is():
    out = sent(ProtectFilter("clip:norm=0.5,at=upload"), result(model(3.0), DataKind.WEIGHT_DIFF))
    assert change(model(0.0), out.data) == pytest.approx(0.5, rel=1e-5)


def test_weights_themselves_are_protected_by_a_method_of_the_upload():
    made = ProtectFilter("spm:epsilon=1")
    out = [sent(made, result(model(0.5))).data for _ in range(2)]
    assert not np.array_equal(out[0]["fc.weight"], model(0.5)["fc.weight"])
    assert not np.array_equal(out[0]["fc.weight"], out[1]["fc.weight"])  # noise is never drawn twice


def test_what_it_acts_on_can_be_chosen():
    both = {"of": "weights"}
    out = sent(ProtectFilter("clip:norm=0.5,at=upload", **both), result(model(3.0)))
    assert change(model(0.0), out.data) == pytest.approx(0.5, rel=1e-5)
    out = sent(
        ProtectFilter("clip:norm=0.5,at=upload", **both), result(model(2.0), DataKind.WEIGHT_DIFF), context(model(1.0))
    )
    assert change({name: -array for name, array in model(1.0).items()}, out.data) == pytest.approx(0.5, rel=1e-5)


def test_tensors_come_back_as_tensors():
    data = {name: torch.from_numpy(array) for name, array in model(2.0).items()}
    out = sent(ProtectFilter("clip:norm=0.5,at=upload"), result(data, DataKind.WEIGHT_DIFF))
    assert all(isinstance(tensor, torch.Tensor) for tensor in out.data.values())
    assert torch.equal(data["fc.bias"], torch.full((4,), 2.0))  # what came in is left as it is


OTHERS = {"cdp", "dp-sgd", "fedbarre", "fedcrap", "fedem", "gradient-masking", "gradient-pruning", "ldpm", "ppfa"}
OTHERS |= {"sign-compression", "soteria"}


@pytest.mark.parametrize("name", sorted(set(defenses.entries()) - OTHERS - {"none"}))
def test_every_defense_of_the_upload_protects_an_update(name):
    spec = f"{name}:at=upload" if "at" in getattr(defenses.load(name), "__dataclass_fields__", {}) else name
    out = sent(ProtectFilter(spec), result(model(4.0)), context(model(0.0))).data
    assert not np.array_equal(out["fc.weight"], model(4.0)["fc.weight"])


@pytest.mark.parametrize("name", sorted(OTHERS))
def test_every_other_defense_is_refused_when_the_filter_is_made(name):
    with pytest.raises(FedveilError):
        ProtectFilter(name)


@pytest.mark.parametrize(
    "spec, words",
    [
        ("gradient-dropout", "acts on the gradient of every step"),
        ("dp-sgd", "dp-sgd"),
        ("fedem", "acts on a client's data"),
        ("cdp", "acts on the server"),
        ("no-such", "unknown defense"),
    ],
)
def test_a_defense_that_cannot_protect_an_update_is_refused_at_once(spec, words):
    with pytest.raises(FedveilError, match=words):
        ProtectFilter(spec)


# ---- what is blocked ----------------------------------------------------------------------------------------


def nan():
    broken = model(1.0)
    broken["fc.bias"] = broken["fc.bias"] * np.nan
    return broken


def grown():
    return {**model(1.0), "fc.bias": np.zeros((9,), dtype=np.float32)}


BLOCKED = {
    "no DXO": (Shareable({"canary": CANARY}), "not a DXO"),
    "another kind": (DXO(DataKind.STATISTICS, {"mean": 1.0}).to_shareable(), "kind STATISTICS"),
    "a collection": (
        DXO(DataKind.COLLECTION, {"a": DXO(DataKind.WEIGHTS, model(1.0))}).to_shareable(),
        "kind COLLECTION",
    ),
    "an app's own kind": (DXO(DataKind.APP_DEFINED, {"canary": CANARY}).to_shareable(), "kind APP_DEFINED"),
    "metrics": (DXO(DataKind.METRICS, {"accuracy": 0.5}).to_shareable(), "none of its metrics"),
    "no data": (DXO(DataKind.WEIGHTS, {}).to_shareable(), "no arrays by name"),
    "NaN": (result(nan()), r"not finite \(NaN or infinity\) in fc\.bias"),
    "a text": (result({**model(1.0), "fc.text": CANARY}), "is not an array of numbers"),
    "a list": (result({**model(1.0), "fc.bias": [1.0, 2.0]}), "is not an array of numbers"),
    "objects": (result({**model(1.0), "fc.bias": np.array([CANARY], dtype=object)}), "is not an array of numbers"),
    "integers": (result({**model(1.0), "fc.bias": np.arange(4)}), "which no defense protects"),
    "another shape": (result(grown()), r"has fc\.bias of shape \(9,\), not \(4,\)"),
    "an array more": (result({**model(1.0), "more": np.zeros(3, dtype=np.float32)}), "has more, which is not in"),
    "an array less": (result({"fc.weight": model(1.0)["fc.weight"]}), r"has no fc\.bias"),
    "another type": (result({**model(1.0), "fc.bias": np.zeros(4)}), "of type torch.float64"),
    "encrypted": (result(model(1.0), PROCESSED_ALGORITHM="HE"), "encrypted or compressed before"),
    "a hidden count": (result(model(1.0), NUM_STEPS_CURRENT_ROUND=0.123), "is not a whole number"),
    "no dict": (None, "could not be protected"),
}


@pytest.mark.parametrize("case", BLOCKED)
def test_what_cannot_be_protected_is_blocked(case):
    shareable, words = BLOCKED[case]
    made = ProtectFilter("gradient-dropout:at=upload")
    with pytest.raises(ContentBlockedException, match=words) as caught:
        made.process(shareable, context(model(0.0)))
    assert CANARY not in str(caught.value)
    assert caught.value.__cause__ is None


def test_an_error_of_anyone_blocks_and_its_text_stays_here(monkeypatch):
    made = ProtectFilter("gradient-dropout:at=upload")

    def fails(*args):
        raise ValueError(CANARY)

    monkeypatch.setattr(made._chain.defenses[0].__class__, "protect", fails)
    with pytest.raises(ContentBlockedException, match=r"could not be protected \(ValueError\)"):
        made.process(result(model(1.0)), context(model(0.0)))


def test_a_form_that_was_not_seen_before_is_blocked_without_the_servers_model_too():
    made = ProtectFilter("spm:epsilon=1")
    made.process(result(model(0.5)), context())
    with pytest.raises(ContentBlockedException, match=r"has fc\.bias of shape"):
        made.process(result(grown()), context())


def test_a_change_cannot_be_protected_without_the_model_that_was_received():
    with pytest.raises(ContentBlockedException, match=r"add fedveil\.nvflare\.ReceiveFilter"):
        ProtectFilter("gradient-dropout:at=upload").process(result(model(1.0)), context())


def test_an_update_that_is_absurdly_long_is_blocked():
    with pytest.raises(ContentBlockedException, match="has a norm of"):
        ProtectFilter("gradient-dropout:at=upload", longest=1.0).process(
            result(model(100.0), DataKind.WEIGHT_DIFF), context()
        )


# ---- what goes along ----------------------------------------------------------------------------------------


def test_nothing_goes_along_but_numbers_that_are_allowed():
    shareable = result(
        model(1.0), DataKind.WEIGHT_DIFF, initial_metrics={"accuracy": 0.123456, "names": 7.0}, note=CANARY
    )
    shareable["more"] = CANARY
    shareable.set_header("mine", CANARY)
    shareable.set_header("current_round", 2)
    shareable.add_cookie("cookie", CANARY)
    dxo_before = from_shareable(shareable)
    dxo_before.add_filter_history(CANARY)
    dxo_before.update_shareable(shareable)
    out = ProtectFilter("clip:at=upload", metrics=["accuracy"]).process(shareable, context())
    dxo = from_shareable(out)
    assert dxo.meta == {
        "NUM_STEPS_CURRENT_ROUND": 3,
        "initial_metrics": {"accuracy": 0.123},
        "filter_history": ["ProtectFilter"],
    }
    assert out.get_header("current_round") == 2
    assert CANARY not in str(out)
    assert "initial_metrics" not in sent(ProtectFilter("clip:at=upload"), shareable).meta


def test_metrics_alone_are_limited_too():
    shareable = DXO(DataKind.METRICS, {"accuracy": 0.98765, "loss": 1.0, "note": CANARY}).to_shareable()
    out = sent(ProtectFilter("clip:at=upload", metrics=["accuracy"], digits=2), shareable)
    assert (out.data_kind, out.data, out.meta) == (DataKind.METRICS, {"accuracy": 0.99}, {})
    with pytest.raises(ContentBlockedException, match="not a single finite number"):
        ProtectFilter("clip:at=upload", metrics=["note"]).process(shareable, context())


def test_a_failed_task_sends_its_code_and_nothing_else():
    made = ProtectFilter("clip:at=upload")
    failed = make_reply(ReturnCode.EXECUTION_EXCEPTION, {"why": CANARY})
    failed["data"] = model(1.0)
    out = made.process(failed, context())
    assert out.get_return_code() == ReturnCode.EXECUTION_EXCEPTION
    assert list(out) == ["__headers__"]
    assert CANARY not in str(out)
    assert made.process(make_reply(CANARY), context()).get_return_code() == ReturnCode.EXECUTION_EXCEPTION


def test_buffers_are_withheld_or_shared():
    before, after = {**model(0.0), **running(1.0)}, {**model(1.0), **running(5.0)}
    out = sent(ProtectFilter("clip:at=upload"), result(after), context(before)).data
    assert out["bn.running_mean"].tolist() == [1.0] * 4
    assert out["bn.num_batches_tracked"] == 1
    out = sent(ProtectFilter("clip:at=upload"), result(after, DataKind.WEIGHT_DIFF)).data
    assert not out["bn.running_mean"].any()
    assert not out["bn.num_batches_tracked"].any()
    out = sent(ProtectFilter("clip:at=upload", buffers="share"), result(after), context(before)).data
    assert out["bn.running_mean"].tolist() == [5.0] * 4
    with pytest.raises(ContentBlockedException, match="may not leave"):
        ProtectFilter("spm", of="weights").process(result(after), context())


# ---- what is received -----------------------------------------------------------------------------------------


def imprinted():
    rows = np.tile(np.linspace(0.1, 1.0, 16, dtype=np.float32), (8, 1))
    return {"in.weight": rows, "in.bias": np.linspace(0, 1, 8, dtype=np.float32)}


def test_a_malicious_model_is_refused_or_logged(caplog):
    task = DXO(DataKind.WEIGHTS, imprinted()).to_shareable()
    with pytest.raises(ContentBlockedException, match=r"looks malicious: imprint block in in\.weight"):
        ReceiveFilter().process(task, context())
    assert ReceiveFilter("log").process(task, context()) is task
    assert "fedveil: the received model: imprint block" in caplog.text
    caplog.clear()
    assert ReceiveFilter("ignore").process(task, context()) is task
    assert not caplog.text
    with pytest.raises(FedveilError, match="suspicious is 'refuse'"):
        ReceiveFilter("never")


def noisy(seed=0):
    random = np.random.default_rng(seed)
    return {name: random.normal(size=array.shape).astype(np.float32) for name, array in model().items()}


def test_a_model_of_another_form_than_before_is_refused():
    receive = ReceiveFilter()
    receive.process(DXO(DataKind.WEIGHTS, noisy()).to_shareable(), context())
    with pytest.raises(ContentBlockedException, match="changed architecture"):
        receive.process(DXO(DataKind.WEIGHTS, {**noisy(), **imprinted()}).to_shareable(), context())


@pytest.mark.parametrize("kind", [DataKind.WEIGHT_DIFF, DataKind.ANALYTIC, DataKind.APP_DEFINED])
def test_a_model_under_another_name_is_refused(kind, caplog):
    """NVFlare's client API takes arrays of any kind for the model: a server must not get past the inspection so."""
    from nvflare.app_common.utils.fl_model_utils import FLModelUtils

    task = DXO(kind, imprinted()).to_shareable()
    assert FLModelUtils.from_shareable(task).params.keys() == imprinted().keys()
    with pytest.raises(ContentBlockedException, match="a model cannot be inspected"):
        ReceiveFilter().process(task, context())
    assert ReceiveFilter("log").process(task, context()) is task
    assert "a model cannot be inspected" in caplog.text
    assert ReceiveFilter().process(DXO(kind, {"question": [1, 2]}).to_shareable(), context())


def test_a_task_without_a_model_passes():
    task = Shareable({"question": 1})
    assert ReceiveFilter().process(task, context()) is task


# ---- what was spent -----------------------------------------------------------------------------------------


def site(name="site-1"):
    fl_ctx = context(model(0.0))
    fl_ctx.set_prop("__identity_name__", name)
    fl_ctx.set_prop("__run_num__", "job/../7")
    return fl_ctx


def test_every_release_counts_and_a_new_process_goes_on(tmp_path):
    folder = tmp_path / "ledger"
    spec = "dp-gaussian:epsilon=1,delta=1e-5,at=upload"
    for _ in range(2):  # as many processes
        made = ProtectFilter(spec, ledger=str(folder))
        for _ in range(2):
            made.process(result(model(1.0)), site())
        with pytest.raises(ContentBlockedException):
            made.process(result(nan()), site())
    (path,) = folder.iterdir()
    assert path.parent == folder
    assert json.loads(path.read_text())["spent"][0]["times"] == 4
    made = ProtectFilter(spec, ledger=str(folder))
    made.process(result(model(1.0)), site("site-2"))
    assert len(list(folder.iterdir())) == 2


def test_a_damaged_ledger_blocks(tmp_path):
    made = ProtectFilter("clip:at=upload", ledger=str(tmp_path))
    made.process(result(model(1.0)), site())
    (path,) = tmp_path.iterdir()
    path.write_text("{")
    with pytest.raises(ContentBlockedException, match="cannot be read"):
        ProtectFilter("clip:at=upload", ledger=str(tmp_path)).process(result(model(1.0)), site())


# ---- an audit of the site's own -----------------------------------------------------------------------------

TRAINING = {"lr": 0.5, "batch_sizes": [4, 4, 1], "facts": {"shape": [1, 8, 8], "classes": 10}}


@pytest.mark.parametrize(
    "spec, of, kind", [("clip:norm=1,at=upload", None, "delta"), ("spm:epsilon=1", None, "weights")]
)
def test_what_left_is_kept_for_an_audit(tmp_path, spec, of, kind):
    made = ProtectFilter(spec, of, captures={"folder": str(tmp_path / "kept"), **TRAINING})
    task = result(model(1.0))
    task.set_header("current_round", 4)
    seen = sent(made, task, site())
    (path,) = (tmp_path / "kept").iterdir()
    assert path.name == "round-0005-site-1.safetensors"
    assert (tmp_path / "kept").stat().st_mode & 0o77 == 0
    kept = Capture.load(path)
    assert (kept.kind, kept.batch_sizes, kept.public.defense) == (kind, (4, 4, 1), str(Chain.of(spec)))
    for name, array in seen.data.items():
        start = kept.before[name] if kind == "delta" else 0
        torch.testing.assert_close(kept.shared[name] + start, torch.from_numpy(array))


def test_a_capture_that_cannot_be_made_holds_nothing_up(tmp_path, caplog):
    made = ProtectFilter("spm", captures={"folder": str(tmp_path / "kept"), **TRAINING, "batch_sizes": [0]})
    assert sent(made, result(model(1.0)), site()).data.keys() == model().keys()
    made = ProtectFilter("spm", captures={"folder": str(tmp_path / "kept"), **TRAINING})
    assert sent(made, result(model(1.0))).data.keys() == model().keys()
    assert caplog.text.count("fedveil: what left was not captured") == 2
    assert not list(tmp_path.glob("kept/*"))


def test_arrays_leave_in_the_order_of_the_server():
    back = dict(reversed(model(1.0).items()))
    assert list(sent(ProtectFilter("spm"), result(back), context(model())).data) == list(model())


# ---- configuration ------------------------------------------------------------------------------------------


def test_wrong_settings_are_refused():
    for wrong in ({"of": "gradient"}, {"buffers": "keep"}, {"digits": 0}):
        with pytest.raises(FedveilError, match="of is 'weights' or 'delta'"):
            ProtectFilter("clip:at=upload", **wrong)
    for wrong in ({}, {"folder": "x"}, {"folder": "x", **TRAINING, "rate": 1}, "folder"):
        with pytest.raises(FedveilError, match="captures is a dict of batch_sizes, folder, lr and"):
            ProtectFilter("clip:at=upload", captures=wrong)


def test_a_recipe_takes_the_filters(tmp_path, monkeypatch):
    from nvflare.app_opt.pt.recipes.fedavg import FedAvgRecipe

    monkeypatch.chdir(tmp_path)
    (tmp_path / "script.py").write_text("")
    model = {"class_path": "torch.nn.Linear", "args": {"in_features": 2, "out_features": 2}}
    recipe = FedAvgRecipe(name="r", model=model, min_clients=2, num_rounds=1, train_script="script.py")
    recipe.add_client_input_filter(ReceiveFilter(suspicious="log"), tasks=["train"])
    recipe.add_client_output_filter(ProtectFilter("spm:epsilon=2", metrics=["accuracy"]), tasks=["train"])
    recipe.export(str(tmp_path / "job"))
    (path,) = tmp_path.rglob("config_fed_client.json")
    config = json.loads(path.read_text())
    (received,), (left,) = (config[f"task_{which}_filters"][0]["filters"] for which in ("data", "result"))
    assert ReceiveFilter(**received["args"]).suspicious == "log"
    again = ProtectFilter(**left["args"])
    assert (again.defense, again.metrics) == ("spm:epsilon=2", ("accuracy",))
    assert not list(tmp_path.rglob("custom/fedveil/__init__.py")), "a copy in the job must not stand for the whole"


def test_a_job_keeps_the_settings(tmp_path):
    from nvflare import FedJob, FilterType

    job = FedJob(name="j")
    job.set_app_packages(["fedveil"])
    made = ProtectFilter("clip:norm=2,at=upload", buffers="share", metrics=["accuracy"], digits=2, ledger="kept")
    made.captures = {"folder": "seen", **TRAINING}
    job.to(made, "site-1", tasks=["train"], filter_type=FilterType.TASK_RESULT)
    job.export_job(str(tmp_path))
    (path,) = tmp_path.rglob("config_fed_client.json")
    (entry,) = json.loads(path.read_text())["task_result_filters"][0]["filters"]
    assert entry["path"] == "fedveil.nvflare.protect_filter.ProtectFilter"
    again = ProtectFilter(**entry["args"])
    assert again.captures == made.captures
    assert {name: getattr(again, name) for name in ("defense", "buffers", "digits", "ledger", "buffer_names")} == {
        "defense": "clip:norm=2,at=upload",
        "buffers": "share",
        "digits": 2,
        "ledger": "kept",
        "buffer_names": made.buffer_names,
    }
