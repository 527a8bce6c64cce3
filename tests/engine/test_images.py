"""Models that see: prompts with images are answered as transformers answers them, and text stays exact after."""

import base64
import io
from typing import Any

import pytest
import torch
from fastapi.testclient import TestClient
from langchain_core.messages import HumanMessage
from llama_index.core.base.llms.types import ChatMessage, ImageBlock, TextBlock
from texts import make_chunks
from transformers import BatchFeature

from kvrag import Chunk, InputError, KVRagEngine, RepairConfig
from kvrag.generate import images
from kvrag.model import CausalLM
from kvrag.model.proof import _Trial, prove
from kvrag.server import ServerConfig, create_app
from kvrag.testing.models import tiny_model
from kvrag.testing.tokenizers import tiny_tokenizer
from langchain_kvrag import ChatKVRag
from llama_index.llms.kvrag import KVRagLLM

Image = pytest.importorskip("PIL.Image", reason="images need Pillow")

IMAGE_TOKEN = 5
CHUNKS = make_chunks(3, words=30)
TEMPLATE = """
{%- for m in messages %}<|im_start|>{{ m['role'] }}
{% for c in m['content'] %}{% if c['type'] == 'image' %}IMAGE{% else %}{{ c['text'] }}{% endif %}{% endfor %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


def llava_processor() -> Any:
    """Return the processor of the tiny Llava."""
    from transformers import CLIPImageProcessorPil, LlavaProcessor

    tokenizer = tiny_tokenizer()
    token = tokenizer.convert_ids_to_tokens(IMAGE_TOKEN)
    size = {"height": 16, "width": 16}
    return LlavaProcessor(
        image_processor=CLIPImageProcessorPil(size=size, crop_size=size),
        tokenizer=tokenizer,
        patch_size=8,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        image_token=token,
        chat_template=TEMPLATE.replace("IMAGE", token),
    )


class QwenProcessor:
    """Processor of the tiny Qwen2-VL, whose images have positions in height and width.

    Transformers' own needs torchvision, for videos.
    """

    def __init__(self) -> None:
        from transformers import Qwen2VLImageProcessorPil

        size = {"shortest_edge": 256, "longest_edge": 1024}
        self.image_processor = Qwen2VLImageProcessorPil(patch_size=8, merge_size=2, size=size)
        self.tokenizer = tiny_tokenizer()
        self.wraps = self.tokenizer.convert_ids_to_tokens([7, IMAGE_TOKEN, 8])

    def apply_chat_template(self, messages: Any, **options: Any) -> BatchFeature:
        before, token, after = self.wraps
        shown = [p["image"] for m in messages for p in m["content"] if p["type"] == "image"]
        seen = self.image_processor(shown, return_tensors="pt")
        rendered = self.tokenizer.apply_chat_template(
            messages, chat_template=TEMPLATE, tokenize=False, add_generation_prompt=True
        )
        text, *parts = rendered.split("IMAGE")
        for part, (time, height, width) in zip(parts, seen["image_grid_thw"], strict=True):
            text += before + token * int(time * height * width // 4) + after + part
        found = self.tokenizer(text, return_tensors="pt", add_special_tokens=False)
        kinds = (found["input_ids"] == IMAGE_TOKEN).long()
        return BatchFeature({**found, **seen, "mm_token_type_ids": kinds})


MODELS = {"llava": llava_processor, "qwen2_vl": QwenProcessor}


def picture(color: str = "red") -> Any:
    """Return an image that a processor has to resize, with a corner of another colour."""
    made = Image.new("RGB", (40, 30), color)
    made.paste("blue", (0, 0, 10, 10))
    return made


def png(image: Any) -> str:
    """Return an image as base64 text."""
    out = io.BytesIO()
    image.save(out, "PNG")
    return base64.b64encode(out.getvalue()).decode()


def asked(*parts: Any) -> list[dict[str, Any]]:
    return [{"role": "system", "content": "Be short."}, {"role": "user", "content": list(parts)}]


def engine_of(name: str) -> KVRagEngine:
    """Return an engine on a tiny model with its processor."""
    return KVRagEngine.from_pretrained(
        tiny_model(name), tokenizer=MODELS[name](), prefix="Read.\n", context=None, prove="off"
    )


def own_answer(name: str, *parts: Any, count: int = 8) -> list[int]:
    """Return what transformers alone answers to the processor's inputs."""
    model, processor = tiny_model(name), MODELS[name]()
    messages = [
        {"role": "system", "content": [{"type": "text", "text": "Be short."}]},
        {"role": "user", "content": list(parts)},
    ]
    inputs = processor.apply_chat_template(
        messages, tokenize=True, return_dict=True, return_tensors="pt", add_generation_prompt=True
    )
    made = model.generate(**inputs, max_new_tokens=count, do_sample=False, pad_token_id=0)
    return made[0, inputs["input_ids"].shape[1] :].tolist()


@pytest.mark.parametrize("name", MODELS)
def test_an_image_is_answered_as_by_generate(name):
    engine = engine_of(name)
    text = {"type": "text", "text": "What is it?"}
    answers = []
    for shown in (picture(), picture("green")):
        expected = own_answer(name, {"type": "image", "image": shown}, text)
        result = engine.generate(asked({"type": "image", "image": shown}, text), max_new_tokens=8)
        assert result.token_ids == expected
        assert (result.exactness, result.cached_tokens) == ("full", 0)
        assert "the prompt holds an image" in str(result.fallback_reason)
        assert result.prompt_ids.count(IMAGE_TOKEN) >= 4
        answers.append(engine.prefill(asked({"type": "image", "image": shown}, text)).logits)
    assert not torch.allclose(*answers), "or the image was not looked at"


@pytest.mark.parametrize("name", MODELS)
def test_text_is_exact_after_an_image(name):
    """Qwen keeps an image's offset of positions in the model; nobody else's forward may see it."""
    engine = engine_of(name)
    engine.precompute(CHUNKS)
    prompt = ["Read.\n", Chunk(CHUNKS[1]), "\n", Chunk(CHUNKS[0]), "Who?"]
    model = engine.loaded.lm.model
    holders = [m for m in model.modules() if hasattr(m, "rope_deltas")]
    for holder in holders:
        holder.rope_deltas = torch.tensor([[17]])  # as if its owner had shown an image
    engine.generate(asked({"type": "image", "image": picture()}, "What?"), max_new_tokens=3)
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


def test_images_are_read_from_every_form_of_data():
    engine, data = engine_of("llava"), png(picture())
    forms = [
        {"type": "image", "image": picture()},
        {"type": "image", "image": base64.b64decode(data)},
        {"type": "image", "base64": data, "mime_type": "image/png"},
        {"type": "image", "source_type": "base64", "data": data, "mime_type": "image/png"},
        {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": data}},
        {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}},
        {"type": "input_image", "image_url": f"data:image/png;base64,{data}"},
    ]
    logits = [engine.prefill(asked(form, "What is it?")).logits for form in forms]
    assert all(torch.equal(found, logits[0]) for found in logits)


@pytest.mark.parametrize(
    "given", ["https://example.com/cat.png", "/etc/passwd", "file:///etc/passwd", "cat.png", 3]
)
def test_no_prompt_makes_kvrag_open_a_file_or_an_address(given):
    part = {"type": "image_url", "image_url": {"url": given}}
    with pytest.raises(InputError, match="pass it as a data: URL"):
        engine_of("llava").generate(asked(part, "What?"))


@pytest.mark.parametrize("name", ["images", "processor_kwargs", "size"])
def test_no_variable_of_a_template_is_an_option_of_the_processor(name):
    """Else ``images`` would be opened, or fetched, by the processor."""
    prompt = asked({"type": "image", "image": picture()}, "What?")
    with pytest.raises(InputError, match=f"chat_template_kwargs has '{name}'"):
        engine_of("llava").generate(prompt, chat_template_kwargs={name: ["/etc/passwd"]})


def test_images_are_bounded_before_they_are_decoded(monkeypatch):
    """A small file may hold many pixels."""
    engine = engine_of("llava")
    many = [{"type": "image", "image": picture()}] * (images.MAX_IMAGES + 1)
    with pytest.raises(InputError, match="more than 64 images"):
        engine.generate(asked(*many, "What?"))
    monkeypatch.setattr(images, "MAX_PIXELS", 2 * 40 * 30)
    for form in (picture(), png(picture())):
        engine.prefill(asked(*[{"type": "image", "image": form}] * 2, "What?"))
        with pytest.raises(InputError, match=r"more than 2,400 pixels"):
            engine.prefill(asked(*[{"type": "image", "image": form}] * 3, "What?"))


def test_a_chunk_beside_an_image_holds_no_control_tokens():
    engine = engine_of("llava")
    control = engine.loaded.encoder.tokenizer.eos_token
    prompt = asked({"type": "image", "image": picture()}, Chunk(f"a {control} b"), "What?")
    with pytest.raises(InputError, match="control token"):
        engine.generate(prompt)


@pytest.mark.parametrize("given", ["https://bücher.example/a.png", "ü"])
def test_data_that_is_not_ascii_is_refused_in_a_sentence(given):
    part = {"type": "image_url", "image_url": {"url": given}}
    with pytest.raises(InputError, match="pass it as a data: URL"):
        engine_of("llava").generate(asked(part, "What?"))


def test_a_message_that_is_none_is_refused_beside_an_image():
    prompt = [*asked({"type": "image", "image": picture()}, "What?"), 3]
    with pytest.raises(InputError):
        engine_of("llava").generate(prompt)


def test_other_formats_are_not_tried():
    """Pillow would run Ghostscript for this."""
    script = base64.b64encode(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n").decode()
    with pytest.raises(InputError, match=r"can't be read.*PNG"):
        engine_of("llava").generate(asked({"type": "image", "base64": script}, "What?"))


def test_an_answer_to_an_image_streams_and_samples():
    engine = engine_of("qwen2_vl")
    prompt = asked({"type": "image", "image": picture()}, "What is it?")
    whole = engine.generate(prompt, max_new_tokens=6, temperature=1.0, seed=3)
    stream = engine.stream(prompt, max_new_tokens=6, temperature=1.0, seed=3)
    assert "".join(stream) == whole.text
    assert stream.result.token_ids == whole.token_ids
    assert "image" in str(engine.explain(prompt))


def test_chunks_beside_an_image_are_text():
    engine = engine_of("llava")
    image = {"type": "image", "image": picture()}
    given = engine.generate(asked(image, "See: ", Chunk(CHUNKS[0]), " Who?"), max_new_tokens=4)
    text = {"type": "text", "text": f"See: {CHUNKS[0]} Who?"}
    assert given.token_ids == own_answer("llava", image, text, count=4)


def test_a_prompt_with_images_has_no_tools():
    tool = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
    prompt = asked({"type": "image", "image": picture()}, "What?")
    with pytest.raises(InputError, match="can have no tools"):
        engine_of("llava").generate(prompt, tools=[tool])
    with pytest.raises(InputError, match="prompt_logprobs is not for prompts with images"):
        engine_of("llava").generate(prompt, prompt_logprobs=1)


def test_without_eyes_or_processor_a_sentence_says_so(tmp_path):
    prompt = asked({"type": "image", "image": picture()}, "What?")
    blind = KVRagEngine.from_pretrained(tiny_model(), tokenizer=tiny_tokenizer())
    with pytest.raises(InputError, match="part of type 'image'; kvrag reads text only"):
        blind.generate(prompt)
    unequipped = KVRagEngine.from_pretrained(tiny_model("llava"), tokenizer=tiny_tokenizer())
    with pytest.raises(InputError, match="pass the processor as the tokenizer"):
        unequipped.generate(prompt)
    tiny_model("llava").save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    with pytest.raises(InputError, match=r"the processor of .* can't be loaded"):
        KVRagEngine.from_pretrained(tmp_path).generate(prompt)


def test_a_directory_brings_its_processor(tmp_path):
    tiny_model("llava").save_pretrained(tmp_path)
    llava_processor().save_pretrained(tmp_path)
    image = {"type": "image", "image": picture()}
    engine = KVRagEngine.from_pretrained(tmp_path)
    result = engine.generate(asked(image, "What is it?"), max_new_tokens=8)
    text = {"type": "text", "text": "What is it?"}
    assert result.token_ids == own_answer("llava", image, text)


def test_every_client_can_show_an_image(tmp_path):
    """LangChain, LlamaIndex and OpenAI's API, each in its own form."""
    tiny_model("llava").save_pretrained(tmp_path)
    llava_processor().save_pretrained(tmp_path)
    data, text = png(picture()), {"type": "text", "text": "What is it?"}
    url = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}}
    engine = KVRagEngine.get(tmp_path)
    want = engine.generate([{"role": "user", "content": [url, text]}], max_new_tokens=8).text

    chat = ChatKVRag(model=str(tmp_path), max_tokens=8)
    assert chat.profile["image_inputs"]
    for given in (url, {"type": "image", "base64": data, "mime_type": "image/png"}):
        answer = chat.invoke([HumanMessage([given, text])])
        assert answer.content == want
        assert "image" in answer.response_metadata["kvrag"]["fallback_reason"]

    llm = KVRagLLM(model=str(tmp_path), max_tokens=8)
    for block in (
        ImageBlock(image=base64.b64decode(data)),
        ImageBlock(url=url["image_url"]["url"]),
    ):
        asked_for = ChatMessage(role="user", blocks=[block, TextBlock(text="What is it?")])
        answer = llm.chat([asked_for])
        assert "image" in answer.raw["kvrag"]["fallback_reason"]
    page = ChatMessage(role="user", blocks=[ImageBlock(url="https://example.com/cat.png")])
    with pytest.raises(InputError, match="opens no files or addresses"):
        llm.chat([page])

    with TestClient(create_app(engine, ServerConfig(model_name="tiny"))) as http:
        body = {"model": "tiny", "max_tokens": 8}
        sent = {**body, "messages": [{"role": "user", "content": [url, text]}]}
        found = http.post("/v1/chat/completions", json=sent).json()
        assert found["choices"][0]["message"]["content"] == want
        page = {"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}
        sent["messages"] = [{"role": "user", "content": [page, text]}]
        refused = http.post("/v1/chat/completions", json=sent)
        assert refused.status_code == 400
        assert "opens no files" in refused.json()["error"]["message"]
    engine.close()
