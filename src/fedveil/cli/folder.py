"""The output folder of a run: who may write there, and whether the run continues or starts from the beginning."""

from __future__ import annotations

import itertools
import shutil
import tomllib
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedveil.auditing.experiment import read_toml
from fedveil.cli.config import Config
from fedveil.cli.stores import HOME, NONE, store_of
from fedveil.errors import FedveilError
from fedveil.federation.checkpoint import differences
from fedveil.files import write_atomically
from fedveil.ownership import LOCK, InUse, owned
from fedveil.tasks.own_files import Reference, is_reference
from fedveil.toml import to_toml

CONFIG = "config.toml"
DONE = {"audit": "result.json", "train": "history.json"}  # written last
FILES = ("result.json", "history.json", "report.html", "images.safetensors", "model.safetensors")
FOLDERS = ("captures", "truths")


@dataclass
class Claim:
    """A folder that belongs to this run."""

    path: Path
    finished: bool = False  # nothing is left to do: show what is there
    resumes: bool = False  # started by an earlier process
    begun: bool = False  # there is something to continue

    def begin(self, config: Config, backend: str = "auto") -> None:
        """Clear the folder and write this run's configuration, once. Before that, its contents are not touched.

        backend: what "auto" came to. The same bits come out on the same backend alone.
        """
        if self.resumes or self.begun:
            self.begun = True
            return
        # Remove first what marks the old run as finished, and replace its configuration last, so that a kill in between
        # leaves a half-done run.
        for name in (*FILES, "checkpoint.safetensors"):
            (self.path / name).unlink(missing_ok=True)
        for name in FOLDERS:
            shutil.rmtree(self.path / name, ignore_errors=True)
        named = f" --backend {backend}" if backend != config.backend else ""
        head = f"# fedveil {config.command} --config {CONFIG}{named} does this again; with --resume it continues\n"
        kept = config.kept()
        if config.command == "audit":  # where a stopped audit finds what it had computed, from any folder
            folder = store_of(config.store).folder
            kept["store"] = NONE if folder is None else str(folder.absolute())
        write_atomically(self.path / CONFIG, (head + to_toml(kept)).encode())
        self.begun = True

    def give_back(self) -> None:
        """Remove the configuration of a run that was refused before it kept any work, to make room for the next."""
        kept = {path for path in self.path.rglob("*") if path.is_file()} - {self.path / LOCK}
        if self.begun and not self.resumes and kept == {self.path / CONFIG}:
            (self.path / CONFIG).unlink()


@contextmanager
def claimed(config: Config, source: Path | None, *, resume: bool) -> Iterator[Claim]:
    """Choose and check the folder, and own it while the block runs.

    `source` is the configuration file, if there is one.
    """
    path = config.out or _beside(source, resume)
    if resume and path is None:
        raise FedveilError("--resume needs the run to go on with: --out FOLDER, or --config FOLDER/config.toml")
    with own_folder(path, _label(config), CONFIG) as path:
        claim = _claim(path, config, resume)
        try:
            yield claim
        except FedveilError:
            claim.give_back()
            raise


def _claim(path: Path, config: Config, resume: bool) -> Claim:
    there = _visible(path)
    if CONFIG not in there:
        return Claim(path)
    changed = _changed(path / CONFIG, config)
    finished = DONE[config.command] in there
    if resume and not changed:
        return Claim(path, finished=finished, resumes=True, begun=True)
    if config.overwrite and not resume:
        return Claim(path)
    state = "the finished run" if finished else "a half-done run"
    if changed:
        raise FedveilError(
            f"{path} holds {state} of another configuration ({'; '.join(changed[:3])}): choose another --out or add "
            "--overwrite"
        )
    go_on = "" if finished else "add --resume to go on with it, "
    raise FedveilError(f"{path} holds {state} of this configuration: {go_on}choose another --out or add --overwrite")


@contextmanager
def own_folder(path: Path | None, label: str, mark: str) -> Iterator[Path]:
    """Own a folder while the block runs: this one, or the first free one of this name and a number.

    A folder with contents belongs to a run if it holds the file `mark`; any other is refused.
    """
    with ExitStack() as stack:
        if path is None:
            path = _free_folder(label, stack)
        else:
            _check_name(path)
            there = _visible(path)
            if there and mark not in there:
                raise FedveilError(f"{path} is not empty and holds no run of fedveil: choose another --out")
            stack.enter_context(owned(path))
        yield path


def _free_folder(label: str, stack: ExitStack) -> Path:
    """The first folder of this name and a number that does not exist yet and that no other run takes first."""
    for number in itertools.count(1):
        path = HOME / f"{label}-{number}"
        with suppress(InUse):
            if not path.exists():
                stack.enter_context(owned(path))
                return path
    raise AssertionError  # numbers do not end


def _check_name(path: Path) -> None:
    if not str(path).isprintable():
        raise FedveilError(f"{str(path)!r} holds characters that cannot be shown: choose another --out")


def _visible(path: Path) -> list[str]:
    try:
        return [item.name for item in path.iterdir() if not item.name.startswith(".")]
    except OSError:
        return []  # it does not exist yet, or making it will say what is wrong


def _label(config: Config) -> str:
    names = "+".join(defense.name for defense in config.defense) or "none"
    parts = (_word(config.task.data), _word(config.task.model), names)
    return "-".join((*(("train",) if config.command == "train" else ()), *parts))


def _word(spec: str) -> str:
    """The name of a data set or model in the name of a folder; without the file, if it comes from one."""
    return Reference.read(spec).name if is_reference(spec) else spec.partition(":")[0]


def _beside(source: Path | None, resume: bool) -> Path | None:
    """The folder of the configuration file, if a run is resumed by its own."""
    if resume and source is not None and source.name == CONFIG and "command" in read_toml(source):
        return source.parent
    return None


def _changed(path: Path, config: Config) -> list[str]:
    """How the configuration in a folder differs from this one."""
    found = read_toml(path)
    command = found.get("command", config.command)
    if command != config.command:
        return [f"it is of `fedveil {command}`"]
    try:
        theirs = Config.checked({**found, "command": config.command}).kept()
    except FedveilError as error:
        return [str(error)]
    return differences(_comparable(theirs), _comparable(config.kept()))


def _comparable(kept: dict[str, Any]) -> dict[str, Any]:
    """The configuration as read back from a file, without the folder of the data, whose hash is checked instead."""
    plain = tomllib.loads(to_toml(kept))
    plain["task"].pop("data_root", None)
    return plain
