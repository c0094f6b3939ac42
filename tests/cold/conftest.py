"""What many tests of the cold tier begin with."""

from __future__ import annotations

import pytest
from tests.cold.published import KINDS, PublishedTopic


@pytest.fixture(params=KINDS)
def topic(request: pytest.FixtureRequest) -> PublishedTopic:
    """A topic over each kind of metadata store."""
    return PublishedTopic(request.param)
