import contextlib
import hashlib
import io
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import typer
from typer.testing import CliRunner, Result

from mamba3_lite.data import encode, ingest
from mamba3_lite.data import progress as progress_module
from mamba3_lite.data.dataset import PretrainDataset
from mamba3_lite.data.prepare import prepare, prepare_command
from mamba3_lite.data.report import PrepareReport
from mamba3_lite.data.shards import open_shards
from mamba3_lite.data.tokenizer import load_tokenizer
from mamba3_lite.errors import UserError
from mamba3_lite.training.pretrain import Pretrainer
from tests import runs

EOS = 50256


def run(inputs: Any, out: Path, **options: Any) -> PrepareReport:
    inputs = inputs if isinstance(inputs, list) else [inputs]
    quiet: dict[str, Any] = {"log": lambda message: None, "progress": False}
    return prepare(inputs, out, **(quiet | options))


def tokens(folder: Path) -> list[int]:
    return np.concatenate([shard.tokens() for shard in open_shards(folder).shards]).tolist()


def documents(folder: Path) -> list[str]:
    """The texts between the EOS tokens; the last token must be an EOS."""
    texts = load_tokenizer("gpt2").decode(tokens(folder)).split("<|endoftext|>")
    assert texts.pop() == ""
    return texts


def jsonl(path: Path, records: list[Any]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def tree(folder: Path) -> dict[str, str]:
    """Every file below `folder` (hidden ones too) with its hash."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {str(p.relative_to(folder)): hashlib.sha256(p.read_bytes()).hexdigest() for p in files}


def refused(tmp_path: Path, message: str, inputs: Any, **options: Any) -> None:
    """`prepare` raises one clear line and leaves the folder as it was."""
    before = sorted(path for path in tmp_path.rglob("*"))
    with pytest.raises(UserError, match=message) as caught:
        run(inputs, tmp_path / "new" / "out", **options)
    assert "\n" not in str(caught.value)
    assert sorted(path for path in tmp_path.rglob("*")) == before


def test_folder_is_walked_in_sorted_order(tmp_path: Path) -> None:
    source = tmp_path / "in"
    for name in ("b.txt", "a/z.md", "a/c.py", "d.rst", "x.c", ".hidden.txt", ".git/e.txt", "E.TXT"):
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_text(f"text of {name}")
    report = run([source, source / "b.txt"], tmp_path / "out")
    expected = ["E.TXT", "b.txt", "d.rst", "a/c.py", "a/z.md"]
    assert documents(tmp_path / "out" / "train") == [f"text of {name}" for name in expected]
    assert report.documents == 5
    run(source, tmp_path / "c", suffixes=["c"])
    assert documents(tmp_path / "c" / "train") == ["text of x.c"]


def test_every_document_ends_with_exactly_one_eos(tmp_path: Path) -> None:
    # case C07
    texts = ["one", "two <|endoftext|> three", "four\n", " five"]
    report = run(jsonl(tmp_path / "a.jsonl", [{"text": t} for t in texts]), tmp_path / "out")
    ids = tokens(tmp_path / "out" / "train")
    assert ids.count(EOS) == len(texts) == report.documents
    encode = load_tokenizer("gpt2").encode
    assert ids == [i for text in texts for i in [*encode(text), EOS]]
    manifest = open_shards(tmp_path / "out" / "train").manifest
    assert (manifest["documents"], manifest["tokens"]) == (4, len(ids))
    assert (report.tokens, report.text_bytes) == (len(ids), sum(len(t) for t in texts))
    assert report.bytes_per_token == report.text_bytes / report.tokens
    assert manifest["tokenizer"]["name"] == "gpt2"


def test_report_is_stored_beside_shards_that_train(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("some words " * 50)
    report = run(tmp_path / "a.txt", tmp_path / "out", shard_size_tokens=20)
    stored = json.loads((tmp_path / "out" / "prepare.json").read_text())["report"]
    assert stored["tokens"] == report.tokens
    assert report.val_path is None
    assert report.shards == len(list(Path(report.train_path).glob("tokens_*.bin"))) > 1
    data = PretrainDataset(report.train_path, 16, 50257)
    assert data.n_tokens == report.tokens
    assert data.tokenizer_fingerprint == load_tokenizer("gpt2").fingerprint


def test_bad_records_are_counted_and_change_nothing(tmp_path: Path) -> None:
    # case C03
    good: list[Any] = [{"text": "first"}, {"text": "second", "n": 1}, {"text": "third"}]
    bad: list[Any] = [{"text": ""}, {"text": " \n\t"}, {"text": None}, {"other": 1}, {"text": 5}, 7]
    mixed = [bad[0], good[0], bad[1], bad[2], good[1], *bad[3:], good[2]]
    lines: list[str] = []
    report = run(jsonl(tmp_path / "mixed.jsonl", mixed), tmp_path / "a", log=lines.append)
    run(jsonl(tmp_path / "good.jsonl", good), tmp_path / "b")
    assert report.skipped == {"empty": 2, "not_a_string": 2, "missing_field": 1, "not_an_object": 1}
    assert tree(tmp_path / "a" / "train") == tree(tmp_path / "b" / "train")
    assert any("mixed.jsonl:6: no field 'text'" in line for line in lines)
    assert any("mixed.jsonl:4: field 'text' is null" in line for line in lines)


def test_blank_text_files_are_skipped(tmp_path: Path) -> None:
    # case C03
    for name, content in {"a": b"", "b": b" \n ", "c": b"\xef\xbb\xbf\n", "d": b"x"}.items():
        (tmp_path / f"{name}.txt").write_bytes(content)
    report = run(tmp_path, tmp_path / "out")
    assert documents(tmp_path / "out" / "train") == ["x"]
    assert report.skipped == {"empty": 3}


def test_unusable_input_leaves_nothing(tmp_path: Path) -> None:
    # case C04
    (tmp_path / "a.docx").write_text("x")
    refused(tmp_path, r"a\.docx: cannot read files ending in '\.docx'", tmp_path / "a.docx")
    (tmp_path / "empty.txt").write_text("")
    refused(tmp_path, "no document with text .skipped: 1 empty.", tmp_path / "empty.txt")
    (tmp_path / "empty.jsonl").write_text("\n\n")
    refused(tmp_path, "no document with text .skipped: none.", tmp_path / "empty.jsonl")
    wrong = jsonl(tmp_path / "wrong.jsonl", [{"body": "x", "id": 1}, {"title": "y"}])
    (tmp_path / "good.txt").write_text("fine")
    refused(
        tmp_path,
        r"wrong\.jsonl: no record has the field 'text' \(fields seen: body, id, title\)",
        [tmp_path / "good.txt", wrong],
    )
    refused(tmp_path, "absent: no such file", tmp_path / "absent")
    refused(tmp_path, "no input", [])
    (tmp_path / "folder").mkdir()
    refused(tmp_path, "folder: no file ending in", tmp_path / "folder")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"val_fraction": 1.0}, "val_fraction must be"),
        ({"val_fraction": -0.1}, "val_fraction must be"),
        ({"shard_size_tokens": 0}, "shard_size_tokens must be"),
        ({"max_tokens": 1}, "max_tokens must be"),
        ({"invalid_utf8": "ignore"}, "invalid_utf8 must be one of replace, skip, fail"),
        ({"tokenizer": "bert"}, "'bert' is not known"),
        ({"suffixes": []}, "name at least one file ending"),
        ({"val_fraction": 1e-9}, "none falls into val"),
    ],
)
def test_wrong_options_leave_nothing(options: dict[str, Any], message: str, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("x")
    refused(tmp_path, message, tmp_path / "a.txt", **options)


BAD_LINES = [
    b'{"text": "good one"}\n',
    b'{"text": "bad \xff byte"}\n',
    b'{"text": "lone \\ud800 surrogate"}\n',
    b'{"text": "broken\n',
    b'{"text": "pair \\ud83d\\ude00 is fine"}',
]


@pytest.mark.parametrize("policy", ["replace", "skip"])
def test_invalid_text_policy_is_obeyed_and_counted(policy: str, tmp_path: Path) -> None:
    # case C05
    (tmp_path / "a.jsonl").write_bytes(b"".join(BAD_LINES))
    lines: list[str] = []
    out = tmp_path / "out"
    report = run(tmp_path / "a.jsonl", out, invalid_utf8=policy, log=lines.append)
    kept = ["good one", "pair \U0001f600 is fine"]
    if policy == "replace":
        kept[1:1] = ["bad \ufffd byte", "lone \ufffd surrogate"]
        assert (report.repaired, report.skipped) == (2, {"broken_json": 1})
    else:
        assert (report.repaired, report.skipped) == (0, {"invalid_utf8": 2, "broken_json": 1})
    assert documents(out / "train") == kept
    for line, problem in ((2, "invalid UTF-8"), (3, "lone surrogate"), (4, "broken JSON")):
        assert any(f"a.jsonl:{line}: {problem}" in message for message in lines)


@pytest.mark.parametrize(
    ("line", "problem"), [(1, "invalid UTF-8"), (2, "lone surrogate"), (3, "broken JSON")]
)
def test_invalid_text_can_stop_the_job(line: int, problem: str, tmp_path: Path) -> None:
    # case C05
    (tmp_path / "a.jsonl").write_bytes(BAD_LINES[0] + BAD_LINES[line])
    refused(tmp_path, rf"a\.jsonl:2: {problem}", tmp_path / "a.jsonl", invalid_utf8="fail")


def test_invalid_bytes_of_a_text_file(tmp_path: Path) -> None:
    # case C05
    (tmp_path / "a.txt").write_bytes(b"line one\nline \xfftwo\n")
    (tmp_path / "b.txt").write_text("fine")
    report = run(tmp_path, tmp_path / "replace")
    assert documents(tmp_path / "replace" / "train") == ["line one\nline \ufffdtwo\n", "fine"]
    assert report.repaired == 1
    report = run(tmp_path, tmp_path / "skip", invalid_utf8="skip")
    assert documents(tmp_path / "skip" / "train") == ["fine"]
    assert report.skipped == {"invalid_utf8": 1}
    refused(tmp_path, r"a\.txt:2: invalid UTF-8", tmp_path / "a.txt", invalid_utf8="fail")


def test_only_the_first_problems_are_logged(tmp_path: Path) -> None:
    lines: list[str] = []
    records: list[Any] = [{"text": "x"}, *[{"text": ""}] * 50]
    report = run(jsonl(tmp_path / "a.jsonl", records), tmp_path / "out", log=lines.append)
    assert report.skipped == {"empty": 50}
    assert len(lines) < 15
    assert "[prepare] further problems are only counted" in lines


@pytest.mark.parametrize("kind", ["txt", "jsonl"])
def test_long_documents_come_in_pieces_but_tokenise_whole(kind: str, tmp_path: Path) -> None:
    text = "".join(f"line {i} é of the text,\n    indented\n\n" for i in range(60_000))
    path = tmp_path / f"a.{kind}"
    if kind == "txt":
        path.write_text(text)
    else:
        jsonl(path, [{"text": text}])
    pieces = encode.pieces_of(text, load_tokenizer("gpt2"))
    assert "".join(pieces) == text
    assert max(map(len, pieces)) <= 65_536
    run(path, tmp_path / "out")
    assert tokens(tmp_path / "out" / "train") == [*load_tokenizer("gpt2").encode(text), EOS]


def test_line_ends_are_kept(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"one\r\ntwo\rthree\n")
    run(tmp_path / "a.txt", tmp_path / "out")
    assert documents(tmp_path / "out" / "train") == ["one\r\ntwo\rthree\n"]


def test_validation_split_is_by_document_and_stable(tmp_path: Path) -> None:
    texts = [f"document number {i}" for i in range(400)]
    first = jsonl(tmp_path / "a.jsonl", [{"text": t} for t in texts])
    report = run(first, tmp_path / "a", val_fraction=0.25)
    train, val = documents(tmp_path / "a" / "train"), documents(tmp_path / "a" / "val")
    assert sorted(train + val) == sorted(texts)
    assert not set(train) & set(val)
    assert 60 < len(val) < 140
    assert (report.documents, report.val_documents) == (400, len(val))
    assert report.val_tokens == len(tokens(tmp_path / "a" / "val"))
    # Neither the order nor other documents move a document to the other side.
    second = jsonl(tmp_path / "b.jsonl", [{"text": t} for t in ["new", *reversed(texts)]])
    run(second, tmp_path / "b", val_fraction=0.25)
    assert set(val) <= set(documents(tmp_path / "b" / "val")) <= {*val, "new"}


@pytest.mark.parametrize("budget", range(2, 14))
def test_token_budget_is_kept_with_whole_endings(budget: int, tmp_path: Path) -> None:
    # case C07
    texts = ["a b c", "d", "e f g h"]
    path = jsonl(tmp_path / "a.jsonl", [{"text": t} for t in texts])
    report = run(path, tmp_path / "out", max_tokens=budget)
    ids = tokens(tmp_path / "out" / "train")
    encode = load_tokenizer("gpt2").encode
    whole = [i for text in texts for i in [*encode(text), EOS]]
    # One token cannot hold a document and its EOS, so it stays unused.
    assert min(budget, len(whole)) - 1 <= len(ids) <= budget
    assert ids[-1] == EOS
    assert ids[:-1] == whole[: len(ids) - 1]
    assert ids.count(EOS) == report.documents


def test_token_budget_cuts_a_long_document(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("word " * 100_000)
    report = run(tmp_path / "a.txt", tmp_path / "out", max_tokens=70_000)
    ids = tokens(tmp_path / "out" / "train")
    assert (len(ids), ids.count(EOS), report.documents) == (70_000, 1, 1)


def test_output_does_not_depend_on_batches_and_repeats(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = jsonl(tmp_path / "a.jsonl", [{"text": f"text {i} " * i} for i in range(1, 60)])
    options: dict[str, Any] = {"val_fraction": 0.3, "max_tokens": 4000, "shard_size_tokens": 999}
    run(path, tmp_path / "a", **options)
    monkeypatch.setattr(ingest, "_BATCH_TEXTS", 3)
    run(path, tmp_path / "b", **options)
    assert tree(tmp_path / "a" / "train") == tree(tmp_path / "b" / "train")
    assert tree(tmp_path / "a" / "val") == tree(tmp_path / "b" / "val")


def test_finished_output_is_recognised(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("x y z")
    out = tmp_path / "out"
    first = run(tmp_path / "a.txt", out)
    before = tree(out)
    lines: list[str] = []
    again = run(tmp_path / "a.txt", out, log=lines.append)
    assert again.already_prepared and not first.already_prepared
    assert again.tokens == first.tokens
    assert "already prepared" in lines[0]
    with pytest.raises(UserError, match=r"differs in: shard_size_tokens\).*--force"):
        run(tmp_path / "a.txt", out, shard_size_tokens=5)
    (tmp_path / "a.txt").write_text("changed")
    with pytest.raises(UserError, match=r"differs in: source files\)"):
        run(tmp_path / "a.txt", out)
    assert tree(out) == before
    assert run(tmp_path / "a.txt", out, force=True).already_prepared is False
    assert documents(out / "train") == ["changed"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.txt", "out"]


def test_damaged_output_is_not_taken_for_finished(tmp_path: Path) -> None:
    # case C09
    (tmp_path / "a.txt").write_text("x y z")
    run(tmp_path / "a.txt", tmp_path / "out")
    os.truncate(tmp_path / "out" / "train" / "tokens_00000.bin", 130)
    with pytest.raises(UserError, match="truncated.*--force"):
        run(tmp_path / "a.txt", tmp_path / "out")
    run(tmp_path / "a.txt", tmp_path / "out", force=True)
    assert documents(tmp_path / "out" / "train") == ["x y z"]


def test_foreign_folder_is_never_replaced(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("x")
    home = tmp_path / "home"
    home.mkdir()
    (home / "precious").write_text("y")
    for target in (home, home / "precious"):
        with pytest.raises(UserError, match="no readable output of prepare"):
            run(tmp_path / "a.txt", target, force=True)
    assert (home / "precious").read_text() == "y"


def test_failure_with_force_keeps_the_old_output(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("x")
    run(tmp_path / "a.txt", tmp_path / "out")
    (tmp_path / "a.txt").write_text("")
    with pytest.raises(UserError, match="no document"):
        run(tmp_path / "a.txt", tmp_path / "out", force=True)
    assert documents(tmp_path / "out" / "train") == ["x"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.txt", "out"]


def command(*arguments: Any) -> Result:
    app = typer.Typer()
    app.command()(prepare_command)
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


@pytest.mark.parametrize("rest", [("--only", "pack"), ()])
def test_a_forced_read_wins_over_equal_output(rest: tuple[str, ...], tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("x y z")
    out = tmp_path / "out"
    shard = out / "train" / "tokens_00000.bin"
    assert command(tmp_path / "a.txt", "--out", out).exit_code == 0
    whole = tree(out)
    # Of the right length, so it is taken for whole: what --force is there for.
    damaged = shard.read_bytes()[:-4] + b"\7\0\7\0"
    shard.write_bytes(damaged)
    assert "already prepared" in command(tmp_path / "a.txt", "--out", out).output
    assert command(tmp_path / "a.txt", "--out", out, "--only", "read", "--force").exit_code == 0
    assert shard.read_bytes() == damaged
    other = command(tmp_path / "a.txt", "--out", out, "--shard-size-tokens", 2)
    assert isinstance(other.exception, UserError)
    assert "half-done run with other settings (differs in: shard_size" in str(other.exception)
    done = command(tmp_path / "a.txt", "--out", out, *rest)
    assert done.exit_code == 0 and "already prepared" not in done.output
    assert tree(out) == whole


def test_the_seeds_formats_and_a_nested_field_convert_and_train(tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    from pyarrow import table

    texts = [" ".join(f"word{i * j % 97}" for j in range(2, 40)) for i in range(1, 12)]
    ids = [i for text in texts for i in [*load_tokenizer("gpt2").encode(text), EOS]]
    for name in ("torch", "raw_uint32", "parquet"):
        (tmp_path / name).mkdir()
    cut = ids.index(EOS, 300) + 1
    for number, some in enumerate((ids[:cut], ids[cut:])):
        torch.save(torch.tensor(some), tmp_path / "torch" / f"shard_{number:05d}.bin")
    np.array(ids, "<u4").tofile(tmp_path / "raw_uint32" / "records.bin")
    rows = table({"doc": [{"body": text, "n": 1} for text in texts]})
    parquet.write_table(rows, tmp_path / "parquet" / "table.parquet")

    curves = []
    for kind in ("torch", "raw_uint32", "parquet"):
        out, config = tmp_path / f"from_{kind}", tmp_path / f"{kind}.yaml"
        config.write_text(
            f"prepare: {{out: {out}}}\nsources:\n"
            f"  - {{name: only, kind: {kind}, paths: {tmp_path / kind}, field: doc.body}}\n"
        )
        assert command(config, "--verify").exit_code == 0
        assert tokens(out / "train") == ids
        curves.append(losses_of_training_on(out / "train", tmp_path / f"runs_{kind}"))
    # The tensors can be trained on as they are: conversion changes nothing.
    curves.append(losses_of_training_on(tmp_path / "torch", tmp_path / "runs_direct"))
    assert len(curves[0]) == 8
    assert all(curve == curves[0] for curve in curves)


def losses_of_training_on(data: Path, folder: Path) -> list[tuple[int, float, float]]:
    folder.mkdir()
    settings = runs.config(
        folder, data_path=str(data), max_steps=4, vocab_size=50257, model={"vocab_size": 50257}
    )
    assert Pretrainer(settings).train() == 0
    return runs.losses(folder / "run")


def test_json_tokenizer_of_a_large_vocabulary_gives_uint32(tmp_path: Path) -> None:
    # case C01
    tokenizers = pytest.importorskip("tokenizers")
    words = {f"w{i}": i for i in range(69_999)} | {"</s>": 69_999}
    built = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="w0"))
    built.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    built.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "a.txt").write_text("w1 w65535 w65536 w69998")
    run(tmp_path / "a.txt", tmp_path / "out", tokenizer=str(tmp_path / "tokenizer.json"))
    shard = open_shards(tmp_path / "out" / "train").shards[0]
    assert shard.header.dtype == np.dtype("<u4")
    assert shard.tokens().tolist() == [1, 65535, 65536, 69998, 69999]
    with pytest.raises(UserError, match="token 1 has id 65535"):
        PretrainDataset(tmp_path / "out" / "train", 2, 50257)


def test_progress_bar_shows_the_rates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.txt").write_text("x y z")
    screen = io.StringIO()
    terminal = progress_module.Console(file=screen, force_terminal=True, width=120)
    monkeypatch.setattr(progress_module, "Console", lambda stderr: terminal)
    run(tmp_path / "a.txt", tmp_path / "out", progress=True)
    shown = screen.getvalue()
    assert all(unit in shown for unit in ("documents/s", "MB/s", "tokens/s", "100%"))
    monkeypatch.undo()
    with contextlib.redirect_stderr(io.StringIO()) as plain:
        run(tmp_path / "a.txt", tmp_path / "plain", progress=True)
    assert plain.getvalue() == ""


def test_command_prints_a_summary(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("x y z")
    (tmp_path / "b.txt").write_text("")
    out = tmp_path / "out"
    result = command(tmp_path, "--out", out, "--suffix", ".txt")
    assert result.exit_code == 0, result.output
    for shown in ("documents", "bytes per token", "1 empty", "shards"):
        assert shown in result.output
    assert documents(out / "train") == ["x y z"]
    result = command(tmp_path / "absent", "--out", tmp_path / "o")
    assert result.exit_code != 0
    assert isinstance(result.exception, UserError)
    text = command("--help").output
    assert "mamba3-lite prepare notes/" in text[text.index("Examples:") :]
