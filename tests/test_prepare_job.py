"""`prepare` over several sources: mixture, duplicates, resumption, full disks, memory."""

import errno
import json
import os
import sqlite3
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mamba3_lite.data import encode, ingest, parts, shards
from mamba3_lite.data.clean import CleanConfig
from mamba3_lite.data.config import DedupConfig
from mamba3_lite.data.files import is_full_disk
from mamba3_lite.data.shards import open_shards
from mamba3_lite.data.tokenizer import load_tokenizer
from mamba3_lite.data.verify import verify
from mamba3_lite.errors import UserError
from tests.data_jobs import EOS, indexed_documents, job, jsonl, run, source, texts, tokens, tree

ROOT = Path(__file__).resolve().parents[1]
WEIGHTS = {"prose": 0.5, "docs": 0.2, "maths": 0.2, "code": 0.1}


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ingest, "PART_RECORDS", 60)
    monkeypatch.setattr(ingest, "_BATCH_TEXTS", 7)


@pytest.fixture
def corpus(tmp_path: Path) -> dict[str, list[str]]:
    """Four sources; prose bounds the mixture."""
    found = {name: texts(name, 500) for name in WEIGHTS}
    for name, some in found.items():
        jsonl(tmp_path / f"{name}.jsonl", some)
    return found


def mixed_job(tmp_path: Path, out: str = "out", **changes: Any) -> Any:
    sources = [source(tmp_path / f"{name}.jsonl", weight) for name, weight in WEIGHTS.items()]
    options: dict[str, Any] = {"val_fraction": 0.1, "shard_size_tokens": 5000}
    return job(tmp_path / out, *sources, **(options | changes))


def test_mixture_meets_its_weights_and_loses_nothing(
    tmp_path: Path, corpus: dict[str, list[str]], small_parts: None
) -> None:
    # case C09
    report = run(mixed_job(tmp_path), check=True)
    all_texts = Counter(text for some in corpus.values() for text in some)
    seen: dict[str, set[str]] = {}
    for split in ("train", "val"):
        folder = tmp_path / "out" / split
        documents = indexed_documents(folder)
        assert tokens(folder).tolist().count(EOS) == len(documents)
        opened = open_shards(folder)
        for entry in opened.manifest["sources"]:
            assert abs(entry["share"] - WEIGHTS[entry["name"]]) < 0.005
        whole = [text for _, text in documents if text in all_texts]
        assert len(set(whole)) == len(whole)
        # The last document of a quota may be cut, one a source.
        cut = [(name, text) for name, text in documents if text not in all_texts]
        assert len({name for name, _ in cut}) == len(cut)
        assert all(any(text.startswith(part) for text in corpus[name]) for name, part in cut)
        seen[split] = set(whole)
        limits = range(0, opened.manifest["tokens"], 5000)
        where = np.searchsorted(limits, opened.document_starts(), side="right")
        owners = opened.document_sources()
        for shard in range(1, len(opened.shards)):
            assert set(owners[where == shard].tolist()) == {0, 1, 2, 3}
    assert not seen["train"] & seen["val"]
    # The source that bounds the mixture is there whole, in both splits together.
    used = {text for some in seen.values() for text in some}
    bound = [s.name for s in report.sources if s.used_up]
    assert bound == ["prose"]
    held = report.sources[0]
    assert held.documents + held.val_documents <= 500 == held.read_documents
    assert len(used & set(corpus["prose"])) >= held.documents + held.val_documents - 1


def test_single_source_is_kept_whole_as_a_multiset(tmp_path: Path, small_parts: None) -> None:
    some = texts("a", 300)
    doubled = some + some[:20]
    path = jsonl(tmp_path / "a.jsonl", doubled)
    keep = DedupConfig(exact=False)
    run(job(tmp_path / "all", source(path), val_fraction=0.2, dedup=keep), check=True)
    found = [
        text
        for split in ("train", "val")
        for _, text in indexed_documents(tmp_path / "all" / split)
    ]
    assert Counter(found) == Counter(doubled)
    assert Counter(text for _, text in indexed_documents(tmp_path / "all" / "train")).total() < 300
    report = run(job(tmp_path / "unique", source(path)))
    assert report.skipped == {"duplicate": 20}
    assert [text for _, text in indexed_documents(tmp_path / "unique" / "train")] == some


def test_order_and_bytes_do_not_depend_on_the_workers(
    tmp_path: Path, corpus: dict[str, list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    run(mixed_job(tmp_path, "one", workers=1))
    monkeypatch.setattr(encode, "_SERIAL_CHARS", 0)
    monkeypatch.setattr(ingest, "_BATCH_TEXTS", 11)
    run(mixed_job(tmp_path, "three", workers=3))
    assert tree(tmp_path / "one") == tree(tmp_path / "three")


def test_seed_chooses_the_validation_split(tmp_path: Path, corpus: dict[str, list[str]]) -> None:
    for seed in (0, 1):
        run(mixed_job(tmp_path, f"out{seed}", seed=seed))
    first, second = (
        {t for _, t in indexed_documents(tmp_path / f"out{i}" / "val")} for i in (0, 1)
    )
    assert first != second


def test_a_dead_worker_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = jsonl(tmp_path / "a.jsonl", texts("a", 50))
    monkeypatch.setattr(encode, "_SERIAL_CHARS", 0)
    monkeypatch.setattr(encode, "_PROGRAM", "import sys; sys.stdin.buffer.read(4)")
    with pytest.raises(UserError, match="a tokenising process died"):
        run(job(tmp_path / "out", source(path), workers=2))
    assert not (tmp_path / "out").exists()


def test_cleaning_and_duplicates_are_counted_by_source(tmp_path: Path, small_parts: None) -> None:
    some = texts("a", 130)
    digits, blank = "0123456789 " * 20, "   "
    first = jsonl(tmp_path / "a.jsonl", [*some, digits, blank, some[0], digits])
    second = jsonl(tmp_path / "b.jsonl", [some[5], *texts("b", 130), some[70]])
    made = job(
        tmp_path / "out",
        source(first),
        source(second),
        clean=CleanConfig(),
        on_exhausted="continue",
    )
    report = run(made)
    assert report.sources[0].skipped == {"digits": 2, "duplicate": 1, "empty": 1}
    assert report.sources[1].skipped == {"duplicate": 2}
    found = Counter(text for _, text in indexed_documents(tmp_path / "out" / "train"))
    assert found == Counter([*some, *texts("b", 130)])


def test_near_duplicates_are_dropped_also_after_a_stop(tmp_path: Path, small_parts: None) -> None:
    pytest.importorskip("datasketch")
    some = [" ".join(texts(f"a{i}", 5)) for i in range(100)]
    path = jsonl(tmp_path / "a.jsonl", [*some, *(text + " end" for text in some[:30])])
    dedup = DedupConfig(near=True)
    report = run(job(tmp_path / "out", source(path), dedup=dedup))
    assert report.skipped == {"near_duplicate": 30}
    stop_after(1, lambda: run(job(tmp_path / "again", source(path), dedup=dedup)))
    run(job(tmp_path / "again", source(path), dedup=dedup))
    assert tree(tmp_path / "again") == tree(tmp_path / "out")


def stop_after(commits: int, action: Any) -> None:
    """Run `action` and break it off after so many finished parts."""
    commit, done = parts.State.commit, []

    def stopping(state: Any, part: Any, **more: Any) -> None:
        if len(done) == commits:
            raise KeyboardInterrupt
        commit(state, part, **more)
        done.append(part)

    with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(parts.State, "commit", stopping)
        action()


def test_reading_stops_when_there_is_enough(
    tmp_path: Path, corpus: dict[str, list[str]], small_parts: None
) -> None:
    report = run(mixed_job(tmp_path, max_tokens=4000, val_fraction=0.05))
    assert 4000 - 8 <= report.tokens <= 4000
    assert 200 - 4 <= report.val_tokens <= 200
    for entry in report.sources:
        assert abs(entry.share - entry.weight) < 0.005
        assert entry.records < 500
    run(mixed_job(tmp_path, "again", max_tokens=4000, val_fraction=0.05), check=True)
    assert tree(tmp_path / "out") == tree(tmp_path / "again")


@pytest.mark.parametrize("policy", ["continue", "repeat"])
def test_a_source_that_runs_out_is_reported(policy: str, tmp_path: Path, small_parts: None) -> None:
    # case C09
    large = jsonl(tmp_path / "large.jsonl", texts("large", 600))
    small = jsonl(tmp_path / "small.jsonl", texts("small", 20))
    sources = (source(large, 0.5), source(small, 0.5))
    report = run(job(tmp_path / "out", *sources, max_tokens=20_000, on_exhausted=policy))
    entry = report.sources[1]
    found = Counter(text for name, text in indexed_documents(tmp_path / "out" / "train"))
    assert 20_000 - 2 <= report.tokens <= 20_000
    assert entry.used_up
    if policy == "repeat":
        assert entry.passes > 5 and abs(entry.share - 0.5) < 0.005
        assert sum(found[text] for text in texts("small", 20)) >= 20 * int(entry.passes)
    else:
        assert entry.passes == 1
        assert all(found[text] == 1 for text in texts("small", 20))


def test_stages_alone_give_the_same_bytes(tmp_path: Path, corpus: dict[str, list[str]]) -> None:
    with pytest.raises(UserError, match="not all is read yet"):
        run(mixed_job(tmp_path), only="pack")
    assert not (tmp_path / "out").exists()
    for stage in ("read", "pack", "verify"):
        assert (tmp_path / "out" / "train").exists() == (stage == "verify")
        # Only packing gives a report.
        if stage == "pack":
            run(mixed_job(tmp_path), only=stage)
        else:
            with pytest.raises(AssertionError):
                run(mixed_job(tmp_path), only=stage)
    run(mixed_job(tmp_path, "whole"))
    assert tree(tmp_path / "out") == tree(tmp_path / "whole")
    with pytest.raises(UserError, match="unknown stage 'clean'"):
        run(mixed_job(tmp_path), only="clean")
    with pytest.raises(UserError, match="--force starts over"):
        run(mixed_job(tmp_path), only="pack", force=True)


def test_work_can_be_kept(tmp_path: Path, corpus: dict[str, list[str]]) -> None:
    run(mixed_job(tmp_path), keep_work=True)
    assert (tmp_path / "out" / ".work" / "prose" / "part_00000.tok").is_file()
    assert run(mixed_job(tmp_path)).already_prepared
    assert not (tmp_path / "out" / ".work").exists()


def test_half_done_work_goes_with_its_settings(
    tmp_path: Path, corpus: dict[str, list[str]], small_parts: None
) -> None:
    lines: list[str] = []
    stop_after(3, lambda: run(mixed_job(tmp_path), log=lines.append))
    assert any("finished parts are kept" in line for line in lines)
    before = tree(tmp_path / "out")
    with pytest.raises(UserError, match=r"other settings \(differs in: seed, val_fraction\)"):
        run(mixed_job(tmp_path, seed=7, val_fraction=0.2))
    jsonl(tmp_path / "prose.jsonl", texts("other", 500))
    with pytest.raises(UserError, match="differs in: source prose.*--force"):
        run(mixed_job(tmp_path))
    assert set(before) <= set(tree(tmp_path / "out"))
    run(mixed_job(tmp_path), force=True)
    run(mixed_job(tmp_path, "fresh"))
    assert tree(tmp_path / "out") == tree(tmp_path / "fresh")


def test_a_source_not_yet_read_may_be_put_right(
    tmp_path: Path, corpus: dict[str, list[str]], small_parts: None
) -> None:
    (tmp_path / "docs.jsonl").write_text('{"text": ""}\n')
    with pytest.raises(UserError, match=r"source 'docs', .*no document with text \(skipped: 1 em"):
        run(mixed_job(tmp_path))
    assert not (tmp_path / "out" / "train").exists()
    jsonl(tmp_path / "docs.jsonl", corpus["docs"])
    lines: list[str] = []
    run(mixed_job(tmp_path), log=lines.append)
    assert any("going on after 9 finished parts" in line for line in lines)
    run(mixed_job(tmp_path, "fresh"))
    assert tree(tmp_path / "out") == tree(tmp_path / "fresh")


def test_wrong_input_of_any_source_leaves_nothing(
    tmp_path: Path, corpus: dict[str, list[str]]
) -> None:
    # case C04
    before = tree(tmp_path)
    for changes, message in (
        ({"field": "body"}, "no record has the field 'body'"),
        ({"paths": (str(tmp_path / "a.docx"),)}, "docx"),
        ({"paths": ("nowhere",)}, "nowhere"),
    ):
        bad = source(tmp_path / "code.jsonl", **changes)
        with pytest.raises(UserError, match=message):
            run(job(tmp_path / "out", source(tmp_path / "docs.jsonl"), bad))
        assert tree(tmp_path) == before and not (tmp_path / "out").exists()


@pytest.mark.parametrize("place", ["parts", "shards"])
def test_full_disk_keeps_the_finished_parts(
    place: str,
    tmp_path: Path,
    corpus: dict[str, list[str]],
    small_parts: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    module: Any = parts if place == "parts" else shards
    close, calls = module.close_synced, []

    def full(file: Any) -> str:
        calls.append(file)
        if len(calls) == 5:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return close(file)

    with monkeypatch.context() as patch:
        patch.setattr(module, "close_synced", full)
        with pytest.raises(UserError, match="out: no space left on the disk; free some"):
            run(mixed_job(tmp_path))
    kept = sorted((tmp_path / "out" / ".work" / "prose").iterdir())
    assert len(kept) == (4 if place == "parts" else 18)
    assert not (tmp_path / "out" / "train").exists()
    run(mixed_job(tmp_path))
    run(mixed_job(tmp_path, "fresh"))
    assert tree(tmp_path / "out") == tree(tmp_path / "fresh")


def test_a_full_database_is_a_full_disk() -> None:
    database = sqlite3.connect(":memory:")
    database.execute("CREATE TABLE t (value BLOB)")
    database.execute("PRAGMA max_page_count = 3")
    with pytest.raises(sqlite3.OperationalError) as caught:
        database.execute("INSERT INTO t VALUES (zeroblob(100000))")
    assert is_full_disk(caught.value)
    assert not is_full_disk(UserError("something else"))


def test_damaged_parts_are_not_packed(tmp_path: Path, corpus: dict[str, list[str]]) -> None:
    with pytest.raises(AssertionError):
        run(mixed_job(tmp_path), only="read")
    path = tmp_path / "out" / ".work" / "maths" / "part_00000.tok"
    raw = bytearray(path.read_bytes())
    raw[10] ^= 1
    path.write_bytes(raw)
    with pytest.raises(UserError, match=r"maths.part_00000\.tok: not as it was written"):
        run(mixed_job(tmp_path))
    assert not (tmp_path / "out" / "train").exists()


def token_source(tmp_path: Path, ids: list[int]) -> Any:
    torch.save(torch.tensor(ids), tmp_path / "ids.pt")
    return source(tmp_path / "ids.pt", kind="torch", eos_id=EOS)


def test_ids_become_documents_too(tmp_path: Path) -> None:
    made = token_source(tmp_path, [1, 2, 3, EOS, 4, EOS, 1, 2, 3, EOS, 5, 6, EOS])
    report = run(job(tmp_path / "out", made), check=True)
    assert tokens(tmp_path / "out" / "train").tolist() == [1, 2, 3, EOS, 4, EOS, 5, 6, EOS]
    assert report.skipped == {"duplicate": 1}


@pytest.mark.parametrize(
    ("ids", "eos", "message"),
    [([1, 50257, EOS], EOS, "id 50257 is outside 0..50256"), ([1, EOS, 0], 0, "stands inside")],
)
def test_ids_of_another_tokenizer_are_refused(
    ids: list[int], eos: int, message: str, tmp_path: Path
) -> None:
    torch.save(torch.tensor(ids), tmp_path / "ids.pt")
    with pytest.raises(UserError, match=message):
        run(job(tmp_path / "out", source(tmp_path / "ids.pt", kind="torch", eos_id=eos)))
    assert not (tmp_path / "out").exists()


def damage(folder: Path, file: str, entry: dict[str, Any], offset: int, raw: bytes) -> None:
    """Change a file and let the manifest agree, so that only its content can give it away."""
    with (folder / file).open("r+b") as opened:
        opened.seek(offset)
        opened.write(raw)
    entry["sha256"] = parts.file_sha256(folder / file)


def test_verify_finds_what_is_wrong(tmp_path: Path, corpus: dict[str, list[str]]) -> None:
    run(mixed_job(tmp_path))
    train, val = tmp_path / "out" / "train", tmp_path / "out" / "val"
    total = len(tokens(train)) + len(tokens(val))
    assert verify(train, val) == total
    with pytest.raises(UserError, match="holds a document that .* holds too"):
        verify(train, train)
    good = json.loads((train / "manifest.json").read_text())
    for file, offset, raw, message in (
        ("tokens_00001.bin", 128 + 2 * 7, np.array([EOS], "<u2").tobytes(), "its one EOS"),
        ("tokens_00001.bin", 28, np.array([7], "<u4").tobytes(), "its header says 7"),
        ("documents.bin", 8, np.array([1], "<u8").tobytes(), "its one EOS"),
        ("sources.bin", 0, np.array([3], "<u2").tobytes(), "counts of manifest"),
    ):
        before = (train / file).read_bytes()
        manifest = json.loads(json.dumps(good))
        entries = [*manifest["shards"], *manifest["index"].values()]
        damage(train, file, next(e for e in entries if e["file"] == file), offset, raw)
        with pytest.raises(UserError, match="damaged"):
            verify(train, val)
        (train / "manifest.json").write_text(json.dumps(manifest))
        with pytest.raises(UserError, match=message):
            verify(train, val)
        (train / file).write_bytes(before)
        (train / "manifest.json").write_text(json.dumps(good))
    assert verify(train, val) == total


PEAK = """
import re, sys
from pathlib import Path
from tests.data_jobs import job, run, source
run(job(Path(sys.argv[2]), source(Path(sys.argv[1])), val_fraction=0.01))
# Not ru_maxrss: that begins with the size of the process that started this one.
print(re.search(r"VmHWM:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1])
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs /proc")
def test_memory_stays_flat_when_the_input_grows_tenfold(tmp_path: Path) -> None:
    # case C09
    peaks = []
    some = texts("a", 4000)
    for times in (1, 10):
        path = jsonl(
            tmp_path / f"x{times}.jsonl", [f"{i} {text}" for i in range(times) for text in some]
        )
        done = subprocess.run(
            [sys.executable, "-c", PEAK, str(path), str(tmp_path / f"out{times}")],
            cwd=ROOT, capture_output=True, text=True, check=True,
        )  # fmt: skip
        peaks.append(int(done.stdout) / 1024)
    assert peaks[0] > 20 and peaks[1] - peaks[0] < 60, f"{peaks} MiB"


def test_special_token_text_stays_text(tmp_path: Path) -> None:
    # case C07
    path = jsonl(tmp_path / "a.jsonl", ["a <|endoftext|> b", "c"])
    run(job(tmp_path / "out", source(path)))
    assert tokens(tmp_path / "out" / "train").tolist().count(EOS) == 2
    assert load_tokenizer("gpt2").encode("a <|endoftext|> b").count(EOS) == 0
