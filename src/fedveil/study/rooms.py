"""Audits of a grid over one store: each is kept as a whole, and none computes what another has."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch

from fedveil.auditing.audit_result import AuditResult
from fedveil.auditing.experiment import Experiment
from fedveil.auditing.keys import content_key, described, described_chain
from fedveil.auditing.result import Images, Result, load_result, save_result
from fedveil.auditing.run import run_audit
from fedveil.auditing.store import Entry, Form, StageName, Store, Wanted
from fedveil.auditing.training import run_key
from fedveil.auditing.workshop import Workshop
from fedveil.federation.observers import Watch
from fedveil.study.index import Index
from fedveil.tasks.task import Task, read_once
from fedveil.version import __version__
from fedveil.workers import Workers

T = TypeVar("T")
Name = TypeVar("Name")
FILES = ("result.json", "images.safetensors")  # of a kept result


class IndexedStore(Store):
    """A store that writes down in its index which stages a result asks for, as they come."""

    def __init__(self, folder: Path | str | None, index: Index | None = None) -> None:
        super().__init__(folder)
        self.index = index if index is not None else Index(self.folder)
        self.asking = ""  # the key of the result that is being made

    def keep_all(
        self,
        stage: StageName,
        wanted: Mapping[Name, Wanted],
        form: Form[T],
        make: Callable[[list[Name], Path | None], Iterable[tuple[Name, T]]],
    ) -> dict[Name, T]:
        """As any store, and written down: before the work, since it may be killed, and after it with its time."""
        if stage == "result" or not self.asking:
            return super().keep_all(stage, wanted, form, make)
        for each in wanted.values():
            self.index.ask(self.asking, stage, each.key, each.about)
        before, start = len(self.made), time.perf_counter()
        found = super().keep_all(stage, wanted, form, make)
        made = {about for kind, about in self.made[before:] if kind == stage}
        share = (time.perf_counter() - start) / max(len(made), 1)
        for each in wanted.values():
            if each.about in made:
                self.index.ask(self.asking, stage, each.key, each.about, seconds=share)
        return found

    def holds(self, stage: StageName, key: str) -> bool:
        """Whether there is an entry."""
        return self.folder is not None and (self.folder / stage / key).is_dir()


class Rooms:
    """Opens experiments, those of one task and seed beside each other, and audits them."""

    def __init__(
        self, store: IndexedStore, workers: Workers, watch: Watch | None = None, sketched: bool = False
    ) -> None:
        self.store = store
        self.watch = watch or Watch()
        self._workers = workers
        self._sketched = sketched  # for a forecast
        self._first: dict[str, Workshop] = {}
        self._data: dict[Any, Any] = {}  # data sets that were read

    def open(self, experiment: Experiment) -> Workshop:
        """A workshop; what is wrong with the experiment is told here, before any long work."""
        shared = alike(experiment)
        with read_once(self._data):
            beside = self._first.get(shared)
            opened = Workshop.open(experiment, self.store, self._workers, self.watch, beside, self._sketched)
        self._first.setdefault(shared, opened)
        return opened

    def audit(self, shop: Workshop, command: str) -> AuditResult:
        """The result of an experiment: as it was kept, or else made from its stages, of which some may be kept."""
        key = result_key(shop)
        name_result(self.store, shop.experiment, key)

        def make(folder: Path | None) -> AuditResult:
            self.store.asking = key
            try:
                return run_audit(shop, command)
            finally:
                self.store.asking = ""

        about = f"{shop.case.name}, {shop.experiment.chain}, seed {shop.experiment.seed}"
        return self.store.keep("result", Wanted(key, about), _ResultForm(), make)


def result_key(shop: Workshop) -> str:
    """The key of a whole result: of all that any of its stages reads, and of the version that judges."""
    experiment = shop.experiment
    said = {name: value for name, value in experiment.described().items() if name not in ("task", "defense", "suite")}
    runs = [run_key(shop, shop.plain), run_key(shop, shop.defended)]
    return content_key(
        "result",
        version=__version__,
        settings=said,
        stops=experiment.stops,
        runs=runs,
        chain=described_chain(experiment.chain),
        attacks=[described(each) for each in shop.lineup.attacks],
        left_out=shop.lineup.left_out,
        auxiliary=None if shop.auxiliary is None else shop.auxiliary.content,
        judge=shop.modality.described(),
        compiler=shop.plain.engine.backend,
    )


def name_result(store: IndexedStore, experiment: Experiment, key: str) -> None:
    """Write down the key of an experiment's result, so that it can be found without reading its data."""
    if not isinstance(experiment.task, Task):
        store.index.name(_settings_key(experiment), key)


def named_result(store: IndexedStore, experiment: Experiment) -> str | None:
    """The key of the result that an experiment had when it was last opened; None if it never was."""
    return None if isinstance(experiment.task, Task) else store.index.named(_settings_key(experiment))


def kept_result(store: IndexedStore, experiment: Experiment) -> AuditResult | None:
    """The result of an experiment if there is one, without reading its data."""
    key = named_result(store, experiment)
    return None if key is None else store.found("result", key, _ResultForm())


def _settings_key(experiment: Experiment) -> str:
    """A hash of all that a result depends on but for what must be read or computed: data, and what a model does."""
    return content_key(
        "result",
        version=__version__,
        settings=experiment.described(),
        chain=described_chain(experiment.chain),
        attacks=[described(each) for each in experiment.attacks],
    )


def alike(experiment: Experiment) -> str:
    """What two experiments must share for one to be opened beside the other."""
    told = experiment.described()
    names = ("seed", "device", "backend", "task", "federation")
    own = id(experiment.task) if not hasattr(experiment.task, "model_fields_set") else 0
    return json.dumps([{name: told[name] for name in names}, experiment.trains, own], default=str, sort_keys=True)


class _ResultForm:
    """A result as an entry of the store: the same two files that an audit saves."""

    def to_entry(self, result: AuditResult, folder: Path) -> Entry:
        """Its files."""
        save_result(result.result, result.images, folder)
        return Entry({"nothing": torch.zeros(1)}, None, {name: folder / name for name in FILES})

    def from_entry(self, entry: Entry) -> AuditResult:
        """The result again."""
        found: tuple[Result, Images] = load_result(entry.files[FILES[0]].parent)
        return AuditResult(*found)


def plain_settings(experiment: Experiment) -> dict[str, Any]:
    """The experiment's settings without its defense and seed: what all audits of a comparison share."""
    told = {name: value for name, value in experiment.described().items() if name not in ("defense", "seed")}
    return dict(json.loads(json.dumps(told, default=str)))
