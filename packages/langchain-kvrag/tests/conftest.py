"""A tiny random model, made in a second: nothing is downloaded."""

import pytest

from kvrag.testing.models import save_tiny_model


@pytest.fixture(scope="session")
def tiny_dir(tmp_path_factory):
    return str(save_tiny_model(tmp_path_factory.mktemp("llama")))
