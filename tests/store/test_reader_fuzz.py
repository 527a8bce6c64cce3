"""Whatever a blob or a row says, it is read as what it is or refused; nothing else ever comes of it."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from reader_target import NEED_CRYPTOGRAPHY, SEEDS, TARGETS
from stores import needs_cryptography

NAMES = [
    *(name for name in ("file", "header in order", "row")),
    *(pytest.param(name, marks=needs_cryptography) for name in NEED_CRYPTOGRAPHY),
]
SAID = [json.loads(seed) for seed in SEEDS["header in order"]]
ROWS = [json.loads(seed) for seed in SEEDS["row"]]

values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=10), inner, max_size=3)
    ),
    max_leaves=8,
)


@pytest.mark.parametrize("name", NAMES)
def test_the_targets_accept_what_is_sound(name):
    """A target that refuses everything would prove nothing."""
    assert all(TARGETS[name](seed) for seed in SEEDS[name])


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=250, deadline=None)
@given(data=st.data())
def test_whatever_is_read_is_right_or_refused(name, data):
    """The targets of `make fuzz-reader`: whole blobs, headers and rows of the catalog, spliced, with a key and without."""
    seed = data.draw(st.sampled_from(SEEDS[name]))
    place, drop = data.draw(st.integers(0, len(seed))), data.draw(st.integers(0, 40))
    TARGETS[name](seed[:place] + data.draw(st.binary(max_size=40)) + seed[place + drop :])


@settings(max_examples=800, deadline=None)
@given(st.sampled_from(SAID), st.data())
def test_headers_in_order_that_say_something_else_are_usable_or_refused(said, data):
    fields = {key: dict(each) for key, each in said.items()}
    place = fields[data.draw(st.sampled_from([*fields, *["__metadata__"] * 9]))]
    place[data.draw(st.sampled_from([*place]))] = data.draw(values)
    TARGETS["header in order"](json.dumps(fields).encode())


@settings(max_examples=800, deadline=None)
@given(st.sampled_from(ROWS), st.data())
def test_rows_that_say_something_else_are_usable_or_absent(row, data):
    changed, value = list(row), data.draw(values | st.integers(-(2**65), 2**65))
    place = data.draw(st.integers(0, len(row) - 1))
    inner = changed[place]
    if isinstance(inner, list) and inner and data.draw(st.booleans()):
        changed[place] = [*inner]
        changed[place][data.draw(st.integers(0, len(inner) - 1))] = value
    else:
        changed[place] = value
    TARGETS["row"](json.dumps(changed).encode())
