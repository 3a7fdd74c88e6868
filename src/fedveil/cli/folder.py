"""The output folder of a run: who may write there, and whether it goes on or starts anew."""

from __future__ import annotations

import itertools
import shutil
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedveil.cli.config import Config, read_toml
from fedveil.errors import FedveilError
from fedveil.federation.checkpoint import differences
from fedveil.files import writable_folder, write_atomically
from fedveil.tasks.own_files import Reference, is_reference
from fedveil.toml import to_toml

HOME = Path("fedveil-out")  # where runs go that name no folder
CONFIG = "config.toml"
DONE = {"audit": "result.json", "train": "history.json"}  # written last
FILES = ("result.json", "images.safetensors", "report.html", "history.json", "model.safetensors")
FOLDERS = ("attacks", "defended", "undefended", "captures", "truths")


@dataclass(frozen=True)
class Claim:
    """A folder that this run may have."""

    path: Path
    finished: bool = False  # nothing is left to do: show what is there
    resumes: bool = False  # an earlier process began

    def take(self, config: Config) -> None:
        """Make the folder this run's. Nothing is touched before."""
        writable_folder(self.path)
        if self.resumes:
            return
        for name in (CONFIG, "checkpoint.safetensors", *FILES):
            (self.path / name).unlink(missing_ok=True)
        for name in FOLDERS:
            shutil.rmtree(self.path / name, ignore_errors=True)
        head = f"# fedveil {config.command} --config {CONFIG} does this again, with --resume goes on with it\n"
        write_atomically(self.path / CONFIG, (head + to_toml(config.kept())).encode())


def claim(config: Config, source: Path | None, *, resume: bool) -> Claim:
    """Choose and check the folder, or refuse in one line. `source` is the configuration file, if there is one."""
    path = config.out or _beside(source, resume) or free_folder(_label(config))
    if resume and config.out is None and _beside(source, resume) is None:
        raise FedveilError("--resume needs the run to go on with: --out FOLDER, or --config FOLDER/config.toml")
    if not path.exists():
        return Claim(path)
    if not path.is_dir():
        raise FedveilError(f"{path} is a file: choose a folder with --out")
    there = [item.name for item in path.iterdir() if not item.name.startswith(".")]
    if CONFIG not in there:
        if there:
            raise FedveilError(f"{path} is not empty and holds no run of fedveil: choose another --out")
        return Claim(path)
    changed = _changed(path / CONFIG, config)
    finished = DONE[config.command] in there
    if resume and not changed:
        return Claim(path, finished=finished, resumes=True)
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


def free_folder(label: str) -> Path:
    """The first folder of this name and a number that does not exist yet."""
    return next(path for n in itertools.count(1) if not (path := HOME / f"{label}-{n}").exists())


def _label(config: Config) -> str:
    names = "+".join(defense.name for defense in config.defense) or "none"
    parts = (_word(config.task.data), _word(config.task.model), names)
    return "-".join((*(("train",) if config.command == "train" else ()), *parts))


def _word(spec: str) -> str:
    """What a data set or model is called in the name of a folder: of a Python file, what is taken from it."""
    return Reference.read(spec).name if is_reference(spec) else spec.partition(":")[0]


def _beside(source: Path | None, resume: bool) -> Path | None:
    """A resumed run stands where its own configuration file does."""
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
        theirs = Config.checked(config.command, found).kept()
    except FedveilError as error:
        return [str(error)]
    return differences(_comparable(theirs), _comparable(config.kept()))


def _comparable(kept: dict[str, Any]) -> dict[str, Any]:
    """As the file gives it back. Where data files lie is no part of the configuration: their hash is checked."""
    plain = tomllib.loads(to_toml(kept))
    plain["task"].pop("data_root", None)
    return plain
