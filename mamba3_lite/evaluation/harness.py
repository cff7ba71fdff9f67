"""Tasks of lm-evaluation-harness: our model behind its interface, and its results as ours.

A recurrent model has no longest context: nothing is ever truncated.
"""

import copy
import difflib
import fnmatch
import functools
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import torch

from mamba3_lite.errors import UserError
from mamba3_lite.evaluation.choices import loglikelihoods
from mamba3_lite.evaluation.progress import progress_bar
from mamba3_lite.evaluation.subject import Subject, load_subject
from mamba3_lite.inference.generate import stream

MODEL_NAME = "mamba3_lite"
# What the harness takes where a task does not say.
_MAX_NEW_TOKENS = 256
_TOKENS_KEYS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
_SAMPLING_KEYS = ("temperature", "top_k", "top_p", "repetition_penalty")
_MAX_ROWS = 64
# Of metrics without a formula for their standard error; more would take minutes for little.
_BOOTSTRAPS = 1000
_NEEDED = 'task evaluation needs lm-eval; run pip install "mamba3-lite[eval]"'

Arguments = Mapping[str, Any]


class Answers:
    """What the harness asks of a model, in its own words: texts in, numbers and texts out.

    Requests are sorted by length and read in batches; answers come in the order of the requests
    and do not depend on the batch.
    """

    def __init__(self, subject: Subject):
        self.subject = subject

    def loglikelihood(self, pairs: Sequence[tuple[str, str]]) -> list[tuple[float, bool]]:
        """For each (context, continuation): log p of the continuation, and if it is greedy."""
        passages = [self.subject.pair(context, text) for context, text in pairs]
        return loglikelihoods(self.subject.scorer, passages, name="log-likelihoods")

    def rolling(self, texts: Sequence[str]) -> list[float]:
        """log p of each whole text behind an EOS, whatever its length."""
        passages = [self.subject.text(text) for text in texts]
        found = loglikelihoods(self.subject.scorer, passages, name="whole texts")
        return [log_p for log_p, _ in found]

    def generate(self, requests: Sequence[tuple[str, Arguments]]) -> list[str]:
        """Continues each context as its arguments say, up to the first of their ``until``."""
        encode, eos_id = self.subject.tokenizer.encode, self.subject.tokenizer.eos_id
        prompts = [encode(context) or [eos_id] for context, _ in requests]
        alike: dict[str, list[int]] = {}
        for index, (_, arguments) in enumerate(requests):
            alike.setdefault(json.dumps(arguments, sort_keys=True), []).append(index)
        texts = [""] * len(requests)
        with progress_bar("generated texts", len(requests), unit="texts") as advance:
            for indices in alike.values():
                until, how = _generation(requests[indices[0]][1])
                indices.sort(key=lambda index: -len(prompts[index]))
                for batch in self._batches(indices, prompts):
                    found = self._continued([prompts[index] for index in batch], until, how)
                    for index, text in zip(batch, found, strict=True):
                        texts[index] = text
                    advance(len(batch))
        return texts

    def _batches(self, indices: list[int], prompts: list[list[int]]) -> Iterator[list[int]]:
        scorer, start = self.subject.scorer, 0
        while start < len(indices):
            fitting = max(1, scorer.batch_tokens // len(prompts[indices[start]]))
            rows = scorer.batch_size or min(fitting, _MAX_ROWS)
            yield indices[start : start + rows]
            start += rows

    def _continued(
        self, prompts: list[list[int]], until: list[str], how: dict[str, Any]
    ) -> list[str]:
        """One batch; it ends as soon as every row has met one of ``until`` or its EOS."""
        tokenizer = self.subject.tokenizer
        ids: list[list[int]] = [[] for _ in prompts]
        running = [True] * len(prompts)
        steps = stream(
            self._decoded, prompts, eos_id=tokenizer.eos_id, vocab_size=tokenizer.vocab_size, **how
        )
        for drawn in steps:
            for row, token in enumerate(drawn):
                if running[row] and token is not None:
                    ids[row].append(token)
                    text = tokenizer.decode(ids[row])
                    running[row] = not any(stop in text for stop in until)
                else:
                    running[row] = False
            if not any(running):
                break
        return [_cut(tokenizer.decode(row), until) for row in ids]

    @functools.cached_property
    def _decoded(self):
        """The model that generates: with weights in the dtype that passages are scored in."""
        model, dtype = self.subject.scorer.model, self.subject.scorer.dtype
        # Not `.to(dtype)`: the decay is complex and stays so.
        return copy.deepcopy(model).bfloat16() if dtype == torch.bfloat16 else model


def _generation(arguments: Arguments) -> tuple[list[str], dict[str, Any]]:
    """(stop texts, options of ``stream``) of a request's arguments; greedy unless they sample."""
    rest = dict(arguments)
    until = rest.pop("until", None) or []
    lengths = [value for key in _TOKENS_KEYS if (value := rest.pop(key, None)) is not None]
    sampling = {key: rest.pop(key) for key in _SAMPLING_KEYS if key in rest}
    do_sample = rest.pop("do_sample", sampling.get("temperature", 0) > 0)
    if rest:
        raise UserError(
            f"generation_kwargs {', '.join(map(repr, rest))}: not supported; known are until, "
            f"do_sample, {', '.join((*_TOKENS_KEYS, *_SAMPLING_KEYS))}."
        )
    if not do_sample:
        sampling = {"temperature": 0.0}
    how = {"max_new_tokens": int(lengths[0]) if lengths else _MAX_NEW_TOKENS, **sampling}
    return [until] if isinstance(until, str) else list(until), how


def _cut(text: str, until: list[str]) -> str:
    for stop in filter(None, until):
        text = text.partition(stop)[0]
    return text


@functools.cache
def harness_class() -> type:
    """Our model as the harness knows models, registered there under ``MODEL_NAME``.

    Its constructor takes a ready ``subject``, or ``path`` and the options of ``load_subject``.

    Raises:
        UserError: lm-eval is not installed.
    """
    try:
        # First, for the harness adds its own models only to a registry that is empty.
        import lm_eval.models  # noqa: F401
        from lm_eval.api.model import LM
        from lm_eval.api.registry import register_model
    except ImportError as problem:
        raise UserError(_NEEDED) from problem

    @register_model(MODEL_NAME)
    class HarnessModel(LM):
        """Log-likelihoods, whole texts and continuations."""

        def __init__(
            self,
            path: str = "",
            *,
            subject: Subject | None = None,
            **options: Any,
        ):
            super().__init__()
            self.answers = Answers(subject or load_subject(path, **options))

        def loglikelihood(self, requests: list) -> list[tuple[float, bool]]:
            return self._answered("loglikelihood", requests, self.answers.loglikelihood)

        def loglikelihood_rolling(self, requests: list) -> list[float]:
            return self._answered(
                "loglikelihood_rolling", requests,
                lambda asked: self.answers.rolling([text for (text,) in asked]),
            )  # fmt: skip

        def generate_until(self, requests: list) -> list[str]:
            return self._answered("generate_until", requests, self.answers.generate)

        def _answered(self, kind: str, requests: list, answer: Callable[[list], list]) -> list:
            asked = [request.args for request in requests]
            found = answer(asked)
            for arguments, value in zip(asked, found, strict=True):
                self.cache_hook.add_partial(kind, arguments, value)
            return found

    return HarnessModel


def measure(
    subject: Subject,
    tasks: Sequence[str],
    *,
    include_path: str | None = None,
    num_fewshot: int | None = None,
    limit: int | None = None,
) -> dict[str, Any]:
    """Runs tasks of the harness; the result is ready for JSON.

    Args:
        tasks: names of tasks, groups or tags, patterns of them, or paths of YAML files.
        include_path: a folder of further task files, which win over those of the same name.
        num_fewshot: solved examples before each question; None: as the task says.
        limit: only so many examples of each task.

    Raises:
        UserError: no lm-eval, a task that is not known, or one whose data cannot be loaded.
    """
    model = harness_class()(subject=subject)
    from lm_eval.evaluator import simple_evaluate
    from lm_eval.tasks import TaskManager

    if include_path is not None and not Path(include_path).is_dir():
        raise UserError(f"--include-path {include_path} is not a folder; name one of task files.")
    manager = TaskManager(include_path=include_path)
    loaded = _loaded(manager, _task_names(tasks, manager.all_tasks))
    found = simple_evaluate(
        model, tasks=loaded, task_manager=manager, num_fewshot=num_fewshot, limit=limit,
        log_samples=False, bootstrap_iters=_BOOTSTRAPS,
    )  # fmt: skip
    return _summary(found)


def _task_names(asked: Sequence[str], known: Sequence[str]) -> list[str]:
    """The names that were asked for, patterns resolved; a file of a task stays its path."""
    names: dict[str, None] = {}
    for name in asked:
        matching = [name] if Path(name).is_file() else fnmatch.filter(known, name)
        if not matching:
            near = difflib.get_close_matches(name, known, n=3)
            hint = f"; near to it are {', '.join(near)}" if near else ""
            raise UserError(
                f"task {name!r} is not known{hint}. Tasks of your own lie in --include-path."
            )
        names |= dict.fromkeys(matching)
    return list(names)


def _loaded(manager: Any, names: Sequence[str]) -> list[Any]:
    """The harness's tasks and groups of tasks, their data read."""
    found: list[Any] = []
    for name in names:
        # A task is the user's file, and its data may lie on a network that is not there: whatever
        # the libraries raise here is about them.
        try:
            loaded = manager.load(name)
        except Exception as problem:
            reason = " ".join(str(problem).split())[:300]
            raise UserError(
                f"task {name!r} cannot be loaded ({type(problem).__name__}: {reason}); check its "
                "file and its data, which must be local where there is no network."
            ) from problem
        group = loaded["groups"].get(name)
        found += [group] if group is not None else loaded["tasks"].values()
    return found


def _summary(found: Mapping[str, Any]) -> dict[str, Any]:
    """What is worth keeping of the harness's results."""
    rows = {}
    for name, values in {**found["results"], **found.get("groups", {})}.items():
        metrics: dict[str, dict[str, Any]] = {}
        for key, value in values.items():
            metric, comma, kept_by = key.partition(",")
            if not comma:
                continue
            label = metric.removesuffix("_stderr") + ("" if kept_by == "none" else f" ({kept_by})")
            kind = "standard_error" if metric.endswith("_stderr") else "value"
            metrics.setdefault(label, {})[kind] = _number(value)
        rows[name] = {
            "metrics": metrics,
            "examples": found["n-samples"].get(name, {}).get("effective"),
            "num_fewshot": found["n-shot"].get(name),
            "version": found["versions"].get(name),
        }
    return {"tasks": rows, "lm_eval": metadata.version("lm_eval")}


def _number(value: Any) -> float | None:
    """A finite number, or None for what is none: the harness says "N/A", and JSON knows no NaN."""
    fits = isinstance(value, int | float | np.number) and math.isfinite(value)
    return float(value) if fits else None
