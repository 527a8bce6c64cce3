"""A chain that names no prefix: the model learns it from the first prompts."""

import pytest
from langchain_classic.chains.combine_documents import create_stuff_documents_chain
from langchain_core.documents import Document
from langchain_core.prompts import ChatPromptTemplate, PromptTemplate

from langchain_kvrag import ChatKVRag, KVRagLLM

CHAT = ChatPromptTemplate.from_messages(
    [("system", "Use the notes."), ("human", "{context}\n\n{input}")]
)
TEXT = PromptTemplate.from_template("Use the notes.\n{context}\n\n{input}")

pytestmark = pytest.mark.filterwarnings("ignore:chunks were encoded behind another prefix")


@pytest.mark.parametrize(("kind", "prompt"), [(ChatKVRag, CHAT), (KVRagLLM, TEXT)])
def test_a_chain_that_names_no_prefix_finds_it_by_itself(options, chunks, kind, prompt):
    model = kind(**options, prefix="learn", mode="stitch", context=None)
    model.precompute_kv(chunks)
    chain, documents = (
        create_stuff_documents_chain(model, prompt),
        [Document(page_content=text) for text in chunks],
    )
    found = []
    for n in range(5):
        asked = {"context": documents[n:] + documents[:n], "input": f"Question {n}: who reads?"}
        value = prompt.invoke(
            {**asked, "context": "\n\n".join(d.page_content for d in asked["context"])}
        )
        found.append(
            next(span for span in model.explain(value).spans if span.kind == "chunk").exact
        )
        assert isinstance(chain.invoke(asked), str)
        if n == 2:
            model.precompute_kv(chunks)  # as the log says
    assert found == [False, False, False, True, True]
