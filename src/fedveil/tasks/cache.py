"""Where fedveil keeps results that it could compute again."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder() -> Path:
    """FEDVEIL_CACHE, or the user's cache folder."""
    chosen = os.environ.get("FEDVEIL_CACHE")
    if chosen:
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fedveil"
