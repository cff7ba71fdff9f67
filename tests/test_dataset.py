import hashlib
import json
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mamba3_lite.data import dataset as module
from mamba3_lite.data.dataset import DummyDataset, PretrainDataset, TokenStream
from mamba3_lite.data.shards import HEADER_BYTES, ShardHeader, ShardWriter, dtype_for
from mamba3_lite.data.tokenizer import GPT2_SHA256
from mamba3_lite.errors import UserError


def save(path: Path, tokens: Any) -> Path:
    torch.save(torch.as_tensor(tokens, dtype=torch.int64), path)
    return path


def write_shards(folder: Path, tokens: Any, **changes: Any) -> Path:
    options: dict[str, Any] = {
        "vocab_size": 100,
        "eos_id": 99,
        "tokenizer_name": "toy",
        "tokenizer_fingerprint": "ab" * 32,
        "shard_size_tokens": 7,
    }
    with ShardWriter(folder, **(options | changes)) as out:
        out.append(tokens)
    return folder


def make(kind: str, folder: Path, tokens: np.ndarray) -> Path:
    """`tokens` in one of the formats; several files where the format allows it."""
    if kind == "torch file":
        return save(folder / "data.bin", tokens)
    if kind == "torch folder":
        for i, part in enumerate(np.array_split(tokens, 3)):
            save(folder / f"shard_{i:04d}.bin", part)
        return folder
    if kind == "shard folder":
        return write_shards(folder / "shards", tokens, shard_size_tokens=len(tokens) // 3 + 1)
    return write_shards(folder / "shards", tokens, shard_size_tokens=100_000) / "tokens_00000.bin"


KINDS = ["torch file", "torch folder", "shard folder", "one shard"]


@pytest.mark.parametrize("kind", KINDS)
def test_windows_of_every_format(kind: str, tmp_path: Path) -> None:
    tokens = np.random.default_rng(0).integers(0, 99, 43)
    data = PretrainDataset(make(kind, tmp_path, tokens), 4, 100)
    assert (data.n_tokens, data.n_windows, len(data)) == (43, 10, 10)
    for i in range(10):
        x, y = data[i]
        assert x.dtype == y.dtype == torch.int64
        # case C07: labels are the inputs shifted by exactly one
        assert x.tolist() == tokens[4 * i : 4 * i + 4].tolist()
        assert y.tolist() == tokens[4 * i + 1 : 4 * i + 5].tolist()
    for outside in (-1, 10):
        with pytest.raises(IndexError):
            data[outside]


def sparse_shard(path: Path, vocab_size: int, n_tokens: int, start: int, ids: np.ndarray) -> None:
    """A shard of zeros that take no room on the disk, but for `ids` from token `start` on."""
    header = ShardHeader(dtype_for(vocab_size), n_tokens, vocab_size, 99, 0, "ab" * 32)
    with path.open("wb") as file:
        file.write(header.pack())
        file.truncate(HEADER_BYTES + n_tokens * header.dtype.itemsize)
        file.seek(HEADER_BYTES + start * header.dtype.itemsize)
        file.write(ids.astype(header.dtype).tobytes())


@pytest.mark.parametrize("vocab_size", [100, 70_000])
def test_c01_windows_beyond_four_gigabytes(vocab_size: int, tmp_path: Path) -> None:
    # case C01: an offset cut to 32 bits would read the zeros at the beginning
    ids = np.random.default_rng(0).integers(1, 100, 4 * 64 + 1)
    first = 2**32 // dtype_for(vocab_size).itemsize // 64 - 2
    path = tmp_path / "tokens_00000.bin"
    sparse_shard(path, vocab_size, first * 64 + len(ids), first * 64, ids)
    assert path.stat().st_size > 2**32 > HEADER_BYTES + first * 64 * dtype_for(vocab_size).itemsize
    data = PretrainDataset(path, 64, vocab_size)
    assert len(data) == first + 4
    for i in range(4):
        x, y = data[first + i]
        assert x.tolist() == ids[64 * i : 64 * i + 64].tolist()
        assert y.tolist() == ids[64 * i + 1 : 64 * i + 65].tolist()
    assert data[first - 1][0].tolist() == [0] * 64


def test_c01_documents_beyond_four_billion_tokens(tmp_path: Path) -> None:
    # case C01: the same for places in the stream and in the document index
    size, at, ids = 2**31 + 12, 2**32 + 8, np.arange(1, 42)
    # The known tokens run over the end of the second shard.
    shards = [(0, ids[:0]), (at - size, ids[:16]), (0, ids[16:])]
    for number, (start, part) in enumerate(shards):
        sparse_shard(tmp_path / f"tokens_{number:05d}.bin", 100, size, start, part)
    starts = np.array([0, 5, at, at + 3, at + 17], "<u8").tobytes()
    (tmp_path / "documents.bin").write_bytes(starts)
    manifest = {
        "documents": 5,
        "tokenizer": {"name": "toy", "fingerprint": "ab" * 32},
        "shards": [{"file": f"tokens_{i:05d}.bin", "tokens": size} for i in range(3)],
        "index": {
            "documents": {"file": "documents.bin", "sha256": hashlib.sha256(starts).hexdigest()}
        },
    }
    (tmp_path / "manifest.json").write_text(json.dumps(manifest))
    data = PretrainDataset(tmp_path, 8, 100, document_mode=True)
    assert len(data) == (3 * size - 1) // 8
    found = [data[at // 8 + i] for i in range(-1, 5)]
    assert torch.cat([x for x, _, _ in found]).tolist() == [0] * 8 + ids[:40].tolist()
    assert [segments.tolist() for _, _, segments in found[:4]] == [
        [0] * 8, [0, 0, 0, 1, 1, 1, 1, 1], [0] * 8, [0, 1, 1, 1, 1, 1, 1, 1],
    ]  # fmt: skip


def test_window_over_many_small_files(tmp_path: Path) -> None:
    for i, part in enumerate([[0], [1], [], [2, 3], [4]]):
        save(tmp_path / f"shard_{i}.bin", part)
    x, y = PretrainDataset(tmp_path, 4, 5)[0]
    assert (x.tolist(), y.tolist()) == ([0, 1, 2, 3], [1, 2, 3, 4])


@pytest.mark.parametrize("kind", KINDS)
def test_acc11_c02_data_preflight(kind: str, tmp_path: Path) -> None:
    # case C02
    window = 8
    for n_tokens in (0, window):
        folder = tmp_path / f"short{n_tokens}"
        folder.mkdir()
        if n_tokens == 0 and kind == "one shard":
            continue  # the writer makes no file without tokens
        path = make(kind, folder, np.zeros(n_tokens, np.int64))
        with pytest.raises(UserError, match=f"holds {n_tokens} tokens, but one window needs 9"):
            PretrainDataset(path, window, 100)
    exact = tmp_path / "exact"
    exact.mkdir()
    path = make(kind, exact, np.arange(window + 1))
    assert len(PretrainDataset(path, window, 100)) == 1
    assert len(PretrainDataset(path, window, 100)[0][1]) == window
    # A validation split goes through the same door, so one shorter than a window is refused too.
    with pytest.raises(UserError, match="holds 9 tokens, but one window needs 10"):
        PretrainDataset(path, window + 1, 100)
    with pytest.raises(UserError, match=r"absent does not exist"):
        PretrainDataset(tmp_path / "absent", window, 100)


@pytest.mark.parametrize("bad", [-1, 50])
@pytest.mark.parametrize("kind", ["torch file", "torch folder"])
def test_acc11_c02_ids_out_of_range(kind: str, bad: int, tmp_path: Path) -> None:
    # case C02: id = -1 and id == vocab_size
    tokens = np.arange(30)
    tokens[17] = bad
    place = ("data.bin", 17) if kind == "torch file" else ("shard_0001.bin", 7)
    path = make(kind, tmp_path, tokens)
    with pytest.raises(UserError, match=rf"{place[0]}: token {place[1]} has id {bad}, .*0\.\.49"):
        PretrainDataset(path, 8, 50)


@pytest.mark.parametrize("full_scan_bytes", [1 << 30, 0])
def test_shards_of_a_larger_vocabulary_are_refused(
    full_scan_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # case C02, case C01: by a scan of small data, by the header of large data
    monkeypatch.setattr(module, "_FULL_SCAN_BYTES", full_scan_bytes)
    path = write_shards(tmp_path / "a", [1, 2, 3, 4, 5, 6, 7, 8, 50, 9])
    with pytest.raises(UserError, match=r"tokens_00001\.bin: token 1 has id 50, outside 0\.\.49"):
        PretrainDataset(path, 4, 50)
    with pytest.raises(UserError, match="vocabulary of 100 ids, more than vocab_size 51"):
        PretrainDataset(path, 4, 51)
    assert PretrainDataset(path, 4, 128).n_windows == 2


def test_scan_works_across_its_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_SCAN_TOKENS", 4)
    path = save(tmp_path / "data.bin", [1, 2, 3, 4, 5, 6, 77, 8, 9, 78])
    with pytest.raises(UserError, match="token 6 has id 77"):
        PretrainDataset(path, 4, 10)


def test_id_that_appears_after_the_preflight_is_refused(tmp_path: Path) -> None:
    folder = write_shards(tmp_path / "a", np.arange(20))
    data = PretrainDataset(folder, 4, 100)
    data[2]
    with (folder / "tokens_00001.bin").open("r+b") as file:
        file.seek(128 + 2 * 3)
        file.write(b"\xff\xff")
    assert data[0][0].tolist() == [0, 1, 2, 3]
    with pytest.raises(UserError, match=r"tokens_00001\.bin: token 3 has id 65535"):
        data[2]
    again = PretrainDataset(folder, 4, 100_000)  # where it would be an id
    with pytest.raises(UserError, match=r"tokens_00001\.bin is damaged \(its SHA-256"):
        again[2]


def test_wrong_formats_are_named(tmp_path: Path) -> None:
    # case C04
    def refused(path: Path, message: str) -> None:
        with pytest.raises(UserError, match=message) as caught:
            PretrainDataset(path, 4, 100)
        assert "\n" not in str(caught.value)

    torch.save(torch.zeros(20, dtype=torch.int32), tmp_path / "int32.bin")
    refused(tmp_path / "int32.bin", "holds a torch.int32 tensor of shape")
    torch.save(torch.zeros(4, 5, dtype=torch.int64), tmp_path / "matrix.bin")
    refused(tmp_path / "matrix.bin", r"shape \(4, 5\)")
    torch.save({"a": 1}, tmp_path / "dict.bin")
    refused(tmp_path / "dict.bin", "holds a dict")
    torch.save(torch.zeros(20), tmp_path / "old.bin", _use_new_zipfile_serialization=False)
    refused(tmp_path / "old.bin", "old format")
    whole = save(tmp_path / "whole.bin", np.arange(5000)).read_bytes()
    (tmp_path / "cut.bin").write_bytes(whole[: len(whole) // 2])
    refused(tmp_path / "cut.bin", "cut.bin: not a readable torch.save'd tensor")
    np.array([5, 6, 50256] * 10, "<u4").tofile(tmp_path / "raw.bin")
    refused(tmp_path / "raw.bin", "raw uint32 token records.*mamba3-lite prepare")
    (tmp_path / "text.txt").write_text("some text, which is no token file")
    refused(tmp_path / "text.txt", "unknown data format")
    (tmp_path / "empty.bin").write_bytes(b"")
    refused(tmp_path / "empty.bin", "unknown data format")
    (tmp_path / "empty").mkdir()
    refused(tmp_path / "empty", "folder without manifest.json or shard_")
    write_shards(tmp_path / "out" / "train", np.arange(20))
    refused(tmp_path / "out", r"use .*out/train")
    with pytest.raises(UserError, match="max_seq_len"):
        PretrainDataset(tmp_path / "out" / "train", 0, 100)


def test_tokenizer_of_the_data_is_known(tmp_path: Path) -> None:
    data = PretrainDataset(write_shards(tmp_path / "a", np.arange(20)), 4, 100)
    assert (data.tokenizer_name, data.tokenizer_fingerprint) == ("toy", "ab" * 32)
    plain = PretrainDataset(save(tmp_path / "b.bin", np.arange(20)), 4, 100)
    assert (plain.tokenizer_name, plain.tokenizer_fingerprint) == (None, None)


def test_c01_data_of_another_tokenizer_are_refused(tmp_path: Path) -> None:
    # case C01: ids that fit are no proof that they mean the same
    gpt2 = write_shards(tmp_path / "a", np.arange(20), tokenizer_fingerprint=GPT2_SHA256)
    toy = write_shards(tmp_path / "b", np.arange(20))
    assert len(PretrainDataset(gpt2, 4, 100, tokenizer="gpt2")) == 4
    with pytest.raises(UserError, match=r"b: made with another tokenizer 'toy' than .*'gpt2'"):
        PretrainDataset(toy, 4, 100, tokenizer="gpt2")
    with pytest.raises(UserError, match=r"tokens_00000\.bin: made with another tokenizer than"):
        PretrainDataset(toy / "tokens_00000.bin", 4, 100, tokenizer="gpt2")
    assert len(PretrainDataset(toy, 4, 100)) == 4

    # A tokenizer.json is known by its bytes, wherever it lies, and need not be loaded for that.
    file = tmp_path / "moved.json"
    file.write_bytes(b"any")
    mine = hashlib.sha256(b"any").hexdigest()
    data = write_shards(
        tmp_path / "c", np.arange(20), tokenizer_name=str(file), tokenizer_fingerprint=mine
    )
    assert len(PretrainDataset(data, 4, 100, tokenizer=str(file))) == 4
    file.write_bytes(b"other")
    with pytest.raises(UserError, match=rf"SHA-256 {mine[:12]}\.\.\., not d9298a10d1b0\.\.\."):
        PretrainDataset(data, 4, 100, tokenizer=str(file))
    file.unlink()
    with pytest.raises(UserError, match=r"cannot read .*moved\.json"):
        PretrainDataset(data, 4, 100, tokenizer=str(file))
    with pytest.raises(UserError, match="'gpt3' is not known"):
        PretrainDataset(data, 4, 100, tokenizer="gpt3")


@pytest.mark.parametrize("kind", ["torch file", "torch folder"])
def test_tensors_do_not_say_their_tokenizer_and_are_taken(kind: str, tmp_path: Path) -> None:
    path = make(kind, tmp_path, np.arange(20))
    for tokenizer in ("gpt2", "absent.json"):
        assert len(PretrainDataset(path, 4, 100, tokenizer=tokenizer)) == 4


@pytest.mark.parametrize("kind", KINDS)
def test_fingerprint_follows_the_data_not_the_place(kind: str, tmp_path: Path) -> None:
    tokens = np.arange(40)
    other = tokens.copy()
    other[-1] = 0
    prints = []
    for name, content in (("a", tokens), ("b", tokens), ("c", other), ("d", tokens[:-1])):
        (tmp_path / name).mkdir()
        prints.append(PretrainDataset(make(kind, tmp_path / name, content), 4, 100).fingerprint)
    assert prints[0] == prints[1]
    assert len(set(prints)) == 3


@pytest.mark.parametrize("kind", KINDS)
def test_pickles_without_its_data(kind: str, tmp_path: Path) -> None:
    data = PretrainDataset(make(kind, tmp_path, np.arange(99).repeat(100)), 8, 100)
    raw = pickle.dumps(data)
    assert len(raw) < 9_900
    copy = pickle.loads(raw)
    assert copy.fingerprint == data.fingerprint
    assert all(torch.equal(a, b) for a, b in zip(copy[77], data[77], strict=True))


def test_dummy_dataset_is_seeded() -> None:
    data = DummyDataset(5, 16, 11, 3)
    x, y = data[4]
    assert len(data) == data.n_windows == 5
    assert x.dtype == torch.int64 and x.shape == y.shape == (16,)
    assert torch.equal(x[1:], y[:-1])
    assert set(x.tolist()) <= set(range(11))
    assert torch.equal(DummyDataset(5, 16, 11, 3)[4][0], x)
    assert not torch.equal(DummyDataset(5, 16, 11, 4)[4][0], x)
    assert not torch.equal(data[3][0], x)
    with pytest.raises(IndexError):
        data[5]


# Documents ---------------------------------------------------------------------------------------

EOS = 99
# The first has nothing but its EOS; borders fall inside windows, at their ends and between shards.
LENGTHS = [1, 4, 3, 8, 1, 1, 15, 2, 5, 4]


def documents(lengths: list[int]) -> np.ndarray:
    ids = np.random.default_rng(1).integers(0, EOS, sum(lengths))
    ids[np.cumsum(lengths) - 1] = EOS
    return ids


def write_indexed(folder: Path, lengths: list[int], **changes: Any) -> Path:
    options: dict[str, Any] = {
        "vocab_size": 100,
        "eos_id": EOS,
        "tokenizer_name": "toy",
        "tokenizer_fingerprint": "ab" * 32,
        "shard_size_tokens": 7,
        "source_names": ["only"],
    }
    with ShardWriter(folder, **(options | changes)) as out:
        out.append_documents(documents(lengths), lengths, [0] * len(lengths))
    return folder


def expected_segments(lengths: list[int], window: int) -> list[list[int]]:
    """Document numbers of each window, counted token by token, from 0 in each."""
    owner = [number for number, n in enumerate(lengths) for _ in range(n)]
    count = (len(owner) - 1) // window
    return [
        [owner[w * window + i] - owner[w * window] for i in range(window)] for w in range(count)
    ]


@pytest.mark.parametrize("indexed", [True, False])
@pytest.mark.parametrize("window", [1, 3, 8, 43])
def test_segment_ids_change_where_a_document_begins(
    indexed: bool, window: int, tmp_path: Path
) -> None:
    ids = documents(LENGTHS)
    path = write_indexed(tmp_path / "a", LENGTHS) if indexed else write_shards(tmp_path / "a", ids)
    data = PretrainDataset(path, window, 100, document_mode=True)
    plain = PretrainDataset(path, window, 100)
    items = [data[i] for i in range(len(data))]
    assert len(items) == (sum(LENGTHS) - 1) // window
    assert [item[2].tolist() for item in items] == expected_segments(LENGTHS, window)
    for item, (x, y) in zip(items, (plain[i] for i in range(len(plain))), strict=True):
        assert item[2].dtype == torch.int64 and item[2].shape == (window,)
        assert torch.equal(item[0], x) and torch.equal(item[1], y)


@pytest.mark.parametrize("document_mode", [True, False])
@pytest.mark.parametrize("indexed", [True, False])
def test_c07_only_the_target_that_crosses_a_boundary_is_masked(
    indexed: bool, document_mode: bool, tmp_path: Path
) -> None:
    # case C07: labels are shifted by exactly one; the one across a boundary may be left out
    ids = documents(LENGTHS)
    path = write_indexed(tmp_path / "a", LENGTHS) if indexed else write_shards(tmp_path / "a", ids)
    data = PretrainDataset(path, 4, 100, document_mode=document_mode, mask_boundary_targets=True)
    masked = 0
    for i in range(len(data)):
        x, y, *segments = data[i]
        assert len(segments) == document_mode
        assert x.tolist() == ids[4 * i : 4 * i + 4].tolist()
        for j, (now, target) in enumerate(zip(x.tolist(), y.tolist(), strict=True)):
            assert target == (-100 if now == EOS else ids[4 * i + j + 1])
        masked += int((y == -100).sum())
    assert masked == len(LENGTHS) - 1


@pytest.mark.parametrize("kind", ["torch file", "torch folder"])
def test_torch_tensors_have_the_tokenizers_documents(kind: str, tmp_path: Path) -> None:
    ids = documents(LENGTHS)
    ids[ids == EOS] = 50256
    path = make(kind, tmp_path, ids)
    data = PretrainDataset(path, 8, 50257, document_mode=True)
    assert [data[i][2].tolist() for i in range(len(data))] == expected_segments(LENGTHS, 8)
    with pytest.raises(UserError, match=r"end with id 50256 \(the EOS of tokenizer 'gpt2'\)"):
        PretrainDataset(make(kind, tmp_path, ids % 97), 8, 97, document_mode=True)


def test_the_index_counts_and_not_the_tokens(tmp_path: Path) -> None:
    """With an index nothing looks for EOS: another id at the end changes no boundary."""
    path = write_indexed(tmp_path / "a", LENGTHS, eos_id=98)
    data = PretrainDataset(path, 8, 100, document_mode=True)
    assert [data[i][2].tolist() for i in range(len(data))] == expected_segments(LENGTHS, 8)


def test_c09_a_damaged_index_is_refused_before_training(tmp_path: Path) -> None:
    # case C09: a cut or changed index must not be read as boundaries
    path = write_indexed(tmp_path / "a", LENGTHS)
    index = path / json.loads((path / "manifest.json").read_text())["index"]["documents"]["file"]
    whole = index.read_bytes()
    changed = bytearray(whole)
    changed[8] ^= 1
    index.write_bytes(changed)
    with pytest.raises(UserError, match=r"documents\.bin: damaged document index"):
        PretrainDataset(path, 8, 100, document_mode=True)
    assert len(PretrainDataset(path, 8, 100)) == 5
    index.write_bytes(whole[:-8])
    with pytest.raises(UserError, match=r"documents\.bin"):
        PretrainDataset(path, 8, 100, document_mode=True)
    index.unlink()
    with pytest.raises(UserError, match=r"documents\.bin"):
        PretrainDataset(path, 8, 100, document_mode=True)


def test_document_mode_pickles_without_its_index(tmp_path: Path) -> None:
    lengths = [3] * 3000
    path = write_indexed(tmp_path / "a", lengths, shard_size_tokens=100_000)
    data = PretrainDataset(path, 8, 100, document_mode=True)
    want = [data[i] for i in (0, 77)]
    raw = pickle.dumps(data)
    assert len(raw) < 8 * 3000
    copy = pickle.loads(raw)
    for i, item in zip((0, 77), want, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(copy[i], item, strict=True))


def test_a_stream_tells_where_a_token_lies(tmp_path: Path) -> None:
    stream = TokenStream(write_shards(tmp_path / "a", np.arange(20)))
    assert [stream.locate(p) for p in (0, 6, 7, 19)] == [(0, 0), (0, 6), (1, 0), (2, 5)]
    assert stream.read(5, 16).tolist() == list(range(5, 16))
    offsets, parts = zip(*stream.pieces(), strict=True)
    assert offsets == (0, 7, 14) and np.concatenate(parts).tolist() == list(range(20))


def test_dummy_windows_have_documents_on_request() -> None:
    plain = DummyDataset(5, 8, 11, 3)[2]
    x, y, segments = DummyDataset(5, 8, 11, 3, document_mode=True)[2]
    assert torch.equal(x, plain[0]) and torch.equal(y, plain[1])
    assert segments.tolist() == [0, 0, 0, 0, 1, 1, 1, 1]


@pytest.mark.parametrize("kept", [0.5, 0.999])
def test_a_file_that_is_cut_while_it_is_read_is_an_error_and_never_zeros(
    tmp_path: Path, kept: float
) -> None:
    # case C09; the end of the last page that is left would read as zeros
    path = tmp_path / "tokens.bin"
    torch.save(torch.arange(1, 20_001) % 90 + 1, path)
    data = PretrainDataset(path, 100, 97)
    assert int(data[data.n_windows - 1][0].min()) > 0
    with path.open("r+b") as file:
        file.truncate(int(kept * path.stat().st_size))
    with pytest.raises(UserError, match="was cut or written while it was read"):
        data[data.n_windows - 1]
