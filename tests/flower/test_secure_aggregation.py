"""Flower's SecAgg+ with a defense inside it: the server sees the mean of what was protected, and nothing else."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.client.mod import secaggplus_mod
from flwr.clientapp import ClientApp
from flwr.common import ndarrays_to_parameters
from flwr.server import LegacyContext, ServerConfig
from flwr.server.strategy import FedAvg
from flwr.server.workflow import DefaultWorkflow, SecAggPlusWorkflow

from fedveil.flower import protect
from fedveil.flower.federate import simulate_app
from fedveil.toml import to_toml
from flower.exchange import context
from flower.grids import FakeGrid

CLIENTS, EXAMPLES = 3, 10
STEP = 2 * 8.0 / 2**22 * 1000 / EXAMPLES  # the range over the levels, and the largest weight over a client's


def test_the_mean_is_right_to_the_quantization_step() -> None:
    seen: dict[int, np.ndarray] = {}

    def fit(message: Message, held: Context) -> Message:
        partition = int(held.node_config["partition-id"])
        old = message.content["fitins.parameters"]
        change = np.zeros(9, dtype=np.float32)
        change[3 * partition] = 1 + partition
        arrays = ArrayRecord({name: Array(array.numpy() + change) for name, array in old.items()})
        told = {
            "fitres.parameters": arrays,
            "fitres.num_examples": MetricRecord({"num_examples": EXAMPLES}),
            "fitres.metrics": ConfigRecord(),
            "fitres.status": ConfigRecord({"code": 0, "message": ""}),
        }
        return Message(RecordDict(told), reply_to=message)

    inner = protect("clip:norm=2,at=upload")

    def watched(message: Message, held: Context, call_next: object) -> Message:
        reply = inner(message, held, call_next)  # type: ignore[arg-type]
        array = next(iter(reply.content["fitres.parameters"].values())).numpy()
        seen[int(held.node_config["partition-id"])] = array
        return reply

    app = ClientApp(mods=[secaggplus_mod, watched])
    app.train()(fit)
    grid = FakeGrid(dict.fromkeys(range(CLIENTS), app))
    start = [np.zeros(9, dtype=np.float32)]
    strategy = FedAvg(fraction_evaluate=0.0, min_fit_clients=CLIENTS, min_available_clients=CLIENTS)
    strategy.initial_parameters = ndarrays_to_parameters(start)
    legacy = LegacyContext(context(), ServerConfig(num_rounds=1), strategy)
    DefaultWorkflow(SecAggPlusWorkflow(num_shares=3, reconstruction_threshold=2))(grid, legacy)
    record = next(iter(legacy.state.array_records.values()))
    mean = next(iter(record.values())).numpy()
    assert sorted(seen) == [0, 1, 2]
    lengths = [np.linalg.norm(seen[partition]) for partition in range(CLIENTS)]
    assert lengths == pytest.approx([1, 2, 2], rel=1e-4), "each was clipped before it was masked"
    assert np.allclose(mean, np.mean(list(seen.values()), axis=0), atol=STEP)


CLIENT = """
import numpy as np
from flwr.client import NumPyClient
from flwr.client.mod import secaggplus_mod
from flwr.clientapp import ClientApp

import fedveil.flower

inner = fedveil.flower.protect()

def watched(message, context, call_next):
    reply = inner(message, context, call_next)
    if reply.has_content() and "fitres.parameters" in reply.content:
        array = next(iter(reply.content["fitres.parameters"].values())).numpy()
        np.save(f"FOLDER/sent-{context.node_config['partition-id']}.npy", array)
    return reply

def masked(message, context, call_next):
    reply = secaggplus_mod(message, context, call_next)
    values = [value for record in reply.content.config_records.values() for value in record.values()]
    parts = [part for value in values if isinstance(value, list) for part in value if isinstance(part, bytes)]
    with open(f"FOLDER/left-{context.node_config['partition-id']}", "ab") as file:
        file.write(b"".join(parts))
    return reply

class Client(NumPyClient):
    def __init__(self, partition):
        self.partition = partition

    def fit(self, parameters, config):
        change = np.zeros(9, dtype=np.float32)
        change[3 * self.partition] = 1 + self.partition
        return [parameters[0] + change], 10, {}

app = ClientApp(
    client_fn=lambda context: Client(int(context.node_config["partition-id"])).to_client(),
    mods=[masked, watched],
)
"""
SERVER = """
import numpy as np
from flwr.common import ndarrays_to_parameters
from flwr.server import LegacyContext, ServerConfig
from flwr.server.strategy import FedAvg
from flwr.server.workflow import DefaultWorkflow, SecAggPlusWorkflow
from flwr.serverapp import ServerApp

app = ServerApp()

@app.main()
def main(grid, context):
    strategy = FedAvg(fraction_evaluate=0.0, min_fit_clients=3, min_available_clients=3)
    strategy.initial_parameters = ndarrays_to_parameters([np.zeros(9, dtype=np.float32)])
    legacy = LegacyContext(context, ServerConfig(num_rounds=1), strategy)
    DefaultWorkflow(SecAggPlusWorkflow(num_shares=3, reconstruction_threshold=2))(grid, legacy)
    record = next(iter(legacy.state.array_records.values()))
    np.save("FOLDER/mean.npy", next(iter(record.values())).numpy())
"""


@pytest.mark.deployment
def test_so_it_is_in_flower_s_simulation(tmp_path: Path) -> None:
    defense = "clip:norm=1,at=upload+gaussian-noise:sigma=0.1,at=upload"
    package = tmp_path / "app/secure_mean"
    package.mkdir(parents=True)
    for name, text in {"__init__": '""', "client": CLIENT, "server": SERVER}.items():
        (package / f"{name}.py").write_text(text.replace("FOLDER", str(tmp_path)))
    components = {"serverapp": "secure_mean.server:app", "clientapp": "secure_mean.client:app"}
    told = {
        "build-system": {"requires": ["hatchling"], "build-backend": "hatchling.build"},
        "project": {"name": "secure-mean", "version": "1.0.0", "dependencies": [], "license": "Apache-2.0"},
        "tool": {"flwr": {"app": {"publisher": "fedveil", "components": components, "config": {"defense": defense}}}},
    }
    (tmp_path / "app/pyproject.toml").write_text(to_toml(told))
    log = tmp_path / "flower.log"
    code = simulate_app(tmp_path / "app", CLIENTS, [], log)
    assert code == 0, log.read_text()
    assert (tmp_path / "mean.npy").exists(), log.read_text()
    sent = [np.load(tmp_path / f"sent-{client}.npy") for client in range(CLIENTS)]
    mean = np.load(tmp_path / "mean.npy")
    assert np.allclose(mean, np.mean(sent, axis=0), atol=STEP)
    assert all(np.count_nonzero(each) == 9 for each in sent), "noise on every number, inside the mask"
    assert np.abs(sent[2]).max() < 2, "clipped: it was 3"
    for client in range(CLIENTS):
        left = (tmp_path / f"left-{client}").read_bytes()
        assert len(left) > sent[client].nbytes
        assert sent[client].tobytes() not in left, "what leaves is masked"
