"""The model behind lm-evaluation-harness: its answers, local tasks, and the transformers route.

What needs lm-eval itself runs where it is installed; the campaign installs it.
"""

import importlib.util
import json
import os
import re
import subprocess
import sys
import venv
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mamba3_lite.cli import main
from mamba3_lite.errors import UserError
from mamba3_lite.evaluation import choices, harness
from mamba3_lite.evaluation.harness import Answers, harness_class
from mamba3_lite.evaluation.record import read_records
from mamba3_lite.evaluation.subject import Subject, load_subject
from mamba3_lite.export.hf import export_hf
from mamba3_lite.inference.generate import generate
from tests.eval_runs import EvalRun, sentences, trained_run

ROOT = Path(__file__).resolve().parents[1]
needs_harness = pytest.mark.skipif(
    importlib.util.find_spec("lm_eval") is None, reason="lm-eval is not installed"
)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> EvalRun:
    return trained_run(tmp_path_factory.mktemp("eval"))


@pytest.fixture(scope="module")
def subject(run: EvalRun) -> Subject:
    return load_subject(run.folder, device="cpu")


# Answers -----------------------------------------------------------------------------------------


def pairs() -> list[tuple[str, str]]:
    texts = sentences(9, seed=4)
    return [(text[: len(text) // 2], text[len(text) // 2 :]) for text in texts] + [
        ("", "Ada found"), ("Ada  ", "found an old map"), ("   ", "Zoë"), ("Ada", ""),
    ]  # fmt: skip


def test_answers_come_in_the_order_of_the_requests_whatever_the_batch(run):
    asked, texts = pairs(), sentences(7, seed=6) + [""]
    contexts = [(context, {"until": ["."], "max_gen_toks": 9}) for context, _ in asked]
    found = []
    for how in ({"batch_size": 1}, {"batch_size": 4, "batch_tokens": 50}, {}):
        answers = Answers(load_subject(run.folder, device="cpu", **how))
        found.append(
            (answers.loglikelihood(asked), answers.rolling(texts), answers.generate(contexts))
        )
    for pair_scores, text_scores, generated in found[1:]:
        for got, want in zip(pair_scores, found[0][0], strict=True):
            assert got == (pytest.approx(want[0], rel=1e-5), want[1])
        assert text_scores == pytest.approx(found[0][1], rel=1e-5)
        assert generated == found[0][2]
    answers = Answers(load_subject(run.folder, device="cpu"))
    alone = [answers.generate([context])[0] for context in contexts]
    assert alone == found[0][2] and len(set(alone)) > 5
    scores = [answers.loglikelihood([pair])[0][0] for pair in asked]
    assert scores == pytest.approx([score for score, _ in found[0][0]], rel=1e-5)
    assert [answers.rolling([t])[0] for t in texts] == pytest.approx(found[0][1], rel=1e-5)
    assert found[0][0][-1] == (0, True) and found[0][1][-1] == 0, "nothing is certain"


def test_a_rolling_text_is_scored_whole_whatever_its_length(subject):
    text = " ".join(sentences(60, seed=8))
    ids = [subject.tokenizer.eos_id, *subject.tokenizer.encode(text)]
    assert len(ids) > 40 * subject.scorer.model.cfg.max_seq_len
    with torch.no_grad():
        logits = subject.scorer.model(torch.tensor([ids[:-1]]))[0].double()
    want = torch.log_softmax(logits, -1).gather(1, torch.tensor(ids[1:])[:, None]).sum()
    assert Answers(subject).rolling([text]) == [pytest.approx(float(want), rel=1e-6)]


def test_greedy_continuations_are_recognised(subject):
    context = "Ada found a red"
    encoded = subject.tokenizer.encode(context)
    (ids,) = generate(subject.scorer.model, [encoded], max_new_tokens=12, temperature=0)
    # A text that was cut inside a word may be encoded otherwise.
    texts = [(n, subject.tokenizer.decode(ids[:n])) for n in range(12, 3, -1)]
    count, text = next(
        (n, text)
        for n, text in texts
        if subject.tokenizer.encode(context + text) == encoded + ids[:n]
    )
    answers = Answers(subject)
    (_, greedy), (_, other) = answers.loglikelihood([(context, text), (context, text + "xq")])
    assert greedy and not other
    assert answers.generate([(context, {"max_gen_toks": count, "do_sample": False})]) == [text]


def test_generation_stops_at_the_first_of_its_ends(subject, monkeypatch):
    context = "Ada found a red stone in the garden. Ada"
    answers, steps = Answers(subject), []
    (free,) = answers.generate([(context, {"max_gen_toks": 60})])
    stops = [free[12:14], "no such text", free[5:8]]
    want = min((free.partition(stop)[0] for stop in stops), key=len)
    plain = harness.stream
    monkeypatch.setattr(
        harness, "stream", lambda *a, **k: (steps.append(1) or s for s in plain(*a, **k))
    )
    assert answers.generate([(context, {"until": stops, "max_tokens": 60})]) == [want]
    assert answers.generate([(context, {"until": stops[0], "max_new_tokens": 60})])[0] in free
    assert 0 < len(steps) < 60, "no row goes on for nothing"
    # Different arguments never share a batch, and all come back in order.
    mixed = [(context, {"max_gen_toks": n}) for n in (3, 1, 3)]
    first, second, third = answers.generate(mixed)
    assert first == third and first.startswith(second) and len(second) < len(first)


def test_sampling_is_done_only_when_asked_for(subject):
    answers, context = Answers(subject), "Zoë found"
    hot = {"temperature": 3.0, "max_gen_toks": 20}
    (greedy,) = answers.generate([(context, {"max_gen_toks": 20})])
    assert answers.generate([(context, {**hot, "do_sample": False})]) == [greedy]
    assert answers.generate([(context, {**hot, "do_sample": True})]) != [greedy]
    with pytest.raises(UserError, match="generation_kwargs 'num_beams': not supported"):
        answers.generate([(context, {"num_beams": 4})])


def test_bfloat16_generates_with_narrow_weights(run):
    answers = Answers(load_subject(run.folder, device="cpu", dtype="bfloat16"))
    assert answers._decoded.embed.weight.dtype == torch.bfloat16
    assert answers._decoded.layers[0].A.is_complex()
    assert answers.subject.scorer.model.embed.weight.dtype == torch.float32
    assert answers.generate([("Ada found", {"max_gen_toks": 5})])[0]


def test_without_lm_eval_the_extra_is_named(run, capsys, monkeypatch):
    for name in ("lm_eval", "lm_eval.api", "lm_eval.api.model"):
        monkeypatch.setitem(sys.modules, name, None)
    harness_class.cache_clear()
    with pytest.raises(SystemExit) as stop:
        main(["eval", str(run.folder), "--tasks", "arc_easy"])
    harness_class.cache_clear()
    assert stop.value.code == 2
    assert 'run pip install "mamba3-lite[eval]"' in capsys.readouterr().err


# The harness itself ------------------------------------------------------------------------------

CHOICES = """\
task: local_choices
dataset_path: json
dataset_kwargs: {data_files: QUESTIONS}
test_split: train
output_type: multiple_choice
doc_to_text: "{{context}}"
doc_to_choice: "{{choices}}"
doc_to_target: answer
metric_list: [{metric: acc}, {metric: acc_norm}]
"""
TEXTS = """\
task: local_texts
dataset_path: json
dataset_kwargs: {data_files: TEXTS}
test_split: train
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{text}}"
metric_list: [{metric: word_perplexity}, {metric: bits_per_byte}]
"""
CONTINUED = """\
task: local_continued
dataset_path: json
dataset_kwargs: {data_files: CONTINUED}
test_split: train
output_type: generate_until
doc_to_text: "{{context}}"
doc_to_target: "{{target}}"
generation_kwargs: {until: ["."], max_gen_toks: 12, do_sample: false}
metric_list: [{metric: exact_match}]
"""
TASKS = ["local_choices", "local_texts", "local_continued"]


@pytest.fixture(scope="module")
def tasks(subject: Subject, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Three task files and their data, and no network."""
    folder = tmp_path_factory.mktemp("tasks")
    halves = [(text[:30], text[30:]) for text in sentences(40, seed=7) if len(text) > 60]
    generated = Answers(subject).generate(
        [(a, {"until": ["."], "max_gen_toks": 12}) for a, _ in halves]
    )
    data = {
        "QUESTIONS": [
            {"context": a, "choices": [halves[n - 1][1], b, b[::-1]], "answer": 1}
            for n, (a, b) in enumerate(halves)
        ],
        "TEXTS": [{"text": text} for text in sentences(12, seed=2)],
        "CONTINUED": [
            {"context": a, "target": text if n % 3 else "something else"}
            for n, ((a, _), text) in enumerate(zip(halves, generated, strict=True))
        ],
    }  # fmt: skip
    for name, rows in data.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows), "utf-8")
    for name, content in zip(TASKS, (CHOICES, TEXTS, CONTINUED), strict=True):
        path = re.sub(r"data_files: (\w+)", rf"data_files: {folder}/\1.jsonl", content)
        (folder / f"{name}.yaml").write_text(path, "utf-8")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_HUB_OFFLINE", "1")
        patch.setenv("HF_DATASETS_OFFLINE", "1")
        patch.setenv("HF_HOME", str(folder / "hf"))
        yield folder


def own_choices(subject: Subject, tasks: Path, limit: int | None = None) -> dict[str, Any]:
    """Our own multiple choice, with the space between that the harness always puts."""
    questions = choices.read_questions(tasks / "QUESTIONS.jsonl", limit=limit)
    spaced = [question._replace(context=question.context + " ") for question in questions]
    return choices.measure(subject, spaced, name="q")


@needs_harness
def test_local_tasks_run_offline_and_are_kept(run, subject, tasks, capsys):
    arguments = ["eval", str(run.folder), "--tasks", "local_*", "--include-path", str(tasks)]
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    captured = capsys.readouterr()
    assert not stop.value.code, captured.err
    assert "local_choices: acc 0." in captured.out and "acc_norm" in captured.out
    records, _ = read_records(run.folder)
    found = records[-1]["results"]["tasks"]
    assert sorted(found) == sorted(TASKS) and records[-1]["results"]["lm_eval"]
    own = own_choices(subject, tasks)
    metrics = found["local_choices"]["metrics"]
    assert found["local_choices"]["examples"] == own["questions"]
    for ours, theirs in (("accuracy", "acc"), ("accuracy_normalised", "acc_norm")):
        assert metrics[theirs]["value"] == pytest.approx(own[ours]["value"])
        assert metrics[theirs]["standard_error"] == pytest.approx(own[ours]["standard_error"])
    texts = [json.loads(line)["text"] for line in (tasks / "TEXTS.jsonl").read_text().splitlines()]
    nats = -sum(Answers(subject).rolling(texts))
    bits = nats / np.log(2) / sum(len(text.encode()) for text in texts)
    assert found["local_texts"]["metrics"]["bits_per_byte"]["value"] == pytest.approx(bits)
    rows = (tasks / "CONTINUED.jsonl").read_text().splitlines()
    wrong = sum("something else" in row for row in rows)
    right = found["local_continued"]["metrics"]["exact_match"]["value"]
    assert right == pytest.approx(1 - wrong / len(rows)) and 0 < wrong < len(rows)


@needs_harness
def test_mistakes_about_tasks_are_named(subject, tasks, tmp_path):
    def refused(*names: str, include: Path | None = tasks) -> str:
        with pytest.raises(UserError) as problem:
            harness.measure(subject, names, include_path=None if include is None else str(include))
        return str(problem.value)

    assert "task 'local_choice' is not known; near to it are local_choices" in refused(
        "local_choice"
    )
    assert "--include-path" in refused("local_texts", include=tmp_path / "none")
    broken = (tasks / "local_texts.yaml").read_text().replace("TEXTS.jsonl", "NONE.jsonl")
    (tmp_path / "broken.yaml").write_text(broken.replace("local_texts", "broken"))
    assert "task 'broken' cannot be loaded" in refused("broken", include=tmp_path)
    assert "task 'arc_easy' cannot be loaded" in refused("arc_easy", include=None)


@needs_harness
def test_the_registered_model_is_found_by_its_name(run, subject, tasks):
    from lm_eval.evaluator import simple_evaluate
    from lm_eval.tasks import TaskManager

    harness_class()
    found = simple_evaluate(
        harness.MODEL_NAME, model_args={"path": str(run.folder)}, batch_size=2, device="cpu",
        tasks=["local_choices"], limit=5, log_samples=False,
        task_manager=TaskManager(include_path=str(tasks), include_defaults=False),
    )  # fmt: skip
    assert found["n-samples"]["local_choices"]["effective"] == 5
    own = own_choices(subject, tasks, limit=5)["accuracy"]["value"]
    assert found["results"]["local_choices"]["acc,none"] == pytest.approx(own)


@needs_harness
@pytest.mark.skipif(
    importlib.util.find_spec("accelerate") is None, reason="accelerate is not installed"
)
def test_three_local_tasks_have_equal_scores_through_transformers(run, tasks, tmp_path):
    from lm_eval.evaluator import simple_evaluate
    from lm_eval.tasks import TaskManager

    folder = export_hf(run.folder, tmp_path / "exported")
    manager = TaskManager(include_path=str(tasks), include_defaults=False)
    harness_class()
    routes = {
        "hf": {"pretrained": str(folder), "trust_remote_code": True, "max_length": 4096},
        harness.MODEL_NAME: {"path": str(folder)},
    }
    found = [
        simple_evaluate(
            name,
            model_args=arguments,
            tasks=TASKS,
            task_manager=manager,
            batch_size=size,
            device="cpu",
            bootstrap_iters=0,
        )  # fmt: skip
        for (name, arguments), size in zip(routes.items(), (3, 5), strict=True)
    ]
    theirs, ours = found
    for task in TASKS:
        for metric, value in theirs["results"][task].items():
            if isinstance(value, float):
                assert ours["results"][task][metric] == pytest.approx(value, rel=1e-5), metric
        for a, b in zip(theirs["samples"][task], ours["samples"][task], strict=True):
            np.testing.assert_equal(len(a["resps"]), len(b["resps"]))
            for (left,), (right,) in zip(a["resps"], b["resps"], strict=True):
                score, *rest = left if isinstance(left, tuple) else [left]
                own, *own_rest = right if isinstance(right, tuple) else [right]
                assert rest == own_rest
                assert own == (score if isinstance(score, str) else pytest.approx(score, rel=1e-5))


@pytest.mark.campaign
def test_all_of_it_with_the_pinned_lm_eval(tmp_path: Path) -> None:
    """An environment on top of this one, so that lm-eval's 45 packages stay out of it."""
    venv.create(tmp_path / "venv", with_pip=True)
    python = tmp_path / "venv" / "bin" / "python"
    (site,) = (tmp_path / "venv").glob("lib/python*/site-packages")
    here = [path for path in sys.path if path.endswith("site-packages")]
    (site / "below.pth").write_text("\n".join(here) + "\n")
    pip = [python, "-m", "pip", "install", "-q", "-c", ROOT / "constraints.txt"]
    subprocess.run([*pip, "lm-eval", "accelerate", "peft"], check=True)
    torch_version = "import torch; print(torch.__version__)"
    done = subprocess.run([python, "-c", torch_version], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == torch.__version__, "installing it must not swap torch"
    tests = subprocess.run(
        [python, "-m", "pytest", __file__, "-q", "-rs", "-p", "no:cacheprovider"],
        cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    assert tests.returncode == 0, tests.stdout + tests.stderr
    assert "skipped" not in tests.stdout and " passed" in tests.stdout
