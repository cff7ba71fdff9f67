import codecs
import gzip
import json
import os
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mamba3_lite.data import source_ids, source_tables
from mamba3_lite.data import sources as module
from mamba3_lite.data.sources import Record, Source, SourceConfig, open_source
from mamba3_lite.errors import UserError

EOS = 50256
GOOD: list[Any] = [{"text": f"text {i} " * (i + 1), "n": i} for i in range(30)]
BAD: list[Any] = [{"text": ""}, {"text": " \n"}, {"text": None}, {"other": 1}, {"text": 5}, 7]
BAD_REASONS = ["empty", "empty", "not_a_string", "missing_field", "not_a_string", "not_an_object"]


def source(*paths: Path, policy: Any = "replace", **settings: Any) -> Source:
    config = SourceConfig("mine", paths=tuple(map(str, paths)), **settings)
    return open_source(config, invalid_utf8=policy)


def texts(opened: Source) -> list[str | None]:
    return [record.text for record in opened.records()]


def problems(opened: Source) -> list[str | None]:
    return [record.problem for record in opened.records()]


def plain(records: Iterator[Record]) -> list[tuple[Any, ...]]:
    """Records that can be compared: arrays as lists."""
    return [r._replace(ids=None if r.ids is None else r.ids.tolist()) for r in records]


def jsonl_bytes(rows: list[Any]) -> bytes:
    return b"".join(json.dumps(row).encode() + b"\n" for row in rows)


def zstd_bytes(content: bytes) -> bytes:
    """Two frames, as `cat a.zst b.zst` gives."""
    zstandard = pytest.importorskip("zstandard")
    half = len(content) // 2
    compress = zstandard.ZstdCompressor().compress
    return compress(content[:half]) + compress(content[half:])


def refused(message: str, *paths: Path, **settings: Any) -> None:
    """Opening or reading raises one clear line."""
    with pytest.raises(UserError, match=message) as caught:
        list(source(*paths, **settings).records())
    assert "\n" not in str(caught.value)


def make_text(folder: Path) -> Source:
    for name, content in {"a": b"one", "b": b"", "c": b"\0\1", "d": b"\xff", "e": b"five"}.items():
        (folder / f"{name}.txt").write_bytes(content)
    return source(folder)


def make_large_text(folder: Path) -> Source:
    (folder / "a.txt").write_text("small")
    paragraphs = [f"paragraph {i}, é, {'x' * (i % 60)}\n\n" for i in range(400)]
    (folder / "b.txt").write_text("".join(paragraphs))
    (folder / "c.txt").write_text("last")
    return source(folder)


def make_jsonl(folder: Path, suffix: str = "", pack: Callable[[bytes], bytes] = bytes) -> Source:
    rows = [item for pair in zip(GOOD, BAD * 5, strict=True) for item in pair]
    broken = b"\n\n{broken\n" + b'{"text": "bad \xff byte"}\n' + b'{"text": "\\ud800"}\n'
    (folder / f"a.jsonl{suffix}").write_bytes(pack(jsonl_bytes(rows[:40]) + broken))
    (folder / f"b.jsonl{suffix}").write_bytes(pack(jsonl_bytes(rows[40:])))
    return source(folder)


def make_parquet(folder: Path) -> Source:
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet as pq

    for name, n_rows in {"a": 23, "b": 0, "c": 41}.items():
        rows = [{"body": f"{name} {i}" if i % 5 else None, "n": i} for i in range(n_rows)]
        kind = pa.struct([("body", pa.string()), ("n", pa.int64())])
        table = pa.table({"doc": pa.array(rows, kind), "id": list(range(n_rows))})
        pq.write_table(table, folder / f"{name}.parquet", row_group_size=10)
    return source(folder, field="doc.body")


def make_uint32(folder: Path) -> Source:
    ids = np.random.default_rng(0).integers(0, 9, 500).astype("<u4")
    for name, part in {"a": ids[:200], "b": ids[:0], "c": ids[200:]}.items():
        part.tofile(folder / f"{name}.bin")
    return source(folder, kind="raw_uint32", eos_id=3)


def make_torch(folder: Path) -> Source:
    ids = torch.from_numpy(np.random.default_rng(0).integers(-1, 9, 500))
    torch.save(ids[:220], folder / "shard_00000.bin")
    torch.save(ids[220:].clone(), folder / "shard_00001.bin")
    return source(folder, eos_id=3)


class FakeRows:
    """What streaming mode returns: rows that are iterated, and `skip`."""

    def __init__(self, rows: list[Any]) -> None:
        self.rows = rows

    def __iter__(self) -> Iterator[Any]:
        for row in self.rows:
            if isinstance(row, Exception):
                raise row
            yield row

    def skip(self, n: int) -> "FakeRows":
        return FakeRows(self.rows[n:])


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> types.SimpleNamespace:
    """A hub with one data set; `calls` are the arguments of `load_dataset`."""
    state = types.SimpleNamespace(rows=[], calls=[], sha="abc123", unreachable=None)

    def load_dataset(*args: Any, **settings: Any) -> FakeRows:
        state.calls.append((args, settings))
        return FakeRows(state.rows)

    class HfApi:
        def dataset_info(self, name: str, revision: str) -> types.SimpleNamespace:
            if state.unreachable:
                raise state.unreachable
            return types.SimpleNamespace(sha=state.sha)

    datasets = types.ModuleType("datasets")
    datasets.load_dataset = load_dataset  # type: ignore[attr-defined]
    client = types.ModuleType("huggingface_hub")
    client.HfApi = HfApi  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "datasets", datasets)
    monkeypatch.setitem(sys.modules, "huggingface_hub", client)
    return state


MAKERS: dict[str, Callable[[Path], Source]] = {
    "text": make_text,
    "large text": make_large_text,
    "jsonl": make_jsonl,
    "jsonl.gz": lambda folder: make_jsonl(folder, ".gz", gzip.compress),
    "jsonl.zst": lambda folder: make_jsonl(folder, ".zst", zstd_bytes),
    "parquet": make_parquet,
    "raw_uint32": make_uint32,
    "torch": make_torch,
    "hf": lambda folder: open_source(SourceConfig("mine", dataset="owner/set")),
}


@pytest.mark.parametrize("kind", MAKERS)
def test_records_from_any_ordinal_equal_the_rest_of_all(
    kind: str, tmp_path: Path, hub: types.SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_LARGE_BYTES", 1000)
    monkeypatch.setattr(module, "_PIECE_BYTES", 700)
    monkeypatch.setattr(source_ids, "_BLOCK_TOKENS", 64)
    monkeypatch.setattr(source_tables, "_BATCH_ROWS", 7)
    hub.rows = [{"text": "first"}, *BAD[:5], *GOOD]
    opened = MAKERS[kind](tmp_path)
    whole = plain(opened.records())
    assert [record[0] for record in whole] == list(range(len(whole)))
    assert len(whole) >= 5
    if kind != "large text":
        assert {record[4] for record in whole} > {None}
    for start in range(len(whole) + 2):
        assert plain(opened.records(start)) == whole[start:], start
    if kind != "hf":
        assert opened.bytes_read == opened.total_bytes()
        assert opened.total_bytes() == sum(p.stat().st_size for p in tmp_path.iterdir())
    for record in whole:
        given = [record[2] is not None, record[3] is not None, record[4] is not None]
        assert sum(given) == 1
        assert bool(record[7]) == (record[4] is not None or record[6])


@pytest.mark.parametrize("kind", [kind for kind in MAKERS if kind != "hf"])
def test_bytes_read_rises_to_the_total(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_LARGE_BYTES", 1000)
    monkeypatch.setattr(module, "_PIECE_BYTES", 700)
    opened = MAKERS[kind](tmp_path)
    seen = [opened.bytes_read for _ in opened.records()]
    assert seen == sorted(seen) == [opened.bytes_read for _ in opened.records()]
    assert 0 < seen[0] <= seen[-1] <= opened.bytes_read == opened.total_bytes()


def test_folder_is_walked_in_sorted_order_without_hidden_files(tmp_path: Path) -> None:
    names = ("b.txt", "a/z.md", "a/c.py", "d.rst", "x.c", ".hidden.txt", ".git/e.txt", "E.TXT")
    for name in names:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    expected = ["E.TXT", "b.txt", "d.rst", "a/c.py", "a/z.md"]
    # A file reached twice counts once.
    assert texts(source(tmp_path, tmp_path / "b.txt")) == expected
    assert texts(source(tmp_path, suffixes=("c", ".MD"))) == ["x.c", "a/z.md"]
    assert texts(source(tmp_path, suffixes=("*",))) == [*expected[:3], "x.c", *expected[3:]]


def test_binary_files_of_a_source_tree_are_counted(tmp_path: Path) -> None:
    (tmp_path / "Makefile").write_text("all:\n")
    (tmp_path / "logo.png").write_bytes(b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR")
    (tmp_path / "wide.txt").write_text("text", encoding="utf-16")
    records = list(source(tmp_path, kind="text", suffixes=("*",)).records())
    assert [record.problem for record in records] == [None, "binary", "binary"]
    assert "zero bytes" in records[1].detail


def test_auto_takes_each_file_by_its_ending(tmp_path: Path) -> None:
    (tmp_path / "a.md").write_text("from Markdown")
    (tmp_path / "b.jsonl").write_bytes(jsonl_bytes([{"text": "from JSON"}]))
    (tmp_path / "c.json.gz").write_bytes(gzip.compress(jsonl_bytes([{"text": "from gzip"}])))
    torch.save(torch.tensor([5, 6, EOS]), tmp_path / "shard_00000.bin")
    (tmp_path / "other.bin").write_bytes(b"\0" * 8)
    records = list(source(tmp_path).records())
    assert [record.text for record in records] == [
        "from Markdown",
        "from JSON",
        "from gzip",
        None,
    ]
    assert records[3].ids is not None and records[3].ids.tolist() == [5, 6]


def test_wrong_paths_and_endings_are_refused(tmp_path: Path) -> None:
    # case C04
    (tmp_path / "a.pdf").write_bytes(b"%PDF")
    np.arange(5, dtype="<u4").tofile(tmp_path / "a.bin")
    message = "a.pdf: cannot read files ending in '.pdf'; accepted are .txt, .*kind"
    refused(message, tmp_path / "a.pdf")
    refused("no file ending in .txt, .* in this folder", tmp_path)
    refused("no file ending in .parquet in this folder", tmp_path, kind="parquet")
    refused("gone: no such file or folder", tmp_path / "gone")
    refused("a.bin: no torch.save'd tensor.*kind: raw_uint32", tmp_path / "a.bin")
    refused("'mine': no input; give it paths", kind="text")
    refused("'mine': no input; give it paths")
    refused("unknown kind 'jsnl' .did you mean 'jsonl'", tmp_path, kind="jsnl")
    refused("kind hf reads no paths", tmp_path, kind="hf", dataset="owner/set")
    refused("suffixes: name at least one", tmp_path, suffixes=("",))
    refused("invalid_utf8 must be one of replace, skip, fail, not 'drop'", tmp_path, policy="drop")


def test_unreadable_folder_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "a.txt").write_text("x")
    scandir = os.scandir

    def locked(path: Any) -> Any:
        if str(path).endswith("sub"):
            raise PermissionError(13, "Permission denied", str(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", locked)
    refused("sub: cannot list this folder", tmp_path)


def test_fingerprint_changes_with_the_files(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("x")
    before = source(path).fingerprint()
    assert source(path).fingerprint() == before
    path.write_text("xy")
    changed = source(path).fingerprint()
    os.utime(path, ns=(1, 1))
    assert len({before, changed, source(path).fingerprint()}) == 3


def test_a_file_that_vanishes_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("x")
    opened = source(tmp_path)
    (tmp_path / "a.txt").unlink()
    with pytest.raises(UserError, match="a.txt: cannot be read"):
        list(opened.records())
    with pytest.raises(UserError, match="a.txt: cannot be read"):
        opened.fingerprint()


def test_text_is_taken_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(codecs.BOM_UTF8 + "one\r\ntwo\r<|endoftext|> é\n".encode())
    (record,) = source(tmp_path).records()
    assert record.text == "one\r\ntwo\r<|endoftext|> é\n"
    assert record.origin == str(tmp_path / "a.txt")
    assert record.size_bytes == (tmp_path / "a.txt").stat().st_size


@pytest.mark.parametrize("content", [b"", b" \n\t", codecs.BOM_UTF8 + b"\n"])
def test_blank_text_is_counted(content: bytes, tmp_path: Path) -> None:
    # case C03
    (tmp_path / "a.txt").write_bytes(content)
    assert problems(source(tmp_path)) == ["empty"]


def test_invalid_bytes_of_text(tmp_path: Path) -> None:
    # case C05
    path = tmp_path / "a.txt"
    path.write_bytes(b"line one\nline \xfftwo\n")
    (record,) = source(path).records()
    assert (record.text, record.repaired) == ("line one\nline \ufffdtwo\n", True)
    assert (record.origin, record.detail) == (f"{path}:2", "invalid UTF-8")
    (record,) = source(path, policy="skip").records()
    assert (record.text, record.problem, record.origin) == (None, "invalid_utf8", f"{path}:2")
    refused(r"a\.txt:2: invalid UTF-8; repair the file, or set", path, policy="fail")


@pytest.mark.parametrize(
    ("content", "ends"),
    [
        ("".join(f"p{i} é {'x' * (i % 97)}\nand\n\n" for i in range(300)), "\n\n"),
        ("".join(f"p{i} é {'x' * (i % 97)}\r\nand\r\n\r\n" for i in range(300)), "\r\n\r\n"),
        ("".join(f"line {i} 漢字\n" for i in range(900)), "\n"),
        ("漢字😀é" * 1500, ""),
        ("\n\n" + "x" * 5000, ""),
    ],
)
def test_large_text_is_split_without_loss(
    content: str, ends: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_LARGE_BYTES", 1000)
    monkeypatch.setattr(module, "_PIECE_BYTES", 700)
    (tmp_path / "a.txt").write_bytes(content.encode())
    records = list(source(tmp_path).records())
    assert len(records) > 5
    assert "".join(record.text or "" for record in records) == content
    assert max(record.size_bytes for record in records) <= 1400
    assert sum(record.size_bytes for record in records) == len(content.encode())
    if ends:
        assert all(record.text and record.text.endswith(ends) for record in records[:-1])


def test_lines_are_counted_over_the_pieces_of_a_large_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_LARGE_BYTES", 1000)
    monkeypatch.setattr(module, "_PIECE_BYTES", 700)
    lines = [b"line %d\n\n" % i for i in range(400)]
    lines[333] = b"li\xffne\n\n"
    (tmp_path / "a.txt").write_bytes(b"".join(lines))
    repaired = [record for record in source(tmp_path).records() if record.repaired]
    assert [record.origin for record in repaired] == [f"{tmp_path / 'a.txt'}:{2 * 333 + 1}"]
    (tmp_path / "a.txt").write_bytes(b"\0" + b"".join(lines))
    assert problems(source(tmp_path)) == ["binary"]


def test_bad_json_records_are_counted_and_change_nothing(tmp_path: Path) -> None:
    # case C03
    mixed = [BAD[0], GOOD[0], *BAD[1:3], GOOD[1], *BAD[3:], GOOD[2]]
    path = tmp_path / "a.jsonl"
    path.write_bytes(jsonl_bytes(mixed))
    records = list(source(path).records())
    assert [r.text for r in records if r.problem is None] == [row["text"] for row in GOOD[:3]]
    assert [r.problem for r in records if r.problem] == BAD_REASONS
    said = {record.origin: record.detail for record in records}
    assert said[f"{path}:4"] == "field 'text' is null, not a string"
    assert said[f"{path}:6"] == "no field 'text'"
    assert said[f"{path}:7"] == "field 'text' is int, not a string"


def test_invalid_unicode_and_broken_json(tmp_path: Path) -> None:
    # case C05
    lines = [
        b'{"text": "good"}',
        b'{"text": "bad \xff byte"}',
        b'{"text": "lone \\ud800 half"}',
        b'{"text": "cut',
        b'{"text": "pair \\ud83d\\ude00"}',
    ]
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"\n".join(lines))
    records = list(source(path).records())
    assert [r.text for r in records] == [
        "good",
        "bad \ufffd byte",
        "lone \ufffd half",
        None,
        "pair 😀",
    ]
    assert [r.repaired for r in records] == [False, True, True, False, False]
    assert [r.detail for r in records[1:3]] == ["invalid UTF-8", "lone surrogate"]
    assert [r.origin for r in records] == [f"{path}:{i}" for i in range(1, 6)]
    assert records[3].problem == "broken_json" and "broken JSON (" in records[3].detail
    skipped = problems(source(path, policy="skip"))
    assert skipped == [None, "invalid_utf8", "invalid_utf8", "broken_json", None]
    for line, message in {1: "invalid UTF-8", 2: "lone surrogate", 3: r"broken JSON \("}.items():
        path.write_bytes(lines[0] + b"\n\n" + lines[line] + b"\n")
        refused(rf"a\.jsonl:3: {message}.*invalid_utf8", path, policy="fail")


@pytest.mark.parametrize("line", [b"[" * 100_000, b'{"text": ' + b"9" * 5000 + b"}"])
def test_json_that_python_cannot_hold_is_broken(line: bytes, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(jsonl_bytes(GOOD[:1]) + line + b"\n")
    assert problems(source(tmp_path)) == [None, "broken_json"]


def test_fields_may_be_nested_or_several(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    rows = [
        {"a": {"b": "inner"}, "q": "question", "c": "answer"},
        {"a.b": "whole name", "a": {"b": "x"}},
        {"a": 5, "q": "question"},
        {"q": "question", "c": None},
    ]
    path.write_bytes(jsonl_bytes(rows))
    nested = list(source(path, field="a.b").records())
    assert [r.text for r in nested] == ["inner", "whole name", None, None]
    assert [r.problem for r in nested[2:]] == ["missing_field", "missing_field"]
    joined = list(source(path, fields=("q", "c")).records())
    assert joined[0].text == "question\n\nanswer"
    assert [r.problem for r in joined[1:]] == ["missing_field", "missing_field", "not_a_string"]


def test_a_field_that_no_record_has_is_refused_before_reading(tmp_path: Path) -> None:
    # case C04
    (tmp_path / "a.jsonl").write_bytes(jsonl_bytes(GOOD))
    (tmp_path / "b.jsonl").write_bytes(b"{broken\n" + jsonl_bytes([{"body": 1}, {"id": 2}]))
    message = r"b\.jsonl: no record has the field 'text' \(fields seen: body, id\).*--text-field"
    with pytest.raises(UserError, match=message):
        source(tmp_path)
    (tmp_path / "b.jsonl").write_bytes(b"{broken\n\n" + jsonl_bytes([{"id": 1}, {"text": "late"}]))
    assert problems(source(tmp_path))[len(GOOD) :] == ["broken_json", "missing_field", None]
    refused("no record has the field 'text' and 'gone'", tmp_path, fields=("text", "gone"))


@pytest.mark.parametrize("suffix", ["", ".gz", ".zst"])
def test_json_lines_with_bom_and_blank_lines(suffix: str, tmp_path: Path) -> None:
    content = codecs.BOM_UTF8 + b"\n" + jsonl_bytes(GOOD[:2]) + b" \r\n" + jsonl_bytes(GOOD[2:3])
    pack = {"": bytes, ".gz": gzip.compress, ".zst": zstd_bytes}[suffix]
    path = tmp_path / f"a.jsonl{suffix}"
    path.write_bytes(pack(content.rstrip(b"\n")))
    records = list(source(path).records())
    assert [record.text for record in records] == [row["text"] for row in GOOD[:3]]
    assert [record.origin for record in records] == [f"{path}:{line}" for line in (2, 3, 5)]
    assert records[0].size_bytes == len(jsonl_bytes(GOOD[:1]))


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
def test_damaged_archives_are_refused(suffix: str, tmp_path: Path) -> None:
    # case C09
    whole = {".gz": gzip.compress, ".zst": zstd_bytes}[suffix](jsonl_bytes(GOOD * 50))
    path = tmp_path / f"a.jsonl{suffix}"
    for cut in (len(whole) - 3, len(whole) * 2 // 3):
        path.write_bytes(whole[:cut])
        refused(f"a.jsonl{suffix}: damaged or cut short", path)
    path.write_bytes(b"no archive at all, but long enough to be looked at")
    refused(f"a.jsonl{suffix}: damaged or cut short", path)
    path.write_bytes(b"")
    assert texts(source(path)) == []


def test_a_long_line_of_zstd_passes_whole(tmp_path: Path) -> None:
    text = "é" * 300_000
    (tmp_path / "a.jsonl.zst").write_bytes(zstd_bytes(jsonl_bytes([{"text": text}] * 3)))
    assert texts(source(tmp_path)) == [text] * 3


def write_parquet(path: Path, columns: dict[str, Any]) -> Path:
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet as pq

    pq.write_table(pa.table(columns), path)
    return path


def test_parquet_text_of_every_type(tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow")
    values = ["one", None, "", "é"]
    columns = {
        "string": pa.array(values),
        "large": pa.array(values, pa.large_string()),
        "view": pa.array(values, pa.string_view()),
        "dictionary": pa.array(values).dictionary_encode(),
        "binary": pa.array([v and v.encode() for v in values], pa.binary()),
        "dotted.name": pa.array(values),
        "deep": pa.array([{"a": {"b": v}} for v in values]),
    }
    path = write_parquet(tmp_path / "a.parquet", columns)
    for field in [*list(columns)[:-1], "deep.a.b"]:
        records = list(source(path, field=field).records())
        assert [record.text for record in records] == ["one", None, None, "é"], field
        assert [r.problem for r in records] == [None, "not_a_string", "empty", None]
    assert texts(source(path, fields=("string", "deep.a.b"))) == [
        "one\n\none",
        None,
        None,
        "é\n\né",
    ]


def test_parquet_invalid_utf8_follows_the_policy(tmp_path: Path) -> None:
    # case C05
    pa = pytest.importorskip("pyarrow")
    offsets = pa.py_buffer(np.array([0, 1, 2], "<i4").tobytes())
    bad = pa.Array.from_buffers(pa.string(), 2, [None, offsets, pa.py_buffer(b"a\xff")])
    path = write_parquet(tmp_path / "a.parquet", {"text": bad})
    records = list(source(path).records())
    assert [(r.text, r.repaired) for r in records] == [("a", False), ("\ufffd", True)]
    assert problems(source(path, policy="skip")) == [None, "invalid_utf8"]
    refused(r"a\.parquet\[1\]: invalid UTF-8", path, policy="fail")


def test_parquet_that_gives_nothing_is_refused(tmp_path: Path) -> None:
    # case C04
    path = write_parquet(tmp_path / "a.parquet", {"body": ["x"], "n": [1], "l": [["x"]]})
    refused(r"no record has the field 'text' \(fields seen: body, n, l\)", path)
    refused("no record has the field 'body.x'", path, field="body.x")
    refused("field 'n' holds int64, not text", path, field="n")
    refused("field 'l' holds list", path, field="l")
    whole = path.read_bytes()
    for content in (b"", b"text", whole[:-9]):
        path.write_bytes(content)
        refused("a.parquet: no Parquet file, or a damaged one", path, field="body")


def test_parquet_damaged_inside_is_refused_when_it_is_read(tmp_path: Path) -> None:
    # case C09
    path = write_parquet(tmp_path / "a.parquet", {"text": [f"text {i}" for i in range(500)]})
    content = bytearray(path.read_bytes())
    content[4:60] = b"\xff" * 56
    path.write_bytes(content)
    opened = source(path)
    with pytest.raises(UserError, match="a.parquet: no Parquet file, or a damaged one"):
        list(opened.records())


@pytest.mark.parametrize(
    ("package", "name", "extra"),
    [("pyarrow", "a.parquet", "parquet"), ("zstandard", "a.jsonl.zst", "zstd")],
)
def test_a_missing_extra_is_named(
    package: str, name: str, extra: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / name).write_bytes(b"x")
    monkeypatch.setitem(sys.modules, package, None)
    refused(rf"{name}: needs the `{package}` .*mamba3-lite\[{extra}\]", tmp_path)


def ids_of(opened: Source) -> list[list[int] | None]:
    return [None if r.ids is None else r.ids.tolist() for r in opened.records()]


@pytest.mark.parametrize("block", [1, 2, 3, 5, 100])
def test_token_files_are_split_at_eos(
    block: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # case C07
    monkeypatch.setattr(source_ids, "_BLOCK_TOKENS", block)
    stream = [1, 2, EOS, EOS, 70_000, 4, 5, 6, EOS, 7]
    expected = [[1, 2], None, [70_000, 4, 5, 6], [7]]
    np.array(stream, "<u4").tofile(tmp_path / "a.bin")
    torch.save(torch.tensor(stream), tmp_path / "a.pt")
    for name, kind in {"a.bin": "raw_uint32", "a.pt": "torch"}.items():
        opened = source(tmp_path / name, kind=kind)
        records = list(opened.records())
        assert ids_of(opened) == expected
        assert [record.problem for record in records] == [None, "empty", None, None]
        assert all(record.ids.dtype == np.uint32 for record in records if record.ids is not None)
        assert records[2].origin == f"{tmp_path / name}[2]"
    assert records[2].size_bytes == 4 * 8


def test_ids_that_fit_no_vocabulary_are_counted(tmp_path: Path) -> None:
    # case C02
    torch.save(torch.tensor([1, EOS, -1, 2, EOS, 2**32, EOS, 2**32 - 1]), tmp_path / "a.pt")
    opened = source(tmp_path / "a.pt")
    assert problems(opened) == [None, "id_out_of_range", "id_out_of_range", None]
    assert ids_of(opened)[3] == [2**32 - 1]


def test_token_files_of_another_format_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # case C04
    (tmp_path / "a.bin").write_bytes(b"\0" * 7)
    refused("a.bin: 7 bytes are no whole number of uint32 ids", tmp_path, kind="raw_uint32")
    torch.save({"a": 1}, tmp_path / "a.pt")
    refused("a.pt: holds a dict", tmp_path / "a.pt")
    torch.save(torch.zeros(3), tmp_path / "a.pt")
    refused("a.pt: holds a torch.float32 tensor", tmp_path / "a.pt")
    (tmp_path / "a.pt").write_bytes((tmp_path / "a.pt").read_bytes()[:-40])
    refused("a.pt: not a readable torch.save'd tensor", tmp_path / "a.pt")
    monkeypatch.setattr(source_ids, "_MAX_DOCUMENT_TOKENS", 10)
    np.arange(11, dtype="<u4").tofile(tmp_path / "b.bin")
    message = "document 0 has no EOS id 99 .*correct eos_id"
    refused(message, tmp_path / "b.bin", kind="raw_uint32", eos_id=99)


def test_an_empty_tensor_gives_no_record(tmp_path: Path) -> None:
    torch.save(torch.zeros(0, dtype=torch.int64), tmp_path / "a.pt")
    assert ids_of(source(tmp_path / "a.pt")) == []


def test_a_data_set_is_streamed_at_a_fixed_commit(hub: types.SimpleNamespace) -> None:
    hub.rows = [{"q": "why", "a": {"b": "because"}}, {"q": "lone \ud800", "a": {"b": "x"}}]
    config = SourceConfig(
        "mine", dataset="owner/set", subset="small", data_dir="data/x", fields=("q", "a.b")
    )
    opened = open_source(config)
    records = list(opened.records())
    assert [record.text for record in records] == ["why\n\nbecause", "lone \ufffd\n\nx"]
    assert records[1].repaired and records[1].origin == "owner/set[1]"
    assert opened.bytes_read == sum(record.size_bytes for record in records) > 0
    assert opened.total_bytes() is None
    wanted = {"data_dir": "data/x", "split": "train", "revision": "abc123", "streaming": True}
    assert hub.calls == [(("owner/set", "small"), wanted)]
    before = opened.fingerprint()
    assert open_source(config).fingerprint() == before
    hub.sha = "def456"
    assert open_source(config).fingerprint() != before


def test_paths_win_over_the_data_set(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("local")
    assert texts(source(tmp_path, dataset="owner/set")) == ["local"]


def test_a_data_set_out_of_reach_names_the_way_out(hub: types.SimpleNamespace) -> None:
    config = SourceConfig("edu", dataset="owner/set")
    message = (
        r"source 'edu': the data set owner/set cannot be read \(no route to host\);"
        r".*paths: \[FOLDER\] and kind: parquet"
    )
    hub.unreachable = ConnectionError("no route to host\nsecond line")
    with pytest.raises(UserError, match=message):
        open_source(config)
    hub.unreachable = None
    hub.rows = [{"text": "one"}, {"text": "two"}, TimeoutError("no route to host")]
    records = open_source(config).records(1)
    assert next(records).text == "two"
    with pytest.raises(UserError, match=message):
        next(records)


def test_data_set_settings_that_cannot_work(
    hub: types.SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.rows = [{"body": "one", "id": 1}]
    with pytest.raises(UserError, match=r"'mine': no record has the field 'text' .*body, id"):
        open_source(SourceConfig("mine", dataset="owner/set"))
    with pytest.raises(UserError, match="'mine': kind hf needs dataset"):
        open_source(SourceConfig("mine", kind="hf"))
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(UserError, match=r"data set owner/set.*`datasets`.*mamba3-lite\[datasets\]"):
        open_source(SourceConfig("mine", dataset="owner/set"))
