"""Any sequence of calls, on any of two handles, gives what a few dictionaries give."""

import os
import shutil
import tempfile
from pathlib import Path

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from stores import PATIENT_S, other_handle

from kvrag.identity.fingerprint import chunk_key
from kvrag.testing.chunks import NAMESPACE, make_identity, make_kv, make_text, same_bits
from kvrag.types import Hole

CHUNKS = [make_identity(number, prefix=prefix) for number in range(2) for prefix in ("x", "y")]
BUDGET = 2 * make_kv(CHUNKS[0]).num_bytes

chunks, names, docs, who = (
    st.sampled_from(CHUNKS),
    st.sampled_from("abc"),
    st.sampled_from(["one", "two"]),
    st.integers(0, 1),
)


class StoreMachine(RuleBasedStateMachine):
    def __init__(self):
        super().__init__()
        self.root = Path(tempfile.mkdtemp(dir=os.environ.get("PYTEST_DEBUG_TEMPROOT")))
        self.stores = [self.open(), self.open()]
        self.stored = {}  # chunk -> texts
        self.references = set()  # (document, text)
        self.dormant = set()

    def open(self):
        return other_handle(self.root, ram=BUDGET, gpu=BUDGET // 2)

    def is_referenced(self, text):
        return any(name == text for _, name in self.references)

    def add(self, chunk, text, doc):
        self.stored.setdefault(chunk, set())
        self.dormant.discard(chunk)
        if text:
            self.stored[chunk].add(text)
            if doc:
                self.references.add((doc, text))

    @rule(n=who, chunk=chunks, text=st.none() | names, doc=st.none() | docs)
    def put(self, n, chunk, text, doc):
        written = self.stores[n].put(
            chunk, make_kv(chunk), text=text and make_text(text), doc_id=doc
        )
        is_there = chunk in self.stored or chunk in self.dormant
        assert written == (0 if is_there else make_kv(chunk).num_bytes)
        self.add(chunk, text, doc)

    @rule(n=who, chunk=chunks, text=st.none() | names, doc=st.none() | docs)
    def link(self, n, chunk, text, doc):
        is_there = chunk in self.stored or chunk in self.dormant
        assert self.stores[n].link(chunk, text=text and make_text(text), doc_id=doc) == is_there
        if is_there:
            self.add(chunk, text, doc)

    @rule(n=who, chunk=chunks)
    def delete(self, n, chunk):
        is_there = chunk in self.stored or chunk in self.dormant
        assert self.stores[n].delete([chunk_key(chunk)]) == is_there
        self.stored.pop(chunk, None)
        self.dormant.discard(chunk)

    @rule(n=who, doc=docs)
    def forget(self, n, doc):
        mine = {text for name, text in self.references if name == doc}
        self.references -= {(doc, text) for text in mine}
        gone = self.drop({text for text in mine if not self.is_referenced(text)})
        assert self.stores[n].forget(NAMESPACE, doc) == len(gone)
        self.dormant.clear()

    def drop(self, texts):
        gone = []
        for chunk, held in list(self.stored.items()):
            if held & texts:
                held -= texts
                if not any(self.is_referenced(text) for text in held):
                    gone.append(chunk)
                    del self.stored[chunk]
        return gone

    @rule(n=who)
    def reopen(self, n):
        self.stores[n].close()
        self.stores[n] = self.open()

    @rule()
    def lose_the_catalog(self):
        shutil.rmtree(self.root / "catalog")
        self.dormant |= set(self.stored)
        self.stored.clear()
        self.references.clear()

    @rule(n=who, many=st.lists(chunks, max_size=5))
    def load(self, n, many):
        for chunk, kv in zip(many, self.stores[n].get_many(many, timeout_s=PATIENT_S), strict=True):
            if chunk in self.stored:
                assert same_bits(kv, make_kv(chunk))
            else:
                assert kv == Hole(chunk_key(chunk), "absent", None)

    @invariant()
    def agrees(self):
        for store in self.stores:
            catalog = store.catalog
            assert sorted(catalog.keys()) == sorted(map(chunk_key, self.stored))
            assert set(catalog.documents(NAMESPACE)) == {doc for doc, _ in self.references}
            found = [text.digest for text in catalog.texts(NAMESPACE, 0)[0]]
            assert len(set(found)) == len(found)
            held = {text for texts in self.stored.values() for text in texts}
            findable = {make_text(text).digest for text in held}
            assert (
                findable
                <= set(found)
                <= findable | {make_text(text).digest for _, text in self.references}
            )
            assert catalog.totals() == (
                len(self.stored),
                sum(make_kv(chunk).num_bytes for chunk in self.stored),
            )
            assert all(tier.stats().num_bytes <= tier.max_bytes for tier in store.tiers)
        assert self.stores[0].blobs.keys() == {
            chunk_key(chunk) for chunk in {*self.stored, *self.dormant}
        }

    def teardown(self):
        for store in self.stores:
            store.close()
        shutil.rmtree(self.root)


TestStoreMachine = StoreMachine.TestCase
TestStoreMachine.settings = settings(max_examples=40, stateful_step_count=20, deadline=None)
