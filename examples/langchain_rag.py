"""LangChain: an ordinary chain, retriever | prompt | model, answered by a full prefill and with reuse.

Needs the extra ``examples``, and SmolLM2-135M and all-MiniLM-L6-v2 from their packages (README.md says how to install both).
Takes half a minute or so on two cores.
"""

from langchain_core.documents import Document
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.runnables import RunnablePassthrough
from langchain_huggingface import HuggingFaceEmbeddings
from langchain_text_splitters import Language, RecursiveCharacterTextSplitter

from langchain_kvrag import ChatKVRag, KVRagVectorStore
from local import EMBEDDINGS, HANDBOOK, KV_DIR, MODEL, show

prompt = ChatPromptTemplate(
    [
        ("system", "Answer the question with words from the documents."),
        ("human", "{context}\n\n{question}"),
    ]
)
llm = ChatKVRag(model=MODEL, kv_dir=KV_DIR, prefix=prompt, max_tokens=16)

# Ids that stay the same let a second run replace documents instead of adding them again.
splitter = RecursiveCharacterTextSplitter.from_language(
    Language.MARKDOWN, chunk_size=1000, chunk_overlap=0
)
texts = splitter.split_text(HANDBOOK.read_text())
documents = [Document(text, id=f"handbook#{number}") for number, text in enumerate(texts)]
store = KVRagVectorStore.from_documents(
    documents, HuggingFaceEmbeddings(model_name=EMBEDDINGS), llm=llm
)


def join(found: list[Document]) -> str:
    """Put the best match last, next to the question, where a small model reads best."""
    return "\n\n".join(document.page_content for document in reversed(found))


retriever = store.as_retriever(search_kwargs={"k": 4})
to_prompt = {"context": retriever | join, "question": RunnablePassthrough()} | prompt
kvrag = to_prompt | llm
full = to_prompt | llm.bind(mode="full")

kvrag.invoke(
    "Who is the archivist?"
)  # the first request of a process measures what the model costs here
question = "How many seats does the Lindqvist Room have?"
answers = {"full": full.invoke(question), "kvrag": kvrag.invoke(question)}
show(
    question,
    **{
        name: (answer.content, answer.response_metadata["kvrag"])
        for name, answer in answers.items()
    },
)
