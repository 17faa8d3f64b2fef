"""One target per backend and session: opening one is what costs."""

import pytest

from tests.conformance.backends import MAKERS, Backend


@pytest.fixture(scope="session", params=sorted(MAKERS))
def backend(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Backend:
    """A backend under test."""
    return MAKERS[request.param](tmp_path_factory.mktemp(request.param), False)


@pytest.fixture(scope="session", params=sorted(MAKERS))
def tied(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Backend:
    """A backend whose even ids each have a twin with exactly equal logits, the next odd id."""
    return MAKERS[request.param](tmp_path_factory.mktemp("ties"), True)
