"""The options of `audit` and `train`: one table, in which every option is also a key of the configuration file."""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from fedveil.auditing.suites import SUITES
from fedveil.errors import FedveilError
from fedveil.fields import parse_value
from fedveil.registry import REGISTRIES

Command = Literal["audit", "train"]
Kind = Literal["text", "number", "numbers", "steps", "specs", "switch"]

TASK, DEFENSE, FEDERATION, AUDIT, RUN = "Data and model", "Defense", "Federation", "Attack", "Run and output"


@dataclass(frozen=True)
class Setting:
    """One option. Defaults and checks are in the classes that the keys belong to."""

    key: str  # in the configuration file: "federation.lr" is `lr` in the section [federation]
    flag: str
    kind: Kind
    help: str
    panel: str
    default: str = ""  # as the help shows it; a test compares it with the class
    command: Command | None = None  # None: both

    @property
    def name(self) -> str:
        """The key as a Python identifier."""
        return self.key.replace(".", "_")

    def read(self, given: Any) -> Any:
        """The typed value as it would be in the configuration file. Bad values are refused later, by the class."""
        if self.kind == "number":
            return parse_value(given)
        if self.kind == "numbers":
            numbers = [parse_value(part.strip()) for part in given.split(",") if part.strip()]
            if not all(isinstance(number, int | float) for number in numbers):
                raise FedveilError(f"{self.flag} must be numbers with commas between them, as in 1,5 (got '{given}')")
            return numbers
        if self.kind == "steps":
            if not all(part.count(":") == 1 for part in given.split(",")):
                raise FedveilError(f"{self.flag} must be ROUND:RATE, as in 51:0.001,81:0.0001 (got '{given}')")
            return [[parse_value(each.strip()) for each in part.split(":")] for part in given.split(",")]
        return given


SETTINGS = (
    Setting("task.data", "--data", "text", "Data set: see `fedveil list datasets`. Or file.py:data.", TASK, "digits"),
    Setting(
        "task.model",
        "--model",
        "text",
        "Model, with fields: resnet18:norm=group. Or file.py:Net.",
        TASK,
        "lenet",
    ),
    Setting("task.clients", "--clients", "number", "Clients that share the training data.", TASK, "4"),
    Setting("task.split", "--split", "text", "Own parts, or train/validation/test: 70/15/15.", TASK, "own"),
    Setting("task.partition", "--partition", "text", "How clients share the training data.", TASK, "iid"),
    Setting(
        "task.limit",
        "--limit",
        "number",
        "Use at most this many training examples, drawn by class.",
        TASK,
        "all",
    ),
    Setting("task.buffers", "--buffers", "text", "Running statistics: shared, local or recalibrated.", TASK, "shared"),
    Setting(
        "task.data_root", "--data-root", "text", "Folder of the data files.", TASK, "FEDVEIL_DATA or ~/.cache/fedveil"
    ),
    Setting(
        "defense",
        "--defense",
        "specs",
        "name:field=value,... Chains: join with + or repeat. See `fedveil list defenses`.",
        DEFENSE,
        "none",
    ),
    Setting("federation.protocol", "--protocol", "text", "fedsgd or fedavg.", FEDERATION, "fedsgd"),
    Setting(
        "federation.rounds", "--rounds", "number", "Rounds of training; 0: audit without training.", FEDERATION, "10"
    ),
    Setting("federation.batch_size", "--batch-size", "number", "Examples per step of a client.", FEDERATION, "8"),
    Setting("federation.lr", "--lr", "number", "Learning rate.", FEDERATION, "0.1"),
    Setting("federation.lr_steps", "--lr-steps", "steps", "Another rate from a round on: 51:0.001.", FEDERATION),
    Setting(
        "federation.sampling_rate", "--sampling-rate", "number", "Share of the clients in a round.", FEDERATION, "1.0"
    ),
    Setting(
        "federation.weighting",
        "--weighting",
        "text",
        "Clients count equally (uniform) or by size.",
        FEDERATION,
        "uniform",
    ),
    Setting("federation.momentum", "--momentum", "number", "Momentum.", FEDERATION, "0.0"),
    Setting("federation.weight_decay", "--weight-decay", "number", "Weight decay.", FEDERATION, "0.0"),
    Setting("federation.local_epochs", "--local-epochs", "number", "FedAvg: epochs of a round.", FEDERATION, "1"),
    Setting("federation.upload", "--upload", "text", "FedAvg: weights or delta.", FEDERATION, "weights"),
    Setting(
        "federation.warmup_rounds",
        "--warmup-rounds",
        "number",
        "Rounds without the defense at the start.",
        FEDERATION,
        "0",
    ),
    Setting(
        "federation.patience",
        "--patience",
        "number",
        "Stop after this many rounds without better validation accuracy.",
        FEDERATION,
        "never",
    ),
    Setting(
        "federation.evaluate_every",
        "--evaluate-every",
        "number",
        "Rounds between evaluations of the model.",
        FEDERATION,
        "1",
    ),
    Setting(
        "federation.record_rounds",
        "--record-rounds",
        "numbers",
        "Rounds whose updates are captured: 1,5.",
        FEDERATION,
        command="train",
    ),
    Setting(
        "federation.record_clients",
        "--record-clients",
        "number",
        "Capture only this many clients, the first ones.",
        FEDERATION,
        "all",
        command="train",
    ),
    Setting(
        "federation.local_utility",
        "--local-utility",
        "number",
        "Also evaluate the models of this many clients per round.",
        FEDERATION,
        "0",
    ),
    Setting(
        "suite",
        "--suite",
        "text",
        "Attacks that belong together: quick, standard or thorough. See `fedveil list suites`.",
        AUDIT,
        "standard",
        "audit",
    ),
    Setting(
        "attack",
        "--attack",
        "specs",
        "In place of a suite: name:field=value,... Repeat for several. See `fedveil list attacks`.",
        AUDIT,
        command="audit",
    ),
    Setting("audit.victims", "--victims", "number", "Attacked updates per attacked round.", AUDIT, "16", "audit"),
    Setting(
        "audit.batch_size", "--attack-batch-size", "number", "Examples behind an attacked update.", AUDIT, "1", "audit"
    ),
    Setting(
        "audit.source",
        "--source",
        "text",
        "Whose examples: clients, or test in their order.",
        AUDIT,
        "clients",
        "audit",
    ),
    Setting("audit.rounds", "--attack-rounds", "numbers", "Rounds at whose start to attack: 1,5.", AUDIT, "1", "audit"),
    Setting(
        "audit.local_steps",
        "--local-steps",
        "text",
        "FedAvg updates are attacked unrolled, or as a pseudo-gradient.",
        AUDIT,
        "unrolled",
        "audit",
    ),
    Setting(
        "audit.step_order",
        "--step-order",
        "text",
        "Their unknown order: searched, the same in every epoch, or mean.",
        AUDIT,
        "searched",
        "audit",
    ),
    Setting(
        "audit.views",
        "--views",
        "number",
        "Messages about each batch that the attacker saw, each protected anew.",
        AUDIT,
        "1",
        "audit",
    ),
    Setting("audit.attackers", "--attackers", "text", "both, naive or adaptive.", AUDIT, "both", "audit"),
    Setting(
        "audit.link",
        "--link/--no-link",
        "switch",
        "Ask, too, whether updates can be linked to known images.",
        AUDIT,
        "link",
        "audit",
    ),
    Setting(
        "audit.member",
        "--member/--no-member",
        "switch",
        "Suites ask, too, whether it can be told which images were used.",
        AUDIT,
        "member",
        "audit",
    ),
    Setting(
        "audit.nonmembers",
        "--nonmembers",
        "number",
        "Held-out images that those are told from, at most.",
        AUDIT,
        "1000",
        "audit",
    ),
    Setting(
        "audit.auxiliary",
        "--auxiliary",
        "text",
        "What attackers may learn from: held-out test images, none, or a data set by name.",
        AUDIT,
        "held-out",
        "audit",
    ),
    Setting("audit.auxiliary_most", "--auxiliary-most", "number", "Of these, at most.", AUDIT, "20000", "audit"),
    Setting(
        "audit.stop_when_settled",
        "--stop-when-settled/--no-stop-when-settled",
        "switch",
        "quick and standard leave out attacks on a question that is settled.",
        AUDIT,
        "stop-when-settled",
        "audit",
    ),
    Setting(
        "audit.candidates",
        "--candidates",
        "number",
        "Images among which the original is to be recognized.",
        AUDIT,
        "100",
        "audit",
    ),
    Setting(
        "audit.reference",
        "--reference",
        "text",
        "trained: compare by a classifier of the task's own data, too; none.",
        AUDIT,
        "trained",
        "audit",
    ),
    Setting("audit.lpips", "--lpips", "text", "none, alex or vgg; needs weight files.", AUDIT, "none", "audit"),
    Setting(
        "audit.tolerance",
        "--tolerance",
        "number",
        "Deviations of its column within which a number of a table counts as recovered.",
        AUDIT,
        "0.1",
        "audit",
    ),
    Setting(
        "audit.exposed_above",
        "--exposed-above",
        "number",
        "Share of recognized images above which updates count as exposed.",
        AUDIT,
        "0.5",
        "audit",
    ),
    Setting(
        "audit.smallest_gain",
        "--smallest-gain",
        "number",
        "By how much an attack must beat the floor to count.",
        AUDIT,
        "0.0",
        "audit",
    ),
    Setting(
        "audit.rule_out",
        "--rule-out",
        "number",
        "Share of recognized images to rule out before saying 'no leakage found'.",
        AUDIT,
        "0.25",
        "audit",
    ),
    Setting(
        "audit.recognizable_from",
        "--recognizable-from",
        "number",
        "Similarity at which a picture that is picked counts as recognizable.",
        AUDIT,
        "0.5",
        "audit",
    ),
    Setting(
        "audit.large_drop",
        "--large-drop",
        "number",
        "Loss of accuracy above which the cost is called large.",
        AUDIT,
        "0.05",
        "audit",
    ),
    Setting("seed", "--seed", "number", "Seed of everything random.", RUN, "0"),
    Setting("device", "--device", "text", "Where to compute: cpu, cuda, mps.", RUN, "cpu"),
    Setting("backend", "--backend", "text", "auto, loop, stacked or compiled.", RUN, "auto"),
    Setting("workers", "--workers", "text", "Processes for FedAvg and attacks: auto or a number.", RUN, "auto"),
    Setting("out", "--out", "text", "Output folder.", RUN, "fedveil-out/DATA-MODEL-DEFENSE-NUMBER"),
    Setting(
        "store",
        "--store",
        "text",
        "Folder that audits share: what one computed, no other computes again. none: keep nothing.",
        RUN,
        "FEDVEIL_STORE or fedveil-out/store",
        "audit",
    ),
    Setting("overwrite", "--overwrite", "switch", "Replace an earlier run in the output folder.", RUN),
    Setting("json", "--json", "switch", "Print a summary as JSON, and nothing else, on standard output.", RUN),
    Setting("quiet", "--quiet", "switch", "Do not show progress.", RUN),
    Setting(
        "fail_if",
        "--fail-if",
        "specs",
        "Exit with 3 at this finding: exposed, partly-exposed, not-judged. Repeat for several.",
        RUN,
        command="audit",
    ),
)
_BY_KEY = {setting.key: setting for setting in SETTINGS}
_METAVARS = {"text": "TEXT", "number": "NUMBER", "numbers": "N,N", "steps": "ROUND:RATE", "specs": "SPEC"}


@dataclass(frozen=True)
class Given:
    """The options given on the command line."""

    values: dict[str, Any]  # by key, as they would be in the configuration file
    config: Path | None
    resume: bool


def with_settings(command: Command) -> Callable[[Callable[[Given], int | None]], Callable[..., int | None]]:
    """Add the options of the table to a command that takes a `Given`."""
    chosen = [setting for setting in SETTINGS if setting.command in (None, command)]

    def decorate(function: Callable[[Given], int | None]) -> Callable[..., int | None]:
        def typed(*, config: Path | None = None, resume: bool = False, **options: Any) -> int | None:
            return function(Given(read_values({s.key: options[s.name] for s in chosen}), config, resume))

        file = typer.Option("--config", metavar="FILE", help="TOML file; options override it.", rich_help_panel=RUN)
        again = typer.Option("--resume", help="Continue a stopped run.", rich_help_panel=RUN, show_default=False)
        parameters = [parameter_of(setting) for setting in chosen]
        parameters.append(keyword("config", None, Annotated[Path | None, file]))
        parameters.append(keyword("resume", False, Annotated[bool, again]))
        typed.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        typed.__annotations__ = {}
        typed.__name__, typed.__doc__ = command, function.__doc__
        return typed

    return decorate


_NAMED = {
    "task.data": "datasets",
    "task.model": "models",
    "defense": "defenses",
    "attack": "attacks",
    "suite": "suites",
    "audit.auxiliary": "datasets",
}


def names_of(kind: str) -> Callable[[str], list[tuple[str, str]]]:
    """For the shell's completion: the names of a kind that match a word, with their summaries. Needs no torch."""

    def complete(incomplete: str) -> list[tuple[str, str]]:
        chain, plus, last = incomplete.rpartition("+")  # of a chain of defenses, complete the last
        entries = SUITES.values() if kind == "suites" else REGISTRIES[kind].entries().values()
        return [(f"{chain}{plus}{each.name}", _short(each.summary)) for each in entries if each.name.startswith(last)]

    return complete


def _short(summary: str) -> str:
    """Short enough for one line beside a name, in any shell."""
    return textwrap.shorten(summary, 60, placeholder=" …")


def option(key: str) -> Any:
    """The option for a key of the table, for the signature of a command."""
    setting = _BY_KEY[key]
    return typer.Option(
        setting.flag,
        help=setting.help,
        show_default=setting.default or False,
        metavar=_METAVARS.get(setting.kind),
        rich_help_panel=setting.panel,
        autocompletion=names_of(_NAMED[key]) if key in _NAMED else None,
    )


def read_values(options: dict[str, Any]) -> dict[str, Any]:
    """The given options, by key, as they would be in the configuration file."""
    return {key: _BY_KEY[key].read(value) for key, value in options.items() if value not in (None, [])}


def parameter_of(setting: Setting) -> inspect.Parameter:
    """The option as a parameter of a command."""
    if setting.kind == "switch":
        return keyword(setting.name, None, Annotated[bool | None, option(setting.key)])
    if setting.kind == "specs":
        return keyword(setting.name, None, Annotated[list[str] | None, option(setting.key)])
    return keyword(setting.name, None, Annotated[str | None, option(setting.key)])


def keyword(name: str, default: Any, annotation: Any) -> inspect.Parameter:
    """A parameter of a command."""
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)
