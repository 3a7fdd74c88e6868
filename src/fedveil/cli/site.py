"""`fedveil site`: what a hospital runs in place of Flower's own programs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(help="Enforce a site's own policy on what leaves it.")
_Policy = Annotated[Path, typer.Option("--policy", metavar="FILE", help="The site's policy, a TOML file.")]


@app.command("supernode", context_settings={"ignore_unknown_options": True, "allow_extra_args": True})
def supernode(context: typer.Context, policy: _Policy) -> None:
    """Run Flower's SuperNode; every reply goes through the policy. Other options are those of flower-supernode."""
    from fedveil.flower.site.supernode import run_supernode

    run_supernode(policy, context.args)


@app.command("check")
def check(policy: _Policy) -> None:
    """Read a policy, and see whether it can be enforced in the Flower that is installed."""
    from fedveil.flower.site.policy import Policy
    from fedveil.flower.site.seam import check as check_seam

    read = Policy.load(policy)
    check_seam()
    print(f"Every update leaves under {read.rules.chain}, on {read.rules.kind}; log: {read.log}; state: {read.state}")


@app.command("wrapper")
def wrapper(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="Where to write the programs.")], policy: _Policy
) -> None:
    """Write a `flwr-clientapp` that runs apps under the policy, for a SuperNode that others start."""
    from fedveil.flower.site.clientapp import write_wrapper

    for path in write_wrapper(folder, policy):
        print(path)
    print(f"Start flower-superexec with PATH={folder.absolute()}:$PATH")
