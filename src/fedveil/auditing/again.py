"""An audit's configuration as the file that `--config` reads, and as a command line."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from typing import Any

from fedveil.auditing.suites import DEFAULT
from fedveil.errors import FedveilError
from fedveil.registry import Registry, attacks, defenses
from fedveil.toml import to_toml

# As the command line names what it does not call by the name of its key.
_FLAGS = {"audit.batch_size": "--attack-batch-size", "audit.rounds": "--attack-rounds"}
OWN = "own data"  # in the place of a data set's name, for examples that no name stands for
_TASK = {"clients": 4, "split": "own", "partition": "iid", "limit": None, "buffers": "shared"}
_RUN = {"seed": 0, "device": "cpu", "backend": "auto"}


def config_file(config: Mapping[str, Any]) -> dict[str, Any] | None:
    """The configuration of a result in the layout of the file.

    None where no file can say it: the model, the data or the auxiliary data are the user's own, or the task has another
    seed than the run.
    """
    task = dict(config.get("task", {}))
    named = {"name", "model", "split", "seed"} <= task.keys() and {"federation", "audit"} <= config.keys()
    if not named or not {"attack", "suite"} & config.keys() or task["seed"] != config.get("seed"):
        return None
    if config["audit"].get("auxiliary") == OWN:
        return None
    federation = {
        k: v for k, v in config["federation"].items() if k not in ("train", "record_rounds", "record_clients")
    }
    if not config["federation"].get("train", True):  # as earlier versions said it
        federation["rounds"] = 0
    return {
        "command": "audit",
        **{name: config.get(name, default) for name, default in _RUN.items()},
        "task": {"data": task.pop("name"), **{name: value for name, value in task.items() if name != "seed"}},
        "federation": federation,
        "audit": dict(config["audit"]),
        **({"attack": list(config["attack"])} if "attack" in config else {"suite": config["suite"]}),
        "defense": list(config.get("defense", [])),
    }


def config_toml(config: Mapping[str, Any]) -> str:
    """The file itself; of the user's own model or data, what there is of it."""
    return to_toml(config_file(config) or config)


def command_line(config: Mapping[str, Any], changes: Mapping[str, Any] | None = None) -> str:
    """The whole command of an audit, with some keys of its file changed; in Python's words for the user's own model.

    Only what differs from the defaults is spelled out.
    """
    from fedveil.auditing.settings import AuditSettings  # these know of torch, which showing a result does not need
    from fedveil.federation.settings import FederationSettings
    from fedveil.fields import field_values

    file = config_file(config)
    if file is None:
        return _in_python(changes or {})
    if {"attack", "suite"} & (changes or {}).keys():
        file = {key: value for key, value in file.items() if key not in ("attack", "suite")}
    for key, value in (changes or {}).items():
        section, dot, name = key.partition(".")
        if dot:
            file[section] = {**file[section], name: value}
        else:
            file[key] = value
    words = ["fedveil", "audit", "--data", file["task"]["data"], "--model", file["task"]["model"]]
    plain = {
        "task": _TASK,
        "federation": field_values(FederationSettings()),
        "audit": field_values(AuditSettings()),
    }
    for section, defaults in plain.items():
        for name, default in defaults.items():
            value = file[section].get(name, default)
            if isinstance(default, bool):
                words += [] if value == default else [f"--{'' if value else 'no-'}{name.replace('_', '-')}"]
            elif _plain(value) != _plain(default):
                words += [_FLAGS.get(f"{section}.{name}", f"--{name.replace('_', '-')}"), _typed(value)]
    for kind, registry in (("defense", defenses), ("attack", attacks)):
        for each in file.get(kind, ()):
            words += [f"--{kind}", _spelled(registry, each)]
    if file.get("suite", DEFAULT) != DEFAULT:
        words += ["--suite", file["suite"]]
    for name, default in _RUN.items():
        if file[name] != default:
            words += [f"--{name}", str(file[name])]
    return shlex.join(words)


def _in_python(changes: Mapping[str, Any]) -> str:
    """For a model or data that no command line can name."""
    specs = [_spelled(attacks, each) for each in changes.get("attack", ())]
    attack = "attack" if not specs else repr(specs[0] if len(specs) == 1 else specs)
    attack = f"suite={changes['suite']!r}" if "suite" in changes else attack
    audit = [f"{key.removeprefix('audit.')}={value!r}" for key, value in changes.items() if key.startswith("audit.")]
    settings = [f"settings=fedveil.AuditSettings({', '.join(audit)})"] if audit else []
    return f"fedveil.audit({', '.join(['task', 'defense', attack, *settings, '...'])})"


def _spelled(registry: Registry, described: Mapping[str, Any]) -> str:
    """As the command line writes it; a plugin that is not installed here is spelled from its fields."""
    try:
        return registry.spell(registry.build(**described))
    except (FedveilError, TypeError):
        fields = ",".join(f"{name}={_typed(value)}" for name, value in described.items() if name != "name")
        return f"{described.get('name', '')}:{fields}".rstrip(":")


def _plain(value: Any) -> Any:
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value


def _typed(value: Any) -> str:
    """A value as options take it: 1,5 and 51:0.001,81:0.0001."""
    if isinstance(value, list | tuple):
        return ",".join(":".join(map(str, each)) if isinstance(each, list | tuple) else str(each) for each in value)
    return str(value)
