"""The tiny model, loaded once for all tests of the gateway."""

from __future__ import annotations

import pytest

from disagg.router.gateway.tokenizer import ServedModel
from disagg.router.gateway.validate import Limits
from tests.support.gateway import limits_of, served_model


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> ServedModel:
    return served_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def limits(model: ServedModel) -> Limits:
    return limits_of(model)
