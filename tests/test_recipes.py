"""Every recipe is run: on this host, on two network namespaces of it, under a real Slurm.

A recipe is given what a small machine lacks (ranks without GPUs) through its own variables and
arguments; no line of it is changed.
"""

import contextlib
import dataclasses
import gc
import os
import re
import shlex
import shutil
import signal
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
import torch.distributed as dist
import typer
import yaml
from torch.distributed.run import get_args_parser
from torch.nn.parallel import DistributedDataParallel

from mamba3_lite import cli
from mamba3_lite.training import heartbeat, pretrain
from mamba3_lite.training.heartbeat import EXIT_CODE
from mamba3_lite.training.stop import EXIT_OUT_OF_TIME
from mamba3_lite.training.watchdog import EXIT_HUNG
from mamba3_lite.utils.logging import read_metrics
from tests import ranks, runs

ROOT = ranks.ROOT
RECIPES = ROOT / "recipes"
OPT_STEPS = 100
TIMEOUT_SEC = 120


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Both commands on the PATH, installed or not."""
    folder = tmp_path_factory.mktemp("bin")
    command = folder / "mamba3-lite"
    command.write_text(
        f'#!/bin/sh\nexec {sys.executable} -c "from mamba3_lite.cli import main; main()" "$@"\n'
    )
    command.chmod(0o755)
    path = os.pathsep.join([str(folder), str(Path(sys.executable).parent), os.environ["PATH"]])
    return {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run of :func:`tests.runs.config`, as a YAML."""
    folder = tmp_path_factory.mktemp("config")
    training = {
        "micro_batch_size": 2, "gradient_accumulation_steps": 1, "total_steps": OPT_STEPS,
        "warmup_steps": 3, "lr": 3e-3, "compile": False, "grad_checkpoint": False,
        "save_interval": 1000, "log_interval": 1, "tensorboard": False,
        "save_dir": str(folder / "run"),
    }  # fmt: skip
    data = {"train_data_path": runs.write_tokens(folder / "train.bin", 24 * 101 + 1)}
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump({"model": runs.MODEL, "training": training, "data": data}))
    return path


def start(words: Sequence[object], environment: dict[str, str]) -> subprocess.Popen:
    return subprocess.Popen(
        [str(word) for word in words], cwd=ROOT, env=environment, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True,
    )  # fmt: skip


def finish(process: subprocess.Popen, code: int = 0, *, limit_sec: float = TIMEOUT_SEC) -> str:
    """What it said, once it has ended with this code."""
    try:
        said, _ = process.communicate(timeout=limit_sec)
    except subprocess.TimeoutExpired:
        process.terminate()  # torchrun takes its ranks along
        said, _ = process.communicate(timeout=60)
        pytest.fail(f"{process.args} took too long:\n{said}")
    assert process.returncode == code, said
    return said


def wait_for(what: Callable[[], object], process: subprocess.Popen | None = None) -> None:
    end = time.monotonic() + TIMEOUT_SEC
    while not what():
        assert time.monotonic() < end, "waited too long"
        assert process is None or process.poll() is None, process.communicate()[0]
        time.sleep(0.02)


def losses(folder: Path) -> dict[int, float]:
    """By micro-step; each was logged once."""
    found = runs.losses(folder)
    assert [m for m, *_ in found] == list(range(1, len(found) + 1))
    return {micro_step: loss for micro_step, loss, _ in found}


@pytest.fixture(scope="module")
def whole(config: Path, environment: dict[str, str]) -> Path:
    """The run folder of the recipe for one node, run to the end."""
    command = ["bash", RECIPES / "single_node.sh", "--config", config]
    finish(start(command, {**environment, "RANKS": "2"}))
    return config.parent / "run"


def test_one_node(whole: Path) -> None:
    found = losses(whole)
    assert len(found) == OPT_STEPS and found[OPT_STEPS] < found[1] - 1
    rows = read_metrics(whole / "metrics.jsonl")
    assert {r["ranks"] for r in rows if r["kind"] == "train"} == {2}
    assert (whole / f"model_step_{OPT_STEPS}.safetensors").is_file()


@pytest.fixture(scope="module")
def stopped(
    config: Path, environment: dict[str, str], tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, str]:
    """(run folder, what was said) of a run that was told to stop in the way of Kubernetes.

    SIGTERM to the first process of the pod alone, whose exit code is then looked at.
    """
    folder = tmp_path_factory.mktemp("stopped")
    command = [
        "bash", RECIPES / "launch.sh", folder, "--standalone", "--nproc_per_node", "2",
        "--no-python", "mamba3-lite", "pretrain", "--config", config, "--checkpoint-dir", folder,
    ]  # fmt: skip
    process, rows = start(command, environment), folder / "metrics.jsonl"
    wait_for(lambda: rows.is_file() and rows.stat().st_size, process)
    process.send_signal(signal.SIGTERM)
    return folder, finish(process, EXIT_OUT_OF_TIME)


def test_a_request_to_stop_reaches_the_ranks(whole: Path, stopped: tuple[Path, str]) -> None:
    folder, said = stopped
    assert "SIGUSR1: saved at opt_step " in said
    found = losses(folder)
    assert 0 < len(found) < OPT_STEPS and found.items() <= losses(whole).items()


def test_nothing_holds_the_group_of_ranks_when_the_command_ends(
    config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Else about one end in ten hangs, in the destructor of DDP's reducer.
    variables = {"WORLD_SIZE": 1, "RANK": 0, "MASTER_ADDR": "127.0.0.1"}
    for name, value in {**variables, "MASTER_PORT": ranks.free_port()}.items():
        monkeypatch.setenv(name, str(value))
    left: list[int] = []

    def destroy() -> None:
        left.append(sum(type(o) is DistributedDataParallel for o in gc.get_objects()))
        really_destroy()

    really_destroy = dist.destroy_process_group
    monkeypatch.setattr(dist, "destroy_process_group", destroy)
    few = ["training.total_steps=4", "--checkpoint-dir", str(tmp_path / "run")]
    with pytest.raises(SystemExit) as end:
        pretrain.main(["--config", str(config), *few])
    assert end.value.code == 0 and left == [0]


# launch.sh alone, with torchrun's part played ----------------------------------------------------


@pytest.mark.parametrize(
    ("played", "code"),
    [
        ("exit 0", 0), ("echo 0 > $run/exit_code", 0), ("exit 1", 1), ("exit 3", 3),
        ("echo 75 > $run/exit_code; exit 1", 75), ("echo 124 > $run/exit_code; exit 1", 124),
        ('[ "$*" = "--a b c.py" ]', 0),
    ],
)  # fmt: skip
def test_the_exit_code_is_the_runs_own(tmp_path: Path, played: str, code: int) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (run / EXIT_CODE).write_text("75\n")  # of an earlier job
    finish(launch(tmp_path, f"run={run}\n{played}"), code)


def launch(folder: Path, played: str) -> subprocess.Popen:
    torchrun = folder / "torchrun"
    torchrun.write_text(f"#!/bin/bash\n{played}\n")
    torchrun.chmod(0o755)
    environment = {**os.environ, "PATH": f"{folder}{os.pathsep}{os.environ['PATH']}"}
    words = ["bash", RECIPES / "launch.sh", folder / "run", "--a", "b", "c.py"]
    return start(words, environment)


@pytest.mark.parametrize(
    ("number", "to_all"),
    [
        (signal.SIGTERM, False), (signal.SIGINT, False), (signal.SIGUSR1, False),
        (signal.SIGUSR1, True),  # Slurm signals every process of the step
    ],
)  # fmt: skip
def test_torchrun_is_not_told_of_a_signal_but_its_ranks_are(
    tmp_path: Path, number: int, to_all: bool
) -> None:
    # Each rank begins to listen late, and then takes a while to save.
    rank = tmp_path / "rank.py"
    rank.write_text(
        "import pathlib, signal, sys, time\n"
        "def save(*_):\n"
        "    time.sleep(0.5)\n"
        "    sys.exit(7)\n"
        "pathlib.Path(sys.argv[1]).touch()\n"
        "time.sleep(0.5)\n"
        "signal.signal(signal.SIGUSR1, save)\n"
        "while True: signal.pause()\n"
    )
    # A signal that was not ignored would end it before its ranks.
    started = [tmp_path / "a", tmp_path / "b"]
    ranks_of_it = "\n".join(f"{sys.executable} {rank} {name} &" for name in started)
    process = launch(tmp_path, f"{ranks_of_it}\nwait %1 && exit 1\nwait %2\nexit $?")
    wait_for(lambda: all(name.exists() for name in started), process)
    (os.killpg if to_all else os.kill)(process.pid, number)
    finish(process, 7)


# Two hosts ---------------------------------------------------------------------------------------


@pytest.fixture
def two_hosts() -> Iterator[list[tuple[list[str], str, str]]]:
    """(how to run something there, interface, address) of two network namespaces and a cable."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("needs root and the command ip")
    names = [f"mamba3-{os.getpid()}-{i}" for i in range(2)]

    def ip(words: str, check: bool = True) -> subprocess.CompletedProcess:
        return subprocess.run(["ip", *words.split()], check=check, capture_output=True, text=True)

    made = ip(f"netns add {names[0]}", check=False)
    if made.returncode:
        pytest.skip(f"network namespaces are not permitted here: {made.stderr.strip()}")
    try:
        ip(f"netns add {names[1]}")
        ip(f"link add net0 netns {names[0]} type veth peer name net0 netns {names[1]}")
        for i, name in enumerate(names):
            ip(f"-n {name} addr add 10.77.0.{i + 1}/24 dev net0")
            ip(f"-n {name} link set lo up")
            ip(f"-n {name} link set net0 up")
        inside = [["ip", "netns", "exec", name] for name in names]
        yield [(words, "net0", f"10.77.0.{i + 1}") for i, words in enumerate(inside)]
    finally:
        for name in names:
            ip(f"netns del {name}", check=False)


def test_two_nodes_go_on_with_what_one_node_has_saved(
    whole: Path, stopped: tuple[Path, str], config: Path, environment: dict[str, str],
    tmp_path: Path, two_hosts: list,
) -> None:  # fmt: skip
    folder = tmp_path / "run"
    shutil.copytree(stopped[0], folder)
    arguments = ["--config", config, "--checkpoint-dir", folder]
    given = {**environment, "RANKS": "1", "HEAD": two_hosts[0][2]}
    processes = [
        start([*there, "bash", RECIPES / "two_nodes.sh", *arguments], {**given, "INTERFACE": net})
        for there, net, _ in two_hosts
    ]
    said = "".join(finish(process) for process in processes)
    assert said.count("resumed from ") == 1
    assert losses(folder) == losses(whole)
    runs.assert_same_weights(runs.final_weights(folder), runs.final_weights(whole))


# Kubernetes --------------------------------------------------------------------------------------

POD = RECIPES / "kubernetes" / "pretrain.yaml"


def test_the_job_of_kubernetes_agrees_with_the_code() -> None:
    service, job = yaml.safe_load_all(POD.read_text(encoding="utf-8"))
    spec = job["spec"]["template"]["spec"]
    (container,) = spec["containers"]
    shell, recipe, run_dir = container["command"]
    assert shell == "bash" and (ROOT / recipe).is_file()
    variables = {one["name"]: one["value"] for one in container["env"]}
    words = [w.replace("$(NODES)", variables["NODES"]) for w in container["args"]]
    arguments = get_args_parser().parse_args(words)
    assert int(arguments.nnodes) == job["spec"]["completions"] == job["spec"]["parallelism"]
    name = job["metadata"]["name"]
    assert arguments.rdzv_endpoint.startswith(f"{name}-0.{service['metadata']['name']}:")
    assert spec["subdomain"] == service["metadata"]["name"]
    assert service["spec"]["selector"] == {"job-name": name}
    assert_pretrain_understands(arguments.training_script, arguments.training_script_args)
    # The folder that launch.sh looks into is the one that the run writes to.
    assert f"--checkpoint-dir={run_dir}" in arguments.training_script_args
    rules = job["spec"]["podFailurePolicy"]["rules"]
    codes = [rule["onExitCodes"]["values"] for rule in rules if "onExitCodes" in rule]
    assert codes == [[EXIT_OUT_OF_TIME]] and spec["restartPolicy"] == "Never"
    assert all(rule["action"] == "Ignore" for rule in rules)
    volumes = {volume["name"] for volume in spec["volumes"]}
    assert volumes == {mount["name"] for mount in container["volumeMounts"]}


def assert_pretrain_understands(script: str, arguments: list[str]) -> None:
    assert (ROOT / script).is_file()
    group = typer.main.get_command(cli.app)
    command = group.get_command(group.make_context("mamba3-lite", ["pretrain"]), "pretrain")
    command.make_context("pretrain", list(arguments))  # raises on an unknown option


@pytest.mark.campaign
def test_kubernetes_knows_every_field_of_the_job() -> None:
    validate = pytest.importorskip("kubernetes_validate")
    for document in yaml.safe_load_all(POD.read_text(encoding="utf-8")):
        validate.validate(document, "1.31", strict=True)
        validate.validate(document, validate.latest_version(), strict=True)
        with pytest.raises(validate.ValidationError):
            validate.validate({**document, "specs": {}}, "1.31", strict=True)


def test_alerts_are_about_metrics_and_states_that_exist() -> None:
    text = (RECIPES / "prometheus" / "alerts.yaml").read_text(encoding="utf-8")
    rules = yaml.safe_load(text)["groups"][0]["rules"]
    named = {m for rule in rules for m in re.findall(r"mamba3_(\w+)", rule["expr"])}
    assert len(named) > 4 and named <= {m.name for m in heartbeat._METRICS} | {"state"}
    states = {s for rule in rules for s in re.findall(r'state=~?"([\w|]+)"', rule["expr"])}
    assert {s for one in states for s in one.split("|")} <= set(heartbeat.STATES)


# Slurm -------------------------------------------------------------------------------------------

SBATCH = RECIPES / "slurm" / "pretrain.sbatch"


def test_the_slurm_recipe_goes_on_after_what_can_go_on() -> None:
    text = SBATCH.read_text(encoding="utf-8")
    assert f"{EXIT_OUT_OF_TIME} | {EXIT_HUNG})" in text
    options = [line.split()[1] for line in text.splitlines() if line.startswith("#SBATCH")]
    assert "--requeue" in options and any(o.startswith("--signal=USR1@") for o in options)


@pytest.mark.parametrize(
    "recipe", [*RECIPES.rglob("*.sh"), *RECIPES.rglob("*.sbatch")], ids=lambda p: p.name
)
def test_shell_recipes_are_shell(recipe: Path) -> None:
    subprocess.run(["bash", "-n", recipe], check=True)
    assert recipe.read_text(encoding="utf-8").startswith("#!/usr/bin/env bash\n")
    assert recipe.stat().st_mode & stat.S_IXUSR


@dataclasses.dataclass
class Cluster:
    """A controller and two nodes, each with a make-believe GPU, on this machine."""

    folder: Path
    environment: dict[str, str]

    def run(self, *words: object) -> str:
        command = [str(word) for word in words]
        done = subprocess.run(
            command, cwd=ROOT, env=self.environment, capture_output=True, text=True, timeout=60
        )
        assert done.returncode == 0, done.stderr + done.stdout
        return done.stdout

    def submit(self, run_dir: Path, log: Path, *options: str, arguments: Sequence[object]) -> str:
        self.environment["RUN_DIR"] = str(run_dir)
        self.environment["CACHE_DIR"] = str(run_dir.parent / "cache")
        answer = self.run(
            "sbatch", "--parsable", "--gpus-per-node=1", "--cpus-per-task=1", f"--output={log}",
            *options, SBATCH, *arguments,
        )  # fmt: skip
        return answer.strip()

    def job(self, number: str) -> dict[str, str]:
        words = shlex.split(self.run("scontrol", "--oneliner", "show", "job", number))
        return dict(word.split("=", 1) for word in words if "=" in word)

    def wait(self, number: str, log: Path, *, limit_sec: float = 500) -> dict[str, str]:
        """Until the job is over, however often it comes again."""
        end, over = time.monotonic() + limit_sec, 0
        while over < 10:
            job = self.job(number)
            if job["JobState"] == "COMPLETED":
                return job
            # On its way back into the queue it passes through states that are final otherwise.
            active = job["JobState"] in ("PENDING", "RUNNING", "COMPLETING")
            over = 0 if active else over + 1
            assert time.monotonic() < end, (job, log.read_text()[-3000:])
            if job["JobState"] == "PENDING":  # Slurm lets a requeued job rest for two minutes
                self.run("scontrol", "update", f"jobid={number}", "StartTime=now")
            time.sleep(1)
        return job


@pytest.fixture(scope="module")
def cluster(
    tmp_path_factory: pytest.TempPathFactory, environment: dict[str, str]
) -> Iterator[Cluster]:
    programs = ("munged", "slurmctld", "slurmd", "sbatch")
    path = os.pathsep.join([environment["PATH"], "/usr/sbin"])
    missing = [name for name in programs if shutil.which(name, path=path) is None]
    if missing or os.geteuid() != 0:
        pytest.skip(f"needs root and Slurm (Debian: slurm-wlm, munge); missing: {missing}")
    folder = tmp_path_factory.mktemp("slurm")
    host, key = socket.gethostname().partition(".")[0], folder / "munge.key"
    key.write_bytes(os.urandom(1024))
    key.chmod(0o400)
    ports = [ranks.free_port() for _ in range(3)]
    nodes = [
        f"NodeName=n{i} NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[i]} CPUs=1 Gres=gpu:1"
        for i in (1, 2)
    ]
    (folder / "slurm.conf").write_text("\n".join([
        "ClusterName=test", f"SlurmctldHost={host}", f"SlurmctldPort={ports[0]}", "SlurmUser=root",
        "AuthType=auth/munge", f"AuthInfo=socket={folder}/munge.socket", "CredType=cred/munge",
        f"StateSaveLocation={folder}/state", f"SlurmdSpoolDir={folder}/spool.%n",
        f"SlurmctldPidFile={folder}/slurmctld.pid", f"SlurmdPidFile={folder}/slurmd.%n.pid",
        f"SlurmctldLogFile={folder}/slurmctld.log", f"SlurmdLogFile={folder}/slurmd.%n.log",
        "ProctrackType=proctrack/linuxproc", "TaskPlugin=task/none", "SwitchType=switch/none",
        "SelectType=select/cons_tres", "SelectTypeParameters=CR_Core", "MpiDefault=none",
        "GresTypes=gpu", "ReturnToService=2", *nodes,
        "PartitionName=all Nodes=n1,n2 Default=YES MaxTime=INFINITE State=UP", "",
    ]))  # fmt: skip
    (folder / "gres.conf").write_text(
        "NodeName=n1 Name=gpu File=/dev/null\nNodeName=n2 Name=gpu File=/dev/zero\n"
    )
    settings = {**environment, "PATH": path, "SLURM_CONF": str(folder / "slurm.conf")}
    found = Cluster(folder, settings)
    with contextlib.ExitStack() as at_end:
        for words, name in (
            (["munged", "--force", f"--key-file={key}", f"--socket={folder}/munge.socket",
              f"--pid-file={folder}/munge.pid", f"--log-file={folder}/munge.log",
              f"--seed-file={folder}/munge.seed"], "munge"),
            (["slurmctld", "-i"], "slurmctld"),
            (["slurmd", "-N", "n1"], "slurmd.n1"), (["slurmd", "-N", "n2"], "slurmd.n2"),
        ):  # fmt: skip
            found.run(*words)
            pid = folder / f"{name}.pid"
            wait_for(lambda pid=pid: pid.is_file() and pid.read_text().strip())
            at_end.callback(os.kill, int(pid.read_text()), signal.SIGTERM)
        wait_for(lambda: found.run("sinfo", "-h", "-o", "%T").split() == ["idle"])
        yield found


@pytest.mark.campaign
def test_slurm_stops_it_before_the_limit_and_it_goes_on(
    cluster: Cluster, config: Path, environment: dict[str, str], tmp_path: Path
) -> None:
    opt_steps = 40 * OPT_STEPS
    many = [f"training.total_steps={opt_steps}", "training.save_interval=1000"]
    run_dir, log = tmp_path / "run", tmp_path / "job.log"
    # Slurm looks every half minute, so this is between 25 and 55 seconds after the start.
    limit = ("--time=1", "--signal=USR1@5")
    number = cluster.submit(run_dir, log, *limit, arguments=["--config", config, *many])
    job = cluster.wait(number, log)
    said, restarts = log.read_text(), int(job["Restarts"])
    assert job["JobState"] == "COMPLETED" and restarts >= 1, (job, said[-3000:])
    assert said.count("SIGUSR1: saved at opt_step ") == restarts
    assert said.count("resumed from ") == said.count("exit code 75: again") == restarts
    # The curve is that of a run which nobody stopped.
    reference = ["--config", config, *many, "--checkpoint-dir", tmp_path / "whole"]
    process = start(["bash", RECIPES / "single_node.sh", *reference], {**environment, "RANKS": "2"})
    finish(process, limit_sec=600)
    assert losses(run_dir) == losses(tmp_path / "whole")
    assert len(losses(run_dir)) == opt_steps


@pytest.mark.campaign
def test_slurm_keeps_what_was_compiled(cluster: Cluster, config: Path, tmp_path: Path) -> None:
    run_dir, log = tmp_path / "run", tmp_path / "job.log"
    compiled = ["training.compile=true", "training.compile_mode=default"]
    many = f"training.total_steps={50 * OPT_STEPS}"
    number = cluster.submit(run_dir, log, arguments=["--config", config, many, *compiled])
    rows, files = run_dir / "metrics.jsonl", tmp_path / "cache" / "inductor"
    wait_for(lambda: rows.is_file() and rows.stat().st_size)
    before = sorted(files.rglob("*"))
    # What --signal sends, only sooner.
    cluster.run("scancel", "--signal=USR1", number)
    job = cluster.wait(number, log)
    assert job["JobState"] == "COMPLETED" and job["Restarts"] == "1", log.read_text()[-3000:]
    assert len(before) > 10 and sorted(files.rglob("*")) == before
