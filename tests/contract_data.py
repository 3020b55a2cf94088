"""Contract: rows in, the same rows out, judged by the raw medium; refusals that touch nothing."""

from __future__ import annotations

import numpy as np
import pytest
from contract_base import (
    BLOCK,
    ContractBase,
    check_raw,
    empty_like,
    read,
    same,
    slots_of,
    tokens_of,
    value,
    write,
)

from emu import Capability
from emu.errors import (
    TokenMissing,
    UserError,
)


class DataContract(ContractBase):
    def test_put_lies_where_the_layout_says(self, store, raw):
        rows = {key: value(key, n) for key, n in (("a", 1), ("b", 64), ("c", 150))}
        store.put(list(rows), list(rows.values()))
        device = raw(store)
        for key in rows:
            check_raw(device, store.publish(key), rows[key])

    def test_append_lies_where_the_layout_says(self, store, raw):
        rows = value("a", 200)
        reservation = store.reserve("a", 70, append_tokens=130)
        write(store, reservation.slot, rows, 0, 70)
        for first, last in ((70, 71), (71, 140), (140, 200)):
            write(store, reservation.slot, rows, first, last)
        descriptor = store.publish("a")
        assert (descriptor.prompt_tokens, descriptor.num_tokens) == (70, 200)
        assert len(descriptor.blocks) == 2 + 3
        check_raw(raw(store), descriptor, rows)
        assert same(read(store, reservation.slot, 200), rows)

    def test_get_reads_hits_and_leaves_misses_as_they_were(self, store):
        rows = [value("a", 70), value("b", 3)]
        store.put(["a", "b"], rows)
        out = [
            empty_like(rows[1]),
            {k: v + 7 for k, v in empty_like(rows[0]).items()},
            empty_like(rows[0]),
        ]
        untouched = {k: v.copy() for k, v in out[1].items()}
        assert store.get(["b", "nobody", "a"], out).tolist() == [True, False, True]
        assert same(out[0], rows[1])
        assert same(out[1], untouched)
        assert same(out[2], rows[0])

    def test_the_callers_arrays_are_not_aliased(self, store):
        rows = value("a", 70)
        given = {k: v.copy() for k, v in rows.items()}
        store.put(["a"], [given])
        for array in given.values():
            array[:] = 0
        first = empty_like(rows)
        store.get(["a"], [first])
        assert same(first, rows)
        first["kv"][:] = 1
        second = empty_like(rows)
        store.get(["a"], [second])
        assert same(second, rows)

    def test_gather_takes_tokens_in_any_order(self, store):
        rows = [value("a", 130), value("b", 5)]
        store.put(["a", "b"], rows)
        tokens = tokens_of([129, 0, 64, 64, -1, 63], [4, 4, -1, 0, -1, 3])
        out = store.buffer(2 * 6 * 656).reshape(2, 6, 656)
        out[:] = 77
        assert store.gather(store.slots(["a", "b"]), 2, tokens, out) == 9
        for b, j in np.ndindex(2, 6):
            want = 77 if tokens[b, j] < 0 else rows[b]["kv"][2, tokens[b, j]]
            assert (out[b, j] == want).all(), (b, j)

    def test_gather_into_chosen_rows(self, store):
        rows = value("a", 100)
        store.put(["a"], [rows])
        out = store.buffer(8 * 132).reshape(8, 132)
        out[:] = 77
        targets = tokens_of([7, 0, 3, 3])
        moved = store.gather(
            store.slots(["a"]),
            1,
            tokens_of([9, 99, -1, 50]),
            out,
            component="index",
            out_rows=targets,
        )
        assert moved == 3
        assert (out[[7, 0, 3]] == rows["index"][0, [9, 99, 50]]).all()
        assert (out[[1, 2, 4, 5, 6]] == 77).all()

    def test_gather_out_of_the_chosen_rows_is_refused(self, store):
        store.put(["a"], [value("a", 10)])
        out = store.buffer(2 * 132).reshape(2, 132)
        out[:] = 77
        for target in (2, -1, 2**31 - 1):
            with pytest.raises(ValueError, match="out"):
                store.gather(
                    store.slots(["a"]),
                    1,
                    tokens_of([0, 1]),
                    out,
                    component="index",
                    out_rows=tokens_of([0, target]),
                )
        assert (out == 77).all()

    @pytest.mark.parametrize(
        ("name", "change"),
        [
            ("slots", lambda a: a | {"slots": a["slots"].astype(np.int32)}),
            ("slots", lambda a: a | {"slots": a["slots"].tolist()}),
            ("tokens", lambda a: a | {"tokens": a["tokens"].astype(np.int64)}),
            ("tokens", lambda a: a | {"tokens": a["tokens"][0]}),
            ("tokens", lambda a: a | {"tokens": np.repeat(a["tokens"], 2, axis=0)}),
            ("out", lambda a: a | {"out": a["out"][:, :, :-1]}),
            ("out", lambda a: a | {"out": a["out"][:, ::-1]}),
            ("out", lambda a: a | {"out": a["out"].view(np.int8)}),
            ("out", lambda a: a | {"out": np.zeros((1, 2, 656), np.uint8)}),
            ("out", lambda a: a | {"out": np.frombuffer(bytes(4 * 656), np.uint8).reshape(1, 4, 656)}),
            ("out_rows", lambda a: a | {"out_rows": tokens_of([0, 1])}),
            ("layer", lambda a: a | {"layer": 9}),
        ],
    )  # fmt: skip
    def test_gather_refuses_wrong_arguments(self, store, name, change):
        store.put(["a"], [value("a", 4)])
        good = {
            "slots": store.slots(["a"]),
            "layer": 0,
            "tokens": tokens_of([0, 1, 2, 3]),
            "out": store.buffer(4 * 656).reshape(1, 4, 656),
        }
        store.gather(**good)
        with pytest.raises(ValueError, match=name) as refused:
            store.gather(**change(good))
        assert name == "layer" or "wanted" in str(refused.value)

    def test_put_and_get_refuse_wrong_arrays(self, store):
        rows = value("a", 4)
        for bad in (
            rows | {"kv": rows["kv"][:2]},
            rows | {"kv": rows["kv"][:, :3]},
            rows | {"kv": rows["kv"].astype(np.int16)},
            rows | {"kv": np.asfortranarray(rows["kv"])},
            {"kv": rows["kv"]},
            rows | {"other": rows["kv"]},
        ):
            with pytest.raises(ValueError, match=r"got .* wanted"):
                store.put(["a", "b"], [rows, bad])
        assert not store.exists(["a", "b"]).any()
        store.put(["a"], [rows])
        out = empty_like(value("", 5))
        with pytest.raises(ValueError, match=r"wanted uint8 \[3, 4, 656\]"):
            store.get(["a"], [out])
        assert not out["kv"].any()
        with pytest.raises(ValueError, match="2 keys and 1"):
            store.get(["a", "b"], [out])

    def test_a_token_past_the_end_names_everything(self, store):
        store.put(["a", "b"], [value("a", 4), value("b", 9)])
        out = store.buffer(2 * 2 * 132).reshape(2, 2, 132)
        for token in (9, 2**31 - 1, -2):
            with pytest.raises(TokenMissing) as missing:
                store.gather(
                    store.slots(["a", "b"]),
                    1,
                    tokens_of([0, 3], [8, token]),
                    out,
                    component="index",
                )
            error = missing.value
            assert (error.device, error.key, error.component) == (store.device, "b", "index")
            assert (error.layer, error.token, error.length) == (1, token, 9)
            assert isinstance(error, IndexError)

    def test_fetch_reads_a_range_of_all_layers(self, store):
        rows = value("a", 150)
        store.put(["a"], [rows])
        slot = int(store.slots(["a"])[0])
        out = store.buffer(3 * 90 * 656).reshape(3, 90, 656)
        store.fetch(slot, "kv", 60, out)
        assert (out == rows["kv"][:, 60:150]).all()
        store.fetch(slot, "kv", 150, out[:, :0].copy())
        for start in (61, -1, -90):
            with pytest.raises(TokenMissing):
                store.fetch(slot, "kv", start, out)
        with pytest.raises(ValueError, match="nothing"):
            store.fetch(slot, "nothing", 0, out)

    def test_append_refuses_a_gap_a_shared_token_and_too_much(self, store, raw):
        reservation = store.reserve("a", 70, append_tokens=10)
        rows = value("a", 150)
        write(store, reservation.slot, rows, 0, 10)
        before = raw(store)
        one = slots_of(reservation.slot)
        for start, count, why in ((11, 1, "gap"), (10, 71, "80 are reserved"), (-1, 1, "shared")):
            block = np.zeros((1, count, 656), np.uint8)
            with pytest.raises(ValueError, match=why):
                store.append(one, 0, np.array([start], np.int32), block)
        assert raw(store) == before
        assert store.length(reservation.slot) == 10
        write(store, reservation.slot, rows, 10, 80)
        assert store.length(reservation.slot) == 80

    @pytest.mark.parametrize("prompt", [0, 1, BLOCK - 1, BLOCK, BLOCK + 1])
    @pytest.mark.parametrize("more", [0, 1, BLOCK - 1, BLOCK, BLOCK + 1])
    def test_append_takes_what_was_asked_for_and_not_a_token_more(self, store, raw, prompt, more):
        total = prompt + more
        rows = value("a", total + 1)
        writer = store.reserve("a", prompt, append_tokens=more).slot
        write(store, writer, rows, 0, prompt)
        reader = store.attach(store.publish("a"))
        store.detach(writer)  # an attacher knows the limit as well as the one that reserved
        write(store, reader, rows, prompt, total)
        before = raw(store)
        with pytest.raises(UserError, match=f"{total} are reserved"):
            write(store, reader, rows, total, total + 1)
        assert raw(store) == before
        assert store.length(reader) == total
        assert store.publish("a").num_tokens == total

    def test_append_of_a_batch_is_all_or_nothing(self, store, raw):
        slots = slots_of(*(store.reserve(key, 4).slot for key in "abc"))
        before = raw(store)
        start = np.array([0, 0, 1], np.int32)
        with pytest.raises(ValueError, match="gap"):
            store.append(slots, 0, start, np.full((3, 2, 656), 9, np.uint8))
        assert raw(store) == before

    def test_length_is_what_every_layer_holds(self, store):
        slot = store.reserve("a", 4).slot
        rows = value("a", 4)
        store.append(slots_of(slot), 0, np.zeros(1, np.int32), rows["kv"][:1])
        assert store.length(slot) == 0
        write(store, slot, rows, 0, 3)
        assert store.length(slot) == 3
        with pytest.raises(TokenMissing):
            store.gather(slots_of(slot), 1, tokens_of([3]), np.zeros((1, 1, 656), np.uint8))

    def test_packed_only_where_it_is_offered(self, store):
        store.put(["a"], [value("a", 4)])
        out = store.buffer(2 * 656).reshape(1, 2, 656)
        arguments = (store.slots(["a"]), 0, tokens_of([3, 0]), out)
        if Capability.PACKED in store.capabilities:
            assert store.gather(*arguments, packed=True) == 2
            assert (out[0] == value("a", 4)["kv"][0, [3, 0]]).all()
        else:
            with pytest.raises(UserError, match="PACKED"):
                store.gather(*arguments, packed=True)
