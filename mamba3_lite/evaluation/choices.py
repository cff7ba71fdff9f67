"""Multiple choice from JSON lines: which choice does the model find likeliest?

A line is an object with ``choices`` (texts), ``answer`` (the place of the right one, from 0), and
either ``context``, a text that is used as it is, or ``question``, which becomes
"Question: ...\\nAnswer:". A space is put before a choice unless there is white space already.
"""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from mamba3_lite.errors import UserError, reading
from mamba3_lite.evaluation.progress import progress_bar
from mamba3_lite.evaluation.scoring import Passage, Scorer
from mamba3_lite.evaluation.subject import Subject

# Of the normal distribution, 95 % lie within so many standard deviations.
_Z95 = 1.959963984540054


class Question(NamedTuple):
    """What stands before the choices, the choices, and the place of the right one."""

    context: str
    choices: tuple[str, ...]
    answer: int


def read_questions(path: str | Path, *, limit: int | None = None) -> list[Question]:
    """The questions of a file, or its first ``limit``.

    Raises:
        UserError: a file that cannot be read, holds no question, or a line that is none.
    """
    with reading(str(path), "check --choices"):
        content = Path(path).read_bytes()
    try:
        lines = content.decode("utf-8-sig").split("\n")
    except UnicodeDecodeError as problem:
        line = content.count(b"\n", 0, problem.start) + 1
        raise UserError(f"{path}:{line}: not UTF-8; convert the file first.") from None
    found = [_question(line, f"{path}:{n}") for n, line in enumerate(lines, 1) if line.strip()]
    if not found[:limit]:
        raise UserError(f"{path} holds no question; write one JSON object a line.")
    return found[:limit]


def _question(line: str, where: str) -> Question:
    try:
        row = json.loads(line)
    except ValueError as problem:
        raise UserError(f"{where}: broken JSON ({problem}); write one object a line.") from None
    if not isinstance(row, dict):
        raise UserError(f"{where}: not a JSON object; write one object a line.")
    given = [name for name in ("context", "question") if isinstance(row.get(name), str)]
    if len(given) != 1:
        raise UserError(f'{where}: needs one text, "context" or "question".')
    choices, answer = row.get("choices"), row.get("answer")
    if not isinstance(choices, list) or not all(isinstance(c, str) and c.strip() for c in choices):
        raise UserError(f'{where}: "choices" must be a list of texts, none of them empty.')
    if len(choices) < 2:
        raise UserError(f'{where}: "choices" needs two texts or more.')
    if type(answer) is not int or not 0 <= answer < len(choices):
        raise UserError(
            f'{where}: "answer" must be the place of the right choice, 0 to {len(choices) - 1}, '
            f"got {json.dumps(answer)}."
        )
    text = row[given[0]]
    context = f"Question: {text}\nAnswer:" if given == ["question"] else text
    return Question(context, tuple(choices), answer)


def loglikelihoods(
    scorer: Scorer, passages: Sequence[Passage], *, name: str
) -> list[tuple[float, bool]]:
    """For each passage (log p in nat of all its scored tokens, whether each was the likeliest)."""
    sums, greedy = np.zeros(len(passages)), np.ones(len(passages), bool)
    total = sum(passage.scored for passage in passages)
    with progress_bar(name, total, unit="tokens") as advance:
        for part in scorer.score(passages, greedy=True):
            assert part.greedy is not None
            sums[part.passage] -= part.losses.sum()
            greedy[part.passage] &= part.greedy.all()
            advance(len(part.ids))
    return list(zip(sums.tolist(), greedy.tolist(), strict=True))


def measure(subject: Subject, questions: Sequence[Question], *, name: str) -> dict[str, Any]:
    """Accuracy by the likeliest choice, and by the likeliest per character; ready for JSON."""
    passages = [
        subject.pair(question.context, _delimited(question.context, choice))
        for question in questions
        for choice in question.choices
    ]
    found = loglikelihoods(subject.scorer, passages, name=name)
    scores = np.array([log_p for log_p, _ in found])
    right, right_normalised, start = [], [], 0
    for question in questions:
        own = scores[start : start + len(question.choices)]
        start += len(question.choices)
        lengths = np.array([len(choice) for choice in question.choices])
        right.append(int(own.argmax()) == question.answer)
        right_normalised.append(int((own / lengths).argmax()) == question.answer)
    return {
        "data": name,
        "questions": len(questions),
        "chance": float(np.mean([1 / len(question.choices) for question in questions])),
        "accuracy": share(right),
        "accuracy_normalised": share(right_normalised),
        "tokens": sum(passage.scored for passage in passages),
    }


def _delimited(context: str, choice: str) -> str:
    apart = not context or context[-1].isspace() or choice[0].isspace()
    return choice if apart else f" {choice}"


def share(hits: Sequence[bool]) -> dict[str, Any]:
    """Share of hits with its standard error, and Wilson's 95 % interval.

    The interval is sound for few hits and for shares near 0 and 1, where the error alone is not.
    """
    n, p = len(hits), sum(hits) / len(hits)
    z2 = _Z95**2 / n
    middle = (p + z2 / 2) / (1 + z2)
    half = _Z95 / (1 + z2) * math.sqrt(p * (1 - p) / n + z2 / (4 * n))
    error = math.sqrt(p * (1 - p) / (n - 1)) if n > 1 else None
    return {
        "value": p, "standard_error": error,
        "low": max(0.0, middle - half), "high": min(1.0, middle + half),
    }  # fmt: skip
