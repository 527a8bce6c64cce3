from importlib.metadata import entry_points

import pytest

from kvrag import ConfigError, precompute_dataset
from kvrag_ray import build


def test_an_invalid_option_is_refused_before_ray_starts():
    with pytest.raises(ConfigError, match="max_running"):
        build({"model": "m", "kv_dir": "memory:///", "server": {"max_running": 0}})


def test_what_it_adds_to_kvrag():
    assert precompute_dataset.__module__ == "kvrag_ray.dataset"
    assert "ray" in entry_points(group="kvrag.backends").names
