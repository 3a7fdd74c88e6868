"""Run in a network and process namespace of its own: NVFlare's POC mode with a policy at each site, and one job.

    unshare --net --pid --fork --kill-child --mount-proc python poc_run.py FOLDER

POC mode listens on all addresses; here nothing but this machine's own loopback device is there. When this program ends,
the system ends every process in the namespace.
"""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

from nvflare import FedJob
from nvflare.app_common.workflows.fedavg import FedAvg
from nvflare.app_opt.pt.job_config.model import PTModel
from nvflare.fuel.flare_api.flare_api import new_secure_session
from nvflare.job_config.script_runner import ScriptRunner
from poc_model import Zeros  # beside this file

ADMIN = "admin@nvidia.com"
PATIENCE = 240.0
POLICY = {
    "scopes": [
        {
            "name": "all",
            "task_data_filters": [{"path": "fedveil.nvflare.ReceiveFilter"}],
            "task_result_filters": [
                {
                    "path": "fedveil.nvflare.ProtectFilter",
                    "args": {"defense": "clip:norm=1,at=upload", "metrics": ["accuracy"], "digits": 2},
                }
            ],
        }
    ],
    "default_scope": "all",
}


def job() -> FedJob:
    """A job without any filter of its own; the training of the second site goes wrong."""
    made = FedJob(name="plain", min_clients=2)
    persistor = made.to_server(PTModel(Zeros()))["persistor_id"]
    made.to_server(FedAvg(num_clients=2, num_rounds=1, persistor_id=persistor, ignore_result_error=True))
    script = str(Path(__file__).with_name("poc_client.py"))
    for site, words in (("site-1", ""), ("site-2", "--broken")):
        made.to(ScriptRunner(script=script, script_args=words), site)
    return made


def nvflare(*words: str) -> None:
    program = str(Path(sys.executable).with_name("nvflare"))
    subprocess.run([program, *words], check=True, timeout=PATIENCE, stdin=subprocess.DEVNULL)


def submitted(folder: Path, kit: Path) -> str:
    """Log in, which takes until the server is up, and submit the job once both sites are there."""
    job().export_job(str(folder / "job"))
    end = time.monotonic() + PATIENCE
    while True:
        try:
            session = new_secure_session(ADMIN, str(kit), timeout=5)
            try:
                if len(session.get_system_info().client_info) == 2:
                    return str(session.submit_job(str(folder / "job" / "plain")))
            finally:
                session.close()
        except Exception as error:
            print("not yet:", type(error).__name__, flush=True)
        if time.monotonic() > end:
            raise TimeoutError("the server or a site did not come up")
        time.sleep(1)


def main(folder: Path) -> None:
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True, timeout=30)
    os.environ["NVFLARE_POC_WORKSPACE"] = str(folder / "poc")
    nvflare("poc", "prepare", "-n", "2")
    (kit,) = (folder / "poc").rglob(ADMIN)
    for site in ("site-1", "site-2"):
        (kit.parent / site / "local" / "privacy.json").write_text(json.dumps(POLICY))
    nvflare("poc", "start", "-ex", ADMIN)
    number = submitted(folder, kit)
    session = new_secure_session(ADMIN, str(kit), timeout=10)
    code = session.monitor_job(number, timeout=PATIENCE, poll_interval=1.0)
    print("ended:", code, flush=True)
    result = Path(session.download_job_result(number))
    (model,) = result.rglob("FL_global_model.pt")
    (folder / "model.pt").write_bytes(model.read_bytes())
    (folder / "status.txt").write_text(str(session.get_job_meta(number)["status"]))
    for log in kit.parent.rglob("log*.txt"):
        (folder / f"{'.'.join(log.relative_to(kit.parent).parts)}").write_text(log.read_text())
    session.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
