"""Clusters are forked from templates of the test process, as those of integration tests are."""

from __future__ import annotations

from tests.integration.conftest import shared_templates

__all__ = ["shared_templates"]
