"""The site's policy inside `flwr-clientapp`: for a SuperNode that others start."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from flwr.app import ConfigRecord, Message
from flwr.supernode.runtime import run_clientapp as internal

from fedveil.errors import FedveilError
from fedveil.flower.launch import LOOPBACK, program
from fedveil.flower.site import clientapp
from fedveil.flower.site import gate as gates
from fedveil.flower.site.clientapp import Wrapped, check, write_wrapper
from fedveil.flower.site.gate import Gate
from fedveil.toml import to_toml
from flower.deployment import Deployment, node_key, until
from flower.exchange import asked, context, trained
from flower.test_site import CLIP, length, logged, policy

CANARY = "born 1961 in Ulm"


class Task:
    """What Flower pulls and pushes for an app: one message, and what was handed over."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, config: dict[str, Any] | None = None) -> None:
        self.message, self.pushed, self.loaded = asked(), [], 0
        task = (self.message, context(), type("Run", (), {"fab_id": "someone/app"}), type("Fab", (), {"content": b""}))
        monkeypatch.setattr(gates, "get_fused_config_from_fab", lambda content, run: config or {})
        monkeypatch.setattr(internal, "pull_task_input", lambda client: task)
        monkeypatch.setattr(internal, "push_message", lambda client, message, context: self.pushed.append(message))
        monkeypatch.setattr(internal, "get_load_client_app_fn", lambda default_app_ref, app_path, multi_app: self.load)
        monkeypatch.setattr(clientapp, "check", lambda: None)
        Wrapped(Gate(policy(folder))).install()

    def load(self, *_: str) -> Any:
        self.loaded += 1
        return trained()

    def run(self) -> Message:
        """What `run_clientapp` does."""
        message, held, _, _ = internal.pull_task_input("client")
        app = internal.get_load_client_app_fn(default_app_ref="", app_path=None, multi_app=True)("id", "1", "hash")
        reply = app(message, held)
        internal.push_message("client", reply, held)
        return reply


def test_a_reply_is_protected_on_its_way_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    task = Task(tmp_path, monkeypatch)
    task.run()
    (sent,) = task.pushed
    assert length(sent) == pytest.approx(0.001, rel=1e-2)
    assert [line["sent"] for line in logged(tmp_path)] == [True]


def test_an_app_that_spoils_the_message_or_replies_twice_gains_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    task = Task(tmp_path, monkeypatch)
    task.load = lambda *_: lambda message, held: trained()(message, held)  # type: ignore[method-assign]
    message, held, _, _ = internal.pull_task_input("client")
    reply = trained()(message, held)
    message.content["arrays"] = reply.content["arrays"]  # so that there would be no change to clip
    internal.push_message("client", reply, held)
    with pytest.raises(FedveilError, match="to no message of the server"):
        internal.push_message("client", reply, held)
    (sent,) = task.pushed
    assert length(sent) == pytest.approx(0.001, rel=1e-2)


def test_what_an_app_adds_behind_flower_s_back_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    task = Task(tmp_path, monkeypatch)
    push = internal.push_message

    def hostile(client: Any, message: Message, held: Any) -> None:
        message.content["notes"] = ConfigRecord({"patient": CANARY})
        push(client, message, held)

    internal.push_message = hostile
    task.run()
    assert "settings" in str(task.pushed[0].error.reason)
    assert CANARY not in str(task.pushed[0].error.reason)


def test_an_app_that_may_not_run_is_never_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    task = Task(tmp_path, monkeypatch, {"defense": "none"})
    task.run()
    assert task.loaded == 0
    assert "asks for no defense" in str(task.pushed[0].error.reason)


def test_another_flower_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    check()
    monkeypatch.setattr(internal, "push_message", lambda client: None)
    with pytest.raises(FedveilError, match="no push_message with client, context, message"):
        check()
    monkeypatch.delattr(internal, "pull_task_input")
    with pytest.raises(FedveilError, match="no pull_task_input with client"):
        check()


def test_the_programs_run_apps_under_the_policy_and_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "policy.toml").write_text(to_toml({"defense": CLIP}))
    written = write_wrapper(tmp_path / "a folder", tmp_path / "policy.toml")
    told = {path.name: subprocess.run([path, "--help"], capture_output=True, text=True) for path in written}
    assert "Run a Flower ClientApp" in told.pop("flwr-clientapp").stdout
    assert told.keys() >= {"flwr-agentapp", "flwr-connector", "flwr-model"}
    assert {(each.returncode, each.stdout) for each in told.values()} == {(1, "")}
    (tmp_path / "policy.toml").write_text('defense = "none"')
    refused = subprocess.run([written[0], "--help"], capture_output=True, text=True)
    assert (refused.returncode, refused.stdout) == (1, "")
    assert "would let everything out" in refused.stderr


APP = """
from pathlib import Path
from flwr.app import ConfigRecord
from flwr.clientapp import ClientApp
from flwr.supernode.runtime import run_clientapp
import fedveil.flower
from wrapped.task import new_model

Path("LOADED").touch()
app = ClientApp()
fedveil.flower.introduce(app)

@app.train()
def train(message, context):
    from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
    if message.metadata.group_id == "2":
        push = run_clientapp.push_message
        def hostile(client, message, context):
            message.content["notes"] = ConfigRecord({"patient": "CANARY"})
            push(client, message, context)
        run_clientapp.push_message = hostile
    arrays = {name: tensor + 1 for name, tensor in message.content["arrays"].to_torch_state_dict().items()}
    reply = {"arrays": ArrayRecord(arrays), "metrics": MetricRecord({"num-examples": 3})}
    return Message(RecordDict(reply), reply_to=message)
"""


@pytest.mark.deployment
def test_an_app_in_process_isolation_is_under_the_policy_too(tmp_path: Path) -> None:
    from fedveil.flower.new_app import NewApp, write_app

    app, out, loaded = tmp_path / "wrapped", tmp_path / "out", tmp_path / "loaded"
    write_app(app, NewApp(model="mlp:hidden=[4]", defense=CLIP, clients=1, rounds=2))
    (app / "wrapped/client.py").write_text(APP.replace("LOADED", str(loaded)).replace("CANARY", CANARY))
    text = (app / "pyproject.toml").read_text().replace('out = "fedveil-out/wrapped"', f'out = "{out}"')
    (app / "pyproject.toml").write_text(text.replace("limit = 600.0", "limit = 90.0"))
    (tmp_path / "policy.toml").write_text(to_toml({"defense": CLIP}))
    write_wrapper(tmp_path / "bin", tmp_path / "policy.toml")
    deployment, key = Deployment(tmp_path), node_key(tmp_path, "node")
    try:
        deployment.superlink()
        deployment.register(key)
        arguments = deployment.node_arguments(key, "partition-id=0 num-partitions=1")
        port = arguments[arguments.index("--port") + 1]
        deployment.start([program("flower-supernode"), *arguments, "--isolation", "process"], "node")
        # The site starts the apps, and nothing else.
        superexec = [program("flower-superexec"), "--insecure", "--runtime-api-address", f"{LOOPBACK}:{port}"]
        path = f"{tmp_path / 'bin'}:{Path(sys.executable).parent}:/usr/bin:/bin"
        deployment.start(superexec, "superexec", PATH=path)
        run = deployment.run(app)
        rounds = out / "rounds.jsonl"
        assert until(lambda: rounds.exists() and len(rounds.read_text().splitlines()) == 2, 240), run.said()
        loaded.unlink()
        weak = deployment.start(
            [
                program("flwr"),
                "run",
                str(app),
                deployment.connection,
                "--stream",
                "-c",
                f'defense="none" out="{out}-2"',
            ],
            "run",
        )
        last = Path(f"{out}-2/rounds.jsonl")
        assert until(lambda: last.exists() and len(last.read_text().splitlines()) == 1, 180), weak.said()
    finally:
        deployment.stop()
    told = [json.loads(line) for line in rounds.read_text().splitlines()]
    assert (told[0]["taken"], told[0]["metrics"]) == ([0], {})
    assert "site policy: the reply holds a record of settings" in told[1]["failed"]["0"]
    assert "asks for no defense" in json.loads(last.read_text().splitlines()[0])["failed"]["0"]
    assert not loaded.exists(), "an app that may not run is never loaded"
    left = [json.loads(line) for line in (tmp_path / "left.jsonl").read_text().splitlines()]
    assert [line["sent"] for line in left if line["type"] == "train"] == [True, False, False]
    assert CANARY not in (tmp_path / "run.log").read_text()
