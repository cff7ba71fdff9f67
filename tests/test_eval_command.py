"""The command eval: multiple choice, records and their place in the report, one line an error."""

import hashlib
import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch

from mamba3_lite.cli import main
from mamba3_lite.data.prepare import prepare
from mamba3_lite.errors import UserError
from mamba3_lite.evaluation import choices
from mamba3_lite.evaluation.choices import Question, read_questions, share
from mamba3_lite.evaluation.record import headlines, read_records, write_record
from mamba3_lite.evaluation.subject import Subject, load_subject
from tests.eval_runs import EvalRun, sentences, trained_run, write_jsonl

QUESTIONS = [
    {"context": "Ada found a red stone in the", "choices": ["garden.", "key 🔑"], "answer": 0},
    {"context": "Ada found twelve ", "choices": ["eggs", "stone", "map by"], "answer": 0},
    {"question": "Who found it?", "choices": ["Émile", "小明", "Zoë"], "answer": 2},
    {"context": "", "choices": ["Ada found", "dna fuoda"], "answer": 0},
]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> EvalRun:
    return trained_run(tmp_path_factory.mktemp("eval"))


@pytest.fixture(scope="module")
def subject(run: EvalRun) -> Subject:
    return load_subject(run.folder, device="cpu")


def write_questions(path: Path, rows: list) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    return path


def says(arguments: list[object], capsys: pytest.CaptureFixture[str]) -> str:
    """What the command prints when all is well."""
    with pytest.raises(SystemExit) as stop:
        main(["eval", *map(str, arguments)])
    captured = capsys.readouterr()
    assert not stop.value.code, captured.err
    return captured.out


def refuses(arguments: list[object], capsys: pytest.CaptureFixture[str]) -> str:
    """The one line that a user's mistake gives."""
    with pytest.raises(SystemExit) as stop:
        main(["eval", *map(str, arguments)])
    assert stop.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ")
    return line


# Multiple choice ---------------------------------------------------------------------------------


def test_a_choice_is_scored_behind_its_context(subject, tmp_path):
    questions = read_questions(write_questions(tmp_path / "q.jsonl", QUESTIONS))
    assert questions[2].context == "Question: Who found it?\nAnswer:"
    result = choices.measure(subject, questions, name="q")
    tokenizer, model = subject.tokenizer, subject.scorer.model

    def log_p(before: str, choice: str) -> float:
        first = tokenizer.encode(before) or [tokenizer.eos_id]
        ids = torch.tensor(first + tokenizer.encode(choice))
        with torch.no_grad():
            table = torch.log_softmax(model(ids[None, :-1])[0].double(), -1)
        return float(table.gather(1, ids[1:, None])[len(first) - 1 :].sum())

    # By hand: the white space between belongs to the choice.
    splits = [
        ("Ada found a red stone in the", [" garden.", " key 🔑"]),
        ("Ada found twelve", [" eggs", " stone", " map by"]),
        ("Question: Who found it?\nAnswer:", [" Émile", " 小明", " Zoë"]),
        ("", ["Ada found", "dna fuoda"]),
    ]
    right = normalised = 0
    for (before, texts), question in zip(splits, questions, strict=True):
        scores = np.array([log_p(before, text) for text in texts])
        lengths = [len(choice) for choice in question.choices]
        right += int(scores.argmax()) == question.answer
        normalised += int((scores / lengths).argmax()) == question.answer
    assert result["accuracy"]["value"] == right / 4
    assert result["accuracy_normalised"]["value"] == normalised / 4
    assert result["chance"] == pytest.approx((1 / 2 + 1 / 3 + 1 / 3 + 1 / 2) / 4)
    assert right >= 2, "the model knows its sentences"


def test_a_longer_choice_may_win_per_character(subject, monkeypatch):
    scores = [(-4.0, False), (-6.0, False), (-1.0, True), (-2.0, False)]
    monkeypatch.setattr(choices, "loglikelihoods", lambda *_, **__: scores)
    questions = [Question("", ("ab", "abcdef"), 1), Question("", ("ab", "abc"), 0)]
    result = choices.measure(subject, questions, name="q")
    assert result["accuracy"]["value"] == 0.5 and result["accuracy_normalised"]["value"] == 1


def test_choices_do_not_depend_on_the_batch(run, subject):
    questions = [
        Question(text[:cut], (text[cut:], text[:cut], "x"), 0)
        for text in sentences(12, seed=3, most=9)
        for cut in (len(text) // 2,)
    ]
    results = []
    for how in ({"batch_size": 1}, {"batch_size": 5, "batch_tokens": 64}, {}):
        other = load_subject(run.folder, device="cpu", **how)
        found = [other.pair(q.context, choice) for q in questions for choice in q.choices]
        results.append(choices.loglikelihoods(other.scorer, found, name="x"))
    for result in results[1:]:
        np.testing.assert_allclose(
            [score for score, _ in result], [score for score, _ in results[0]], rtol=1e-5
        )
        assert [greedy for _, greedy in result] == [greedy for _, greedy in results[0]]


def test_shares_have_sound_intervals():
    half = share([True, False] * 50)
    assert half["value"] == 0.5 and half["standard_error"] == pytest.approx(0.5 / 99**0.5)
    # Wilson, 1927: 50 of 100.
    assert half["low"] == pytest.approx(0.40383, abs=1e-5)
    assert half["high"] == pytest.approx(0.59617, abs=1e-5)
    every = share([True] * 10)
    assert every["high"] == pytest.approx(1) and every["low"] == pytest.approx(0.7225, abs=1e-4)
    assert share([False])["standard_error"] is None


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("{", "q.jsonl:2: broken JSON"),
        ("[]", "q.jsonl:2: not a JSON object"),
        ('{"choices": ["a", "b"], "answer": 0}', 'needs one text, "context" or "question"'),
        ('{"context": "c", "question": "q", "choices": ["a", "b"], "answer": 0}', "needs one text"),
        ('{"context": "c", "choices": ["a", " "], "answer": 0}', "none of them empty"),
        ('{"context": "c", "choices": ["a"], "answer": 0}', "two texts or more"),
        ('{"context": "c", "choices": ["a", "b"], "answer": 2}', "0 to 1, got 2"),
        ('{"context": "c", "choices": ["a", "b"], "answer": "b"}', 'got "b"'),
        ('{"context": "c", "choices": ["a", "b"], "answer": true}', "got true"),
        ("\udcff", "q.jsonl:2: not UTF-8"),
    ],
)
def test_a_line_that_is_no_question_is_named(tmp_path, line, complaint):
    path = tmp_path / "q.jsonl"
    good = json.dumps(QUESTIONS[0])
    path.write_text(f"{good}\n{line}\n", "utf-8", errors="surrogateescape")
    with pytest.raises(UserError, match=re.escape(complaint)):
        read_questions(path)


# Records -----------------------------------------------------------------------------------------


def test_a_run_is_evaluated_and_its_report_lists_it(run, tmp_path, capsys):
    questions = write_questions(tmp_path / "q.jsonl", QUESTIONS)
    arguments = [run.folder, "--perplexity", "--documents", "--window", 16, "--choices", questions]
    out = says([*arguments, "--limit", 4], capsys)
    assert "val, windows of 16: " in out and "val, whole documents: " in out
    records, damaged = read_records(run.folder)
    assert not damaged and [record["kind"] for record in records] == ["perplexity", "choices"]
    weights = run.folder / "model_step_60.safetensors"
    for record in records:
        checkpoint = record["checkpoint"]
        assert checkpoint["file"] == weights.name and checkpoint["opt_step"] == 60
        assert record["settings"]["device"] == "cpu" and record["environment"]["torch"]
        assert all(line in out for line in headlines(record))
    assert records[0]["checkpoint"]["sha256"] == hashlib.sha256(weights.read_bytes()).hexdigest()
    # The same documents, so the same tokens and bytes, however they are cut.
    windows, whole = records[0]["results"]
    assert windows["tokens"] == whole["tokens"] and windows["bytes"] == whole["bytes"]
    assert (whole["documents"], windows["stride"], whole["window"]) == (4, 16, None)

    (run.folder / "eval" / "tasks-20200101T000000Z.json").write_text("{}")
    with pytest.raises(SystemExit) as stop:
        main(["report", str(run.folder), "--out", str(tmp_path / "report")])
    assert not stop.value.code
    page = (tmp_path / "report" / "index.html").read_text("utf-8")
    section = page.split("<h2>Evaluations</h2>")[1].split("</section>")[0]
    assert "whole documents: " in section and "normalised" in section
    assert "damaged: tasks-20200101T000000Z.json." in section


def test_an_older_checkpoint_and_another_place(run, tmp_path, capsys):
    text = tmp_path / "notes.txt"
    text.write_text("Zoë found an old map by the river.\n", "utf-8")
    out = tmp_path / "results" / "here"
    says([run.folder, "--text", text, "--opt-step", 30, "--out", out], capsys)
    latest = json.loads((out / "latest.json").read_text())
    record = json.loads((out / latest["perplexity"]).read_text())
    assert record["checkpoint"]["opt_step"] == 30
    (result,) = record["results"]
    assert result["bytes"] == len(text.read_bytes()) and result["documents"] == 1
    assert result["window"] == 24, "that of training"
    assert (out / latest["perplexity"]).with_suffix(".png").is_file()


def test_no_record_is_overwritten_and_the_newest_is_listed(tmp_path):
    record = {
        "kind": "tasks", "time": "2026-12-01T18:00:00+00:00", "checkpoint": {"opt_step": 1},
        "results": {"tasks": {"a": {"metrics": {"acc": {"value": 0.5, "standard_error": None}}}}},
    }  # fmt: skip
    folder = tmp_path / "eval"
    names = [write_record(folder, {**record, "n": n}).name for n in range(3)]
    assert len(set(names)) == 3 and names[0] == "tasks-20261201T180000Z.json"
    later = write_record(folder, {**record, "time": "2026-12-01T18:00:01+00:00", "n": 3})
    early = write_record(folder, {**record, "time": "2026-12-01T17:59:59+00:00", "n": -1})
    records, damaged = read_records(tmp_path)
    assert [record["n"] for record in records] == [-1, 0, 1, 2, 3] and not damaged
    assert json.loads((folder / "latest.json").read_text()) == {"tasks": later.name}
    assert headlines(records[0]) == ["a: acc 0.5000"] and early.is_file()
    assert not list(folder.glob(".*"))


# A user's mistakes -------------------------------------------------------------------------------


def test_mistakes_about_the_model_and_the_options(run, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for arguments, complaint in (
        ([run.folder], "give --perplexity, --tasks or --choices"),
        ([tmp_path / "none", "--perplexity"], "is not a folder"),
        ([tmp_path, "--perplexity"], "holds no checkpoint"),
        ([run.folder, "--perplexity", "--opt-step", 31], "checkpoint of step 31"),
        ([run.folder, "--perplexity", "--device", "cuda"], "no CUDA device"),
        ([run.folder, "--perplexity", "--dtype", "float8"], "dtype 'float8' is unknown"),
        ([run.folder, "--perplexity", "--batch-tokens", 0], "--batch-tokens must be 1 or more"),
        ([run.folder, "--perplexity", "--window", 0], "--window must be 1 or more"),
        ([run.folder, "--perplexity", "--out", run.tokenizer], "choose another folder (--out)"),
        ([run.folder, "--choices", tmp_path / "q.jsonl"], "No such file"),
    ):
        assert complaint in refuses(arguments, capsys), arguments


def test_mistakes_about_data(run, tmp_path, capsys):
    corpus = write_jsonl(tmp_path / "texts.jsonl", sentences(5))
    quiet = {"workers": 1, "log": lambda _: None, "progress": False}
    prepare([corpus], tmp_path / "gpt2", **quiet)
    other = json.loads(run.tokenizer.read_text("utf-8"))
    other["model"]["merges"].pop()
    (tmp_path / "other.json").write_text(json.dumps(other), "utf-8")
    prepare([corpus], tmp_path / "other", tokenizer=str(tmp_path / "other.json"), **quiet)
    for arguments, complaint in (
        (["--data", tmp_path / "none"], "does not exist"),
        (["--data", tmp_path / "gpt2" / "train"], "50,257 ids, more than the model's 300"),
        (["--data", tmp_path / "other" / "train"], "another tokenizer"),
        (["--text", corpus, "--tokenizer", "gpt2"], "50,257 ids, more than the model's 300"),
        (["--text", corpus, "--text-field", "body"], "no record has the field 'body'"),
    ):
        assert complaint in refuses([run.folder, *arguments], capsys), arguments


@pytest.mark.parametrize(
    ("name", "content", "complaint"),
    [
        ("a.txt", b"", "a.txt: no text"),
        ("a.txt", b" \n\t", "a.txt: no text"),
        ("a.jsonl", b"\n", "holds no text"),
        ("a.jsonl", b'{"text": "good"}\n{"text": " "}\n', "a.jsonl:2: no text"),
        ("a.jsonl", b'{"text": "good"}\nnone\n', "a.jsonl:2: broken JSON"),
        ("a.jsonl", b'{"text": "good"}\n{"text": 3}\n', "a.jsonl:2: field 'text' is int"),
        ("a.txt", "caf\xe9\n".encode("latin-1"), "a.txt:1: invalid UTF-8"),
        ("a.jsonl", '{"text": "caf\xe9"}\n'.encode("latin-1"), "a.jsonl:1: invalid UTF-8"),
        ("a.txt", b"abc\0def", "a.txt: not text"),
        ("a", None, "a: no such file"),
    ],
)  # fmt: skip
def test_a_text_that_cannot_be_scored_is_named(run, tmp_path, capsys, name, content, complaint):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    before = sorted(run.folder.glob("eval/*"))
    line = refuses([run.folder, "--perplexity", "--text", tmp_path / name], capsys)
    assert complaint in line
    assert sorted(run.folder.glob("eval/*")) == before


def test_a_run_without_validation_data_needs_some(run, tmp_path):
    from mamba3_lite.evaluation.command import _perplexity

    subject = load_subject(run.folder, device="cpu")
    del subject.training["val_data_path"]
    how = {"data": [], "text": [], "text_field": "text", "tokenizer": None, "limit": None}
    how |= {"window": None, "stride": None, "documents": False}
    with pytest.raises(UserError, match="names no validation data"):
        _perplexity(subject, tmp_path, **how)
