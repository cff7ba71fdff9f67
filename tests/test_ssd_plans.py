"""How a launch plan is chosen, trusted and remembered; the kernels themselves run elsewhere."""

import json
import shutil
import sys
import threading
import types
from pathlib import Path

import pytest
import torch

from mamba3_lite.errors import UserError
from mamba3_lite.models import ssd_backends, ssd_fused, ssd_plans
from mamba3_lite.models.ssd_plans import CANDIDATES

CUDA = torch.device("cuda")
SHAPE = (2, 16, 16)
NAME = "some GPU|triton 3.6.0|0123456789ab|bfloat16|H2-N16-P16"


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A cache folder that does not exist yet, and a process that has chosen nothing."""
    monkeypatch.setenv("MAMBA3_LITE_CACHE", str(tmp_path / "cache"))
    ssd_fused.plan_for.cache_clear()
    yield tmp_path / "cache" / "fused_plans.json"
    ssd_fused.plan_for.cache_clear()
    ssd_plans._source_hash.cache_clear()


class Device:
    """A pretended GPU: which candidates are right on it and how fast they are, and what it did."""

    def __init__(
        self, monkeypatch, problems=(None, None, None), times=(3.0, 2.0, 1.0), arch=(8, 0)
    ):
        self.problems, self.times = problems, times
        self.tested: list[int] = []
        self.timed: list[int] = []
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: arch)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "some GPU")
        monkeypatch.setitem(sys.modules, "triton", types.SimpleNamespace(__version__="3.6.0"))
        monkeypatch.setattr(ssd_fused, "HAS_TRITON", True)
        monkeypatch.setattr(ssd_fused, "_problem", self.problem)
        monkeypatch.setattr(ssd_fused, "_milliseconds", self.milliseconds)

    def problem(self, plan, device, dtype, shape):
        assert not self.timed, "timed before all were tested"
        self.tested.append(CANDIDATES.index(plan))
        return self.problems[self.tested[-1]]

    def milliseconds(self, plan, device, dtype, shape):
        self.timed.append(CANDIDATES.index(plan))
        return self.times[self.timed[-1]]


def choose(dtype=torch.bfloat16):
    return ssd_fused.plan_for(CUDA, dtype, *SHAPE)


def in_a_new_process():
    ssd_fused.plan_for.cache_clear()


# case A04
def test_all_are_tested_before_any_is_timed_and_the_fastest_right_one_is_taken_a04(monkeypatch):
    device = Device(monkeypatch, problems=(None, None, "y off by 3.0e-02"))
    assert choose() == CANDIDATES[1]
    assert device.tested == [0, 1, 2] and device.timed == [0, 1]


# cases A04, A14
def test_where_the_first_was_measured_it_is_taken_untimed_or_the_next_that_is_right(monkeypatch):
    arch = ssd_plans.MEASURED[0]
    first = Device(monkeypatch, arch=arch)
    assert choose() == CANDIDATES[0]
    assert first.tested == [0] and first.timed == []
    second = Device(monkeypatch, problems=("out of resource: shared memory", None, None), arch=arch)
    assert choose(torch.float16) == CANDIDATES[1]
    assert second.tested == [0, 1] and second.timed == []


# case A13
def test_where_none_is_right_the_reason_is_given_a13(monkeypatch, own_cache):
    Device(monkeypatch, problems=("d_dt off by 2.0e-01 at 256 tokens", "worse", "worst"))
    with pytest.raises(
        UserError, match="d_dt off by 2.0e-01 at 256 tokens.*ssd_dispatch='rotated'"
    ):
        choose()
    assert not own_cache.exists()


# case A13
def test_a_failed_self_test_refuses_the_backend_and_auto_says_why_a13(monkeypatch, capsys):
    Device(monkeypatch, problems=("y off by 3.0e-02", "worse", "worst"))
    monkeypatch.setattr(ssd_backends, "_parity_error", lambda name, device: 1e-7)
    ssd_backends._choose.cache_clear()
    shape = ssd_backends.Shape(16, 16, 64, CUDA, heads=2)
    assert ssd_backends.resolve("auto", shape).name == "rotated"
    assert "not 'fused': the fused SSD kernels failed their parity test (y off by 3.0e-02" in (
        capsys.readouterr().out
    )
    with pytest.raises(UserError, match="ssd_dispatch='fused' cannot run here: .*y off by 3.0e-02"):
        ssd_backends.resolve("fused", shape)
    ssd_backends._choose.cache_clear()


# case A14
def test_a_candidate_that_does_not_fit_is_passed_over_a14(monkeypatch):
    resources = pytest.importorskip("triton.runtime.errors")

    def too_large(*args, **options):
        raise resources.OutOfResources(131072, 101376, "shared memory")

    monkeypatch.setattr(ssd_fused, "run_projected", too_large)
    problem = ssd_fused._problem(CANDIDATES[0], torch.device("cpu"), torch.float32, SHAPE)
    assert problem is not None and "shared memory, Required: 131072" in problem


# case E03
def test_a_choice_outlives_its_process_e03(monkeypatch, own_cache):
    device = Device(monkeypatch)
    assert choose() == CANDIDATES[2]
    for _ in range(3):
        assert choose() == CANDIDATES[2]
        in_a_new_process()
    assert device.tested == [0, 1, 2]
    assert list(json.loads(own_cache.read_text()).values()) == [2]
    assert [path.name for path in own_cache.parent.iterdir()] == ["fused_plans.json"]
    # Another precision is another choice.
    device.timed.clear()
    assert choose(torch.float32) == CANDIDATES[2]
    assert device.tested == [0, 1, 2, 0, 1, 2]


@pytest.mark.parametrize(
    "content",
    [
        b"", b"{", b"\xff\xfe\x00", b"[1, 2]", b"null", b'{"%s": "0"}', b'{"%s": 1.5}',
        b'{"%s": true}', b'{"%s": null}', b'{"%s": 99}', b'{"%s": -1}', b"[" * 100_000,
    ],
)  # fmt: skip
def test_a_damaged_file_is_as_good_as_none_and_is_replaced(content, own_cache):
    own_cache.parent.mkdir()
    own_cache.write_bytes(content.replace(b"%s", NAME.encode()))
    assert ssd_plans.remembered(NAME) is None
    ssd_plans.remember(NAME, CANDIDATES[1])
    assert ssd_plans.remembered(NAME) == CANDIDATES[1]
    assert json.loads(own_cache.read_text()) == {NAME: 1}


def test_a_cache_that_cannot_be_written_only_means_choosing_again(monkeypatch, tmp_path, own_cache):
    device = Device(monkeypatch)
    (tmp_path / "file").write_text("no folder")
    monkeypatch.setenv("MAMBA3_LITE_CACHE", str(tmp_path / "file" / "cache"))
    assert choose() == CANDIDATES[2]
    in_a_new_process()
    device.timed.clear()
    assert choose() == CANDIDATES[2]
    assert device.tested == [0, 1, 2, 0, 1, 2]


def test_a_user_without_a_home_can_choose(monkeypatch):
    monkeypatch.setenv("MAMBA3_LITE_CACHE", "~nobody-of-this-name/cache")
    ssd_plans.remember(NAME, CANDIDATES[1])
    assert ssd_plans.remembered(NAME) is None


def test_others_choices_are_kept(own_cache):
    for number, plan in enumerate(CANDIDATES):
        ssd_plans.remember(f"GPU {number}", plan)
    assert [ssd_plans.remembered(f"GPU {n}") for n in range(3)] == list(CANDIDATES)
    assert ssd_plans.remembered("GPU 3") is None


# case E03
def test_writers_at_the_same_time_leave_a_whole_file_e03(own_cache):
    def write(number: int) -> None:
        for i in range(20):
            ssd_plans.remember(f"{number}-{i}", CANDIDATES[1])

    ssd_plans.remember(NAME, CANDIDATES[2])
    writers = [threading.Thread(target=write, args=(number,)) for number in range(4)]
    for writer in writers:
        writer.start()
    while any(writer.is_alive() for writer in writers):
        assert json.loads(own_cache.read_text())[NAME] == 2
    assert {ssd_plans.remembered(f"{number}-19") for number in range(4)} & {CANDIDATES[1]}


def test_a_key_names_all_that_a_choice_depends_on(monkeypatch):
    Device(monkeypatch)
    base = ssd_plans.key(CUDA, torch.bfloat16, *SHAPE)
    others = [
        ssd_plans.key(CUDA, torch.float32, *SHAPE),
        *(ssd_plans.key(CUDA, torch.bfloat16, *s) for s in ((1, 16, 16), (2, 8, 16), (2, 16, 8))),
    ]
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "another GPU")
    others.append(ssd_plans.key(CUDA, torch.bfloat16, *SHAPE))
    monkeypatch.setattr(sys.modules["triton"], "__version__", "3.7.0")
    others.append(ssd_plans.key(CUDA, torch.bfloat16, *SHAPE))
    assert len({base, *others}) == 7


@pytest.mark.parametrize(
    "source", ["kernels/fused.py", "models/ssd_fused.py", "models/ssd_plans.py"]
)
def test_other_code_is_tested_anew(source, monkeypatch, tmp_path):
    device = Device(monkeypatch)
    assert choose() == CANDIDATES[2] and device.tested == [0, 1, 2]
    package = Path(ssd_plans.__file__).parent.parent
    for name in ("kernels/fused.py", "models/ssd_fused.py", "models/ssd_plans.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(package / name, tmp_path / name)
    monkeypatch.setattr(ssd_plans, "__file__", str(tmp_path / "models" / "ssd_plans.py"))
    for edit, tests in (("", 3), ("# edited\n", 6)):
        with (tmp_path / source).open("a") as file:
            file.write(edit)
        ssd_plans._source_hash.cache_clear()
        in_a_new_process()
        device.timed.clear()
        choose()
        assert len(device.tested) == tests


def test_a_plan_can_be_forced(monkeypatch):
    device = Device(monkeypatch)
    proj = types.SimpleNamespace(device=CUDA, dtype=torch.bfloat16)
    with ssd_fused.forced(CANDIDATES[1]):
        assert ssd_fused._plan(proj, *SHAPE) == CANDIDATES[1]
    assert device.tested == []
    assert ssd_fused._plan(proj, *SHAPE) == CANDIDATES[2]


def test_refusals_name_their_reason(monkeypatch):
    Device(monkeypatch)

    def refuse(device="cuda", head_dim=64, state_dim=64):
        return ssd_fused.refuse(
            heads=2, head_dim=head_dim, state_dim=state_dim, device=torch.device(device)
        )

    assert refuse() is None
    assert refuse(head_dim=512) == "head_dim=512 exceeds 256."
    assert refuse(state_dim=257) == "state_dim=257 exceeds 256."
    assert "'cpu', not on CUDA" in refuse("cpu")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    assert "compute capability 8.0" in refuse()
    monkeypatch.setattr(ssd_fused, "HAS_TRITON", False)
    assert refuse() == "Triton is not installed."
