"""Assertions outside of the test's module say what they compared."""

from __future__ import annotations

import pytest

pytest.register_assert_rewrite("tests.integration.matrix.answers", "tests.integration.matrix.drills")
