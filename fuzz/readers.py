"""Every reader of foreign files in fedveil."""

from __future__ import annotations

from fedveil.registry import REGISTRIES
from fuzz.data_readers import DATA_READERS
from fuzz.reader import Reader
from fuzz.run_readers import RUN_READERS
from fuzz.settings_readers import SETTINGS_READERS
from fuzz.text_readers import TEXT_READERS
from fuzz.web_readers import WEB_READERS

READERS: tuple[Reader, ...] = (*DATA_READERS, *WEB_READERS, *TEXT_READERS, *RUN_READERS, *SETTINGS_READERS)

# Import everything that a name in a file can stand for before there are workers: the time and memory of imports must
# not count against a file.
for registry in REGISTRIES.values():
    for name in registry.entries():
        registry.load(name)
