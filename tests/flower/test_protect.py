"""The client mod, called as Flower calls it."""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Error, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from torch import Tensor

import fedveil as fv
from fedveil.defenses.base import Call, Defense
from fedveil.defenses.chain import Chain
from fedveil.errors import FedveilError
from fedveil.fields import declared
from fedveil.flower import protect
from fedveil.flower.memory import FACTS
from fedveil.streams import Streams
from fedveil.tree import Tree
from flower.exchange import arrays_of, asked, context, replied, sending, small_model, trained

BUFFERS = ("1.running_mean", "1.running_var", "1.num_batches_tracked")
LOUD = "gaussian-noise:sigma=1,at=upload"


def weights(arrays: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in arrays.items() if name not in BUFFERS}


def reason(reply: Message) -> str:
    assert reply.has_error()
    return str(reply.error.reason)


# ---- what is sent ------------------------------------------------------------------------------------------


def test_the_change_is_protected_and_added_to_the_server_s_weights() -> None:
    message = asked()
    reply = protect("clip:norm=0.5,at=upload")(message, context(), trained())
    change = Tree.expand(weights(arrays_of(reply)), 1) - Tree.expand(weights(arrays_of(message)), 1)
    assert change.norm().item() == pytest.approx(0.5, rel=1e-5)


def test_a_method_of_the_upload_acts_on_the_weights_as_the_chain_itself_does() -> None:
    message, chain = asked(), Chain.of("spm:epsilon=1")
    reply = protect(chain, seed=3)(message, context(partition=2), trained())
    moved = Tree.expand({name: t + 0.25 for name, t in weights(arrays_of(message)).items()}, 1)
    streams = Streams.seeded(3, [2], "round", 1, "upload")
    expected = chain.protect_message(moved, "weights", streams, chain.new_states()).row(0)
    sent = weights(arrays_of(reply))
    assert list(arrays_of(reply)) == [*expected, *BUFFERS]
    assert all(torch.equal(sent[name], expected[name]) for name in expected)


def test_noise_comes_from_the_operating_system_and_differs_from_message_to_message() -> None:
    mod, message = protect(LOUD), asked()
    replies = [weights(arrays_of(mod(message, context(), trained()))) for _ in range(2)]
    start = arrays_of(message)
    noise = [torch.cat([(sent[name] - start[name]).flatten() for name in sent]) for sent in replies]
    assert not torch.isclose(*noise).any()
    assert torch.stack(noise).std().item() == pytest.approx(1, abs=0.4)


def test_buffers_are_the_server_s_own_unless_they_are_shared() -> None:
    message = asked()
    withheld = arrays_of(protect(LOUD)(message, context(), trained()))
    shared = arrays_of(protect(LOUD, buffers="share")(message, context(), trained()))
    for name in BUFFERS:
        assert torch.equal(withheld[name], arrays_of(message)[name])
        assert torch.equal(shared[name], arrays_of(message)[name] + (3 if "num" in name else 0.25))
        assert withheld[name].dtype == arrays_of(message)[name].dtype


def test_metrics_are_dropped_unless_they_are_named_and_then_rounded() -> None:
    reply = protect(LOUD)(asked(), context(), trained())
    assert dict(reply.content["metrics"]) == {"num-examples": 12}
    reply = protect(LOUD, metrics=["train-loss"])(asked(), context(), trained())
    assert dict(reply.content["metrics"]) == {"train-loss": 0.123}


def test_names_of_records_are_the_server_s_not_the_app_s() -> None:
    def app(message: Message, _: Context) -> Message:
        told = replied(message, small_model(1).state_dict()).content
        return Message(RecordDict({"born 1961": told["arrays"], "in Ulm": told["metrics"]}), reply_to=message)

    reply = protect(LOUD)(asked(), context(), app)
    assert list(reply.content) == ["arrays", "metrics"]


def test_it_acts_last_on_a_reply_when_it_is_the_first_mod() -> None:
    app = ClientApp(mods=[protect("clip:norm=1e-6,at=upload"), lambda m, c, call_next: call_next(m, c)])
    app.train()(trained())
    reply = app(asked(), context())
    assert torch.allclose(arrays_of(reply)["0.weight"], arrays_of(asked())["0.weight"], atol=1e-5)


def test_what_it_costs_is_in_the_client_s_log(caplog: pytest.LogCaptureFixture) -> None:
    def app(message: Message, held: Context) -> Message:
        time.sleep(0.2)
        return trained()(message, held)

    with caplog.at_level("INFO", "fedveil.flower.protect"):
        protect(LOUD)(asked(), context(), app)
    (told,) = re.findall(r"took (\S+) s to protect the reply, (\S+) % of this message's time", caplog.text)
    own, share = map(float, told)
    assert share == pytest.approx(100 * own / (0.2 + own), rel=0.1)


def test_evaluation_replies_hold_named_metrics_alone() -> None:
    def app(message: Message, _: Context) -> Message:
        return Message(RecordDict({"m": MetricRecord({"num-examples": 5, "accuracy": 0.98765})}), reply_to=message)

    message = asked(kind="evaluate")
    assert dict(protect(LOUD)(message, context(), app).content["metrics"]) == {"num-examples": 5}
    both = protect(LOUD, metrics=["accuracy", "num-examples"])(message, context(), app)
    assert dict(both.content["metrics"]) == {"accuracy": 0.988, "num-examples": 5}
    assert "holds arrays" in reason(protect(LOUD)(message, context(), trained()))


# ---- what is not -------------------------------------------------------------------------------------------


def damaged(name: str, tensor: Tensor) -> dict[str, Tensor]:
    return {**small_model(1).state_dict(), name: tensor}


@pytest.mark.parametrize(
    "arrays, why",
    [
        (damaged("0.bias", torch.full((5,), torch.nan)), "not finite"),
        (damaged("0.bias", torch.zeros(6)), "has 0.bias of another shape than the server sent"),
        (damaged("0.bias", torch.zeros(5, dtype=torch.float64)), "0.bias of type torch.float64"),
        (
            damaged("0.bias", torch.zeros(5, dtype=torch.int64)),
            "torch.int64, which no defense protects",
        ),
        (damaged("more", torch.zeros(2)), "has an array that is not in the model"),
        ({"0.weight": torch.zeros(5, 6)}, "has no 0.bias"),
        (damaged("0.bias", torch.full((5,), 1e30)), "norm"),
    ],
)
def test_an_update_that_cannot_be_protected_is_not_sent(arrays: dict[str, Tensor], why: str) -> None:
    state = RecordDict()
    told = reason(protect(LOUD)(asked(), context(state=state), sending(arrays)))
    assert why in told
    assert FACTS not in state, "nothing was spent"


@pytest.mark.parametrize(
    "defense, why",
    [
        ("fedem", "fedem acts before there is an update, in training, and no guarded training was seen"),
        ("gradient-dropout", "use a defense with at=upload"),
        ("soteria", "soteria acts before there is an update"),
        ("cdp", "acts on the server"),
        ("dp-sgd", "dp-sgd acts before there is an update"),
    ],
)
def test_a_defense_that_should_have_acted_earlier_sends_nothing(defense: str, why: str) -> None:
    assert why in reason(protect(defense)(asked(), context(), trained()))


def record_of(name: str) -> RecordDict:
    good = replied(asked(), small_model(1).state_dict()).content
    match name:
        case "settings":
            return RecordDict({**good, "notes": ConfigRecord({"patient": b"0017"})})
        case "two":
            return RecordDict({**good, "more": good["arrays"]})
        case "none":
            return RecordDict({"metrics": good["metrics"]})
        case "list":
            return RecordDict({"arrays": good["arrays"], "metrics": MetricRecord({"num-examples": [1, 2]})})
        case "negative":
            return RecordDict({"arrays": good["arrays"], "metrics": MetricRecord({"num-examples": -1})})
    array = Array("float32", (5,), "pickle", b"secret bytes")
    return RecordDict({"arrays": ArrayRecord({**good["arrays"], "0.bias": array}), "metrics": good["metrics"]})


@pytest.mark.parametrize("name", ["settings", "two", "none", "list", "negative", "bytes"])
def test_records_it_does_not_know_are_not_sent(name: str) -> None:
    told = reason(protect(LOUD)(asked(), context(), lambda message, _: Message(record_of(name), reply_to=message)))
    assert "0017" not in told
    assert "secret" not in told


def test_errors_of_the_app_are_told_without_their_text() -> None:
    def fails(_: Message, __: Context) -> Message:
        raise ValueError("/srv/patients/0017.dcm is broken")

    def reports(message: Message, _: Context) -> Message:
        return Message(Error(code=2, reason="/srv/patients/0017.dcm"), reply_to=message)

    assert reason(protect(LOUD)(asked(), context(), fails)) == "fedveil: the client app failed (ValueError)"
    assert reason(protect(LOUD)(asked(), context(), reports)) == "fedveil: the client app reported error 2"


def test_the_number_of_an_error_tells_nothing_either() -> None:
    def reports(message: Message, _: Context) -> Message:
        return Message(Error(code=19610317, reason="born"), reply_to=message)

    reply = protect(LOUD)(asked(), context(), reports)
    assert (reason(reply), reply.error.code) == ("fedveil: the client app reported an error", 6)


def test_an_app_that_ends_its_process_is_answered_for() -> None:
    def ends(_: Message, __: Context) -> Message:
        raise SystemExit("/srv/patients/0017.dcm")

    assert reason(protect(LOUD)(asked(), context(), ends)) == "fedveil: the client app failed (SystemExit)"


def test_an_error_of_ours_that_quotes_data_stays_with_the_client(tmp_path: Path) -> None:
    def reads(_: Message, __: Context) -> Message:
        (tmp_path / "own.csv").write_text("age,label\nborn 1961 in Ulm,1\n")
        fv.task(f"csv:path={tmp_path / 'own.csv'},target=label", model="mlp").train.batch([0])
        raise AssertionError("it can be read")

    told = reason(protect(LOUD)(asked(), context(), reads))
    assert told == "fedveil: the client app failed: the client's own log says why"


@pytest.mark.parametrize("spoil", ["name", "shape", "record", "settings", "metric"])
def test_no_error_repeats_the_words_of_a_reply(spoil: str) -> None:
    def app(message: Message, held: Context) -> Message:
        reply = trained()(message, held)
        record = dict(reply.content["arrays"])
        if spoil == "name":
            reply.content["arrays"] = ArrayRecord({**record, "born-1961": record["0.bias"]})
        if spoil == "shape":
            reply.content["arrays"] = ArrayRecord({**record, "0.bias": Array(np.zeros((0, 1961, 3), np.float32))})
        if spoil == "record":
            reply.content["born-1961"] = ArrayRecord(record)
        if spoil == "settings":
            reply.content["born-1961"] = ConfigRecord({"born-1961": 1})
        if spoil == "metric":
            reply.content["metrics"] = MetricRecord({"num-examples": 1961.5, "born-1961": 1})
        return reply

    assert "1961" not in reason(protect(LOUD)(asked(), context(), app))


def test_an_error_of_ours_that_quotes_somebody_else_s_stays_with_the_client() -> None:
    def loads(_: Message, __: Context) -> Message:
        code = "raise FedveilError('cannot load it: /opt/lib.so is broken') from ImportError()"
        exec(code, {"__name__": "fedveil.defenses.theirs", "FedveilError": FedveilError})
        raise AssertionError("it was loaded")

    assert "/opt" not in reason(protect(LOUD)(asked(), context(), loads))


@declared
class _Breaks(Defense):
    name = "test-breaks"
    place = "upload"

    def protect(self, update: Tree, call: Call) -> Tree:
        raise RuntimeError(f"data: {update.flat().tolist()}")


def test_a_defense_that_breaks_sends_its_type_of_error_and_nothing_else() -> None:
    told = reason(protect(_Breaks())(asked(), context(), trained()))
    assert told == "fedveil: the update could not be protected (RuntimeError)"


def test_no_error_repeats_a_number_of_the_update() -> None:
    told = reason(protect(LOUD)(asked(), context(), sending(damaged("0.bias", torch.full((5,), 1.961e16)))))
    assert "the update has a norm of …, above …" in told
    told = reason(protect(LOUD, longest=19.61)(asked(), context(), trained(19.61)))
    assert "19" not in told


def test_an_app_that_writes_into_the_message_is_measured_against_what_the_server_sent() -> None:
    def app(message: Message, held: Context) -> Message:
        message.content["arrays"] = trained()(message, held).content["arrays"]
        del message.content["config"]
        return Message(message.content, reply_to=message)

    def in_place(message: Message, held: Context) -> Message:
        reply = trained()(message, held)
        for name, array in reply.content["arrays"].items():
            message.content["arrays"][name].data = array.data
        return reply

    for each in (app, in_place):
        sent = weights(arrays_of(protect("clip:norm=0.5,at=upload")(asked(), context(), each)))
        change = Tree.expand(sent, 1) - Tree.expand(weights(arrays_of(asked())), 1)
        assert change.norm().item() == pytest.approx(0.5, rel=1e-5)


# ---- settings ----------------------------------------------------------------------------------------------


def test_the_run_s_settings_configure_it() -> None:
    run = {"defense": "clip:norm=1e-6,at=upload", "protect-metrics": "train-loss, num-examples"}
    reply = protect()(asked(), context(run), trained())
    assert torch.allclose(arrays_of(reply)["0.weight"], arrays_of(asked())["0.weight"], atol=1e-5)
    assert dict(reply.content["metrics"]) == {"num-examples": 12, "train-loss": 0.123}


@pytest.mark.parametrize(
    "fixed, run, why",
    [
        ({}, {}, "no defense is set"),
        ({"defense": LOUD}, {"defense": "none"}, 'the run asks for defense = "none", but this client is fixed to'),
        ({"defense": LOUD, "buffers": "withhold"}, {"protect-buffers": "share"}, "protect-buffers"),
        ({}, {"defense": "no-such"}, "unknown defense 'no-such'"),
        ({}, {"defense": 3}, "must be a text"),
        ({}, {"defense": LOUD, "protect-of": "everything"}, "of must be"),
    ],
)
def test_settings_that_do_not_fit_send_nothing(fixed: dict[str, Any], run: dict[str, Any], why: str) -> None:
    assert why in reason(protect(**fixed)(asked(), context(run), trained()))


@pytest.mark.parametrize("run", [{}, {"defense": "no-such"}, {"defense": LOUD, "protect-of": "everything"}])
def test_a_client_does_not_train_for_what_it_could_not_send(run: dict[str, Any]) -> None:
    def app(message: Message, held: Context) -> Message:
        raise AssertionError("it trained")

    assert "AssertionError" not in reason(protect()(asked(), context(run), app))


def test_what_is_wrong_in_code_is_told_when_the_app_is_loaded() -> None:
    with pytest.raises(FedveilError, match="digits"):
        protect(LOUD, digits=0)
    with pytest.raises(FedveilError, match="unknown defense"):
        protect("spmm")


# ---- memory ------------------------------------------------------------------------------------------------


@declared
class _Counts(Defense):
    """Adds how often it was called before."""

    name = "test-counts"
    place = "upload"

    def protect(self, update: Tree, call: Call) -> Tree:
        calls = call.state.get("calls", torch.zeros(call.streams.count))
        call.state["calls"] = calls + 1
        return update.map(lambda tensor: torch.full_like(tensor, float(calls[0])))


@declared
class _Remembers(_Counts):
    name = "test-remembers"
    state_scope = "run"


@pytest.mark.parametrize("defense, seen", [(_Counts(), [0, 0, 0]), (_Remembers(), [0, 1, 2])])
def test_memory_of_a_run_lasts_and_that_of_a_round_does_not(
    defense: Defense, seen: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fedveil.registry.Registry.spell", lambda self, thing: thing.name)
    state, mod = RecordDict(), protect(defense)
    replies = [mod(asked(number=n), context(state=state), trained()) for n in (1, 2, 3)]
    assert [arrays_of(reply)["0.bias"][0].item() for reply in replies] == seen


def test_what_was_spent_is_counted_over_rounds_and_not_for_refused_updates() -> None:
    state, mod = RecordDict(), protect("dp-gaussian:epsilon=1,at=upload")
    for number in (1, 2):
        assert mod(asked(number=number), context(state=state), trained()).has_content()
    mod(asked(number=3), context(state=state), sending(damaged("0.bias", torch.full((5,), torch.nan))))
    facts = state.config_records[FACTS]
    assert facts["sent"] == 2
    assert '"times": 2' in str(facts["ledger"])


def test_an_app_that_begins_every_round_with_a_state_of_its_own_loses_no_count() -> None:
    held, mod = context(), protect("dp-gaussian:epsilon=1,at=upload")

    def app(message: Message, own: Context) -> Message:
        own.state = RecordDict()
        return trained()(message, own)

    for number in (1, 2):
        assert mod(asked(number=number), held, app).has_content()
    assert held.state.config_records[FACTS]["sent"] == 2


def test_a_model_of_another_form_is_refused_within_a_run() -> None:
    state, mod = RecordDict(), protect(LOUD)
    assert mod(asked(), context(state=state), trained()).has_content()
    other = {**small_model().state_dict(), "imprint": torch.zeros(4)}
    assert "another form" in reason(mod(asked(other, number=2), context(state=state), trained()))


# ---- Flower's older API ------------------------------------------------------------------------------------


def test_the_older_api_is_protected_and_its_texts_are_emptied() -> None:
    names = [str(place) for place in range(3)]
    sent = ArrayRecord({name: Array(np.zeros(4, dtype=np.float32)) for name in names})
    content = RecordDict({"fitins.parameters": sent, "fitins.config": ConfigRecord({"server-round": 1})})
    message = Message(content, dst_node_id=7, message_type="train")

    def app(message: Message, _: Context) -> Message:
        moved = ArrayRecord({name: Array(np.full(4, 3, dtype=np.float32)) for name in names})
        told = {
            "fitres.parameters": moved,
            "fitres.num_examples": MetricRecord({"num_examples": 9}),
            "fitres.metrics": ConfigRecord({"note": "patient 0017"}),
            "fitres.status": ConfigRecord({"code": 0, "message": "patient 0017"}),
        }
        return Message(RecordDict(told), reply_to=message)

    reply = protect("clip:norm=1,at=upload")(message, context(), app)
    arrays = [array.numpy() for array in reply.content["fitres.parameters"].values()]
    assert np.linalg.norm(np.concatenate(arrays)) == pytest.approx(1, rel=1e-5)
    assert reply.content["fitres.num_examples"]["num_examples"] == 9
    assert "0017" not in str(reply.content)
