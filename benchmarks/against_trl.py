"""A GRPO step against TRL's GRPOTrainer, and against what the machine itself could do: the same work on both sides.

8 prompts x 8 completions of exactly 32 tokens, no KL, bf16 compute over float32 weights (TRL: autocast), the same
threads. The two sides take steps in turns; the first steps of each are left out. The third column is the machine's own
limit: the floating-point operations of the linear layers, every distinct token once, at the rate of a large bf16
matrix product measured in between. (Attention, sampling and the optimizer are not in it.)

TRL needs a place of its own, since it may want other versions than ours:

    python3 -m venv trl-env
    trl-env/bin/pip install torch==2.13.0 transformers trl==1.16.0 datasets accelerate
    python benchmarks/against_trl.py --trl-python trl-env/bin/python [--steps 5] [--json FILE]

Without --trl-python the interpreter of this process is used, where TRL must then be installed.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import select
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from common import HERE, Goal, Result, options, seconds, stop, use_threads
from grpo_work import COMPLETIONS, LEARNING_RATE, PROMPTS_PER_STEP, TEMPERATURE, TOKENS, questions, reward

if TYPE_CHECKING:
    from rollforge.types import Completion, Group, IntArray, Rollout, TrainSample

TRL_VERSION = "1.16."
GOALS = {"generate": 3.0, "forward+backward": 4.0, "step": 4.0}
"""How many times faster than TRL each part should be."""
ANSWER_LIMIT_S = 600.0
MATRIX = 2048
Times = dict[str, float]


def main() -> int:
    parser = options(__doc__)
    parser.add_argument("--trl-python", default=sys.executable, metavar="PYTHON", help="an interpreter that has TRL")
    parser.add_argument("--model", help="smollm2 (default; with --quick tiny), tiny, a folder or a hub name")
    parser.add_argument("--steps", type=int, default=5, help="steps of each side that count")
    parser.add_argument("--warm-up", type=int, default=2, help="steps of each side before those")
    args = parser.parse_args()
    trl_version = find_trl(args.trl_python)
    use_threads(args.threads)
    from rollforge.data.models import resolve

    model = args.model or ("tiny" if args.quick else "smollm2")
    folder = resolve(model)
    steps, warm_up = (1, 1) if args.quick else (args.steps, args.warm_up)
    work = Ours(folder, steps + warm_up)
    ours, theirs, rate = side_by_side(work, args.trl_python, folder, args.threads, steps, warm_up)
    return report(work, ours, theirs, rate, f"{model}, TRL {trl_version}, {steps} steps each").finish(args)


def side_by_side(
    work: Ours, trl_python: str, folder: Path, threads: int, steps: int, warm_up: int
) -> tuple[Times, Times, float]:
    """(our medians, TRL's medians, floating-point operations per second of a large product)."""
    ours: list[Times] = []
    theirs: list[Times] = []
    rates: list[float] = []
    with Theirs(trl_python, folder, threads) as trl, asyncio.Runner() as runner:
        for number in range(warm_up + steps):
            ours.append(runner.run(work.step(number)))
            theirs.append(trl.step())
            rates.append(product_rate())
            print(f"step {number + 1}: ours {ours[-1]['step']:.2f} s, TRL {theirs[-1]['step']:.2f} s", flush=True)
    return medians(ours[warm_up:]), medians(theirs[warm_up:]), max(rates)


def report(work: Ours, ours: Times, theirs: Times, rate: float, what: str) -> Result:
    """The table: parts of a step, three columns of seconds, and the ratios."""
    forward = work.forward_flops / rate
    limit = {"generate": forward, "forward+backward": 3 * forward, "step": 4 * forward}
    result = Result("against_trl", ["seconds", "Rollforge", "TRL", "machine's limit", "TRL / ours", "limit / ours"])
    for part, goal in GOALS.items():
        ratio = theirs[part] / ours[part]
        result.rows.append([part, ours[part], theirs[part], limit[part], ratio, limit[part] / ours[part]])
        result.goals.append(Goal(f"{part}: TRL's seconds over ours", ratio, goal))
    result.rows += [[f"  {part}", "-", theirs[part], "-", "-", "-"] for part in ("forward", "backward")]
    result.rows += [[f"  {part}", ours[part], "-", "-", "-", "-"] for part in ("optimizer", "new weights")]
    tokens = PROMPTS_PER_STEP * COMPLETIONS * TOKENS
    result.notes += [
        f"{what}; tokens generated per second: {tokens / ours['generate']:,.0f} ours, "
        f"{tokens / theirs['generate']:,.0f} TRL",
        f"limit: {work.forward_flops / 1e9:,.0f} GFLOP for a forward over {work.distinct_tokens} distinct tokens, at "
        f"{rate / 1e9:,.0f} GFLOP/s of a {MATRIX} x {MATRIX} bf16 product; forward+backward is three forwards",
    ]
    return result


def medians(steps: Sequence[Times]) -> Times:
    """The median of each part over steps."""
    return {name: statistics.median(step[name] for step in steps) for name in steps[0]}


def product_rate() -> float:
    """Floating-point operations per second of a large bf16 product: the fastest of some."""
    import torch

    a, b = (torch.randn(MATRIX, MATRIX, dtype=torch.bfloat16) for _ in range(2))
    return 2 * MATRIX**3 / min(seconds(lambda: a @ b) for _ in range(4))


class Ours:
    """A step of ours in this process: the engine, the algorithm, the trainer, and new weights back to the engine."""

    def __init__(self, folder: Path, steps: int) -> None:
        import torch

        from rollforge.algo.config import GRPOConfig
        from rollforge.algo.grpo import GRPO
        from rollforge.data.renderer import Renderer
        from rollforge.generate.config import NativeConfig
        from rollforge.generate.native.engine import Engine
        from rollforge.generate.native.model import EngineModel
        from rollforge.train.config import TrainConfig
        from rollforge.train.trainer import PolicyTrainer

        self._renderer = Renderer(folder)
        model = EngineModel(str(folder), torch.bfloat16, "cpu")
        self._engine = Engine(model, self._renderer.decode, frozenset(), NativeConfig())
        self._algorithm = GRPO(GRPOConfig(filter_zero_variance=False))
        self._trainer = PolicyTrainer(
            str(folder), "bfloat16", "cpu", TrainConfig(learning_rate=LEARNING_RATE), self._algorithm,
            total_steps=steps, temperature=TEMPERATURE, weights=self,
        )  # fmt: skip
        self._questions = questions(PROMPTS_PER_STEP * steps)
        self._linears = linear_sizes(folder)
        self.forward_flops, self.distinct_tokens = 0.0, 0

    async def publish(self, version: int, tensors: Mapping[str, Any]) -> None:
        """types.WeightPublisher: straight into the engine."""
        self._engine.load(tensors, version)

    async def step(self, number: int) -> Times:
        """Seconds by part of one step."""
        from rollforge.types import Batch

        marks = [time.perf_counter()]
        groups = self._generate(number)
        marks.append(time.perf_counter())
        batch = Batch(number, tuple(sample for group in groups for sample in self._samples(group)))
        metrics = await self._trainer.forward_backward(batch)
        marks.append(time.perf_counter())
        await self._trainer.optim_step()
        marks.append(time.perf_counter())
        await self._trainer.publish(number + 1)
        marks.append(time.perf_counter())
        self._count(metrics, batch.samples)
        names = ("generate", "forward+backward", "optimizer", "new weights")
        times = {name: after - before for name, before, after in zip(names, marks, marks[1:], strict=False)}
        return {**times, "step": marks[-1] - marks[0]}

    def _generate(self, number: int) -> list[Group]:
        """The groups of a step: 64 completions of 32 tokens; no id stops one."""
        from rollforge.types import Group, Message, Prompt, Sampling

        first = number * PROMPTS_PER_STEP
        drawn: dict[int, list[Completion]] = {}
        prompts = [
            Prompt(id=f"{first + at}", messages=(Message("user", self._questions[first + at]),))
            for at in range(PROMPTS_PER_STEP)
        ]
        prompt_ids = [self._renderer.prompt_ids(prompt) for prompt in prompts]
        for at, ids in enumerate(prompt_ids):
            sampling = Sampling(temperature=TEMPERATURE, max_tokens=TOKENS, seed=first + at)
            done = partial(drawn.__setitem__, at)
            self._engine.submit(self._engine.prepare(ids, sampling, COMPLETIONS, done))
        while self._engine.busy:
            self._engine.step()
        return [
            Group(first + at, prompt, tuple(_rollout(prompt.id, prompt_ids[at], found) for found in drawn[at]))
            for at, prompt in enumerate(prompts)
        ]

    def _samples(self, group: Group) -> tuple[TrainSample, ...]:
        from rollforge.rollout.samples import to_samples

        return to_samples(group, self._algorithm.credit(group))

    def _count(self, metrics: Mapping[str, float], samples: Sequence[TrainSample]) -> None:
        """The floating-point operations of one forward: two per weight and token; the head sees trained tokens only.

        The last token of a sequence predicts nothing, and no token is counted that only our way of working adds.
        """
        from rollforge.data import trie

        if metrics["train/tokens"] != PROMPTS_PER_STEP * COMPLETIONS * TOKENS:
            stop(f"{metrics['train/tokens']:.0f} tokens were trained on: the work is not what was meant")
        body, head = self._linears
        self.distinct_tokens = trie.build([sample.token_ids[:-1] for sample in samples]).token_ids.size
        self.forward_flops = 2.0 * (body * self.distinct_tokens + head * metrics["train/tokens"])


def _rollout(prompt_id: str, prompt_ids: IntArray, completion: Completion) -> Rollout:
    """An episode of one turn, with its reward."""
    from rollforge.types import Observation, Rollout, Turn

    scored = reward(completion.text)
    return Rollout(prompt_id, (Turn(prompt_ids, completion, Observation("", scored, done=True)),), scored)


def linear_sizes(folder: Path) -> tuple[int, int]:
    """Weights of (all linear layers below the head, the head)."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    total = sum(module.weight.numel() for module in model.modules() if isinstance(module, torch.nn.Linear))
    head = model.get_output_embeddings().weight.numel()
    return total - head, head


class Theirs:
    """The process that runs `trl_side.py`; it computes only while a step is asked for."""

    def __init__(self, python: str, folder: Path, threads: int) -> None:
        words = [python, str(HERE / "trl_side.py"), str(folder), str(threads)]
        self._process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it has ended before
            self._process.stdin.close()
        try:
            self._process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            self._process.kill()

    def step(self) -> Times:
        """Seconds by part of one step of TRL's."""
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            print("step", file=self._process.stdin, flush=True)
        except BrokenPipeError:
            stop("TRL's process has ended; the reason stands above.")
        if not select.select([self._process.stdout], [], [], ANSWER_LIMIT_S)[0]:
            stop(f"TRL's process took no step in {ANSWER_LIMIT_S:.0f} s.")
        answer = self._process.stdout.readline()
        if not answer:
            stop("TRL's process has ended; the reason stands above.")
        times: Times = json.loads(answer)
        return {**times, "forward+backward": times["forward"] + times["backward"]}


def find_trl(python: str) -> str:
    """TRL's version in that interpreter. Stops, with the remedy, where there is none or another."""
    ask = "from importlib.metadata import version; import datasets, accelerate; print(version('trl'))"
    try:
        found = subprocess.run([python, "-c", ask], capture_output=True, text=True, timeout=120)
    except OSError as error:
        stop(f"--trl-python {python} cannot be started: {error.strerror}")
    if found.returncode == 0 and found.stdout.startswith(TRL_VERSION):
        return found.stdout.strip()
    there = f"TRL {found.stdout.strip()}" if found.returncode == 0 else "no TRL, datasets and accelerate"
    stop(
        f"{python} has {there}, and this comparison is with TRL {TRL_VERSION}*. Make an environment for it and name "
        "its interpreter:\n  python3 -m venv trl-env\n  trl-env/bin/pip install torch==2.13.0 transformers "
        "trl==1.16.0 datasets accelerate\n  python benchmarks/against_trl.py --trl-python trl-env/bin/python"
    )


if __name__ == "__main__":
    sys.exit(main())
