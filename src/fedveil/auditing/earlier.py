"""Results that earlier versions wrote, in today's layout: only names change, nothing is made up.

Format 1 asked one question, whether a picture can be rebuilt. Its other two answers said that nobody had asked, and
say so still.
"""

from __future__ import annotations

import json
from typing import Any

FIRST = "fedveil-result-1"


def upgraded(document: bytes) -> bytes:
    """A saved result in today's layout; whatever is not one of an earlier version, as it is."""
    if FIRST.encode() not in document[:200]:
        return document
    try:
        return json.dumps(_from_first(json.loads(document))).encode()
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return document  # which is then refused for what is wrong with it


def _from_first(old: dict[str, Any]) -> dict[str, Any]:
    new = {**old, "format": "fedveil-result-2", "candidates": old["identified_among"]}
    del new["identified_among"]
    new["verdict"] = _verdict(dict(old["verdict"]))
    new["attacks"] = [_attack(dict(each)) for each in old["attacks"]]
    config = old["provenance"]["config"]
    if "recognizable_ssim" in config.get("audit", {}):
        audit = dict(config["audit"])
        audit["recognizable_from"] = audit.pop("recognizable_ssim")
        new["provenance"] = {**old["provenance"], "config": {**config, "audit": audit}}
    return new


def _verdict(old: dict[str, Any]) -> dict[str, Any]:
    moved = ("role", "attack", "round", "measure", "floor", "recognizable")
    found = {name: old.pop(name) for name in moved if name in old}
    told = {"status": old["status"], "why": old["why"], "question": "Can a picture be rebuilt from an update?"}
    questions = ("reconstruct", "link", "member")
    answers = [
        {"question": question, "asked": said["question"], "status": said["status"], "why": said["why"]}
        for question, said in zip(questions, old.pop("answers", None) or [told], strict=False)
    ]
    step = {"next_step": old.get("next_step", ""), "command": old.get("command", "")}
    answers[0] |= {**found, **step, "sentence": old["sentences"][0]}
    return {**old, "question": "reconstruct", "answers": answers}


def _attack(old: dict[str, Any]) -> dict[str, Any]:
    curves, similar = old.pop("traces", []), old.pop("ssim_at", {})
    return {**old, "curves": curves, "on_the_way": {role: {"ssim": marks} for role, marks in similar.items()}}
