from importlib.metadata import entry_points


def test_what_it_adds_to_kvrag_and_to_vllm():
    (serve,) = entry_points(group="kvrag.backends", name="vllm")
    assert callable(serve.load().serve)
    assert "kvrag" in entry_points(group="vllm.general_plugins").names
