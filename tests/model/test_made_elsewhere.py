"""A model that another loader made from the source's files takes the place of loading it."""

from transformers import AutoModelForCausalLM

from kvrag import KVRagEngine
from kvrag.model.load import load
from kvrag.model.source import ModelSource
from kvrag.prompt.template import PromptEncoder
from kvrag.testing.models import save_tiny_model


def test_engines_of_the_source_use_it_as_if_it_was_loaded(tmp_path):
    source = ModelSource(save_tiny_model(tmp_path))
    other = ModelSource(source.model, prove="off")  # loads the files
    made, another = (AutoModelForCausalLM.from_pretrained(tmp_path) for _ in range(2))
    found = load(source, PromptEncoder, made)
    assert found.lm.model is made
    assert found.fingerprint == load(other, PromptEncoder).fingerprint
    assert KVRagEngine.from_pretrained(tmp_path, context=None).loaded is found
    assert load(source, PromptEncoder, another) is not found
