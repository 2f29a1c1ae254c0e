"""What the broker promises holds on every Redis at hand, and on a cluster."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from fedstream.broker.client import RedisSettings
from tests.broker.guarded import Guarded, guarded
from tests.broker.servers import Redis, cluster, redis_7
from tests.conftest import _ORDERED, _SERVERS

CLUSTER = "cluster"


@pytest.fixture(scope="session")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[int]]:
    """The ports of a cluster of three masters."""
    with cluster(tmp_path_factory.mktemp("cluster")) as made:
        yield made.ports


@pytest.fixture(scope="module")
def there(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guarded]:
    """A Redis with the users of `fedstream acl`, shared by the tests of a module."""
    with guarded(tmp_path_factory.mktemp("guarded")) as server:
        yield server


def _params() -> list[str]:
    """Each server at hand alone, except the cluster's version."""
    return [*(name for name in _ORDERED if _SERVERS[name] != redis_7()), CLUSTER]


@pytest.fixture(params=_params())
def redis(request: pytest.FixtureRequest, server_of: Callable[[str], Redis]) -> RedisSettings:
    """Each version of Redis at hand, the newest as a cluster: the contract holds on all of them."""
    if request.param != CLUSTER:
        return RedisSettings(url=server_of(request.param).url)
    if redis_7() is None:
        pytest.skip("a cluster is made by CLUSTER ADDSLOTSRANGE, which came with Redis 7")
    ports: list[int] = request.getfixturevalue("nodes")
    return RedisSettings(url=f"redis://127.0.0.1:{ports[0]}", cluster=True)
