from importlib.metadata import entry_points

import pytest

from kvrag import StoreConfig, StoreError
from kvrag.store import open_store


def test_what_it_adds_to_kvrag():
    found = {point.value for point in entry_points(group="kvrag.stores")}
    assert found == {"kvrag_shared.object_store:ObjectBlobs", "kvrag_shared.redis:RedisBlobs"}


def test_an_unknown_scheme_is_refused_with_those_that_there_are():
    with pytest.raises(StoreError, match="redis"):
        open_store("ftp://host/kv", StoreConfig())
