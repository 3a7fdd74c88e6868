"""The examples are right: their configurations read, their scripts run."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest
from PIL import Image

from fedveil.auditing.requirements import check_experiment
from fedveil.cli.config import Config
from fedveil.cli.options import Given
from fedveil.leakage.modalities import modality

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture
def pictures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A data root with the folders that examples name. Pictures are enlarged when they are read."""
    for number in range(20):
        folder = tmp_path / "photographs" / ("animals" if number % 2 else "things")
        folder.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (12, 10), (12 * number, 200, 255 - 12 * number)).save(folder / f"{number}.png")
    monkeypatch.setenv("FEDVEIL_DATA", str(tmp_path))


@pytest.mark.usefixtures("pictures")
@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.toml")), ids=lambda path: path.name)
def test_a_configuration_can_be_audited(path: Path) -> None:
    config = Config.load("audit", Given({}, path, False))
    task = config.build_task()
    check_experiment(config, task, modality("sentences" if path.name == "text.toml" else "pictures"))


def test_the_demonstration_may_be_run_again() -> None:
    config = Config.load("audit", Given({}, EXAMPLES / "demo.toml", False))
    assert config.overwrite
    assert config.out == Path("fedveil-out/demo")


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.name)
def test_a_script_runs(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    runpy.run_path(str(path), run_name="__main__")
    assert "picks the right image out of" in capsys.readouterr().out
    assert list(tmp_path.rglob("report.html"))
