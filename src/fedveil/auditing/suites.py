"""Suites: several attacks under one name, so that no verdict hangs on a single one. Plain data, read without torch."""

from __future__ import annotations

from dataclasses import dataclass

from fedveil.errors import unknown_name


@dataclass(frozen=True)
class Suite:
    """Attacks with their settings, in the order in which they run: first those who need little, then the expensive.

    An attack that cannot work on a task (no auxiliary data, no linear first layer) is left out, and the result says so.
    """

    name: str
    summary: str
    attacks: tuple[str, ...]  # as the command line writes them
    stops: bool = True  # may leave out attacks on a question that is settled: see `AuditSettings.stop_when_settled`


DEFAULT = "standard"
SUITES = {
    suite.name: suite
    for suite in (
        Suite(
            "quick",
            "A first look, about a minute on a small model: few steps, one try.",
            (
                "link",
                "token-rows",
                "token-span",
                "analytic",
                "inverting-gradients:steps=200,restarts=1,signed=false",
                "learned-linear",
            ),
        ),
        Suite(
            DEFAULT,
            "The default: the attacks that get most on most models, within minutes on a small one.",
            (
                "link",
                "token-rows",
                "token-span",
                "analytic",
                "inverting-gradients:steps=400",
                "learned-linear",
                "latent-start",
                "lamp",
                "update-alignment",
                "loss-threshold",
            ),
        ),
        Suite(
            "thorough",
            "All attacks, with more steps and tries, none left out early. Takes many times as long as the default.",
            (
                "link",
                "token-rows",
                "token-span",
                "analytic",
                "idlg",
                "dlg:restarts=4",
                "inverting-gradients:steps=4000,restarts=4",
                "grad-inversion:steps=1000",
                "ci-net:steps=1000",
                "learned-linear",
                "lti",
                "latent-start:restarts=2",
                "gias:weight_steps=400",
                "mjolnir",
                "dlg-text:steps=1000",
                "tag:steps=1000",
                "lamp:steps=2000,starts=500,every=75,moves=200",
                "update-alignment",
                "fedmia",
                "loss-threshold",
                "lira",
            ),
            stops=False,
        ),
    )
}


def suite_named(name: str) -> Suite:
    """The suite of this name; any other is refused."""
    if name not in SUITES:
        raise unknown_name("suite", name, SUITES)
    return SUITES[name]
