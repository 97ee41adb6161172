"""A laptop without a cloud."""

import pytest

from tests.launch.clients import make_laptop


@pytest.fixture(scope="session")
def answers(tmp_path_factory):
    return tmp_path_factory.mktemp("answers")


@pytest.fixture
def laptop(tmp_path, answers):
    return make_laptop(tmp_path, answers)
