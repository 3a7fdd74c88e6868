"""A policy of the site itself, in NVFlare's POC mode: servers and sites as processes, in a namespace of their own."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("nvflare")
PROGRAM = Path(__file__).with_name("programs") / "poc_run.py"
ALONE = ["unshare", "--net", "--pid", "--fork", "--kill-child", "--mount-proc"]
PATIENCE = 600


def able() -> bool:
    """Whether this user may make namespaces, and set up a network in one."""
    if not (shutil.which("unshare") and shutil.which("ip")):
        return False
    tried = [*ALONE, "ip", "link", "set", "lo", "up"]
    return subprocess.run(tried, capture_output=True, timeout=60, check=False).returncode == 0


@pytest.mark.deployment
def test_a_site_protects_what_it_sends_whatever_job_comes(tmp_path):
    if not able():
        pytest.skip("POC mode listens on all addresses: it runs in a network namespace, which takes root and iproute2")
    environment = {**os.environ, "HOME": str(tmp_path), "PYTHONPATH": ""}
    done = subprocess.run(
        [*ALONE, sys.executable, str(PROGRAM), str(tmp_path)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert (tmp_path / "status.txt").read_text() == "FINISHED:COMPLETED"
    # The job adds one to each of ten zeros; the site lets out a change of norm 1. The second site sends NaN.
    weights = torch.load(tmp_path / "model.pt", weights_only=False)["model"]
    torch.testing.assert_close(weights["weight"], torch.full((10,), 10**-0.5))
    logs = {path.name.split(".")[0]: path.read_text() for path in tmp_path.glob("site-*log.txt") if len(path.name) > 20}
    assert "fedveil: protected by clip:at=upload" in logs["site-1"]
    assert "fedveil: the result is not sent: the update is not finite" in logs["site-2"]
    server = "".join(path.read_text() for path in tmp_path.glob("server*log.txt"))
    assert "canary" not in server
    assert "not finite" not in server  # the server gets a code, not the reason
