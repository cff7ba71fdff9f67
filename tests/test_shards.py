import errno
import hashlib
import json
import os
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mamba3_lite.data import files as module
from mamba3_lite.data.files import atomic_folder
from mamba3_lite.data.shards import (
    HEADER_BYTES,
    MANIFEST,
    ShardWriter,
    open_shards,
    read_shard,
)
from mamba3_lite.errors import UserError

SHA = "ab" * 32


def writer(folder: Path, **changes: Any) -> ShardWriter:
    options: dict[str, Any] = {
        "vocab_size": 100,
        "eos_id": 99,
        "tokenizer_name": "toy",
        "tokenizer_fingerprint": SHA,
    }
    return ShardWriter(folder, **(options | changes))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """25 tokens (0..24) in shards of 10, three documents."""
    with writer(tmp_path / "data", shard_size_tokens=10) as out:
        for start, stop in ((0, 4), (4, 24), (24, 25)):
            out.append(np.arange(start, stop), documents=1)
    return tmp_path / "data"


def test_round_trip_splits_at_the_shard_size(folder: Path) -> None:
    opened = open_shards(folder)
    assert [shard.path.name for shard in opened.shards] == [f"tokens_0000{i}.bin" for i in range(3)]
    assert [shard.header.n_tokens for shard in opened.shards] == [10, 10, 5]
    assert [shard.header.max_id for shard in opened.shards] == [9, 19, 24]
    assert np.concatenate([shard.tokens() for shard in opened.shards]).tolist() == list(range(25))
    assert opened.shards[0].tokens().dtype == np.uint16
    assert not opened.shards[0].tokens().flags.writeable


def test_manifest_and_header_fields(folder: Path) -> None:
    manifest = open_shards(folder).manifest
    assert (manifest["tokens"], manifest["documents"], manifest["dtype"]) == (25, 3, "uint16")
    assert (manifest["vocab_size"], manifest["eos_id"]) == (100, 99)
    assert manifest["tokenizer"] == {"name": "toy", "fingerprint": SHA}
    for entry in manifest["shards"]:
        raw = (folder / entry["file"]).read_bytes()
        assert hashlib.sha256(raw).hexdigest() == entry["sha256"]
    raw = (folder / "tokens_00002.bin").read_bytes()
    fields = struct.unpack_from("<8sIIQIII4x32s", raw)
    assert fields == (b"M3LTOKEN", 1, 1, 5, 100, 24, 99, bytes.fromhex(SHA))
    assert raw[HEADER_BYTES:] == struct.pack("<5H", 20, 21, 22, 23, 24)


def test_large_vocabulary_is_stored_as_uint32(tmp_path: Path) -> None:
    # case C01
    ids = [0, 65_535, 65_536, 69_999]
    with writer(tmp_path / "big", vocab_size=70_000) as out:
        out.append(ids)
    shard = open_shards(tmp_path / "big").shards[0]
    assert shard.header.dtype == np.dtype("<u4")
    assert shard.tokens().tolist() == ids
    with writer(tmp_path / "edge", vocab_size=65_536) as out:
        out.append([65_535])
    edge = open_shards(tmp_path / "edge").shards[0]
    assert edge.header.dtype == np.dtype("<u2")
    assert edge.tokens().tolist() == [65_535]


@pytest.mark.parametrize("bad", [-1, 100])
def test_writer_refuses_ids_outside_the_vocabulary_and_leaves_nothing(
    bad: int, tmp_path: Path
) -> None:
    with (
        pytest.raises(ValueError, match=rf"token id {bad} is outside 0\.\.99"),
        writer(tmp_path / "new" / "data") as out,
    ):
        out.append([1, 2])
        out.append([3, bad])
    assert list(tmp_path.iterdir()) == []


def test_full_disk_is_a_user_error_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_space(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(module.os, "fsync", no_space)
    with pytest.raises(UserError, match="no space left"), writer(tmp_path / "data") as out:
        out.append([1])
    assert list(tmp_path.iterdir()) == []


def patch(path: Path, offset: int, raw: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(raw)


@pytest.mark.parametrize(
    ("offset", "raw", "message"),
    [
        (0, b"NOTOURS!", "not a mamba3-lite shard"),
        (8, struct.pack("<I", 9), "version 9"),
        (12, struct.pack("<I", 7), "dtype code 7"),
        (12, struct.pack("<I", 2), "do not go with a vocabulary"),
        (16, struct.pack("<Q", 11), "truncated"),
        (16, struct.pack("<Q", 9), "extended"),
        (36 + 4, bytes(32), "another tokenizer"),
    ],
)
def test_wrong_headers_are_refused_by_name(
    folder: Path, offset: int, raw: bytes, message: str
) -> None:
    # case C01, case C09
    patch(folder / "tokens_00001.bin", offset, raw)
    with pytest.raises(UserError, match=message) as caught:
        open_shards(folder)
    assert "tokens_00001.bin" in str(caught.value)


@pytest.mark.parametrize(
    ("size", "message"), [(147, "truncated"), (149, "extended"), (50, "truncated")]
)
def test_cut_and_extended_files_are_refused(folder: Path, size: int, message: str) -> None:
    # case C09
    os.truncate(folder / "tokens_00001.bin", size)
    with pytest.raises(UserError, match=rf"tokens_00001\.bin: .*{message}"):
        open_shards(folder)


def test_missing_shard_and_bad_manifest_are_refused(folder: Path) -> None:
    (folder / "tokens_00001.bin").unlink()
    with pytest.raises(UserError, match=r"tokens_00001\.bin: cannot read"):
        open_shards(folder)
    manifest = json.loads((folder / MANIFEST).read_text())
    manifest["shards"] = [{"file": "tokens_00000.bin", "tokens": 9}]
    (folder / MANIFEST).write_text(json.dumps(manifest))
    with pytest.raises(UserError, match="10 tokens, but .* lists 9"):
        open_shards(folder)
    (folder / MANIFEST).write_text("{")
    with pytest.raises(UserError, match="not a shard manifest"):
        open_shards(folder)
    with pytest.raises(UserError, match="cannot read"):
        open_shards(folder / "absent")


def test_header_without_tokens_reads_as_empty(folder: Path) -> None:
    path = folder / "tokens_00000.bin"
    patch(path, 16, struct.pack("<Q", 0))
    os.truncate(path, HEADER_BYTES)
    assert read_shard(path).tokens().tolist() == []


def test_folder_appears_only_when_the_block_ends(tmp_path: Path) -> None:
    final = tmp_path / "a" / "b"
    with atomic_folder(final) as partial:
        (partial / "file").write_text("x")
        assert not final.exists()
    assert [path.name for path in final.iterdir()] == ["file"]
    assert [path.name for path in final.parent.iterdir()] == ["b"]


def test_leftovers_of_a_killed_run_are_cleared(tmp_path: Path) -> None:
    leftover = tmp_path / ".data.partial"
    (leftover / "train").mkdir(parents=True)
    (leftover / "train" / "old").write_text("x")
    (leftover / "old").write_text("x")
    with atomic_folder(tmp_path / "data") as partial:
        (partial / "new").write_text("y")
    assert [path.name for path in tmp_path.rglob("*")] == ["data", "new"]


def test_two_writers_of_one_folder_do_not_mix(tmp_path: Path) -> None:
    with atomic_folder(tmp_path / "data") as partial:
        with (
            pytest.raises(UserError, match="another process"),
            atomic_folder(tmp_path / "data"),
        ):
            raise AssertionError("the second writer must not get in")
        (partial / "file").write_text("x")
    assert (tmp_path / "data" / "file").read_text() == "x"


def test_existing_content_is_kept_unless_replaced(tmp_path: Path) -> None:
    final = tmp_path / "data"
    final.mkdir()
    (final / "old").write_text("x")
    with pytest.raises(UserError, match="not empty"), atomic_folder(final):
        raise AssertionError("must refuse before the block runs")
    with pytest.raises(KeyError), atomic_folder(final, replace=True):
        raise KeyError
    assert [path.name for path in tmp_path.rglob("*")] == ["data", "old"]
    with atomic_folder(final, replace=True) as partial:
        (partial / "new").write_text("y")
    assert [path.name for path in tmp_path.rglob("*")] == ["data", "new"]


def test_unwritable_place_is_a_user_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with (
        pytest.raises(UserError, match="cannot write there"),
        atomic_folder(tmp_path / "file" / "data"),
    ):
        raise AssertionError("must refuse before the block runs")


@pytest.fixture
def indexed(tmp_path: Path) -> Path:
    """Documents of 3, 1, 9 and 2 tokens in shards of 6; sources b, a, b, b."""
    with writer(tmp_path / "data", shard_size_tokens=6, source_names=["a", "b", "c"]) as out:
        out.append_documents([1, 2, 99, 99], [3, 1], [1, 0])
        out.append_documents(np.append(np.arange(8), [99, 7, 99]), [9, 2], [1, 1])
    return tmp_path / "data"


def test_document_index(indexed: Path) -> None:
    assert (indexed / "documents.bin").read_bytes() == struct.pack("<4Q", 0, 3, 4, 13)
    assert (indexed / "sources.bin").read_bytes() == struct.pack("<4H", 1, 0, 1, 1)
    opened = open_shards(indexed)
    assert opened.has_index
    assert opened.document_starts().tolist() == [0, 3, 4, 13]
    assert opened.document_sources().tolist() == [1, 0, 1, 1]
    assert (opened.manifest["documents"], opened.manifest["tokens"]) == (4, 15)
    assert opened.manifest["sources"] == [
        {"name": "a", "documents": 1, "tokens": 1, "share": 1 / 15},
        {"name": "b", "documents": 3, "tokens": 14, "share": 14 / 15},
        {"name": "c", "documents": 0, "tokens": 0, "share": 0.0},
    ]
    for entry in opened.manifest["index"].values():
        raw = (indexed / entry["file"]).read_bytes()
        assert (entry["entries"], entry["sha256"]) == (4, hashlib.sha256(raw).hexdigest())


def test_folder_without_an_index(folder: Path) -> None:
    opened = open_shards(folder)
    assert not opened.has_index
    with pytest.raises(UserError, match="has no document index"):
        opened.document_starts()


@pytest.mark.parametrize(("name", "size"), [("documents.bin", 31), ("sources.bin", 10)])
def test_cut_and_missing_index_is_refused(name: str, size: int, indexed: Path) -> None:
    # case C09
    os.truncate(indexed / name, size)
    with pytest.raises(UserError, match=rf"{name}: {size} bytes, but 4 documents need"):
        open_shards(indexed)
    (indexed / name).unlink()
    with pytest.raises(UserError, match=rf"{name}: cannot read this index"):
        open_shards(indexed)


def test_stream_and_documents_do_not_mix(tmp_path: Path) -> None:
    with (
        pytest.raises(TypeError, match="append_documents"),
        writer(tmp_path / "a", source_names=["a"]) as out,
    ):
        out.append([1])
    with pytest.raises(TypeError, match="source_names"), writer(tmp_path / "b") as out:
        out.append_documents([1], [1], [0])
    assert list(tmp_path.iterdir()) == []
