"""`mamba3-lite inspect`: what it counts on every format, what it shows, and what it refuses."""

import json
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mamba3_lite import cli
from mamba3_lite.data.inspect import Inspection, length_bins, splits_of
from mamba3_lite.data.prepare import prepare
from mamba3_lite.data.shards import ShardWriter
from mamba3_lite.data.tokenizer import load_tokenizer
from mamba3_lite.measure.consumption import Consumption
from mamba3_lite.training.config import TrainingConfig

GPT2 = load_tokenizer("gpt2")
WORDS = ["the", "quick", "brown", "fox", "jumps", "over", "a", "lazy", "dog"]
# Lengths with their EOS: 2 to 41 tokens, one word is one token.
TEXTS = [" ".join(["", *(WORDS[(i + j) % 9] for j in range(i % 40 + 1))]) for i in range(60)]
DOCUMENTS = [[*GPT2.encode(text), GPT2.eos_id] for text in TEXTS]
LENGTHS = [len(ids) for ids in DOCUMENTS]
TOKENS = sum(DOCUMENTS, [])
KINDS = ["torch file", "torch folder", "shards", "indexed shards", "one shard"]


def write_shards(folder: Path, *, indexed: bool, **changes: Any) -> Path:
    options: dict[str, Any] = {
        "vocab_size": GPT2.vocab_size,
        "eos_id": GPT2.eos_id,
        "tokenizer_name": "gpt2",
        "tokenizer_fingerprint": GPT2.fingerprint,
        "shard_size_tokens": 300,
        "source_names": ["even", "odd"] if indexed else None,
    }
    with ShardWriter(folder, **(options | changes)) as out:
        if indexed:
            out.append_documents(TOKENS, LENGTHS, [i % 2 for i in range(len(LENGTHS))])
        else:
            out.append(TOKENS, documents=len(DOCUMENTS))
    return folder


def make(kind: str, folder: Path) -> Path:
    if kind == "torch file":
        torch.save(torch.tensor(TOKENS), folder / "data.bin")
        return folder / "data.bin"
    if kind == "torch folder":
        for i, part in enumerate(np.array_split(np.array(TOKENS), 3)):
            torch.save(torch.from_numpy(part), folder / f"shard_{i}.bin")
        return folder
    if kind == "one shard":
        shards = write_shards(folder / "one", indexed=False, shard_size_tokens=10_000)
        return shards / "tokens_00000.bin"
    return write_shards(folder / "shards", indexed=kind == "indexed shards")


def shown(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> str:
    """What the command prints, table lines and line ends as single blanks."""
    with pytest.raises(SystemExit) as stop:
        cli.main(["inspect", *map(str, arguments)])
    captured = capsys.readouterr()
    assert (stop.value.code, captured.err) == (0, "")
    return " ".join(re.sub("[─-╿]", " ", captured.out).split())


def refused(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> str:
    """The one error line; nothing is printed before it."""
    with pytest.raises(SystemExit) as stop:
        cli.main(["inspect", *map(str, arguments)])
    captured = capsys.readouterr()
    assert (stop.value.code, captured.out) == (2, "")
    (line,) = captured.err.splitlines()
    assert line.startswith("error: ")
    return line


@pytest.mark.parametrize("kind", KINDS)
def test_counts_are_the_same_on_every_format(kind: str, tmp_path: Path) -> None:
    data = Inspection(make(kind, tmp_path))
    assert (data.tokens, len(data.starts), data.largest_id) == (len(TOKENS), 60, GPT2.eos_id)
    assert data.lengths.tolist() == LENGTHS
    assert data.ends_with_eos
    assert data.tokenizer.name == "gpt2"


@pytest.mark.parametrize("kind", KINDS)
def test_a_sample_at_any_position(kind: str, tmp_path: Path) -> None:
    data = Inspection(make(kind, tmp_path))
    for position in (0, 1, 2, 299, 300, 777, len(TOKENS) - 3, len(TOKENS) - 1):
        sample = data.sample(position, 50)
        assert sample.ids == TOKENS[position : position + 50]
        assert sample.text == GPT2.decode(TOKENS[position : position + 50])
        owner = [number for number, n in enumerate(LENGTHS) for _ in range(n)]
        assert sample.document == owner[position]
        assert sample.offset == position - owner.index(owner[position])
        assert sample.length == LENGTHS[owner[position]]
        want = ("even", "odd")[owner[position] % 2] if kind == "indexed shards" else None
        assert sample.source == want


def test_shares_by_source(tmp_path: Path) -> None:
    shares = Inspection(make("indexed shards", tmp_path)).sources()
    want = [sum(LENGTHS[0::2]), sum(LENGTHS[1::2])]
    assert [(s.name, s.documents, s.tokens) for s in shares] == [
        ("even", 30, want[0]), ("odd", 30, want[1]),
    ]  # fmt: skip
    assert [s.share for s in shares] == [w / len(TOKENS) for w in want]
    assert Inspection(make("shards", tmp_path / "b")).sources() == []


def test_a_cut_last_document_counts_and_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    torch.save(torch.tensor([*TOKENS, 5, 6]), tmp_path / "cut.bin")
    data = Inspection(tmp_path / "cut.bin")
    assert data.lengths.tolist() == [*LENGTHS, 2] and not data.ends_with_eos
    assert "61 (the last one has no EOS)" in shown(capsys, tmp_path / "cut.bin")


@pytest.mark.parametrize("lengths", [[1], [1, 2, 3, 4, 7, 8], [5, 5, 900], [1024]])
def test_every_length_falls_into_one_bin(lengths: list[int]) -> None:
    bins = length_bins(np.array(lengths))
    assert [count for low, high, count in bins] == [
        sum(low <= n <= high for n in lengths) for low, high, _ in bins
    ]
    assert sum(count for _, _, count in bins) == len(lengths)
    assert bins[0][2] and bins[-1][2]
    assert all(high + 1 == 2 * low for low, high, _ in bins)
    assert all(a[1] + 1 == b[0] for a, b in zip(bins, bins[1:], strict=False))


def test_the_command_shows_everything(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    for split in ("train", "val"):
        write_shards(out / split, indexed=True)
    report = {"skipped": {"duplicate": 1200, "near_duplicate": 34, "digits": 5}}
    (out / "prepare.json").write_text(json.dumps({"settings": {}, "report": report}))
    assert splits_of(out) == [out / "train", out / "val"]
    text = shown(capsys, out, "--at", "300")
    assert text.count(f"tokens {len(TOKENS):,}") == 2
    assert "documents 60 " in text and "vocabulary 50,257 (largest id 50,256)" in text
    assert "tokenizer gpt2 (EOS 50,256)" in text
    assert "duplicates removed 1,234" in text and "skipped otherwise 5 digits" in text
    assert f"even 30 {sum(LENGTHS[0::2]):,}" in text
    assert f"odd 30 {sum(LENGTHS[1::2]):,}" in text
    assert re.search(r"16 - 31 \|#{40} 22 \(36\.7%\)", text)
    assert "200 tokens from 300: document" in text
    assert " ".join(GPT2.decode(TOKENS[300:330]).split()) in text


def test_the_report_of_prepare_is_understood(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_text("".join(json.dumps({"text": text}) + "\n" for text in [*TEXTS, " "]))
    prepare([corpus], tmp_path / "out", workers=1, progress=False, log=lambda line: None)
    assert Inspection(tmp_path / "out" / "train").skipped() == {"empty": 1}
    text = shown(capsys, tmp_path / "out")
    assert "duplicates removed 0 " in text and "skipped otherwise 1 empty" in text
    assert Inspection(make("shards", tmp_path)).skipped() is None


def test_what_a_configuration_would_consume(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = make("indexed shards", tmp_path)
    config = tmp_path / "run.yaml"
    windows = (len(TOKENS) - 1) // 32

    def write(steps: int) -> None:
        training = f"{{micro_batch_size: 3, warmup_steps: 1, total_steps: {steps}}}"
        config.write_text(f"model: {{max_seq_len: 32}}\ntraining: {training}\n")

    write(50)
    text = shown(capsys, data, "--config", config)
    assert "tokens per optimizer step 192 " in text and "tokens of the run 9,600" in text
    assert f"windows an epoch {windows} of 32 tokens" in text
    assert f"epochs {50 * 6 / windows:.2f}" in text
    assert "[warn] the data are shorter than the run: it reads 9,600 tokens" in text
    write(2)
    assert "[warn]" not in shown(capsys, data, "--config", config)


def test_epochs_of_the_production_run() -> None:
    # 16.78 B exposures over 8.0 B tokens
    use = Consumption(TrainingConfig(), 8_000_000_000 // 2048)
    assert use.epochs == pytest.approx(2.097, abs=1e-3)
    assert use.steps_per_epoch == pytest.approx(122_070, abs=1)


def test_a_picture_of_the_lengths(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = make("indexed shards", tmp_path)
    picture = tmp_path / "lengths.png"
    assert f"picture: {picture}" in shown(capsys, data, "--plot", picture)
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert {p.name for p in tmp_path.iterdir()} == {"shards", "lengths.png"}


def test_without_matplotlib_the_picture_says_what_to_install(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    data = make("shards", tmp_path)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    line = refused(capsys, data, "--plot", tmp_path / "a.png")
    assert 'pip install "mamba3-lite[plots]"' in line
    assert "documents" in shown(capsys, data)


def test_escape_sequences_in_the_data_do_not_reach_the_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ids = GPT2.encode("red \x1b[31m alert")
    torch.save(torch.tensor(ids), tmp_path / "data.bin")
    text = shown(capsys, tmp_path / "data.bin")
    assert "\x1b" not in text and "red \ufffd[31m alert" in text


def test_every_mistake_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = make("indexed shards", tmp_path)
    last = len(TOKENS) - 1
    assert "absent does not exist" in refused(capsys, tmp_path / "absent")
    for position in (-1, last + 1):
        line = refused(capsys, data, "--at", str(position))
        assert f"position {position} is outside the data" in line and f"0 to {last}" in line
    assert "ends in .png" in refused(capsys, data, "--plot", tmp_path / "a.jpg")
    assert "cannot be written" in refused(capsys, data, "--plot", tmp_path / "no" / "a.png")
    assert "'gpt3' is not known" in refused(capsys, data, "--tokenizer", "gpt3")
    assert "configuration file" in refused(capsys, data, "--config", tmp_path / "no.yaml")
    config = tmp_path / "run.yaml"
    config.write_text("model: {vocab_size: 500, max_seq_len: 32}\n")
    assert "outside 0..499" in refused(capsys, data, "--config", config)
    config.write_text("model: {max_seq_len: 5000}\n")
    assert "one window needs 5001" in refused(capsys, data, "--config", config)
    (tmp_path / "text.txt").write_text("some text")
    assert "unknown data format" in refused(capsys, tmp_path / "text.txt")
    torch.save(torch.tensor([], dtype=torch.int64), tmp_path / "none.bin")
    assert "holds no tokens" in refused(capsys, tmp_path / "none.bin")
    torch.save(torch.tensor([5, 60_000]), tmp_path / "large.bin")
    assert "holds id 60000, outside the vocabulary" in refused(capsys, tmp_path / "large.bin")
    other = write_shards(tmp_path / "other", indexed=True, tokenizer_fingerprint="ab" * 32)
    assert "another tokenizer than 'gpt2'" in refused(capsys, other)
    (data / "prepare.json").write_text("{")
    assert "prepare.json: not a report of prepare" in refused(capsys, data)
    (data / "prepare.json").unlink()
    with (data / "documents.bin").open("r+b") as index:
        index.write(b"\1")
    assert "documents.bin: damaged document index" in refused(capsys, data)
    assert not list(tmp_path.glob(".*.tmp"))
