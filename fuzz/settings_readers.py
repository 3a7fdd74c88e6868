"""The small files of settings and results: headers of compiled code, configurations, options, results of audits."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import io
import json
import tempfile
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from fedveil.auditing.audit_result import AuditResult
from fedveil.auditing.result import Images, Result, load_result, save_result
from fedveil.cli.config import Config
from fedveil.cli.main import run as run_command
from fedveil.cli.options import Given
from fedveil.clients import packages
from fedveil.toml import to_toml
from fuzz.mutate import any_of, damaged, json_files, odd_lines
from fuzz.reader import Files, Reader, Refused, lay_out
from fuzz.run_readers import named, written
from fuzz.structures import safetensors_files


def _package_headers() -> SearchStrategy[Files]:
    head = {"format": packages.FORMAT, "paths": [[0]], "form": 0, "sha256": hashlib.sha256(b"").hexdigest()}
    return named("packages/package.json", json_files(head))


def _read_package(folder: Path) -> object:
    """The header of compiled code beside code that does not belong to it, which must not be run."""
    place = folder / "packages" / "package"
    place.with_suffix(".so").write_bytes(b"no code")
    assert packages._loaded(place, [[0]]) is None
    return None


TOML_VALUES = (
    *(
        "0",
        "1",
        "-1",
        "9" * 30,
        "9" * 5000,
        "1e999",
        "nan",
        "-inf",
        "0.5",
        "true",
        '""',
        '"x"',
        "'\u001f'",
        '"\\u001b[2J"',
    ),
    *("[]", "[[]]", "[1, 2]", "[[1, 0.1], [1, 0.2]]", "[" * 2000 + "]" * 2000, "{}", "{name = 1}", '{name = "clip"}'),
    *('"clip:norm=1"', '"clip:norm="', '"lenet"', '"digits"', '"70/15/15"', '"0/0/0"', '"9e9/1/1"', '"cuda"', '"meta"'),
    *("1979-05-27T07:32:00Z", "25:61:00", '"../x"', '"/x"', '"a\\u0000b"', '"mlp:hidden=[' + "1," * 400 + '1]"'),
    *(
        '"clip:norm=' + "[" * 2000 + '"',
        '"' + "x" * 5000 + '"',
        "0x" + "f" * 4000,
        '"""',
        "[x]",
        "[[defense]]",
        "[task.x]",
    ),
    *(
        '"iid:' + "a=1," * 200 + '"',
        '"dirichlet:alpha=1e-300"',
        '"fedveil.cli:main"',
        '"\\ud800"',
        "{" * 300,
        "a.b.c = 1",
    ),
    *(
        "a." * 3000 + "b = 1",
        '"\\U0010ffff"',
        "\x7f",
        "[task]",
        "name",
        "lr",
        "clients",
        "lr_steps",
        "attack",
        "defense",
    ),
)


def _configs() -> SearchStrategy[Files]:
    made = Config.checked({"defense": ["clip:norm=1", "gradient-dropout"], "federation": {"lr_steps": [[2, 0.1]]}})
    text = to_toml(made.kept())
    odd = odd_lines(text.splitlines(), TOML_VALUES, " = ").map(lambda each: each.encode("utf-8", "surrogatepass"))
    return named("config.toml", any_of(odd, odd, damaged(text.encode())))


def _read_config(folder: Path) -> object:
    made = Config.load("audit", Given(values={}, config=folder / "config.toml", resume=False))
    again = Config.checked(tomllib.loads(to_toml(made.kept())))
    assert again.kept() == made.kept(), "what is written down does not read as the same"
    return made


OPTIONS = (
    'attack = "dlg:steps=5"',
    'shape = "1,4,4"',
    "classes = 3",
    'labels = "recovered"',
    "seed = 1",
    "quiet = true",
)


def _attack_options() -> SearchStrategy[Files]:
    with tempfile.TemporaryDirectory() as folder:  # imports of the first call must not count against a file
        (Path(folder) / "attack.toml").write_text("\n".join(OPTIONS))
        _read_attack_options(Path(folder))
    odd = odd_lines(OPTIONS, TOML_VALUES, " = ").map(lambda each: each.encode("utf-8", "surrogatepass"))
    return named("attack.toml", any_of(odd, damaged("\n".join(OPTIONS).encode())))


def _read_attack_options(folder: Path) -> object:
    """The capture does not exist: a sound file of options gets as far as that error."""
    arguments = ["attack", str(folder / "none.safetensors"), "--config", str(folder / "attack.toml")]
    said = io.StringIO()
    with contextlib.redirect_stderr(said), contextlib.redirect_stdout(said):
        code = run_command([*arguments, "--out", str(folder / "out")])
    if code == 2 and "there is no" not in said.getvalue():
        raise Refused
    assert code == 2, said.getvalue()
    return said


@functools.cache
def _result() -> tuple[bytes, bytes]:
    estimate = {"mean": 0.5, "low": 0.25, "high": 0.75, "count": 2}
    roles = ("ceiling", "naive", "adaptive", "noise-floor", "mean-floor", "bound")
    metrics = dict.fromkeys(("identified", "psnr", "ssim", "mse"), estimate)
    curve = {"attack": "dlg", "role": "naive", "steps": [0, 5], "median": [1, 0.1], "low": [1, 0.1], "high": [1, 0.2]}
    plain: dict[str, Any] = {
        "data": "digits",
        "model": "lenet",
        "protocol": "FedSGD",
        "candidates": 4,
        "judges": ["a net"],
        "defense": {
            "name": "clip",
            "settings": {"norm": 1},
            "spelled": "clip:norm=1",
            "summary": "x",
            "acts_on": "x",
            "guarantee": "None.",
            "formal": False,
            "weaknesses": ["x"],
            "paper": "x",
            "facts": {"a": "b"},
        },
        "verdict": {
            "status": "exposed",
            "question": "link",
            "sentences": ["a", "b", "c"],
            "why": "x",
            "answers": [
                {"question": "reconstruct", "asked": "x", "status": "not judged", "why": "x"},
                {
                    "question": "link",
                    "asked": "x",
                    "status": "exposed",
                    "why": "x",
                    "role": "naive",
                    "attack": "link",
                    "measure": "linked",
                    "floor": "noise-floor",
                    "found": estimate,
                    "bound": 0.5,
                },
            ],
        },
        "rows": [
            {
                "attack": "dlg",
                "role": role,
                "metrics": metrics,
                "values": {"psnr": [0.25, 0.75]},
                "strongest": role == "naive",
            }
            for role in roles
        ]
        + [
            {
                "attack": "link",
                "role": role,
                "question": "link",
                "metrics": {"linked": estimate},
                "values": {"linked": [1, 0]},
                "bound": 0.5,
                "exact": False,
            }
            for role in ("naive", "noise-floor")
        ],
        "cost": {
            "rounds": 1,
            "defended": estimate,
            "undefended": estimate,
            "difference": estimate,
            "slowdown": 2.0,
            "history": [{"round": number, "defended": 0.5, "undefended": 0.75} for number in (0, 1)],
            "seconds_per_round": {"defended": 1.0, "undefended": 0.5},
            "bytes_per_round": {"up": 10, "down": 10},
        },
        "attacks": [
            {
                "attack": "dlg",
                "settings": {},
                "seconds": 1.0,
                "restarts": 1,
                "steps": 5,
                "victims": 2,
                "batch_size": 1,
                "curves": [curve],
                "on_the_way": {"naive": {"ssim": {"all": estimate}}},
            }
        ],
        "assumptions": [{"switch": "labels", "setting": "known", "words": "x"}],
        "not_given": ["x"],
        "not_tried": ["x"],
        "provenance": {
            "command": "x",
            "config": {"seed": 0},
            "seed": 0,
            "versions": {"a": "b"},
            "machine": "x",
            "hashes": {"data": "x"},
            "started": "2025-05-01T12:34:56+00:00",
            "seconds": 1.0,
        },
    }
    images = Images(np.full((2, 1, 4, 4), 0.5, np.float32), np.array([0, 1]))
    for role in roles:
        images.reconstructions["dlg", role] = images.originals  # type: ignore[index]
    result = Result.model_validate(plain)

    def write(folder: Path) -> None:
        save_result(result, images, folder)

    return written(write, "result.json"), written(write, "images.safetensors")


def _results() -> SearchStrategy[Files]:
    result, images = _result()
    with tempfile.TemporaryDirectory() as folder:  # the page's template is compiled at the first call
        lay_out({"result.json": result, "images.safetensors": images}, Path(folder) / "given")
        _read_result(Path(folder) / "given")
    return st.one_of(
        json_files(json.loads(result)).map(lambda content: {"result.json": content, "images.safetensors": images}),
        json_files(json.loads(result)).map(lambda content: {"result.json": content, "images.safetensors": images}),
        safetensors_files(images).map(lambda content: {"result.json": result, "images.safetensors": content}),
    )


def _read_result(folder: Path) -> object:
    """As `fedveil report` does."""
    outcome = AuditResult(*load_result(folder))
    assert str(outcome.leakage)
    return outcome.report(folder / "report.html")


SETTINGS_READERS = (
    Reader("compiled code", _package_headers, _read_package, 800),
    Reader("configuration", _configs, _read_config, 2000),
    Reader("attack options", _attack_options, _read_attack_options, 800),
    Reader("result", _results, _read_result, 1200),
)
