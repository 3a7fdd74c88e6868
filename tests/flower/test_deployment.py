"""A whole deployment with TLS and node keys, in which nearly everything goes wrong once."""

from __future__ import annotations

import importlib
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from fedveil.flower.launch import Program, program
from fedveil.flower.new_app import NewApp, write_app
from fedveil.toml import to_toml
from flower.deployment import Deployment, authority, node_key, remote_addresses, until
from flower.grids import FakeGrid

NODES, ROUNDS, LIMIT = 4, 7, 75.0
CANARY = "born 1961 in Ulm"
# The app's own client, with a hand on the reply behind the mod's back. It trains the same way every time.
DISTURBED = """
import os, time
from pathlib import Path

import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

import fedveil.flower
from disturbed.task import client_data, loss, new_model


def misbehave(message, context, call_next):
    reply, number = call_next(message, context), message.metadata.group_id
    fault = context.node_config.get("fault", "") if number == "2" else ""
    if fault == "patch":
        from flwr.supernode.runtime import run_clientapp
        push = run_clientapp.push_message
        def hostile(client, message, context):
            message.content["notes"] = ConfigRecord({"patient": "CANARY"})
            push(client, message, context)
        run_clientapp.push_message = hostile
    elif fault:
        arrays = dict(reply.content["arrays"])
        name = list(arrays)[0]
        array = arrays[name].numpy()
        spoiled = {"nan": array * float("nan"), "shape": array[:1], "norm": array + 1e18}[fault]
        reply.content["arrays"] = ArrayRecord({**arrays, name: Array(spoiled)})
    return reply


app = ClientApp(mods=[misbehave, fedveil.flower.protect()])
fedveil.flower.introduce(app)


@app.train()
def train(message, context):
    marker = context.node_config.get("marker", "")
    if marker and message.metadata.group_id == "3" and not Path(marker).exists():
        Path(marker).write_text("training")
        time.sleep(300)
    data, model = client_data(context), new_model(context)
    model.load_state_dict(message.content["arrays"].to_torch_state_dict())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    for _ in range(4):
        for x, y in torch.utils.data.DataLoader(data, batch_size=16):
            optimizer.zero_grad()
            loss(model(x), y).backward()
            optimizer.step()
    reply = {"arrays": ArrayRecord(model.state_dict()), "metrics": MetricRecord({"num-examples": len(data)})}
    return Message(RecordDict(reply), reply_to=message)
""".replace("CANARY", CANARY)


@pytest.fixture(scope="module")
def app(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("apps") / "disturbed"
    write_app(folder, NewApp(model="mlp:hidden=[32]", defense="clip:norm=100,at=upload", clients=NODES, rounds=ROUNDS))
    (folder / "disturbed/client.py").write_text(DISTURBED)
    server = (folder / "disturbed/server.py").read_text()
    told = '    import os\n    open(str(run["out"]) + ".pid", "w").write(str(os.getpid()))\n'
    (folder / "disturbed/server.py").write_text(
        server.replace("    run, model =", told.replace("run[", "context.run_config[") + "    run, model =")
    )
    return folder


def settled(app: Path, out: Path) -> Path:
    """The app with the test's own settings."""
    text = (app / "pyproject.toml").read_text()
    text = text.replace('out = "fedveil-out/disturbed"', f'out = "{out}"').replace("limit = 600.0", f"limit = {LIMIT}")
    (app / "pyproject.toml").write_text(text.replace("minimum = 2", "minimum = 1"))
    return app


def undisturbed(app: Path, out: Path) -> float:
    """The accuracy of the same app where nothing goes wrong."""
    from flwr.cli.config_utils import load_and_validate

    config: dict[str, Any] = load_and_validate(app / "pyproject.toml")[0]["tool"]["flwr"]["app"]["config"]
    sys.path.insert(0, str(app))
    try:
        client, server = (importlib.import_module(f"disturbed.{name}").app for name in ("client", "server"))
        grid = FakeGrid(dict.fromkeys(range(NODES), client), {**config, "out": str(out)})
        server(grid, grid.contexts[0])
    finally:
        sys.path.remove(str(app))
        for name in [name for name in sys.modules if name.partition(".")[0] == "disturbed"]:
            del sys.modules[name]
    return float(lines(out)[-1]["evaluation"]["accuracy"])


def lines(out: Path) -> list[dict[str, Any]]:
    path = out / "rounds.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


@pytest.mark.deployment
def test_a_federation_goes_on_whatever_happens_to_its_nodes_and_its_server(app: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    settled(app, out)
    expected = undisturbed(app, tmp_path / "undisturbed")
    deployment = Deployment(tmp_path)
    keys = [node_key(tmp_path, f"node-{number}") for number in range(NODES)]
    marker = tmp_path / "training"
    (tmp_path / "policy.toml").write_text(to_toml({"defense": "clip:norm=100,at=upload"}))
    outside: set[str] = set()

    def watch() -> None:
        nonlocal outside
        outside |= remote_addresses(each.process.pid for each in deployment.started)

    def node(number: int) -> Program:
        fault = {0: 'fault="patch"', 1: 'fault="nan"', 2: 'fault="shape"', 3: f'fault="norm" marker="{marker}"'}[number]
        arguments = deployment.node_arguments(keys[number], f"partition-id={number} num-partitions={NODES} {fault}")
        site = [sys.executable, "-m", "fedveil", "site", "supernode", "--policy", str(tmp_path / "policy.toml")]
        return deployment.start(
            [*(site if number == 0 else [program("flower-supernode")]), *arguments], f"node-{number}"
        )

    try:
        superlink = deployment.superlink()
        for key in keys:
            deployment.register(key)
        nodes = [node(number) for number in range(NODES)]
        other_ca, _, _ = authority(tmp_path, "other")
        stranger = deployment.node_arguments(node_key(tmp_path, "stranger"), "partition-id=4")
        astray = [*deployment.node_arguments(keys[0], "partition-id=4", other_ca), "--max-retries", "1"]
        refused = [
            deployment.start([program("flower-supernode"), *arguments], name)
            for name, arguments in (("stranger", stranger), ("astray", astray))
        ]
        run = deployment.run(app)
        assert until(marker.exists, 240, watch=watch), (tmp_path / "run.log").read_text()
        nodes[3].kill()
        assert until(lambda: len(lines(out)) == 3, 180, watch=watch), run.said()
        nodes[3] = node(3)
        assert until(lambda: len(lines(out)) == 4, 180, watch=watch), run.said()
        os.kill(int((tmp_path / "out.pid").read_text()), signal.SIGKILL)
        run.stop()
        assert len(lines(out)) == 4
        again = deployment.run(app)
        assert until(lambda: len(lines(out)) == 5, 180, watch=watch), again.said()
        before = json.loads((out / "ledger.json").read_text())["spent"]
        superlink.kill()  # with the server app, in mid-round
        again.stop()
        deployment.superlink()
        last = deployment.run(app)
        assert until(lambda: len(lines(out)) == ROUNDS, 300, watch=watch), last.said()
        for each in refused:
            assert each.process.poll() not in (None, 0), "a node with a wrong key or CA must not get in"
    finally:
        deployment.stop()
    assert all(not each.running for each in deployment.started)
    told = lines(out)
    assert [line["round"] for line in told] == list(range(1, ROUNDS + 1))
    assert told[0]["taken"] == [0, 1, 2, 3]
    assert "site policy" in told[1]["failed"]["0"]
    assert CANARY not in (tmp_path / "run.log").read_text()
    assert "not finite" in told[1]["refused"]["1"]
    assert "shape" in told[1]["refused"]["2"]
    assert "norm" in told[1]["refused"]["3"]
    assert "3" in {**told[2]["lost"], **told[2]["failed"]}
    assert told[-1]["taken"] == [0, 1, 2, 3], "all came back"
    assert told[-1]["evaluation"]["accuracy"] == pytest.approx(expected, abs=0.01)
    left = [json.loads(line) for line in (tmp_path / "left.jsonl").read_text().splitlines()]
    assert {line["sent"] for line in left} == {True, False}
    spent = json.loads((out / "ledger.json").read_text())["spent"]
    assert sum(line["times"] for line in spent) > ROUNDS * NODES - 4, "the round in which the server died counts"
    for client in range(NODES):
        then, now = (sum(line["times"] for line in each if line["client"] == client) for each in (before, spent))
        assert now >= then + 2, "nothing was forgotten with the SuperLink, and two rounds came after it"
    assert not outside, f"connections to {outside}"
