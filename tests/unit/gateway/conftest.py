"""The tiny model, loaded once for all tests of the gateway."""

from __future__ import annotations

import pytest

from disagg.gateway.requests.validate import Limits
from disagg.gateway.text.tokenizer import ServedModel
from tests.support.gateway import limits_of, served_model


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> ServedModel:
    return served_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def limits(model: ServedModel) -> Limits:
    return limits_of(model)
