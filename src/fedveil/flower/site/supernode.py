"""`fedveil site supernode`: Flower's SuperNode with a site's policy in it."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from fedveil.errors import FedveilError
from fedveil.flower.launch import QUIET, past_proxies
from fedveil.flower.records import PARTITION
from fedveil.flower.site.policy import Policy


def run_supernode(policy_file: Path, arguments: Sequence[str]) -> None:
    """Run a SuperNode in this process until it is stopped. `arguments` are those of `flower-supernode`."""
    os.environ.update(QUIET | past_proxies())  # for the programs that Flower starts
    programs = str(Path(sys.executable).parent)
    os.environ["PATH"] = os.pathsep.join([programs, os.environ.get("PATH", os.defpath)])
    policy = Policy.load(policy_file)
    from flwr.supernode.cli.flower_supernode import _parse_args_run_supernode, flower_supernode

    from fedveil.flower.site.gate import Gate
    from fedveil.flower.site.installed import stay_quiet
    from fedveil.flower.site.seam import Seam, check

    check()
    stay_quiet()
    given = _parse_args_run_supernode().parse_args(list(arguments))
    gate = Gate(policy, _partition(given.node_config))
    Seam(gate).install()
    print(f"site policy: every update leaves under {policy.rules.chain}; log: {policy.log}", flush=True)
    sys.argv = ["flower-supernode", *arguments]
    flower_supernode()


def _partition(node_config: str | None) -> int:
    from flwr.common.config import parse_config_args

    told = parse_config_args([node_config] if node_config else None).get(PARTITION, 0)
    if not isinstance(told, int) or told < 0:
        raise FedveilError(f"{PARTITION} of --node-config must be a whole number from 0 on (got {told!r})")
    return told
