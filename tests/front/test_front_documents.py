"""Documents before vLLM: its worker computes, the front lists, erases and explains."""

import httpx
import pytest
from front_kit import FakeVLLM, fronted
from texts import asking, make_chunks
from transformers import AutoTokenizer

from kvrag.testing.models import save_tiny_model
from kvrag_server import ServerConfig

NEW = make_chunks(2, words=42, seed=9)


def test_precompute_is_vllms_worker(http, engine, fake):
    documents = [{"id": "new", "text": NEW[0]}, {"text": NEW[1]}]
    answer = http.post("/v1/kv/precompute?model=adapter", json={"documents": documents})
    assert answer.json() == {"stored": 2, "skipped": 0, "failed": []}
    sent = fake.last["body"]
    assert (sent["model"], len(sent["prompt"]), sent["max_tokens"]) == ("adapter", 2, 1)
    assert "new" in http.get("/v1/kv/documents").json()["data"]
    before = http.post("/v1/kv/explain", json={"messages": asking(NEW, 0)}).json()
    assert [s["hit"] for s in before["spans"] if s["kind"] == "chunk"] == [True]
    assert http.post("/v1/kv/delete", json={"ids": ["new"]}).json() == {"erased_chunks": 1}
    assert "new" not in http.get("/v1/kv/documents").json()["data"]
    after = http.post("/v1/kv/explain", json={"messages": asking(NEW, 0)}).json()
    assert not any([s["hit"] for s in after["spans"] if s["kind"] == "chunk"])


def test_a_text_that_utf8_cannot_encode_is_named_and_costs_no_other_its_kv(http):
    url, kind = "/v1/kv/precompute", {"content-type": "application/json"}
    body = '{"documents": [{"id": "bad", "text": "%s"}, {"id": "good", "text": "%s"}]}'
    first = http.post(url, content=body % (NEW[0], NEW[1]), headers=kind).json()
    assert first["stored"] + first["skipped"] == 2
    answer = http.post(url, content=body % (f"{NEW[0]} \\ud835", NEW[1]), headers=kind)
    assert [name for name, _ in answer.json()["failed"]] == ["bad"]
    assert "bad" not in http.get("/v1/kv/documents").json()["data"]
    assert "good" in http.get("/v1/kv/documents").json()["data"]
    assert http.post("/v1/kv/delete", json={"ids": ["good"]}).json() == {"erased_chunks": 1}


def test_a_token_without_an_embedding_is_refused_before_vllm_reads_it(fake, tmp_path):
    folder = save_tiny_model(tmp_path / "model")
    late = AutoTokenizer.from_pretrained(folder)
    late.add_tokens(["<late>"])
    late.save_pretrained(folder)
    with fronted(folder, tmp_path / "kv", fake) as (url, _, _):
        for name, body in {
            "chat/completions": {"messages": [{"role": "user", "content": "a <late> b"}]},
            "completions": {"prompt": "a <late> b"},
            "completions ": {"prompt": [3, 4, len(late) - 1]},
        }.items():
            answer = httpx.post(f"{url}/v1/{name.strip()}", json={"model": "tiny", **body})
            assert answer.status_code == 400
            assert str(len(late) - 1) in answer.json()["error"]["message"]
    sent = [each["body"] for each in fake.requests if each["body"]]
    assert not [body for body in sent if body.get("prompt") != [0, 1]]  # the worker is asked so


@pytest.mark.parametrize(
    ("body", "status", "word"),
    [
        ({"documents": []}, 400, "documents"),
        ({"documents": [{"text": " "}]}, 400, "empty"),
        ({"documents": [{"text": "x"}], "collection": "c"}, 400, "id"),
        ({"documents": [{"text": "explode, please"}]}, 500, "disk is full"),
        ({"documents": [{"text": "refuse, please"}]}, 400, "too long"),
    ],
)
def test_faults_of_documents_are_sentences(http, body, status, word):
    answer = http.post("/v1/kv/precompute", json=body)
    assert answer.status_code == status
    assert word in answer.json()["error"]["message"]


def test_explain_is_the_engines(http, engine, chunks):
    messages = asking(chunks, 1, 3)
    told = http.post("/v1/kv/explain", json={"messages": messages}).json()
    own = engine.explain(messages, mode="stitch")
    assert told["prompt_tokens"] == own.prompt_tokens
    assert [(s["start"], s["stop"], s["hit"], s["exact"]) for s in told["spans"]] == [
        (s.start, s.stop, s.hit, s.exact) for s in own.spans
    ]
    assert (told["mode"], told["repair"]) == ("stitch", "query, ratio 0.1")
    assert http.post("/v1/kv/explain", json={}).status_code == 400


def test_explain_knows_the_repair_that_is_given(http, chunks):
    body = {"messages": asking(chunks, 1, 3), "kvrag": {"repair": {"strategy": "none"}}}
    assert http.post("/v1/kv/explain", json=body).json()["repair"] == "none (given)"
    answer = http.post("/v1/kv/explain", json={**body, "kvrag": {"max_context": "slide"}})
    assert answer.json()["error"]["param"] == "kvrag.max_context"


@pytest.mark.parametrize(("status", "seen"), [(400, 400), (500, 503), (503, 503)])
def test_a_vllm_that_refuses_documents_says_why(http, fake, monkeypatch, status, seen):
    monkeypatch.setattr(fake, "fails", status)
    answer = http.post("/v1/kv/precompute", json={"documents": [{"text": "Who?"}]})
    assert answer.status_code == seen
    assert answer.json()["error"]["message"] == "no room"


def test_stats_show_the_store(http):
    assert "disk" in http.get("/v1/kv/stats").json()["store"]


def test_a_worker_that_refuses_is_explained(tiny_dir, tmp_path, engine, chunks):
    fake = FakeVLLM(engine)
    why = "its weights are quantised"
    fake.worker = lambda _: {"fingerprint": "f", "repair": "", "refusal": why}
    with fronted(tiny_dir, tmp_path / "kv", fake) as (url, _, _):
        told = httpx.post(f"{url}/v1/kv/explain", json={"messages": asking(chunks, 0)}).json()
    assert told["mode"] == "full"
    assert why in told["notes"]


def test_a_worker_without_kvrag_has_no_precompute(tiny_dir, tmp_path, engine):
    fake = FakeVLLM(engine)
    fake.answers_worker = False
    with fronted(tiny_dir, tmp_path / "kv", fake) as (url, _, _):
        answer = httpx.post(f"{url}/v1/kv/precompute", json={"documents": [{"text": "Who?"}]})
    assert answer.status_code == 501
    assert "KVRagConnector" in answer.json()["error"]["message"]


def test_keys_have_their_own_documents(tiny_dir, tmp_path, engine, chunks):
    fake = FakeVLLM(engine)
    config = ServerConfig(model_name="tiny", api_keys={"sk-a": "acme", "sk-b": "beta"})
    body = {"documents": [{"id": "d", "text": chunks[0]}]}
    with fronted(tiny_dir, engine.kv_dir, fake, config) as (url, _, _):
        a, b = ({"headers": {"authorization": f"Bearer {key}"}} for key in ("sk-a", "sk-b"))
        assert httpx.post(f"{url}/v1/kv/precompute", json=body, **a).status_code == 200
        assert httpx.get(f"{url}/v1/kv/documents", **a).json()["data"] == ["d"]
        assert httpx.get(f"{url}/v1/kv/documents", **b).json()["data"] == []


@pytest.mark.parametrize(("method", "path"), [("GET", "/v1/models"), ("POST", "/v1/kv/delete")])
def test_a_page_that_points_its_name_here_gets_nothing(http, method, path):
    headers = {"host": "evil.test", "origin": "http://evil.test"}
    assert http.request(method, path, headers=headers, json={"ids": []}).status_code == 421
