"""What a user may set about the algorithm.

Knows: names, defaults and bounds. Does not know: torch (the command line reads this module before any model is loaded).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

from rollforge.algo.schedule import Schedule
from rollforge.config import ConfigError, option

Advantage = Literal["group_norm", "group_center", "leave_one_out", "leave_one_out_norm"]
Baseline = Literal["group", "turn"]
KLEstimator = Literal["k1", "k2", "k3"]
LossNorm = Literal["token", "sequence", "constant"]

_CHOICES = {"advantage": Advantage, "baseline": Baseline, "kl_estimator": KLEstimator, "loss_norm": LossNorm}


@dataclass(frozen=True, kw_only=True)
class GRPOConfig:
    """GRPO and its close relatives. A coefficient is a number or a `Schedule`. Raises ConfigError naming the field."""

    advantage: Advantage = option(
        "group_norm",
        help="a return against its peers': minus their mean, by their spread (GRPO); group_center: minus the mean "
        "(Dr. GRPO); leave_one_out: minus the mean of the others (RLOO); leave_one_out_norm: that by their spread",
    )
    baseline: Baseline = option(
        "group",
        help="the peers: all rollouts of the prompt; turn: the turns of the group that saw the same tokens (GiGPO), "
        "and the whole group for a turn that no other rollout shares",
    )
    std_eps: float = option(1e-6, help="added to the spread (sample standard deviation), in units of reward")
    filter_zero_variance: bool = option(True, help="drop and count groups whose rewards are all equal")
    zero_variance_tolerance: float = option(
        1e-6, help="rewards are equal if they span at most this share of the largest magnitude among them, or of 1"
    )
    clip_low: float = option(0.2, help="the importance ratio is clipped below at 1 - clip_low")
    clip_high: float = option(0.2, help="and above at 1 + clip_high (DAPO's clip-higher: 0.28)")
    kl_coef: float | Schedule = option(0.0, help="weight of the KL to the reference model; 0: none is loaded")
    kl_estimator: KLEstimator = option("k3", help="Schulman's estimators of that KL; see the algorithm's page")
    entropy_coef: float | Schedule = option(0.0, help="weight of the entropy bonus")
    legal_coef: float | Schedule = option(
        0.0, help="weight of KL(uniform over legal actions || policy), which keeps every legal action alive"
    )
    loss_norm: LossNorm = option(
        "token",
        help="mean over all tokens of the step (DAPO); sequence: mean over samples of their token means (GRPO); "
        "constant: sum over tokens by samples x constant_tokens (Dr. GRPO)",
    )
    constant_tokens: int | None = option(
        None, help="what loss_norm constant divides by, usually the longest completion allowed; else unset"
    )

    def __post_init__(self) -> None:
        for name, choices in _CHOICES.items():
            if getattr(self, name) not in get_args(choices):
                raise ConfigError(f"{name} is {getattr(self, name)!r}; choose one of {', '.join(get_args(choices))}.")
        for name in ("kl_coef", "entropy_coef", "legal_coef"):
            value = getattr(self, name)
            ends = (value.start, value.end) if isinstance(value, Schedule) else (value,)
            if not all(0 <= end < math.inf for end in ends):
                raise ConfigError(
                    f"{name} is {value}; a coefficient is 0 (off) or a finite positive number throughout."
                )
        if not 0 < self.clip_low <= 1:
            raise ConfigError(f"clip_low is {self.clip_low}; a ratio is never below 0, so give more than 0, at most 1.")
        if not self.clip_high > 0:
            raise ConfigError(f"clip_high is {self.clip_high}; give a number above 0.")
        for name in ("std_eps", "zero_variance_tolerance"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ConfigError(f"{name} is {getattr(self, name)}; give 0 or a small positive number.")
        self._check_constant_tokens()

    def _check_constant_tokens(self) -> None:
        if self.loss_norm == "constant" and (self.constant_tokens is None or self.constant_tokens < 1):
            raise ConfigError(
                f"constant_tokens is {self.constant_tokens}; loss_norm 'constant' divides by it, so give the longest "
                "completion allowed, in tokens."
            )
        if self.loss_norm != "constant" and self.constant_tokens is not None:
            raise ConfigError(
                f"constant_tokens is {self.constant_tokens} but loss_norm is {self.loss_norm!r}, which ignores it; "
                "remove it or set loss_norm to 'constant'."
            )
