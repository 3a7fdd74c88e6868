"""The HTML report: one self-contained file that says what leaked, what the defense cost and how to do it again."""

from fedveil.report.render import render, write_report

__all__ = ["render", "write_report"]
