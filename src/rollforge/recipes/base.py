"""What every recipe shares: its configuration, and the facts chosen for this machine.

Knows: the configuration of every room, devices. Does not know: torch at import (the command line reads this before any
model).
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from rollforge.algo.config import GRPOConfig
from rollforge.buffer.config import BufferConfig
from rollforge.config import ConfigError, option
from rollforge.generate.config import NativeConfig
from rollforge.loop.config import LoopConfig
from rollforge.rollout.config import RolloutConfig
from rollforge.train.config import TrainConfig
from rollforge.types import Sampling


@dataclass(frozen=True, kw_only=True)
class SamplingConfig:
    """How rollouts are sampled. Training needs the whole distribution: no top-p, top-k or min-p here."""

    temperature: float = option(1.0, help="logits are divided by it, in the engine and in the trainer")
    max_tokens: int = option(64, help="tokens per turn at most")
    stop: tuple[str, ...] = option((), help="texts at which a turn ends")

    def __post_init__(self) -> None:
        if self.temperature <= 0:
            raise ConfigError(
                f"sampling.temperature is {self.temperature}; rollouts to learn from need more than 0 (1 is usual)."
            )
        if self.max_tokens < 1:
            raise ConfigError(f"sampling.max_tokens is {self.max_tokens}; it must be at least 1.")

    def sampling(self) -> Sampling:
        """The value the engine takes."""
        return Sampling(temperature=self.temperature, max_tokens=self.max_tokens, stop=self.stop)


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """The keys of every recipe; a recipe adds its own and sets the defaults."""

    steps: int = option(100, help="optimizer steps")
    seed: int = option(0, help="seed of everything drawn by chance")
    model: str = option("smollm2", help="a folder, a hub name, smollm2 (packaged) or tiny (for tests)")
    device: str = option("auto", help="auto, cpu or cuda")
    dtype: Literal["auto", "bfloat16", "float32"] = option("auto", help="compute dtype; weights are trained in float32")
    engine: Literal["auto", "native"] = option("auto", help="policy server")
    in_process: bool = option(False, help="all roles in one process, to debug: same code, same results")
    generators: int = option(1, help="replicas of the policy server")
    threads: int = option(0, help="CPU threads of trainer and generator each; 0: all cores")
    sampling: SamplingConfig = option(SamplingConfig(), help="how rollouts are sampled")
    rollout: RolloutConfig = option(RolloutConfig(), help="how episodes are played")
    generate: NativeConfig = option(NativeConfig(), help="the policy server")
    buffer: BufferConfig = option(BufferConfig(), help="the replay buffer")
    train: TrainConfig = option(TrainConfig(), help="the trainer")
    algo: GRPOConfig = option(GRPOConfig(), help="the algorithm")
    loop: LoopConfig = option(LoopConfig(), help="batches and evaluation")

    def __post_init__(self) -> None:
        for name, least in (("steps", 1), ("generators", 1), ("threads", 0)):
            if getattr(self, name) < least:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be at least {least}.")
        if self.device not in ("auto", "cpu", "cuda"):
            raise ConfigError(f"device is {self.device!r}; choose auto, cpu or cuda.")


def _has_cuda() -> bool:
    """Whether torch finds a CUDA device; without a driver it cannot, and the controller is spared importing it."""
    if not Path("/proc/driver/nvidia").exists():
        return False
    import torch

    return torch.cuda.is_available()


@dataclass(frozen=True, slots=True)
class Machine:
    """What a run computes on, each with how it was chosen."""

    device: str
    dtype: str
    engine: str
    threads: int
    facts: dict[str, str]


def choose_machine(config: RunConfig) -> Machine:
    """Resolves every `auto` by what is there. Raises UserError for a device this machine lacks."""
    has_cuda = _has_cuda()
    if config.device == "cuda" and not has_cuda:
        raise ConfigError(
            "device is 'cuda', but torch finds no CUDA device here. Run on a GPU machine with a CUDA build of torch "
            "(`rollforge doctor` shows what is there), or set device to cpu."
        )
    device = ("cuda" if has_cuda else "cpu") if config.device == "auto" else config.device
    dtype = "bfloat16" if config.dtype == "auto" else config.dtype
    cores = len(os.sched_getaffinity(0))
    threads = config.threads or cores

    def how(value: object, chosen: bool) -> str:
        return f"{value} ({'chosen' if chosen else 'set'})"

    return Machine(
        device,
        dtype,
        "native",
        threads,
        {
            "model": config.model,
            "device": how(device, config.device == "auto"),
            "dtype": how(dtype, config.dtype == "auto") + ", masters float32",
            "engine": how("native", config.engine == "auto"),
            "threads": how(f"{threads} of {cores}", config.threads == 0),
            "staleness": f"at most {config.buffer.max_staleness}",
        },
    )
