"""Descriptors on the wire: round trip, and no damaged byte is accepted."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from emu import Descriptor
from emu.descriptor_wire import MAX_DESCRIPTOR_BYTES, MAX_KEY_BYTES
from emu.errors import UserError

INT31 = st.integers(0, 2**31 - 1)
DESCRIPTORS = st.builds(
    Descriptor,
    device=st.binary(min_size=16, max_size=16),
    key=st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=MAX_KEY_BYTES // 4),
    generation=st.integers(0, 2**63 - 1),
    layout=st.binary(min_size=16, max_size=16),
    prompt_tokens=INT31,
    num_tokens=INT31,
    blocks=st.lists(INT31, max_size=50).map(tuple),
)
ONE = Descriptor(b"d" * 16, "request-1", 7, b"l" * 16, 100, 90, (3, 1, 2))


@given(DESCRIPTORS)
def test_round_trip(descriptor):
    assert Descriptor.from_bytes(descriptor.to_bytes()) == descriptor


@given(st.integers(0, len(ONE.to_bytes()) - 1), st.integers(1, 255))
def test_no_changed_byte_is_accepted(position, change):
    raw = bytearray(ONE.to_bytes())
    raw[position] ^= change
    with pytest.raises(UserError):
        Descriptor.from_bytes(bytes(raw))


@pytest.mark.parametrize("length", range(len(ONE.to_bytes())))
def test_no_cut_is_accepted(length):
    with pytest.raises(UserError):
        Descriptor.from_bytes(ONE.to_bytes()[:length])


@given(st.binary(max_size=200))
def test_foreign_bytes_are_refused(raw):
    with pytest.raises(UserError):
        Descriptor.from_bytes(raw)
    with pytest.raises(UserError):
        Descriptor.from_bytes(b"EMUD" + raw)


def test_the_reason_is_named():
    raw = ONE.to_bytes()
    for bad, reason in (
        (raw + b"x", "says it has"),
        (b"EMUD\x02\x00" + raw[6:], "version 2"),
        (raw[:-1] + bytes([raw[-1] ^ 1]), "damaged"),
        (bytes(MAX_DESCRIPTOR_BYTES + 1), "too long"),
        (b"\x80\x04pickle" + bytes(100), "not a descriptor"),
    ):
        with pytest.raises(UserError, match=reason):
            Descriptor.from_bytes(bad)


@pytest.mark.parametrize(
    "change",
    [
        {"device": b"short"},
        {"layout": b"l" * 17},
        {"key": ""},
        {"key": "x" * (MAX_KEY_BYTES + 1)},
        {"key": "\ud800"},
        {"generation": -1},
        {"generation": 2**64},
        {"num_tokens": -1},
        {"blocks": (2**31,)},
        {"blocks": tuple(range(MAX_DESCRIPTOR_BYTES // 4))},
    ],
)
def test_what_the_wire_cannot_hold_is_refused(change):
    with pytest.raises(UserError):
        replace(ONE, **change).to_bytes()
