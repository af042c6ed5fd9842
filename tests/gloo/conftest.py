"""Ends the processes that the launches of a test file share."""

from __future__ import annotations

import pytest

from tests.gloo.launch import end_shared_ranks


@pytest.fixture(scope="module", autouse=True)
def ranks_end_with_their_file():
    yield
    end_shared_ranks()
