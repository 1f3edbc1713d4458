"""How much of the machine the native engine uses, while 1, 8 and 64 sequences are decoded together.

The measure is the machine itself, in the same run: the same matrix products alone (every linear layer of the model and
its head, once as torch.nn.functional.linear and once with the weights packed as the engine packs them), and, for one
sequence, the time it takes to read the weights from memory once. All of it in turns, medians. Then a profile: the
largest operations of a step.

    python benchmarks/engine.py [--model smollm2] [--quick] [--json FILE]
"""

from __future__ import annotations

import statistics
import sys
from functools import partial
from typing import TYPE_CHECKING, Any

from common import Goal, Result, options, seconds, stop, use_threads

if TYPE_CHECKING:
    from pathlib import Path

    from rollforge.generate.native.engine import Engine

GOAL = 0.6
PROMPT_TOKENS = 16
WARM_STEPS = 2
LARGEST = 8
"""So many operations of a profile are told."""
READ_BYTES = 512 * 2**20
"""Far beyond any cache."""


def main() -> int:
    parser = options(__doc__)
    parser.add_argument("--model", default="smollm2", help="smollm2, tiny, a folder or a hub name")
    args = parser.parse_args()
    use_threads(args.threads)
    from rollforge.data.models import resolve

    folder = resolve(args.model)
    repeats, steps = (1, 8) if args.quick else (7, 24)
    linears, bandwidth = Linears(folder), read_bandwidth(3 if args.quick else 7)
    result = Result(
        "engine",
        ["sequences", "tokens/s", "ms/step", "products, ms", "packed, ms", "of the products", "of the packed",
         "of the bandwidth limit"],
    )  # fmt: skip
    for rows in (1, 8, 64):
        step, plain, packed = measure(folder, linears, rows, repeats, steps)
        limit = linears.weight_bytes / bandwidth
        result.rows.append(
            [str(rows), rows / step, 1e3 * step, 1e3 * plain, 1e3 * packed, plain / step, packed / step,
             limit / step if rows == 1 else "-"]
        )  # fmt: skip
        if rows == 1:
            result.goals.append(Goal("one sequence: share of the memory-bandwidth limit", limit / step, GOAL))
        if rows == 64:
            alone = min(plain, packed)
            result.goals.append(Goal("64 sequences: share of the same products alone (the faster)", alone / step, GOAL))
    result.notes.append(
        f"{args.model}: {linears.weight_bytes / 1e6:,.0f} MB of weights read for each step, memory read at "
        f"{bandwidth / 1e9:.1f} GB/s; prompts of {PROMPT_TOKENS} tokens, {steps} steps timed, sampling included"
    )
    result.notes += [f"{rows} sequences, ms a step when profiled: {profile(folder, rows, steps)}" for rows in (1, 64)]
    return result.finish(args)


class Linears:
    """The model's matrix products with nothing around them."""

    def __init__(self, folder: Path) -> None:
        import torch

        from rollforge.data.transformer import load_causal_lm
        from rollforge.generate.native.packed import PackedLinear, can_pack

        model = load_causal_lm(folder, torch.bfloat16, "cpu").requires_grad_(False)
        self.plain = [module for module in model.modules() if isinstance(module, torch.nn.Linear)]
        if not can_pack(torch.bfloat16, "cpu"):
            stop("torch has no oneDNN here, so there are no packed products to compare with")
        self.packed = [PackedLinear(linear) for linear in self.plain]
        self.weight_bytes = sum(linear.weight.numel() * linear.weight.element_size() for linear in self.plain)

    def inputs(self, rows: int) -> list[Any]:
        """One random input [rows, in] for each layer."""
        import torch

        return [torch.randn(rows, linear.in_features, dtype=torch.bfloat16) for linear in self.plain]

    def multiply(self, inputs: list[Any], packed: bool) -> None:
        """Every product of one step."""
        import torch

        with torch.inference_mode():
            for linear, own, x in zip(self.plain, self.packed, inputs, strict=True):
                own(x) if packed else torch.nn.functional.linear(x, linear.weight, linear.bias)


def measure(folder: Path, linears: Linears, rows: int, repeats: int, steps: int) -> tuple[float, float, float]:
    """Median seconds of (an engine step, the products alone, the packed products alone) at `rows` sequences."""
    inputs = linears.inputs(rows)
    engine = make_engine(folder, rows)
    taken: tuple[list[float], list[float], list[float]] = ([], [], [])
    for _ in range(repeats):
        fill(engine, rows, steps)
        taken[0].extend(seconds(engine.step) for _ in range(steps))
        while engine.busy:
            engine.step()
        for times, packed in ((taken[1], False), (taken[2], True)):
            linears.multiply(inputs, packed)
            times.extend(seconds(partial(linears.multiply, inputs, packed)) for _ in range(steps))
    step, plain, packed_time = (statistics.median(times) for times in taken)
    return step, plain, packed_time


def profile(folder: Path, rows: int, steps: int) -> str:
    """The largest operations of a step at `rows` sequences in milliseconds, and what passes outside operations."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as profiler

    engine = make_engine(folder, rows)
    fill(engine, rows, steps)
    with profiler(activities=[ProfilerActivity.CPU], acc_events=True) as profiled:
        wall = seconds(lambda: [engine.step() for _ in range(steps)])
    own = {event.key: event.self_cpu_time_total / 1e3 / steps for event in profiled.key_averages()}
    parts = sorted(own.items(), key=lambda part: -part[1])[:LARGEST]
    parts.append((f"the other {len(own) - len(parts)} operations", sum(own.values()) - sum(ms for _, ms in parts)))
    parts.append(("outside operations", 1e3 * wall / steps - sum(own.values())))
    return ", ".join(f"{name} {ms:.1f}" for name, ms in parts)


def make_engine(folder: Path, rows: int) -> Engine:
    """An engine that stops at no token, so that every sequence has the same length."""
    import torch

    from rollforge.generate.config import NativeConfig
    from rollforge.generate.native.engine import Engine
    from rollforge.generate.native.model import EngineModel

    model = EngineModel(str(folder), torch.bfloat16, "cpu")
    return Engine(model, lambda ids: "", frozenset(), NativeConfig(max_batch=rows, max_prefill=rows * PROMPT_TOKENS))


def fill(engine: Engine, rows: int, steps: int) -> None:
    """Submits `rows` different prompts and runs until all are decoding and warm."""
    import numpy as np

    from rollforge.types import Sampling

    rng = np.random.default_rng(0)
    for row in range(rows):
        prompt = rng.integers(5, 90, PROMPT_TOKENS).astype(np.int32)
        sampling = Sampling(max_tokens=1 + WARM_STEPS + steps + 1, seed=row)
        engine.submit(engine.prepare(prompt, sampling, 1, lambda completions: None))
    for _ in range(1 + WARM_STEPS):
        engine.step()


def read_bandwidth(repeats: int) -> float:
    """Bytes per second at which a large tensor is read once: the fastest of some passes, since this is a limit."""
    import torch

    large = torch.ones(READ_BYTES // 4)
    return READ_BYTES / min(seconds(large.sum) for _ in range(repeats + 1))


if __name__ == "__main__":
    sys.exit(main())
