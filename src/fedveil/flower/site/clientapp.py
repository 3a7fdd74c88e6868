"""A second place for the gate: inside `flwr-clientapp`, where the SuperNode is not the site's own to start.

`fedveil site wrapper` writes programs with the names of Flower's own. First on the PATH of `flower-superexec` (or of a
SuperNode), they run every app under the site's policy. The app's code is then in the same process as the gate: one that
patches Flower's client cannot slip anything past `push`, but one that looks for the gate itself can get round it.
`fedveil site supernode` has the gate in a process of its own, and is to be preferred wherever it can be had.
"""

from __future__ import annotations

import copy
import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from flwr.app import Context, Error, Message
from flwr.common.constant import ErrorCode
from flwr.supernode.runtime import run_clientapp

from fedveil.errors import FedveilError
from fedveil.files import write_atomically
from fedveil.flower.launch import QUIET
from fedveil.flower.site.gate import Gate
from fedveil.flower.site.installed import check_built, stay_quiet
from fedveil.flower.site.policy import Policy

flower: Any = run_clientapp  # it exports none of these names
NEEDED = {
    "pull_task_input": ("client",),
    "get_load_client_app_fn": ("default_app_ref", "app_path", "multi_app"),
    "push_message": ("client", "message", "context"),
}
PROGRAM = "flwr-clientapp"
# What a SuperExec may be asked to start beside client apps. A policy knows nothing of them, so they do not run.
OTHERS = ("flwr-agentapp", "flwr-connector", "flwr-model", "flwr-serverapp", "flwr-simulation")


def check() -> None:
    """Refuse a Flower that is built otherwise than the wrapper needs."""
    check_built(flower, flower.run_clientapp, NEEDED)


def write_wrapper(folder: Path, policy_file: Path) -> list[Path]:
    """Write the programs; returns them."""
    check()
    lasting = [each.name for each in Policy.load(policy_file).rules.chain.defenses if each.state_scope == "run"]
    if lasting:
        raise FedveilError(
            f"{lasting[0]} remembers things over the rounds of a run, and a wrapped app is a new process each time: "
            "use `fedveil site supernode`, or another defense"
        )
    words = shlex.join([sys.executable, "-P", "-m", __name__, str(policy_file.absolute())])
    quiet = "".join(f"export {name}={value}\n" for name, value in QUIET.items())
    refuse = 'echo "the site\'s policy lets client apps run, and nothing else" >&2\nexit 1\n'
    folder.mkdir(parents=True, exist_ok=True)
    for name in (PROGRAM, *OTHERS):
        does = f'{quiet}exec {words} "$@"\n' if name == PROGRAM else refuse
        write_atomically(folder / name, f"#!/bin/sh\n{does}".encode())
        (folder / name).chmod(0o755)
    return [folder / name for name in (PROGRAM, *OTHERS)]


class Wrapped:
    """Stands between an app and the SuperNode, for the one message that this process is started for."""

    def __init__(self, gate: Gate) -> None:
        self._gate = gate
        self._asked: Message | None = None  # as the server sent it
        self._why: str | None = None  # the run may not use this site
        self._pull, self._load, self._push = flower.pull_task_input, flower.get_load_client_app_fn, flower.push_message

    def install(self) -> None:
        """Put the gate in place, for as long as the process lives."""
        check()
        flower.pull_task_input = self.pull
        flower.get_load_client_app_fn = self.loader
        flower.push_message = self.push

    def pull(self, client: Any) -> Any:
        """Pull the task, and keep a copy of the message that the app cannot change."""
        task = self._pull(client)
        message, _, run, fab = task
        self._asked = copy.deepcopy(message)
        self._why = self._gate.refuses(fab.content, run)
        return task

    def loader(self, *given: Any, **named: Any) -> Any:
        """Flower's function that loads an app; one that may not use this site is never loaded."""
        if self._why is None:
            return self._load(*given, **named)
        refused = Error(ErrorCode.LOAD_CLIENT_APP_EXCEPTION)
        return lambda *_: lambda message, context: Message(refused, reply_to=message)

    def push(self, client: Any, message: Message, context: Context) -> None:
        """Hand over what the gate makes of the reply; a second reply is dropped."""
        asked, self._asked = self._asked, None
        if asked is None:
            raise FedveilError("a reply to no message of the server was about to leave")
        answer = self._gate.refused(asked, self._why) if self._why else self._gate.reply(asked, message)
        self._push(client, answer, context)


def main(policy_file: Path, arguments: Sequence[str]) -> None:
    """Be `flwr-clientapp`, under a policy. `arguments` are those of `flwr-clientapp`."""
    from flwr.supernode.cli import flwr_clientapp

    os.environ.update(QUIET)
    try:
        check()
        stay_quiet()
        Wrapped(Gate(Policy.load(policy_file))).install()
    except FedveilError as error:
        sys.exit(f"{PROGRAM}: {error}")
    sys.argv = [PROGRAM, *arguments]
    flwr_clientapp()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
