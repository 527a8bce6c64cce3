"""What the tests of the LangChain adapter ask of a store of KV."""

from langchain_kvrag import ChatKVRag


def kept(chat: ChatKVRag, chunks: list[str]) -> list[int]:
    """Which of the chunks have KV."""
    return [i for i, chunk in enumerate(chunks) if chat.explain(f"{chunk}\n\n?").hits]
