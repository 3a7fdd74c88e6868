"""Tests of the defenses. A package, so that file names may repeat in other folders."""

import pytest

pytest.register_assert_rewrite(f"{__name__}.laws")
