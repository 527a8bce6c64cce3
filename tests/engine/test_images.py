"""Models that see: prompts of text are exact, also after their owner's image, and an image is refused in a sentence."""

import base64
import io
from types import SimpleNamespace

import pytest
import torch
from fastapi.testclient import TestClient
from langchain_core.messages import HumanMessage
from llama_index.core.base.llms.types import ChatMessage, ImageBlock, TextBlock
from texts import make_chunks

from kvrag import Chunk, InputError, KVRagEngine, RepairConfig
from kvrag.model import CausalLM
from kvrag.model.proof import _Trial, prove
from kvrag.testing.models import tiny_model
from kvrag.testing.tokenizers import tiny_tokenizer
from kvrag_server import ServerConfig, create_app
from langchain_kvrag import ChatKVRag
from llama_index.llms.kvrag import KVRagLLM

CHUNKS = make_chunks(3, words=30)
DATA = base64.b64encode(b"\x89PNG\r\n").decode()
URL = f"data:image/png;base64,{DATA}"
FORMS = {
    "bytes": {"type": "image", "image": b"\x89PNG\r\n"},
    "object": {"type": "image", "image": io.BytesIO()},
    "base64": {"type": "image", "base64": DATA, "mime_type": "image/png"},
    "source": {"type": "image", "source": {"type": "base64", "data": DATA}},
    "data URL": {"type": "image_url", "image_url": {"url": URL}},
    "responses": {"type": "input_image", "image_url": URL},
    "address": {"type": "image_url", "image_url": {"url": "https://example.com/cat.png"}},
    "path": {"type": "image_url", "image_url": {"url": "/etc/passwd"}},
}
REFUSED = "kvrag reads text only, remove the"


@pytest.mark.parametrize("name", ["llava", "qwen2_vl"])
def test_text_is_exact_whatever_image_its_owner_has_shown(name):
    """Qwen keeps an image's offset of positions in the model; nobody else's forward may see it."""
    engine = KVRagEngine.from_pretrained(
        tiny_model(name),
        tokenizer=SimpleNamespace(tokenizer=tiny_tokenizer()),  # a processor
        prefix="Read.\n",
        context=None,
        prove="off",
    )
    engine.precompute(CHUNKS)
    prompt = ["Read.\n", Chunk(CHUNKS[1]), "\n", Chunk(CHUNKS[0]), "Who?"]
    model = engine.loaded.lm.model
    holders = [m for m in model.modules() if hasattr(m, "rope_deltas")]
    for holder in holders:
        holder.rope_deltas = torch.tensor([[17]])  # as if its owner had shown an image
    result = engine.prefill(prompt, mode="stitch", repair=RepairConfig(strategy="all"))
    assert result.exactness == "exact"
    assert engine.loaded.lm.config._attn_implementation != "kvrag"
    assert all(holder.rope_deltas.tolist() == [[17]] for holder in holders)
    fresh = tiny_model(name)
    with torch.inference_mode():
        expected = fresh(torch.tensor([result.prompt_ids])).logits[0, -1]
    assert float((result.logits - expected).abs().max()) < 1e-3
    answer = engine.generate(prompt, mode="stitch", max_new_tokens=6)
    assert answer.cached_tokens > 0


@pytest.mark.parametrize("name", ["qwen2_vl", "qwen3_vl", "glm4v"])
def test_a_proof_is_the_same_after_its_owners_image(name):
    """In its runs by transformers, too, which tell roundings."""
    model = tiny_model(name)
    lm = CausalLM(model)
    trial = _Trial(lm, 0)
    own = trial._run_own()
    model.model.rope_deltas = torch.tensor([[17]])
    noise = trial._noise(own)
    assert max(noise.logits, noise.kv) < 1e-3
    assert prove(lm).passed
    assert model.model.rope_deltas.tolist() == [[17]]


@pytest.fixture
def model_dir(tmp_path):
    tiny_model("llava").save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    return str(tmp_path)


def test_an_image_is_refused_in_every_form_and_by_every_client(model_dir):
    """Nothing is opened, nothing is left out, and no answer is made from the text alone."""
    engine = KVRagEngine.get(model_dir)
    chat = ChatKVRag(model=model_dir, max_tokens=8)
    text = {"type": "text", "text": "What is it?"}
    for form in FORMS.values():
        for ask in (
            lambda parts: engine.generate([{"role": "user", "content": parts}]),
            lambda parts: engine.explain([{"role": "user", "content": parts}]),
            lambda parts: chat.invoke([HumanMessage(parts)]),
        ):
            with pytest.raises(InputError, match=f"type '{form['type']}'; {REFUSED} part"):
                ask([form, text])
    assert not chat.profile["image_inputs"]
    engine.close()


@pytest.mark.parametrize(
    "block", [ImageBlock(image=b"\x89PNG\r\n"), ImageBlock(url=URL)], ids=["bytes", "data URL"]
)
@pytest.mark.parametrize("has_template", [True, False])
def test_llama_index_refuses_an_image(model_dir, block, has_template):
    """Also where LlamaIndex renders the messages, as lines of text."""
    tokenizer = tiny_tokenizer()
    if not has_template:
        tokenizer.chat_template = None
    llm = KVRagLLM(model=model_dir, tokenizer=tokenizer, max_tokens=8)
    with pytest.raises(InputError, match=f"a user message holds a image block; {REFUSED} block"):
        llm.chat([ChatMessage(role="user", blocks=[block, TextBlock(text="What is it?")])])


def test_the_server_refuses_an_image(model_dir):
    engine = KVRagEngine.get(model_dir)
    with TestClient(
        create_app(engine, ServerConfig(model_name="tiny")), base_url="http://localhost"
    ) as http:
        content = [FORMS["data URL"], {"type": "text", "text": "What is it?"}]
        body = {"model": "tiny", "messages": [{"role": "user", "content": content}]}
        refused = http.post("/v1/chat/completions", json=body)
        assert refused.status_code == 400
        assert f"type 'image_url'; {REFUSED} part" in refused.json()["error"]["message"]
    engine.close()
