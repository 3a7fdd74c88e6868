"""`fedveil`: the commands, and how every error becomes one line."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from fedveil import fork_server
from fedveil.cli import canary as canary_command
from fedveil.cli import compare as compare_command
from fedveil.cli import data as data_command
from fedveil.cli import federate as federate_command
from fedveil.cli import flower as flower_command
from fedveil.cli import prior as prior_command
from fedveil.cli import site as site_command
from fedveil.cli import study as study_command
from fedveil.cli import tune as tune_command
from fedveil.cli.display import Stopped, debugging, set_up_logging
from fedveil.cli.listing import KINDS, kinds_like, names_like, show_list
from fedveil.cli.options import SETTINGS, Given, names_of, with_settings
from fedveil.errors import FedveilError, printable, unknown_name
from fedveil.memory import keep_freed_memory
from fedveil.ownership import owned
from fedveil.signals import Signaled, exit_code, hear_signals, heard
from fedveil.version import __version__

# Newer versions of Typer contain a copy of Click; the base of its errors is reached through one that Typer exports.
_UsageError: type[Exception] = next(cls for cls in typer.BadParameter.__mro__ if cls.__name__ == "ClickException")

app = typer.Typer(
    name="fedveil",
    help="Train under a defense, attack what was shared, show what leaked and what it cost.",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.add_typer(data_command.app, name="data")
app.add_typer(prior_command.app, name="prior")
app.add_typer(flower_command.app, name="flower")
app.add_typer(site_command.app, name="site")
app.add_typer(study_command.app, name="study")
app.command("canary")(canary_command.canary)
app.command("compare")(compare_command.compare)
app.command("federate")(federate_command.federate)
app.command("tune")(tune_command.tune)
store_app = typer.Typer(help="List and remove what audits keep for each other.")
app.add_typer(store_app, name="store")


def main() -> None:
    """The entry point."""
    # Torch's threads would otherwise wait in a busy loop, which slows a run down many times as soon as another program
    # needs the processor. Torch reads this when it is loaded, which no command has done yet.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    keep_freed_memory()
    set_up_logging()
    try:
        hear_signals()
        code = run(sys.argv[1:])
    except (KeyboardInterrupt, Signaled) as error:  # before the command started, or after its end
        code = exit_code(error)
    fork_server.stop()
    sys.exit(code)


def _check_shown(arguments: Sequence[str]) -> None:
    """No shell can give such a word, but a program can; not every release of the parser survives it."""
    for before, word in zip(["argument", *arguments], arguments, strict=False):
        if "\0" in word:
            raise FedveilError(f"{word!r} holds characters that cannot be shown: choose another {before}")


def run(arguments: Sequence[str]) -> int:
    """Run one command; returns the exit code.

    0 for success, 2 for wrong input, 3 for a finding that --fail-if names, 128 + the number of a signal, 1 otherwise.
    """
    try:
        _check_shown(arguments)
        done = app(list(arguments) or ["--help"], standalone_mode=False, prog_name="fedveil")
        return done if isinstance(done, int) else 0
    except FedveilError as error:
        return _fail("stopped", exit_code(heard[0])) if heard else _fail(str(error), 2)
    except _UsageError as error:
        return _fail(_usage(error), 2)
    except Stopped as error:
        return _fail(str(error), error.code)
    except (KeyboardInterrupt, typer.Abort, Signaled) as error:
        return _fail("stopped", exit_code(error))
    except Exception as error:
        if heard:
            return _fail("stopped", exit_code(heard[0]))
        if debugging():
            traceback.print_exc()
            return 1
        return _fail(f"{type(error).__name__}: {error} (set FEDVEIL_DEBUG=1 for the traceback)", 1)


def _usage(error: Any) -> str:
    """What is wrong with a command line, and what would be right."""
    message = str(error.format_message())
    flag = getattr(error, "option_name", None)
    command = next((each.command for each in SETTINGS if each.flag == flag and each.command), None)
    if command and message.startswith("No such option"):
        return f"{flag} is an option of `fedveil {command}` alone"
    if message.startswith("Got unexpected extra argument"):
        return f"{message.rstrip('.')}: {error.ctx.command_path} takes options (--data digits), see --help"
    return message


def _fail(message: str, code: int) -> int:
    print(f"fedveil: {printable(message)}", file=sys.stderr)
    return code


def _version(asked: bool) -> None:
    if asked:
        print(f"fedveil {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    pass  # the options act by themselves


def _start_workers_early(given: Given) -> None:
    """What workers are forked from imports torch while this process does. The embedded digits rarely need them."""
    small = given.values.get("task.data", "digits") == "digits"
    if fork_server.cores() > 1 and given.values.get("workers", "auto") != "1" and not small:
        fork_server.start(__name__)


@app.command("audit")
@with_settings("audit")
def _audit(given: Given) -> int:
    """Train under a defense and without, attack what clients share, and report what leaked and what it cost."""
    _start_workers_early(given)
    from fedveil.cli.runs import run_audit

    return run_audit(given)


@app.command("train")
@with_settings("train")
def _train(given: Given) -> None:
    """Train over all clients under a defense; keep checkpoints and, if wanted, captured updates."""
    _start_workers_early(given)
    from fedveil.cli.runs import run_train

    run_train(given)


def _defaults_from(context: typer.Context, path: Path | None) -> Path | None:
    """Take options that the command line does not give from a TOML file; its keys are the options' names."""
    if path is None or context.resilient_parsing:
        return path
    from fedveil.auditing.experiment import read_toml

    content = read_toml(path)
    known = {parameter.opts[0].lstrip("-"): parameter.name for parameter in context.command.params}
    known.pop("config")
    for name in content:
        if name not in known:
            raise unknown_name(f"key in {path.name}", name, known)
    context.default_map = {str(known[name]): value for name, value in content.items()}
    return path


@app.command("attack")
def _attack(
    captures: Annotated[list[Path], typer.Argument(metavar="CAPTURE...", help="Captured updates, or folders of them.")],
    attack: Annotated[
        str,
        typer.Option(
            metavar="SPEC",
            help="name:field=value,... See `fedveil list attacks`.",
            autocompletion=names_of("attacks"),
        ),
    ] = "inverting-gradients",
    truth: Annotated[
        list[Path] | None, typer.Option(metavar="FILE", help="What was behind each capture, in their order; to score.")
    ] = None,
    truths: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Folder of truths with the captures' file names.")
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(metavar="SPEC", help="Model, if the capture does not name it.", autocompletion=names_of("models")),
    ] = None,
    shape: Annotated[str | None, typer.Option(metavar="C,H,W", help="Shape of an input, likewise.")] = None,
    classes: Annotated[int | None, typer.Option(metavar="NUMBER", help="Number of classes, likewise.", min=1)] = None,
    defense: Annotated[
        str | None,
        typer.Option(
            metavar="SPEC",
            help="What the adaptive attacker takes the defense to be.",
            autocompletion=names_of("defenses"),
        ),
    ] = None,
    labels: Annotated[
        str | None, typer.Option(metavar="FROM", help="known (from the truths), recovered, idlg or optimized.")
    ] = None,
    data: Annotated[
        str | None,
        typer.Option(
            metavar="TEXT",
            help="Data set whose test images are told apart from the truths.",
            autocompletion=names_of("datasets"),
        ),
    ] = None,
    data_root: Annotated[Path | None, typer.Option(metavar="FOLDER", help="Folder of the data files.")] = None,
    link: Annotated[
        bool, typer.Option("--link/--no-link", help="Ask, too, whether updates can be linked to the truths.")
    ] = True,
    store: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER",
            help="Keeps what attacks come to, for the next time; none: nothing.",
            show_default="FEDVEIL_STORE or fedveil-out/store",
        ),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Output folder.", show_default="fedveil-out/attack-NUMBER")
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an earlier attack there.")] = False,
    seed: Annotated[int, typer.Option(metavar="NUMBER", help="Of the attacker's own draws.", min=0)] = 0,
    backend: Annotated[str, typer.Option(metavar="TEXT", help="auto, loop, stacked or compiled.")] = "auto",
    workers: Annotated[str, typer.Option(metavar="TEXT", help="Processes that attack: auto or a number.")] = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="Print a summary as JSON and nothing else.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="Do not show progress.")] = False,
    config: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="TOML file with any of these.", callback=_defaults_from, is_eager=True),
    ] = None,
) -> None:
    """Attack captured updates, of fedveil's own training or of another framework; with the truth, judge what leaked."""
    from fedveil.cli.attack import AttackOptions, run_attack

    run_attack(
        AttackOptions(
            captures=captures,
            attack=attack,
            truth=truth or [],
            truths=truths,
            model=model,
            shape=shape,
            classes=classes,
            defense=defense,
            labels=labels,
            data=data,
            data_root=data_root,
            link=link,
            store=store,
            out=out,
            overwrite=overwrite,
            seed=seed,
            backend=backend,
            workers=workers,
            as_json=as_json,
            quiet=quiet,
        )
    )


_StoreFolder = Annotated[
    Path | None,
    typer.Option("--store", metavar="FOLDER", help="The store.", show_default="FEDVEIL_STORE or fedveil-out/store"),
]


@store_app.command("list")
def _store_list(
    store: _StoreFolder = None,
    as_json: Annotated[bool, typer.Option("--json", help="As JSON.")] = False,
) -> None:
    """Show every entry: when it was last used, its stage, its size and what it is."""
    from fedveil.cli.stores import list_entries

    list_entries(store, as_json=as_json)


@store_app.command("prune")
def _store_prune(
    days: Annotated[
        float, typer.Option("--unused-for", metavar="DAYS", help="Keep what was used within so many days.", min=0)
    ],
    store: _StoreFolder = None,
) -> None:
    """Remove entries that were not used for a while; 0 removes all. What is in use now stays."""
    from fedveil.cli.stores import prune

    prune(store, days)


@app.command("report")
def _report(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="The output folder of an audit.")],
    path: Annotated[
        Path | None,
        typer.Option("--path", metavar="FILE", help="Where to write it.", show_default="FOLDER/report.html"),
    ] = None,
    table: Annotated[
        Path | None, typer.Option("--csv", metavar="FILE", help="Write every number there as CSV, too.")
    ] = None,
) -> None:
    """Write the report of a finished audit again."""
    from fedveil.auditing.audit_result import AuditResult
    from fedveil.auditing.result import load_result

    # Writing into the folder requires owning it. For a report elsewhere it is only read, and its files are never
    # half-written.
    with owned(folder if path is None and folder.is_dir() else None):
        outcome = AuditResult(*load_result(folder))
        print(outcome.report(path or folder / "report.html"))
        if table is not None:
            print(outcome.csv(table))


@app.command("list")
def _list(
    kind: Annotated[
        str | None,
        typer.Argument(metavar="KIND", help=f"One of {', '.join(KINDS)}.", autocompletion=kinds_like),
    ] = None,
    name: Annotated[
        str | None,
        typer.Argument(metavar="NAME", help="One of these, with all its fields.", autocompletion=names_like),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="As JSON.")] = False,
) -> None:
    """Show what can be chosen by name, and the metrics of every audit."""
    show_list(kind, name, as_json=as_json)
