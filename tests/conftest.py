"""Fixtures of the whole suite: pools of ranks that live as long as the session."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.harness.nursery import Nursery
from tests.harness.pool import RankPool

_POOLS = {"pool1", "pool2", "pool4"}
_nursery = Nursery()


def pytest_collection_finish(session: pytest.Session) -> None:
    """Start the imports of the ranks now, where a test needs ranks: they go on while other tests run."""
    if not session.config.option.collectonly and any(_POOLS & set(_fixtures(item)) for item in session.items):
        _nursery.start()


def _fixtures(item: pytest.Item) -> list[str]:
    return getattr(item, "fixturenames", [])


@pytest.fixture(scope="session")
def nursery() -> Iterator[Nursery]:
    """The process that forks the ranks of all pools."""
    yield _nursery
    _nursery.close()


@pytest.fixture(scope="session")
def pool1(nursery: Nursery) -> Iterator[RankPool]:
    """One rank with a process group of its own."""
    with RankPool(1, nursery) as pool:
        yield pool


@pytest.fixture(scope="session")
def pool2(nursery: Nursery) -> Iterator[RankPool]:
    """Two ranks, started by the first case that runs on them."""
    with RankPool(2, nursery) as pool:
        yield pool


@pytest.fixture(scope="session")
def pool4(nursery: Nursery) -> Iterator[RankPool]:
    """Four ranks, started by the first case that runs on them."""
    with RankPool(4, nursery) as pool:
        yield pool
