"""Reading traces: the real ones, emu's own, and everything that can be wrong with a line."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from emu.errors import UserError
from emu.trace import Request, read_trace, write_trace
from emu.trace.read import MAX_LINE_BYTES
from emu.trace.request import PRIVATE_IDS, blocks_of
from emu.trace.summary import summarise

SHARED = Path(__file__).parents[1].parent / "shared" / "data"
DATA = Path(os.environ.get("EMU_SHARED_DATA", SHARED))
GOOD = '{"timestamp": 5, "input_length": 600, "output_length": 7, "hash_ids": [0, 1]}\n'
OWN = '{"arrival_ms": 1.5, "input_tokens": 1100, "output_tokens": 7, "prefix_ids": [9]}\n'
HEADER = "TIMESTAMP,ContextTokens,GeneratedTokens\n"
ROW = "2023-11-16 18:17:03.9799600,4808,10\n"


def real(name: str) -> Path:
    if not (DATA / name).exists():
        pytest.skip(f"no {name} in {DATA}")
    return DATA / name


def mooncake(**fields: object) -> str:
    line = {"timestamp": 5, "input_length": 600, "output_length": 7, "hash_ids": [0, 1]}
    return json.dumps(line | fields) + "\n"


def own(**fields: object) -> str:
    line = {"arrival_ms": 5, "input_tokens": 600, "output_tokens": 7, "prefix_ids": [0, 1]}
    return json.dumps(line | fields) + "\n"


@pytest.mark.parametrize(
    ("name", "form", "rows", "reuse", "input_mean", "output_mean"),
    [
        ("mooncake_conversation.jsonl", "mooncake", 12031, 0.366, 12035, 343),
        ("mooncake_synthetic.jsonl", "mooncake", 3993, 0.640, 15325, 149),
        ("azure_llm_2023_code.csv", "azure", 8819, 0.0, 2048, 28),
        ("azure_llm_2023_conv.csv", "azure", 19366, 0.0, 1155, 211),
    ],
)
def test_real_traces_have_their_published_figures(
    name: str, form: str, rows: int, reuse: float, input_mean: int, output_mean: int
) -> None:
    trace = read_trace(real(name))
    summary = summarise(trace)
    assert trace.format == form
    assert trace.skipped == ()
    assert summary.requests == rows
    assert summary.block_reuse == pytest.approx(reuse, abs=5e-4)
    assert round(summary.input.mean) == input_mean
    assert round(summary.output.mean) == output_mean
    assert summary.blocks == sum(blocks_of(r.input_tokens) for r in trace.requests)


def test_the_conversation_trace_in_detail() -> None:
    summary = summarise(read_trace(real("mooncake_conversation.jsonl")))
    assert (summary.blocks, summary.unique_blocks) == (288_500, 182_790)
    assert summary.input.percentiles[50] == 6909
    assert round(summary.input.percentiles[99]) == 85_400
    assert summary.input.maximum == 126_195


def test_azure_arrivals_count_from_the_first(tmp_path: Path) -> None:
    file = tmp_path / "a.csv"
    file.write_bytes(
        (HEADER + ROW + "2023-11-16 18:17:04.0319600,3180,8").replace("\n", "\r\n").encode()
    )
    first, second = read_trace(file).requests
    assert (first.arrival_ms, second.arrival_ms) == (0.0, 52.0)
    assert (first.input_tokens, first.output_tokens) == (4808, 10)
    assert not set(first.hash_ids) & set(second.hash_ids)
    assert len(first.hash_ids) == 10
    assert len(second.hash_ids) == 7


def test_azure_columns_may_stand_in_another_order_and_with_a_time_zone(tmp_path: Path) -> None:
    file = tmp_path / "a.csv"
    file.write_text(
        "GeneratedTokens,extra,ContextTokens,TIMESTAMP\n"
        "10,x,4808,2024-05-10 00:00:01+00:00\n8,y,3180,2024-05-10 02:00:00.5+02:00\n"
    )
    requests = read_trace(file).requests
    assert [(r.id, r.arrival_ms, r.input_tokens, r.output_tokens) for r in requests] == [
        ("r1", 0.0, 3180, 8),
        ("r0", 500.0, 4808, 10),
    ]


def test_own_format_gives_blocks_without_id_to_the_request_alone(tmp_path: Path) -> None:
    file = tmp_path / "own"
    file.write_text(OWN + OWN.replace(', "prefix_ids": [9]', ""))
    first, second = read_trace(file).requests
    assert first.hash_ids[0] == 9
    ids = first.hash_ids[1:] + second.hash_ids
    assert len(ids) == 5
    assert len(set(ids)) == 5
    assert min(ids) >= PRIVATE_IDS


def test_the_format_is_told_by_content_not_by_name(tmp_path: Path) -> None:
    for name, text, form in (
        ("a.csv", GOOD, "mooncake"),
        ("b.txt", OWN, "emu"),
        ("c.jsonl", HEADER + ROW, "azure"),
        ("d", "\ufeff" + HEADER + ROW, "azure"),
        ("e", "\n\n" + GOOD + "\n", "mooncake"),
        ("f", GOOD.rstrip("\n"), "mooncake"),
    ):
        (tmp_path / name).write_text(text, encoding="utf-8")
        assert read_trace(tmp_path / name).format == form


def test_requests_come_by_arrival_and_the_limit_takes_the_files_first(tmp_path: Path) -> None:
    file = tmp_path / "t"
    file.write_text(mooncake(timestamp=9) + mooncake(timestamp=3) + mooncake(timestamp=1))
    assert [r.arrival_ms for r in read_trace(file).requests] == [1, 3, 9]
    assert [r.id for r in read_trace(file, limit=2).requests] == ["r1", "r0"]
    with pytest.raises(UserError, match="limit of 0"):
        read_trace(file, limit=0)


BAD_LINES = {
    "torn": (GOOD[:40], "not valid JSON"),
    "negative input": (mooncake(input_length=-600), "input_length is -600, not in 1.."),
    "zero input": (mooncake(input_length=0, hash_ids=[]), "input_length is 0"),
    "negative output": (mooncake(output_length=-1), "output_length is -1"),
    "zero output": (mooncake(output_length=0), "output_length is 0"),
    "text for a number": (mooncake(input_length="600"), "input_length is '600', not a whole"),
    "fraction": (mooncake(input_length=600.5), "input_length is 600.5"),
    "boolean": (mooncake(output_length=True), "output_length is True"),
    "null": (mooncake(timestamp=None), "timestamp is None, not a number"),
    "nan": (mooncake(timestamp=float("nan")), "NaN is no number"),
    "infinity": (mooncake(timestamp=float("inf")), "Infinity is no number"),
    "overflow": (GOOD.replace("5,", "1e999,", 1), "timestamp is inf"),
    "negative time": (mooncake(timestamp=-1), "timestamp is -1"),
    "huge length": (mooncake(input_length=10**30), "input_length is 10000"),
    "enormous length": (GOOD.replace("600", "9" * 5000), "not valid JSON"),
    "too few ids": (mooncake(hash_ids=[0]), "1 hash_ids for input_length 600: 2 blocks"),
    "too many ids": (mooncake(hash_ids=[0, 1, 2]), "3 hash_ids for input_length 600"),
    "negative id": (mooncake(hash_ids=[0, -1]), "hash_ids holds -1"),
    "id beyond 64 bits": (mooncake(hash_ids=[0, 1 << 64]), "hash_ids holds 1844"),
    "id of text": (mooncake(hash_ids=[0, "a"]), "hash_ids holds 'a'"),
    "ids not a list": (mooncake(hash_ids=5), "hash_ids is 5, not a list"),
    "missing field": (
        '{"timestamp": 5, "input_length": 600, "hash_ids": [0, 1]}\n',
        "no field 'output_length'",
    ),
    "a list": ("[1, 2]\n", "a JSON list, not an object"),
    "deep nesting": ('{"a":' * 100_000 + "\n", "not valid JSON"),
    "not utf-8": (b"\xff\xfe\x00" * 9 + b"\n", "not text: byte 0xff at column 1"),
    "zero bytes": (b"\0" * 50 + b"\n", "not text: byte 0x00 at column 1"),
    "overlong": (b"[" * (2 * MAX_LINE_BYTES + 5) + b"\n", "a line of more than"),
    "emu fields": (OWN, "no field 'input_length'"),
}


@pytest.mark.parametrize("kind", BAD_LINES)
def test_a_bad_line_is_named_or_skipped_and_counted(kind: str, tmp_path: Path) -> None:
    bad, reason = BAD_LINES[kind]
    data = bad if isinstance(bad, bytes) else bad.encode()
    file = tmp_path / "trace.jsonl"
    tail = b"" if kind == "torn" else GOOD.encode()
    file.write_bytes(GOOD.encode() + data + tail)
    with pytest.raises(UserError) as caught:
        read_trace(file)
    assert caught.value.message.startswith(f"{file}:2: ")
    assert reason in caught.value.message
    assert ("torn" in caught.value.message) == (kind == "torn")
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 400
    with pytest.raises(UserError):  # damage behind the limit counts too
        read_trace(file, limit=1)

    trace = read_trace(file, skip_bad=True)
    assert [r.id for r in trace.requests] == (["r0"] if kind == "torn" else ["r0", "r1"])
    assert [(bad.file, bad.line) for bad in trace.skipped] == [(str(file), 2)]
    assert reason in trace.skipped[0].reason


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (own(input_tokens=-1), "input_tokens is -1"),
        (own(output_tokens=0), "output_tokens is 0"),
        (own(arrival_ms="now"), "arrival_ms is 'now'"),
        (own(prefix_ids=[1, 2, 3]), "3 prefix_ids for input_tokens 600: at most 2"),
        (own(prefix_ids=None), "prefix_ids is None"),
        ('{"arrival_ms": 1, "output_tokens": 2}\n', "no field 'input_tokens'"),
    ],
)
def test_bad_lines_of_the_own_format(line: str, reason: str, tmp_path: Path) -> None:
    file = tmp_path / "t"
    file.write_text(OWN + line)
    with pytest.raises(UserError, match=":2: ") as caught:
        read_trace(file)
    assert reason in caught.value.message
    assert len(read_trace(file, skip_bad=True).skipped) == 1


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("2023-11-16 18:17:03.97,4808", "2 columns, 3 expected"),
        ("2023-11-16 18:17:03.97,4808,", "GeneratedTokens is '', not a whole number"),
        ("2023-11-16 18:17:03.97,-4,10\n", "ContextTokens is -4"),
        ("2023-11-16 18:17:03.97,0,10\n", "ContextTokens is 0"),
        ("2023-11-16 18:17:03.97,nan,10\n", "ContextTokens is 'nan'"),
        ("2023-11-16 18:17:03.97,4e3,10\n", "ContextTokens is '4e3'"),
        ("2023-11-16 18:17:03.97," + "9" * 39 + ",10\n", "ContextTokens is 9999"),
        ("2023-11-16 18:17:03.97," + "9" * 39999 + ",10\n", "ContextTokens is '9999"),
        ("yesterday,4808,10\n", "TIMESTAMP is 'yesterday'"),
        ("1700000000,4808,10\n", "TIMESTAMP is '1700000000'"),
        ('"2023-11-16,4808,10\n', "not valid CSV"),
        ("x" * 200_000 + "\n", "not valid CSV"),
    ],
)
def test_bad_lines_of_the_azure_format(line: str, reason: str, tmp_path: Path) -> None:
    file = tmp_path / "t.csv"
    file.write_text(HEADER + ROW + line)
    with pytest.raises(UserError, match=":3: ") as caught:
        read_trace(file)
    assert reason in caught.value.message
    trace = read_trace(file, skip_bad=True)
    assert (len(trace.requests), [bad.line for bad in trace.skipped]) == (1, [3])


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (b"", "no requests"),
        (b"\n \n\n", "no requests"),
        (HEADER.encode(), "no requests"),
        (ROW.encode() * 3, ":1: neither a JSON object nor the CSV header TIMESTAMP"),
        (b"\x7fELF\x02\x01\x01\0\0\0" * 99, ":1: not text"),
        (b'{"a": 1}\n', "an object with neither Mooncake's fields"),
        (mooncake(input_length=-1).encode() * 2, "input_length is -1"),
    ],
)
def test_a_file_without_a_good_line_is_an_error_either_way(
    text: bytes, reason: str, tmp_path: Path
) -> None:
    file = tmp_path / "t"
    file.write_bytes(text)
    for skip_bad in (False, True):
        with pytest.raises(UserError) as caught:
            read_trace(file, skip_bad=skip_bad)
        assert reason in caught.value.message
        assert str(file) in caught.value.message


def test_what_is_no_readable_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for path, reason in (
        (tmp_path, "Is a directory"),
        (tmp_path / "none", "No such file"),
        (Path("/dev/zero"), "a device"),
        (tmp_path / ("n" * 300), "File name too long"),
    ):
        with pytest.raises(UserError, match=reason):
            read_trace(path)
    locked = tmp_path / "locked"
    locked.write_text(GOOD)

    def refuse(*_args: object, **_kwargs: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "open", refuse)  # root may read everything: chmod would show nothing
    with pytest.raises(UserError, match=f"{locked}: cannot be read: Permission denied"):
        read_trace(locked)


def test_what_is_written_reads_back_equal(tmp_path: Path) -> None:
    source, out = tmp_path / "in", tmp_path / "out"
    source.write_text(OWN + OWN.replace(', "prefix_ids": [9]', "") + own(arrival_ms=2.125))
    requests = read_trace(source).requests
    write_trace(out, requests)
    assert read_trace(out).requests == requests
    assert [p.name for p in sorted(tmp_path.iterdir())] == ["in", "out"]


def test_a_real_trace_written_and_read_back(tmp_path: Path) -> None:
    requests = read_trace(real("mooncake_conversation.jsonl"), limit=2000).requests
    write_trace(tmp_path / "out", requests)
    assert read_trace(tmp_path / "out").requests == requests


def test_a_failed_write_harms_nothing(tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.write_text("precious\n")
    broken = Request("r0", 0.0, 600, 1, (PRIVATE_IDS, 1))
    with pytest.raises(ValueError, match="private block before a shared one"):
        write_trace(out, [broken])
    assert out.read_text() == "precious\n"
    assert list(tmp_path.iterdir()) == [out]
    for path in (tmp_path, tmp_path / "none" / "x", out / "x"):
        with pytest.raises(UserError, match="cannot be written"):
            write_trace(path, [])


def test_a_link_keeps_its_target_and_a_file_its_mode(tmp_path: Path) -> None:
    target, link = tmp_path / "target", tmp_path / "link"
    target.write_text("")
    target.chmod(0o640)
    link.symlink_to(target)
    write_trace(link, [Request("r0", 0.0, 600, 1, (0, 1))])
    assert link.is_symlink()
    assert target.stat().st_mode & 0o777 == 0o640
    assert len(read_trace(target).requests) == 1
