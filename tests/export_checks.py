"""An exported folder put to use by transformers, where this package cannot be imported.

Run as a script: ``python -I export_checks.py JOB RESULT``. JOB is JSON: ``folder``, ``threads``,
``ids`` (lists of token ids), ``texts``, ``new_tokens``, ``saved`` (where transformers saves it
again). RESULT is what :func:`torch.save` writes of :func:`use`.
"""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch


def use_elsewhere(folder: Path, workplace: Path, python: str = sys.executable, **job: Any) -> dict:
    """What transformers makes of ``folder`` in an interpreter without this package."""
    workplace.mkdir(parents=True, exist_ok=True)
    job |= {"folder": str(folder), "threads": torch.get_num_threads()}
    (workplace / "job.json").write_text(json.dumps(job))
    done = subprocess.run(
        [python, "-I", __file__, "job.json", "result.pt"],
        cwd=workplace,
        env={"HF_HOME": str(workplace / "hf"), "HF_HUB_OFFLINE": "1", "PATH": "/usr/bin:/bin"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return torch.load(workplace / "result.pt", weights_only=True)


class _Hidden:
    """An editable install would be found otherwise."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        if name.partition(".")[0] == "mamba3_lite":
            raise ModuleNotFoundError(name)


def use(job: dict[str, Any]) -> dict[str, Any]:
    """Logits, decoding, tokens, and the folder saved again."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.set_num_threads(job["threads"])
    found: dict[str, Any] = {}
    if texts := job.get("texts"):
        tokenizer = AutoTokenizer.from_pretrained(job["folder"])
        found["encoded"] = [tokenizer(text)["input_ids"] for text in texts]
        found["decoded"] = [tokenizer.decode(ids) for ids in found["encoded"]]
        found["special"] = [len(tokenizer), tokenizer.eos_token_id, tokenizer.pad_token_id]
        found["padded"] = tokenizer(texts, padding=True, return_tensors="pt")["attention_mask"]
    model = AutoModelForCausalLM.from_pretrained(job["folder"], trust_remote_code=True).eval()
    found["dtype"], found["A"] = str(model.dtype), [layer.A.detach() for layer in model.layers]
    found["tied"] = model.lm_head.weight is model.embed.weight
    with torch.no_grad():
        found |= _decoded(model, [torch.tensor([ids]) for ids in job["ids"]], job["new_tokens"])
    if "saved" in job:
        model.save_pretrained(job["saved"])
    return found


def _decoded(model: Any, prompts: list[torch.Tensor], new_tokens: int) -> dict[str, Any]:
    found: dict[str, Any] = {"logits": [model(ids).logits for ids in prompts]}

    # Piece by piece, then token by token, with the state handed on.
    ids = prompts[-1]
    cut = ids.shape[1] - 3
    out, steps = model(ids[:, :cut], use_cache=True), []
    for t in range(cut, ids.shape[1]):
        out = model(ids[:, t : t + 1], cache=out["cache"], use_cache=True)
        steps.append(out.logits[:, 0])
    found["steps"], found["state"] = torch.stack(steps, 1), out["cache"].layers

    options = {"max_new_tokens": new_tokens, "do_sample": False, "pad_token_id": 0}
    options["eos_token_id"] = None
    found["greedy"] = [model.generate(ids, **options)[0, ids.shape[1] :] for ids in prompts]
    # All prompts in one batch, padded on the left with an id that means something.
    longest = max(ids.shape[1] for ids in prompts)
    rows = [torch.nn.functional.pad(ids, (longest - ids.shape[1], 0), value=5) for ids in prompts]
    masks = [
        torch.nn.functional.pad(torch.ones_like(ids), (longest - ids.shape[1], 0))
        for ids in prompts
    ]
    batch, mask = torch.cat(rows), torch.cat(masks)
    found["batch"] = model.generate(batch, attention_mask=mask, **options)[:, longest:]
    found["batch_logits"] = model(batch, attention_mask=mask).logits[:, -1]
    # Padding on the right: the state is the one after the last token that counts.
    padded = torch.nn.functional.pad(ids[:, :6], (0, 5), value=5)
    mask = torch.tensor([[1] * 6 + [0] * 5])
    found["right"] = model(padded, attention_mask=mask, use_cache=True)["cache"].layers
    beams = {**options, "num_beams": 3}
    found["beams"] = model.generate(prompts[-1], **beams)
    found["beams_without_state"] = model.generate(prompts[-1], **beams, use_cache=False)
    # A conversation: the state of one call goes into the next, whose ids are the whole text.
    first = model.generate(ids, return_dict_in_generate=True, **options)
    again = torch.cat([first.sequences, prompts[0]], 1)
    found["gone_on"] = model.generate(again, cache=first["cache"], **options)
    found["from_start"] = model.generate(again, **options)
    return found


if __name__ == "__main__":
    sys.meta_path.insert(0, _Hidden())
    torch.save(use(json.loads(Path(sys.argv[1]).read_text())), sys.argv[2])
    assert "mamba3_lite" not in sys.modules
