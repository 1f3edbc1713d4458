"""Runs a task: places the roles, drives the loop, reports, and leaves nothing behind.

Knows: every role and which process it lives in. Does not know: any particular task (it is handed one).
"""

from __future__ import annotations

import asyncio
import os
import re
import signal
import time
from collections.abc import Coroutine, Iterator, Sequence
from contextlib import AsyncExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Protocol, TypeVar, cast

from safetensors import SafetensorError

from rollforge.algo.grpo import GRPO
from rollforge.config import UserError, dump
from rollforge.data.models import num_parameters, require_chat_template, resolve
from rollforge.loop.pipeline import Pipeline, Roles, TooManyFailures
from rollforge.observe.console import Console, Row
from rollforge.observe.memory import MemoryWatch
from rollforge.observe.plot import curve_png
from rollforge.recipes.base import Machine, RunConfig, choose_machine
from rollforge.runs.files import disk_guard, require_space
from rollforge.runs.folder import RunFolder
from rollforge.runs.reader import RunReader
from rollforge.runtime import RoleDied, RoleSpec, Runtime, log_tail
from rollforge.runtime.process import Watch, start_time
from rollforge.types import EnvironmentPool, Generator, Metrics, Prompt, Rollout, RolloutWorker, Sampling
from rollforge.weights.client import WeightPublisher, WeightReader
from rollforge.weights.folder import weight_folder

T = TypeVar("T")

INTERRUPTED = 130
SERVER = "environment-server"
CALL_LIMIT_S = 1800.0
"""Longest call to a role, where the role has no limit of its own: a step of the trainer may take minutes."""
CAUSE_LIMIT_S = 0.5
"""How long a failure waits for the death that may have caused it."""
ONE_ARENA = {"MALLOC_ARENA_MAX": "1"}
"""A role's large tensors come and go on several threads; with an arena each, the process keeps a quarter more
memory.
"""
VERSIONS_ALIVE = 2
"""Weight versions in shared memory at a time: the newest, which the store keeps, and the one being written."""
BYTES = {"bfloat16": 2, "float32": 4}
BESIDES_MODEL_BYTES = 10**9
"""What a run writes besides its model, with room to spare: rollouts, metrics, logs."""


@dataclass(frozen=True, slots=True)
class Served:
    """What an evaluation works with: a policy being served and a worker that plays episodes."""

    generator: Generator
    worker: RolloutWorker
    max_failed_share: float

    async def play(self, prompts: Sequence[Prompt], sampling: Sampling) -> tuple[list[Rollout], Metrics]:
        """An episode of each prompt; one that fails, retries included, is left out and counted as `eval/failed`.

        Raises TooManyFailures when more than `max_failed_share` of them fail, or all.
        """
        plays = (self.worker.play(prompt, sampling) for prompt in prompts)
        found = await asyncio.gather(*plays, return_exceptions=True)
        errors = [one for one in found if isinstance(one, BaseException)]
        for error in errors:
            if isinstance(error, UserError | RoleDied) or not isinstance(error, Exception):
                raise error
        rollouts = [one for one in found if not isinstance(one, BaseException)]
        if errors and (not rollouts or len(errors) > self.max_failed_share * len(prompts)):
            raise TooManyFailures(
                f"{len(errors)} of the {len(prompts)} episodes of an evaluation failed, more than "
                f"loop.max_failed_share = {self.max_failed_share:g} allows. The last one: "
                f"{type(errors[-1]).__name__}: {errors[-1]}"
            )
        return rollouts, {"eval/failed": float(len(errors))} if errors else {}


class Task(Protocol):
    """What a recipe adds to the shared machinery.

    `chat`: whether prompts are messages, which a model needs a chat template for. `server_pid`: the environment server
    that `environments` has started, if any; the run ends with it.
    """

    name: str
    chat: bool
    server_pid: int | None

    @property
    def config(self) -> RunConfig: ...
    def prompts(self) -> RoleSpec: ...
    async def environments(self, stack: AsyncExitStack, log: Path) -> EnvironmentPool: ...
    async def evaluate(self, served: Served, version: int) -> Metrics: ...
    def report(self, folder: Path, evaluations: Sequence[Metrics]) -> Report: ...


@dataclass(frozen=True, slots=True)
class Report:
    """What a task shows at the end: rows of (what, before, after), pictures it saved, something to print (rich)."""

    rows: Sequence[Row]
    pictures: Sequence[str] = ()
    show: Any = None


def run(task: Task, folder: Path) -> int:
    """Runs a task to its end; returns the exit code. 130 after Ctrl-C (the model is saved first)."""
    run_folder = RunFolder.open(folder)
    machine, model = _prepare(task, task.config.model)
    require_space(run_folder.path, BESIDES_MODEL_BYTES + _weight_bytes(model, machine))
    run_folder.save_config(run_folder.recipe(), dump(machine.resolve(task.config)))
    return asyncio.run(_Run(task, run_folder, model, machine).run())


def evaluate(task: Task, model: str) -> Metrics:
    """Evaluates a model on a task, without training."""
    machine, folder = _prepare(task, model)
    return asyncio.run(_evaluate(task, folder, machine))


def _prepare(task: Task, model: str) -> tuple[Machine, Path]:
    """Everything that can be refused before something heavy starts, cheap checks first. Raises UserError."""
    machine = choose_machine(task.config)
    folder = resolve(model)
    if task.chat:
        require_chat_template(folder)
    if task.config.in_process:
        import torch

        torch.set_num_threads(machine.threads)  # what the environment of a role's process says otherwise
    return machine, folder


async def _evaluate(task: Task, model: Path, machine: Machine) -> Metrics:
    async with AsyncExitStack() as stack:
        runtime = await stack.enter_async_context(Runtime(in_process=task.config.in_process))
        placed = _Placement(task, runtime, model, machine, weights=Path())
        logs = Path(stack.enter_context(TemporaryDirectory(prefix="rollforge-eval-")))
        served = await placed.serve(await task.environments(stack, logs / f"{SERVER}.log"), None)
        return await task.evaluate(served[0], 0)


class _Placement:
    """Says which class plays which role, with what; spawning is the runtime's."""

    def __init__(self, task: Task, runtime: Runtime, model: Path, machine: Machine, weights: Path) -> None:
        self._task, self._config, self._machine = task, task.config, machine
        self._runtime, self._weights = runtime, weights
        # Within one process transformers can load only one model at a time.
        self._turn = asyncio.Lock() if task.config.in_process else nullcontext()
        self._model: dict[str, Any] = {"folder": str(model), "dtype": machine.dtype, "device": machine.device}

    async def _spawn(
        self, name: str, target: str, threads: int = 1, limit_s: float = CALL_LIMIT_S, **kwargs: Any
    ) -> Any:
        """A handle that stands for the role: typed as whatever Protocol the caller expects."""
        async with self._turn:
            return await self._runtime.spawn(
                RoleSpec(name, f"rollforge.{target}", kwargs, ONE_ARENA, threads=threads, limit_s=limit_s)
            )

    async def serve(self, environments: EnvironmentPool, store: Any) -> list[Served]:
        """Policy servers, each with an environment worker. Without a store they serve what they were started with."""
        c = self._config
        reader = WeightReader(store) if store is not None else None
        numbers = [f"_{i}" if c.generators > 1 else "" for i in range(c.generators)]
        tries = c.rollout.retries + 1

        async def one(number: str) -> Served:
            generator = await self._spawn(
                f"generator{number}",
                "generate.native.policy:NativePolicy",
                self._machine.threads,
                **self._model,
                config=c.generate,
                weights=reader,
            )
            worker = await self._spawn(
                f"environment{number}",
                "rollout.worker:EpisodeWorker",
                limit_s=tries * (c.rollout.time_limit_s + CALL_LIMIT_S),  # after the episode's own limits
                folder=self._model["folder"],
                generator=generator,
                environments=environments,
                sampling=c.sampling.sampling(),
                config=c.rollout,
            )
            await worker.check()
            return Served(generator, worker, c.loop.max_failed_share)

        return list(await asyncio.gather(*(one(number) for number in numbers)))

    async def roles(
        self, environments: EnvironmentPool, folder: RunFolder, algorithm: GRPO
    ) -> tuple[Roles, list[Served]]:
        """Every role of a training run."""
        c = self._config
        store = await self._spawn("weights", "weights.store:MemoryWeightStore", folder=str(self._weights))
        served, prompts, buffer, recorder, trainer, reference = await asyncio.gather(
            self.serve(environments, store),
            self._runtime.spawn(self._task.prompts()),
            self._spawn(
                "buffer",
                "buffer.replay:ReplayBuffer",
                limit_s=c.buffer.wait_limit_s + CALL_LIMIT_S,  # after the buffer's own limit, which says more
                groups_per_step=c.loop.groups_per_step,
                config=c.buffer,
            ),
            self._spawn("metrics", "runs.recorder:RunRecorder", folder=str(folder.path)),
            self._trainer(algorithm, store),
            self._reference(algorithm),
        )
        generators, workers = [s.generator for s in served], [s.worker for s in served]
        return Roles(cast(Any, prompts), workers, buffer, trainer, generators, recorder, reference), served

    async def _trainer(self, algorithm: GRPO, store: Any) -> Any:
        return await self._spawn(
            "trainer",
            "train.trainer:PolicyTrainer",
            self._machine.threads,
            **self._model,
            config=self._config.train,
            algorithm=algorithm,
            total_steps=self._config.steps,
            temperature=self._config.sampling.temperature,
            weights=WeightPublisher(store, self._weights),
        )

    async def _reference(self, algorithm: GRPO) -> Any:
        """None when no coefficient needs it: then it is not even loaded."""
        if not algorithm.needs_reference:
            return None
        return await self._spawn(
            "reference",
            "train.scorer:ModelScorer",
            self._machine.threads,
            **self._model,
            micro_batch_tokens=self._config.train.micro_batch_tokens,
            temperature=self._config.sampling.temperature,
        )


class _Run:
    """One training run, from spawning its roles to its last line on the terminal."""

    def __init__(self, task: Task, folder: RunFolder, model: Path, machine: Machine) -> None:
        self._task, self._folder, self._model, self._machine = task, folder, model, machine
        self._config = task.config
        self._evaluations: list[Metrics] = []
        self._failures: list[str] = []
        self._failure_kinds: set[str] = set()
        self._started = time.monotonic()

    async def run(self) -> int:
        c = self._config
        title = (
            f"{self._task.name}: {c.steps} steps of {c.loop.groups_per_step} groups x {c.rollout.group_size} rollouts"
        )
        facts = {**self._machine.facts, "run folder": str(self._folder.path)}
        self._folder.note("\n".join([title, *(f"{name}: {fact}" for name, fact in facts.items())]))
        with MemoryWatch() as memory, Console(title, facts, c.steps) as console:
            self._console = console
            try:
                async with AsyncExitStack() as stack:
                    interrupted = await self._train(stack)
                    summary = self._summary(memory, "interrupted" if interrupted else "finished")
                    await self._roles.recorder.close()
                with disk_guard(self._folder.path, "the pictures"):
                    self._finish(summary, interrupted)
                self._folder.save_summary(summary)
            except BaseException as error:
                if isinstance(error, RoleDied) and (log := self._folder.role_log(error.role)).exists():
                    error.log = str(log)
                self._write_down(error, memory)
                raise
        return INTERRUPTED if interrupted else 0

    async def _train(self, stack: AsyncExitStack) -> bool:
        """Brings everything up, runs the loop, saves the model. Returns whether Ctrl-C ended it early."""
        c = self._config
        logs = self._folder.path / "logs"
        # Before the roles, so that it is removed after them.
        weights = stack.enter_context(weight_folder(VERSIONS_ALIVE * _weight_bytes(self._model, self._machine)))
        runtime = await stack.enter_async_context(Runtime(in_process=c.in_process, log_dir=logs))
        server_log = self._folder.role_log(SERVER)
        environments = await self._task.environments(stack, server_log)
        algorithm = GRPO(c.algo)
        placement = _Placement(self._task, runtime, self._model, self._machine, weights)

        def watches() -> list[Coroutine[Any, Any, None]]:
            pid = self._task.server_pid
            return [runtime.supervise(), *([] if pid is None else [_supervise_server(pid, server_log)])]

        roles = placement.roles(environments, self._folder, algorithm)
        self._roles, self._served = await _beside(roles, watches())
        pipeline = Pipeline(
            self._roles,
            algorithm,
            c.loop,
            c.steps,
            c.buffer.max_staleness,
            c.seed,
            self._evaluate,
            self._on_step,
            self._on_failure,
        )
        interrupted = await _until_interrupted(_beside(pipeline.run(), watches()))
        if interrupted:
            self._note("interrupted: saving the model (a second Ctrl-C ends at once, without it)")
        with _export_guard(self._folder.model):
            await self._roles.trainer.export(str(self._folder.model))
        return interrupted

    async def _evaluate(self, version: int) -> Metrics:
        started = time.monotonic()
        metrics = await self._task.evaluate(self._served[0], version)
        metrics = {**metrics, "eval/seconds": time.monotonic() - started}
        self._evaluations.append({"step": float(version), **metrics})
        await self._roles.recorder.evaluation(version, metrics)
        self._console.evaluation(version, {name.removeprefix("eval/"): value for name, value in metrics.items()})
        return metrics

    def _on_step(self, step: int, metrics: Metrics) -> None:
        self._console.step(step + 1, metrics)
        if metrics.get("train/skipped"):
            self._note(f"the gradient of step {step + 1} was not finite: no weight was changed")

    def _on_failure(self, text: str) -> None:
        """The first failure of each kind is shown at once; all are counted, and the roles' logs hold every one."""
        self._failures.append(text)
        kind = text.partition(":")[0]
        if kind not in self._failure_kinds:
            self._failure_kinds.add(kind)
            self._note(f"an episode failed and is left out: {text}")

    def _note(self, text: str) -> None:
        self._console.note(text)
        self._folder.note(text)

    def _write_down(self, error: BaseException, memory: MemoryWatch) -> None:
        """What ended the run before its time, for the log and the summary."""
        early = isinstance(error, asyncio.CancelledError | KeyboardInterrupt)  # Ctrl-C before training or while saving
        cause = "interrupted" if early else f"{type(error).__name__}: {error}"
        with suppress(OSError, UserError):  # a full disk must not hide what went wrong
            self._folder.note(cause if early else f"ended by {cause}")
            self._folder.save_summary(self._summary(memory, cause.partition("\n")[0]))

    def _summary(self, memory: MemoryWatch, ended: str) -> dict[str, Any]:
        """`ended`: "finished", "interrupted", or the cause in one line."""
        return {
            "recipe": self._task.name,
            "ended": ended,
            "seconds": time.monotonic() - self._started,
            "failed_episodes": len(self._failures),
            "peak_memory_gb": memory.peak_bytes / 1e9,
            "peak_memory_is": memory.method,
            "before": self._evaluations[0] if self._evaluations else {},
            "after": self._evaluations[-1] if self._evaluations else {},
            **self._machine.facts,
        }

    def _finish(self, summary: dict[str, Any], interrupted: bool) -> None:
        path, console = self._folder.path, self._console
        points = [(step + 1, value) for step, value in RunReader(path).series("reward/mean")]
        if points:
            curve_png(path / "reward.png", {"reward": points}, f"{self._task.name}: mean reward of rollouts")
        report = self._task.report(path, self._evaluations) if len(self._evaluations) > 1 else Report([])
        if report.show is not None:
            console.show(report.show)
        rows = [
            *report.rows,
            ("minutes", None, f"{summary['seconds'] / 60:.1f}"),
            (
                f"peak memory of all processes, GB ({summary['peak_memory_is']})",
                None,
                f"{summary['peak_memory_gb']:.2f}",
            ),
        ]
        pictures = [str(path / name) for name in (*report.pictures, *(["reward.png"] if points else []))]
        console.finish(
            rows,
            [
                *([f"pictures       {', '.join(pictures)}"] if pictures else []),
                f"a rollout      rollforge inspect {path} --best",
                f"curves         tensorboard --logdir {self._folder.tensorboard}",
                f"the model      {self._folder.model} (a Hugging Face folder)",
                f"evaluate it    rollforge eval {self._folder.recipe()} --model {self._folder.model} "
                f"--config {self._folder.config}",
            ],
        )
        if self._failures:
            self._note(f"{len(self._failures)} episodes failed and were left out, the last one: {self._failures[-1]}")
        self._note("interrupted: the model as it was is saved" if interrupted else "finished")


def _weight_bytes(model: Path, machine: Machine) -> int:
    """What one published version takes, and the exported model: every parameter in the dtype computed in."""
    return num_parameters(model) * BYTES[machine.dtype]


async def _supervise_server(pid: int, log: Path) -> None:
    """Waits until the environment server is gone and raises RoleDied with the end of its log."""
    watch = Watch(pid, start_time(pid))
    try:
        cause = await watch.gone() or "its process is gone"
    finally:
        watch.close()
    raise RoleDied(SERVER, cause, log_tail(log))


async def _beside(work: Coroutine[Any, Any, T], watches: Sequence[Coroutine[Any, Any, None]]) -> T:
    """Runs `work` to its end. A watch that raises ends it; where both fail, the watch knows the cause."""
    working = asyncio.ensure_future(work)
    watching = [asyncio.ensure_future(watch) for watch in watches]
    try:
        await asyncio.wait([working, *watching], return_when=asyncio.FIRST_COMPLETED)
        if working.done() and working.exception() is not None:
            await asyncio.wait(watching, timeout=CAUSE_LIMIT_S, return_when=asyncio.FIRST_COMPLETED)
        for watch in watching:
            if watch.done():
                watch.result()
        return await working
    finally:
        for task in [working, *watching]:
            task.cancel()
        await asyncio.gather(working, *watching, return_exceptions=True)


@contextmanager
def _export_guard(folder: Path) -> Iterator[None]:
    """`disk_guard` for safetensors, too, which tells an error of the operating system in words only."""
    with disk_guard(folder, "the model"):
        try:
            yield
        except SafetensorError as error:
            number = re.search(r"\(os error (\d+)\)", str(error))
            if number is None:
                raise
            raise OSError(int(number[1]), os.strerror(int(number[1]))) from error


async def _until_interrupted(work: Any) -> bool:
    """Runs `work` to its end, or until Ctrl-C; says whether it was interrupted. A second Ctrl-C is Python's own."""
    loop = asyncio.get_running_loop()
    task = asyncio.ensure_future(work)
    pressed = asyncio.Event()

    def interrupt() -> None:
        loop.remove_signal_handler(signal.SIGINT)
        pressed.set()
        task.cancel()

    loop.add_signal_handler(signal.SIGINT, interrupt)
    try:
        await task
    except asyncio.CancelledError:
        if not pressed.is_set():
            raise
        return True
    finally:
        loop.remove_signal_handler(signal.SIGINT)
    return False
