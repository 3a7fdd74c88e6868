"""Saved models and tokenizers: a folder, or the name of one at the Hugging Face hub or in its cache."""

from __future__ import annotations

import re
from pathlib import Path

from fedveil.errors import FedveilError, one_line
from fedveil.tasks.sources import data_root

NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")
READ = ["*.json", "*.safetensors", "vocab.txt", "merges.txt"]  # never pickled weights, never code


def saved_folder(given: str, root: Path | None = None) -> Path:
    """The folder of a saved model: given, from the working folder or the data root, or the one of a name at the hub.

    Of a name, what is in the cache is taken without asking the hub, so that the same files are read every time.
    """
    path = Path(given).expanduser()
    for choice in (path, data_root(root) / path):
        if choice.is_dir():
            return choice
    if not NAME.fullmatch(given) or given.startswith("."):
        raise FedveilError(f"there is no folder {given}, neither here nor in {data_root(root)}")
    from fedveil.tasks.vocabulary import text_library

    fetch = text_library("huggingface_hub").snapshot_download
    try:
        return Path(fetch(given, allow_patterns=READ, local_files_only=True))
    except Exception:  # not in the cache
        pass
    try:
        return Path(fetch(given, allow_patterns=READ, etag_timeout=10))
    except Exception as error:  # whatever the library, or the network, finds wrong
        raise FedveilError(
            f"there is no folder {given}, and no model of that name in the cache of Hugging Face or at its hub "
            f"({one_line(error, typed=True):.80}): give a folder with config.json, model.safetensors and tokenizer.json"
        ) from None
