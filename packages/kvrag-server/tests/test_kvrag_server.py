from importlib.metadata import entry_points

from fastapi.testclient import TestClient

from kvrag import KVRagClient, KVRagEngine
from kvrag.testing.models import save_tiny_model
from kvrag_server import create_app


def test_it_answers_and_has_its_page(tmp_path):
    engine = KVRagEngine.from_pretrained(save_tiny_model(tmp_path / "llama"))
    with TestClient(create_app(engine)) as client:
        assert client.get("/page/page.js").is_success
        asked = {"model": client.get("/v1/models").json()["data"][0]["id"], "prompt": "one two"}
        reply = client.post("/v1/completions", json={**asked, "max_tokens": 2})
        assert reply.json()["usage"]["completion_tokens"] == 2
    engine.close()


def test_what_it_adds_to_kvrag():
    assert KVRagClient.__module__ == "kvrag_server.client"
    assert "serve" in entry_points(group="kvrag.commands").names
