"""LangGraph: a graph that phrases a search, searches with a tool, and answers from what was found.

Needs the extra ``examples``, and SmolLM2-135M and all-MiniLM-L6-v2 from their packages (README.md says how to install both).
Takes half a minute or so on two cores.
"""

from langchain_core.documents import Document
from langchain_core.messages import AIMessage, BaseMessage, HumanMessage, ToolMessage
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.tools import tool
from langchain_huggingface import HuggingFaceEmbeddings
from langchain_text_splitters import Language, RecursiveCharacterTextSplitter
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.graph.state import CompiledStateGraph
from langgraph.prebuilt import ToolNode

from langchain_kvrag import ChatKVRag, KVRagVectorStore
from local import EMBEDDINGS, HANDBOOK, KV_DIR, MODEL, show

prompt = ChatPromptTemplate(
    [
        ("system", "Answer the question with words from the documents."),
        ("human", "{context}\n\n{question}"),
    ]
)
llm = ChatKVRag(model=MODEL, kv_dir=KV_DIR, prefix=prompt, max_tokens=40)

splitter = RecursiveCharacterTextSplitter.from_language(
    Language.MARKDOWN, chunk_size=1000, chunk_overlap=0
)
texts = splitter.split_text(HANDBOOK.read_text())
documents = [Document(text, id=f"handbook#{number}") for number, text in enumerate(texts)]
store = KVRagVectorStore.from_documents(
    documents, HuggingFaceEmbeddings(model_name=EMBEDDINGS), llm=llm
)


@tool(response_format="content_and_artifact")
def search(query: str) -> tuple[str, list[Document]]:
    """Search the handbook of the Ellerby Quay library."""
    found = store.similarity_search(query, k=4)
    return "\n\n".join(document.page_content for document in reversed(found)), found


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


def graph_of(model: ChatKVRag) -> CompiledStateGraph:
    """Return the graph, with this model in both of its places."""
    # A small model calls a tool where it must: the call is decoded in the form that the tool asks for.
    caller = model.bind_tools([search], tool_choice="any")
    answerer = prompt | model

    def look_up(state: MessagesState) -> dict:
        return {"messages": caller.invoke([*SHOTS, *state["messages"]])}

    def answer(state: MessagesState) -> dict:
        asked = state["messages"][0]
        found = state["messages"][-1]
        return {"messages": answerer.invoke({"context": found.content, "question": asked.content})}

    graph = StateGraph(MessagesState).add_sequence(
        [look_up, ("search", ToolNode([search])), answer]
    )
    return graph.add_edge(START, "look_up").compile()


graphs = {"full": graph_of(llm.model_copy(update={"mode": "full"})), "kvrag": graph_of(llm)}
graphs["kvrag"].invoke(
    {"messages": [("human", "Who is the archivist?")]}
)  # the first request measures the costs here

question = "How many seats does the Lindqvist Room have?"
said = {
    name: graph.invoke({"messages": [("human", question)]})["messages"]
    for name, graph in graphs.items()
}
print("searched for:", said["kvrag"][1].tool_calls[0]["args"])
show(
    question,
    **{
        name: (steps[-1].content, steps[-1].response_metadata["kvrag"])
        for name, steps in said.items()
    },
)
