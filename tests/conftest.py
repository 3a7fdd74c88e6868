"""Settings for all tests: one thread for steady results, property tests without a time limit, caches apart."""

from __future__ import annotations

import os

import pytest
from hypothesis import HealthCheck, settings

settings.register_profile("fedveil", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("fedveil")


@pytest.fixture(autouse=True, scope="session")
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> None:
    """What the tests keep does not get into the user's cache, nor what is there into the tests."""
    os.environ["FEDVEIL_CACHE"] = str(tmp_path_factory.mktemp("cache"))
