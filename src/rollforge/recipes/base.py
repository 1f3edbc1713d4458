"""What every recipe shares: its configuration, and the facts chosen for this machine.

Knows: the configuration of every room, devices. Does not know: torch at import (the command line reads this before any
model).
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, TypeVar

from rollforge.algo.config import GRPOConfig
from rollforge.buffer.config import BufferConfig
from rollforge.config import ConfigError, option, require_at_least
from rollforge.data.models import lasting_name
from rollforge.generate.config import NativeConfig
from rollforge.loop.config import LoopConfig
from rollforge.rollout.config import RolloutConfig
from rollforge.train.config import TrainConfig
from rollforge.types import LOWEST_TEMPERATURE, Sampling


@dataclass(frozen=True, kw_only=True)
class SamplingConfig:
    """How rollouts are sampled. Training needs the whole distribution: no top-p, top-k or min-p here."""

    temperature: float = option(1.0, help="logits are divided by it, in the engine and in the trainer")
    max_tokens: int = option(64, help="tokens per turn at most")
    stop: tuple[str, ...] = option((), help="texts at which a turn ends")

    def __post_init__(self) -> None:
        if not LOWEST_TEMPERATURE <= self.temperature < math.inf:
            raise ConfigError(
                f"sampling.temperature is {self.temperature}; rollouts to learn from need at least "
                f"{LOWEST_TEMPERATURE}, and less than infinity (1 is usual)."
            )
        require_at_least(self, "sampling", max_tokens=1)
        if "" in self.stop:
            raise ConfigError("sampling.stop has an empty text, which every turn would end with; remove it.")

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
        require_at_least(self, "", steps=1, seed=0, generators=1, threads=0)
        if self.device not in ("auto", "cpu", "cuda"):
            raise ConfigError(f"device is {self.device!r}; choose auto, cpu or cuda.")


C = TypeVar("C", bound=RunConfig)

_CPU = Path("/proc/cpuinfo")
_CUDA_DRIVERS = ("/proc/driver/nvidia", "/dev/nvidiactl", "/dev/dxg")
"""Where a driver shows itself; the last is that of Windows' Linux."""


def has_cuda() -> bool:
    """Whether torch finds a CUDA device; without a driver it cannot, and the controller is spared importing it."""
    if not any(Path(driver).exists() for driver in _CUDA_DRIVERS):
        return False
    import torch

    return torch.cuda.is_available()


def _has_bfloat16(device: str) -> bool:
    """Whether the device has instructions for bfloat16. Without them torch imitates it: on a CPU without AVX-512 at a
    quarter of float32's speed.
    """
    if device == "cuda":
        import torch

        return torch.cuda.get_device_capability() >= (8, 0)
    words = set(_CPU.read_text().split()) if _CPU.exists() else set()
    return not words.isdisjoint(("avx512_bf16", "amx_bf16", "bf16"))


def _choose_dtype(config: RunConfig, device: str) -> tuple[Literal["bfloat16", "float32"], str]:
    """The compute dtype, and how it was chosen."""
    if config.dtype != "auto":
        return config.dtype, "set"
    if _has_bfloat16(device):
        return "bfloat16", "chosen"
    return "float32", "chosen: no bfloat16 instructions here"


@dataclass(frozen=True, slots=True)
class Machine:
    """What a run computes on; `facts` say it in words, each with how it was chosen."""

    device: str
    dtype: Literal["bfloat16", "float32"]
    engine: Literal["native"]
    threads: int
    facts: dict[str, str]

    def resolve(self, config: C) -> C:
        """The configuration with nothing left to choose: it means the same wherever it can run."""
        return replace(
            config,
            device=self.device,
            dtype=self.dtype,
            engine=self.engine,
            threads=self.threads,
            model=lasting_name(config.model),
        )


def choose_machine(config: RunConfig) -> Machine:
    """Resolves every `auto` by what is there. Raises UserError for a device this machine lacks."""
    found = has_cuda()
    if config.device == "cuda" and not found:
        raise ConfigError(
            "device is 'cuda', but torch finds no CUDA device here. Run on a GPU machine with a CUDA build of torch "
            "(`rollforge doctor` shows what is there), or set device to cpu."
        )
    device = ("cuda" if found else "cpu") if config.device == "auto" else config.device
    dtype, why = _choose_dtype(config, device)
    cores = len(os.sched_getaffinity(0))
    threads = config.threads or cores

    def how(value: object, is_open: bool) -> str:
        return f"{value} ({'chosen' if is_open else 'set'})"

    return Machine(
        device,
        dtype,
        "native",
        threads,
        {
            "model": config.model,
            "device": how(device, config.device == "auto"),
            "dtype": f"{dtype} ({why}), masters float32",
            "engine": how("native", config.engine == "auto"),
            "threads": how(f"{threads} of {cores}", config.threads == 0),
            "staleness": f"at most {config.buffer.max_staleness}",
        },
    )
