"""A site's policy: the file, the gate, and the seam in Flower's SuperNode. test_deployment.py has the whole process."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from flwr.app import ConfigRecord, Error, Message, MetricRecord, RecordDict
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects, get_object_tree
from flwr.supercore.object_store import ObjectStoreFactory
from flwr.supernode import start_client_internal as internal
from flwr.supernode.nodestate import NodeStateFactory

from fedveil.errors import FedveilError
from fedveil.flower.site import gate as gates
from fedveil.flower.site import installed
from fedveil.flower.site import seam as seams
from fedveil.flower.site.gate import Gate
from fedveil.flower.site.journal import Journal
from fedveil.flower.site.policy import Policy
from fedveil.flower.site.seam import Seam
from flower.exchange import arrays_of, asked, context, replied, small_model, trained

CLIP = "clip:norm=0.001,at=upload"


def policy(folder: Path, **fields: Any) -> Policy:
    given = {"defense": CLIP, "log": folder / "left.jsonl", "state": folder / "state", **fields}
    return Policy(**given)


def logged(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "left.jsonl").read_text().splitlines()]


def length(reply: Message) -> float:
    sent, before = arrays_of(reply), arrays_of(asked())
    return torch.cat([(sent[n] - t).flatten() for n, t in before.items() if t.is_floating_point()]).norm().item()


# ---- the file ----------------------------------------------------------------------------------------------


def test_a_policy_is_read_with_paths_seen_from_its_folder(tmp_path: Path) -> None:
    path = tmp_path / "policy.toml"
    path.write_text(f'defense = "{CLIP}"\nmetrics = ["num-examples", "loss"]\nlog = "logs/left.jsonl"\n')
    read = Policy.load(path)
    assert (read.log, read.state) == (tmp_path / "logs/left.jsonl", tmp_path / "state")
    assert read.rules.kind == "delta"


@pytest.mark.parametrize(
    "text, why",
    [
        ("", "defense is required"),
        ('defense = "none"', "would let everything out"),
        ('defense = "fedem"', "a site cannot enforce it"),
        ('defense = "dp-sgd"', "a site cannot enforce it"),
        ('defense = "cdp"', "a site cannot enforce it"),
        ('defense = "ppfa"', "a site cannot enforce it"),
        ('defense = "spm"\nepsilon = 1\nnoise = 2', "no field 'noise'"),
        (f'defense = "{CLIP}"\nepsilon = 1', "has none"),
        ('defense = "dp-gaussian:at=upload"\nepsilon = 1\nbuffers = "share"', "covers no buffers"),
        ('defense = "dp-gaussian:at=upload+spm"\nof = "delta"\nepsilon = 1', "or several"),
        ('defense = "dp-gaussian:at=upload"\nof = "weights"', "dp-gaussian protects a gradient or a change"),
        ("defense = ", "policy.toml"),
    ],
)
def test_a_policy_that_protects_nothing_or_cannot_be_enforced_is_refused(tmp_path: Path, text: str, why: str) -> None:
    path = tmp_path / "policy.toml"
    path.write_text(text)
    with pytest.raises(FedveilError, match=why):
        Policy.load(path)


@pytest.mark.parametrize(
    "run, refused",
    [
        ({}, None),
        ({"defense": "fedem"}, None),
        ({"defense": "gaussian-noise:sigma=0.5,at=upload"}, None),
        ({"defense": "gaussian-noise:sigma=0.01,at=upload"}, "weaker gaussian-noise"),
        ({"defense": "none"}, "asks for no defense"),
        ({"defense": "of-their-own"}, "does not know"),
        ({"protect-buffers": "share"}, "asks for the buffers"),
        ({"protect-buffers": "withhold", "protect-metrics": "num-examples"}, None),
        ({"protect-metrics": "num-examples, train-loss"}, "asks for metrics"),
    ],
)
def test_a_run_that_asks_for_less_is_refused(tmp_path: Path, run: dict[str, Any], refused: str | None) -> None:
    why = policy(tmp_path, defense="gaussian-noise:sigma=0.1,at=upload").refuse(run)
    assert (why is None) if refused is None else (why is not None and refused in why)


def test_only_named_apps_may_run_where_some_are_named(tmp_path: Path) -> None:
    mine = policy(tmp_path, apps=("hospital/lungs",))
    assert mine.refuse({}, "hospital/lungs") is None
    assert "does not allow the app" in str(mine.refuse({}, "other/lungs"))


# ---- the gate ----------------------------------------------------------------------------------------------


def test_what_leaves_is_protected_and_logged(tmp_path: Path) -> None:
    message = asked()
    reply = Gate(policy(tmp_path)).reply(message, trained()(message, context()))
    assert length(reply) == pytest.approx(0.001, rel=1e-2)
    assert dict(reply.content["metrics"]) == {"num-examples": 12}
    (line,) = logged(tmp_path)
    assert line["sent"]
    assert line["defense"] == CLIP.replace("0.001", "0.001")
    assert line["metrics"] == {"num-examples": 12}
    assert len(line["sha256"]) == 64


@pytest.mark.parametrize(
    "kind, made, why",
    [
        ("train", lambda m: Message(Error(2, "/srv/0017.dcm"), reply_to=m), "reported error 2"),
        ("evaluate", lambda m: trained()(m, context()), "not answered here"),
        ("query", lambda m: trained()(m, context()), "holds arrays"),
        ("train", lambda m: Message(RecordDict({"c": ConfigRecord({"a": b"0017"})}), reply_to=m), "settings"),
        ("train", lambda m: replied(m, {**small_model().state_dict(), "x": torch.ones(2)}), "not in the model"),
    ],
)
def test_everything_else_becomes_an_error_and_a_line_in_the_log(tmp_path: Path, kind: str, made: Any, why: str) -> None:
    message = asked(kind=kind)
    reply = Gate(policy(tmp_path)).reply(message, made(message))
    assert why in str(reply.error.reason)
    assert "0017" not in str(reply.error.reason)
    assert [(line["sent"], why in line["reason"]) for line in logged(tmp_path)] == [(False, True)]


def test_a_query_for_the_partition_is_answered(tmp_path: Path) -> None:
    message = asked(kind="query")
    made = Message(RecordDict({"m": MetricRecord({"partition-id": 3, "age": 80})}), reply_to=message)
    assert dict(Gate(policy(tmp_path)).reply(message, made).content["metrics"]) == {"partition-id": 3}


def test_the_budget_of_a_site_lasts_over_runs_and_restarts(tmp_path: Path) -> None:
    def left(**fields: Any) -> bool:
        message = asked()
        return Gate(policy(tmp_path, **fields)).reply(message, trained()(message, context())).has_content()

    assert [left(updates=2) for _ in range(3)] == [True, True, False]
    assert "allows 2 updates" in logged(tmp_path)[-1]["reason"]
    (tmp_path / "other").mkdir()
    formal = {"defense": "dp-gaussian:epsilon=1,at=upload", "epsilon": 1.6}
    formal |= {name: tmp_path / "other" / name for name in ("state", "left.jsonl")}
    formal["log"] = formal.pop("left.jsonl")
    assert [left(**formal) for _ in range(3)] == [True, True, False]
    assert "privacy budget" in logged(tmp_path / "other")[-1]["reason"]
    (file,) = (tmp_path / "other/state").glob("spent-*.json")
    file.write_text("{")
    assert not left(**formal)
    assert "cannot be read" in logged(tmp_path / "other")[-1]["reason"]


def leaving(folder: Path, client: int = 0, arrays: dict[str, torch.Tensor] | None = None, **fields: Any) -> bool:
    """Whether an update leaves a SuperNode that was just started."""
    message = asked(arrays)
    return Gate(policy(folder, **fields), client).reply(message, trained()(message, context())).has_content()


def test_nodes_of_a_site_under_other_partitions_spend_one_budget(tmp_path: Path) -> None:
    assert [leaving(tmp_path, client, updates=2) for client in (0, 3, 5)] == [True, True, False]


def test_models_share_a_budget_with_its_delta(tmp_path: Path) -> None:
    formal = {"defense": "dp-gaussian:epsilon=1,at=upload", "epsilon": 2.05}
    other = {"w": torch.zeros(40)}
    assert [leaving(tmp_path, **formal), leaving(tmp_path, arrays=other, **formal)] == [True, False]
    assert leaving(tmp_path, arrays=other, **{**formal, "epsilon": 2.1}), "at half of δ each, ε is 1.045"


def test_updates_that_left_without_a_guarantee_leave_no_budget(tmp_path: Path) -> None:
    assert leaving(tmp_path, defense=CLIP)
    formal = {"defense": "dp-gaussian:epsilon=1,at=upload", "epsilon": 100.0}
    assert not leaving(tmp_path, **formal)
    assert "privacy budget cannot be kept" in logged(tmp_path)[-1]["reason"]
    assert not leaving(tmp_path, arrays={"w": torch.zeros(40)}, **formal), "of another model"


def test_a_site_whose_memory_of_what_was_spent_is_gone_does_not_start(tmp_path: Path) -> None:
    assert leaving(tmp_path)
    shutil.rmtree(tmp_path / "state")
    with pytest.raises(FedveilError, match="tells of updates that have left"):
        leaving(tmp_path)


def _spend(folder: Path) -> None:
    journal = Journal(policy(folder))
    for _ in range(20):
        journal.spend({"w": torch.zeros(3)})


def test_nodes_that_count_at_the_same_time_forget_nothing(tmp_path: Path) -> None:
    with ThreadPoolExecutor(3) as pool:
        for done in [pool.submit(_spend, tmp_path) for _ in range(3)]:
            done.result()
    (file,) = (tmp_path / "state").glob("spent-*.json")
    assert [line["times"] for line in json.loads(file.read_text())["spent"]] == [60]


def test_what_cannot_be_written_does_not_leave_and_names_no_path(tmp_path: Path) -> None:
    gate, message = Gate(policy(tmp_path)), asked()
    shutil.rmtree(tmp_path / "state")
    (tmp_path / "left.jsonl").unlink()
    (tmp_path / "left.jsonl").mkdir()
    reply = gate.reply(message, trained()(message, context()))
    assert str(tmp_path) not in str(reply.error.reason)
    assert str(reply.error.reason).startswith("site policy: the reply could not be protected")


# ---- the seam ----------------------------------------------------------------------------------------------


class Link:
    """A SuperLink with one message for the node, and what it was sent; the node's own state and store."""

    def __init__(self, message: Message) -> None:
        store = ObjectStoreFactory()
        self.state = NodeStateFactory(objectstore_factory=store).state()
        self.store = store.store()
        self.state.set_node_id(7)
        message.metadata.__dict__["_message_id"] = message.object_id
        self.message, self.parts = message, {k: o.deflate() for k, o in get_all_nested_objects(message).items()}
        self.sent: list[tuple[Message, list[bytes]]] = []

    def pull(self, run: dict[str, Any] | None = None) -> int | None:
        return internal._pull_and_store_message(
            state=self.state,
            object_store=self.store,
            node_config={},
            receive=lambda: (self.message, get_object_tree(self.message)),
            get_run=lambda run_id: _Run(),  # type: ignore[arg-type, return-value]
            get_fab=lambda fab_hash, run_id: _Fab(run or {}),  # type: ignore[arg-type, return-value]
            pull_object=lambda run_id, object_id: self.parts[object_id],
            confirm_message_received=lambda run_id, message_id: None,
            trusted_entities=None,
        )

    def push(self) -> None:
        def send(message: Message, tree: Any, seconds: float) -> tuple[set[str], str]:
            ids = {part.object_id for part in internal.iterate_object_tree(tree)}
            self.sent.append((message, []))
            return ids, "session"

        internal._push_messages(
            state=self.state,
            object_store=self.store,
            send=send,
            push_object=lambda run_id, session, object_id, content: self.sent[-1][1].append(content),
        )

    def hand_in(self, reply: Message) -> None:
        """What an app does."""
        internal._insert_message(reply, self.state, self.store)


class _Run:
    run_id, fab_id, fab_version, fab_hash, series_id, primary_task_type = 1, "someone/app", "1", "hash", 0, ""


class _Fab:
    hash_str, verifications = "", {}

    def __init__(self, config: dict[str, Any]) -> None:
        self.content = json.dumps(config).encode()


@pytest.fixture
def link(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Link]:
    for module in (internal, gates):
        monkeypatch.setattr(module, "get_fused_config_from_fab", lambda content, run: json.loads(content))
    for name in ("_pull_and_store_message", "_push_messages"):
        monkeypatch.setattr(internal, name, getattr(internal, name))  # to be put back
    monkeypatch.setattr(internal.time, "sleep", lambda seconds: None)
    Seam(Gate(policy(tmp_path))).install()
    return Link(asked())


def received(link: Link) -> list[bytes]:
    return [content for _, contents in link.sent for content in contents]


def canary() -> dict[str, torch.Tensor]:
    return {**small_model().state_dict(), "0.bias": torch.full((5,), 0.12345678)}


CANARY = canary()["0.bias"].numpy().tobytes()


def test_a_reply_leaves_protected_through_flower_s_own_functions(link: Link) -> None:
    assert link.pull() == 1
    link.hand_in(replied(link.message, canary()))
    link.push()
    ((message, contents),) = link.sent
    assert not message.has_error()
    assert message.metadata.reply_to_message_id == link.message.metadata.message_id
    assert len(contents) > 5
    assert not any(CANARY in content for content in contents)


def test_a_hostile_app_that_hands_in_more_gets_nothing_more_out(link: Link, tmp_path: Path) -> None:
    link.pull()
    for by in (0.0, 1.0):
        arrays = {name: t + by if t.is_floating_point() else t for name, t in canary().items()}
        link.hand_in(replied(link.message, arrays))
    stray = asked(number=9)
    link.hand_in(replied(stray, canary()))
    link.push()
    assert len(link.sent) == 1, "one reply to one message"
    assert not any(CANARY in content for content in received(link))
    assert [line["sent"] for line in logged(tmp_path)] == [True]


def test_a_reply_that_comes_while_others_leave_waits_for_the_gate(link: Link, monkeypatch: pytest.MonkeyPatch) -> None:
    link.pull()
    link.hand_in(replied(link.message, canary()))
    passed = Gate.reply

    def late(self: Gate, message: Message, reply: Message) -> Message:
        link.hand_in(replied(link.message, {**canary(), "3.bias": torch.ones(3)}))
        return passed(self, message, reply)

    monkeypatch.setattr(Gate, "reply", late)
    link.push()
    assert len(link.sent) == 1
    assert not any(CANARY in content for content in received(link))


def test_a_run_that_asks_for_less_never_starts_and_is_answered(link: Link, tmp_path: Path) -> None:
    assert link.pull({"defense": "none"}) == 1
    assert link.state.get_run(1) is None, "the app was never handed over"
    link.push()
    ((message, _),) = link.sent
    assert "asks for no defense" in str(message.error.reason)
    assert ["asks for no defense" in line["reason"] for line in logged(tmp_path)] == [True]


def test_an_app_that_cannot_be_read_is_refused_and_the_node_goes_on(
    link: Link, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(content: bytes, run: Any) -> dict[str, Any]:
        raise KeyError("born 1961")

    monkeypatch.setattr(gates, "get_fused_config_from_fab", broken)
    assert link.pull() == 1
    link.push()
    ((message, _),) = link.sent
    assert str(message.error.reason) == "site policy: the app, or the settings of its run, cannot be read"
    assert link.state.get_run(1) is None


def test_another_flower_is_refused_at_start(monkeypatch: pytest.MonkeyPatch) -> None:
    seams.check()
    with monkeypatch.context() as patch:
        patch.setattr(installed, "version", lambda name: "1.43.0")
        with pytest.raises(FedveilError, match=r"Flower 1\.43\.0: it was never tested"):
            seams.check()
    with monkeypatch.context() as patch:
        patch.delattr(internal, "_push_messages")
        with pytest.raises(FedveilError, match="no _push_messages with"):
            seams.check()
    with monkeypatch.context() as patch:
        patch.setattr(internal, "_push_messages", lambda state: None)
        with pytest.raises(FedveilError, match="no _push_messages with object_store"):
            seams.check()


def test_a_supernode_does_not_call_home(tmp_path: Path) -> None:
    """As a user starts it: nothing in the environment switches telemetry or the check for updates off."""
    (tmp_path / "policy.toml").write_text(f'defense = "{CLIP}"')
    program = f"""
import os
from pathlib import Path
import fedveil.flower.site.supernode as ours
from flwr.supercore import telemetry
import flwr.supernode.cli.flower_supernode
import sys
def started():
    sent = []
    telemetry.urllib.request.urlopen = lambda *given, **named: sent.append(given)
    print(telemetry.create_event(telemetry.EventType.PING, None), sent, os.environ["FLWR_DISABLE_UPDATE_CHECK"])
sys.modules["flwr.supernode.cli.flower_supernode"].flower_supernode = started
ours.run_supernode(Path({str(tmp_path / "policy.toml")!r}), [])
"""
    env = {name: value for name, value in os.environ.items() if not name.startswith(("FLWR", "RAY"))}
    told = subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True, timeout=300)
    assert told.stdout.splitlines()[-1] == "disabled [] 1", told.stderr
