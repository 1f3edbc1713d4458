"""Configuration of the policy trainer."""

from __future__ import annotations

import math
from dataclasses import dataclass

from rollforge.config import ConfigError, option, require_at_least


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """AdamW over float32 masters, computing in the run's dtype."""

    learning_rate: float = option(1e-5, help="peak learning rate of AdamW")
    beta1: float = option(0.9, help="AdamW's decay of the mean gradient")
    beta2: float = option(0.95, help="AdamW's decay of the mean squared gradient")
    eps: float = option(1e-8, help="AdamW's denominator floor")
    weight_decay: float = option(0.0, help="AdamW's decoupled weight decay, on matrices only")
    warmup_steps: int = option(5, help="optimizer steps over which the learning rate rises linearly from zero")
    final_share: float = option(
        1.0, help="share of the peak learning rate that it falls to by the end of the run (1 constant, 0 to zero)"
    )
    max_grad_norm: float = option(1.0, help="gradients are scaled down to this global norm")
    micro_batch_tokens: int = option(1024, help="distinct tokens computed at once; larger batches are accumulated")

    def __post_init__(self) -> None:
        for name in ("learning_rate", "eps"):
            if not 0 < getattr(self, name) < math.inf:
                raise ConfigError(f"train.{name} is {getattr(self, name)}; it must be finite and above 0.")
        if not self.max_grad_norm > 0:
            raise ConfigError(f"train.max_grad_norm is {self.max_grad_norm}; it must be above 0 (inf: no clipping).")
        for name in ("beta1", "beta2"):
            if not 0 <= getattr(self, name) < 1:
                raise ConfigError(f"train.{name} is {getattr(self, name)}; it must be at least 0 and below 1.")
        if not 0 <= self.weight_decay < math.inf:
            raise ConfigError(f"train.weight_decay is {self.weight_decay}; it must be 0 or a finite positive number.")
        if not 0 <= self.final_share <= 1:
            raise ConfigError(f"train.final_share is {self.final_share}; it must be between 0 and 1.")
        require_at_least(self, "train", warmup_steps=0, micro_batch_tokens=1)

    def rate(self, step: int, total_steps: int) -> float:
        """Learning rate of optimizer step `step` (from 0): linear warm-up, then a cosine down to `final_share` of
        the peak, reached at the last step.
        """
        if step < self.warmup_steps:
            return self.learning_rate * (step + 1) / (self.warmup_steps + 1)
        done = (step - self.warmup_steps) / max(1, total_steps - 1 - self.warmup_steps)
        fall = 0.5 * (1 + math.cos(math.pi * min(1.0, done)))
        return self.learning_rate * (self.final_share + (1 - self.final_share) * fall)
