"""Any sequence of calls gives what a few dictionaries give."""

import shutil
import tempfile
from pathlib import Path

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvrag.identity.fingerprint import chunk_key
from kvrag.store import DiskStore, MemoryStore, TieredStore, WriteBehind
from kvrag.testing.chunks import NAMESPACE, make_identity, make_kv, make_text, same_bits

CHUNKS = [make_identity(number, prefix=prefix) for number in range(2) for prefix in ("x", "y")]
BUDGET = 2 * make_kv(CHUNKS[0]).num_bytes

chunks = st.sampled_from(CHUNKS)
names = st.sampled_from("abc")
RAM_DISK = Path("/dev/shm")
docs = st.sampled_from(["one", "two"])


class StoreMachine(RuleBasedStateMachine):
    def __init__(self):
        super().__init__()
        self.root = Path(tempfile.mkdtemp(dir=RAM_DISK if RAM_DISK.is_dir() else None))
        self.store = self.open()
        self.stored = {}  # chunk -> texts
        self.references = set()  # (document, text)

    def open(self):
        return TieredStore(MemoryStore(BUDGET), DiskStore(self.root))

    def settle(self):
        """Make the index safe to change behind the store's back."""

    def is_referenced(self, text):
        return any(name == text for _, name in self.references)

    @rule(chunk=chunks, text=st.none() | names, doc=st.none() | docs)
    def put(self, chunk, text, doc):
        written = self.store.put(chunk, make_kv(chunk), text=text and make_text(text), doc_id=doc)
        assert written == (0 if chunk in self.stored else make_kv(chunk).num_bytes)
        self.stored.setdefault(chunk, set())
        if text:
            self.stored[chunk].add(text)
            if doc:
                self.references.add((doc, text))

    @rule(chunk=chunks)
    def delete(self, chunk):
        assert self.store.delete([chunk_key(chunk)]) == (chunk in self.stored)
        self.stored.pop(chunk, None)

    @rule(doc=docs)
    def forget(self, doc):
        mine = {text for name, text in self.references if name == doc}
        self.references -= {(doc, text) for text in mine}
        gone = self.drop({text for text in mine if not self.is_referenced(text)})
        assert self.store.forget(NAMESPACE, doc) == len(gone)

    @rule(doc=docs)
    def unlink(self, doc):
        self.settle()
        mine = {text for name, text in self.references if name == doc}
        self.references -= {(doc, text) for text in mine}
        gone = self.drop({text for text in mine if not self.is_referenced(text)})
        keys = self.store.index.unlink(NAMESPACE, doc)
        assert sorted(keys) == sorted(map(chunk_key, gone))
        assert self.store.delete(keys) == len(gone)

    @rule(text=names)
    def unlink_text(self, text):
        self.settle()
        self.references = {(doc, name) for doc, name in self.references if name != text}
        gone = self.drop({text})
        keys = self.store.index.unlink_text(NAMESPACE, make_text(text).digest)
        assert sorted(keys) == sorted(map(chunk_key, gone))
        assert self.store.delete(keys) == len(gone)

    def drop(self, texts):
        gone = []
        for chunk, held in list(self.stored.items()):
            if held & texts:
                held -= texts
                if not any(self.is_referenced(text) for text in held):
                    gone.append(chunk)
                    del self.stored[chunk]
        return gone

    @rule()
    def reopen(self):
        self.store.close()
        self.store = self.open()

    @rule(many=st.lists(chunks, max_size=5))
    def load(self, many):
        for chunk, kv in zip(many, self.store.get_many(many, timeout_s=30), strict=True):
            assert same_bits(kv, make_kv(chunk)) if chunk in self.stored else kv is None

    @invariant()
    def agrees(self):
        index = self.store.index
        assert sorted(index.keys()) == sorted(map(chunk_key, self.stored))
        assert set(index.documents(NAMESPACE)) == {doc for doc, _ in self.references}
        found = [text.digest for text in index.texts(NAMESPACE, 0)[0]]
        assert len(set(found)) == len(found)
        held = {text for texts in self.stored.values() for text in texts}
        findable = {make_text(text).digest for text in held}
        assert findable <= set(found) <= findable | {make_text(text).digest for _, text in self.references}
        stats = self.store.stats()["disk"]
        assert (stats.chunks, stats.num_bytes) == (len(self.stored), sum(make_kv(c).num_bytes for c in self.stored))
        assert self.store.stats()["host"].num_bytes <= BUDGET

    def teardown(self):
        self.store.close()
        shutil.rmtree(self.root)


class AllTiersMachine(StoreMachine):
    """The same with three tiers, the upper one smaller, and a disk that is written to in the background."""

    def open(self):
        host = TieredStore(MemoryStore(BUDGET), WriteBehind(DiskStore(self.root)))
        return TieredStore(MemoryStore(BUDGET // 2, name="gpu"), host, keeps_puts=False)

    def settle(self):
        assert self.store.flush() == {}


TestAllTiersMachine = AllTiersMachine.TestCase
TestAllTiersMachine.settings = settings(max_examples=40, stateful_step_count=20, deadline=None)

TestStoreMachine = StoreMachine.TestCase
TestStoreMachine.settings = settings(max_examples=60, stateful_step_count=20, deadline=None)
