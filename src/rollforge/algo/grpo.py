"""GRPO and its close relatives, as one pure object.

* GRPO, group-normalised advantages, clipped ratio, KL to a reference: DeepSeekMath, arXiv 2402.03300.
* Dr. GRPO (`advantage: group_center`, `loss_norm: constant`): arXiv 2503.20783.
* DAPO's clip-higher and token mean (`clip_high` > `clip_low`, `loss_norm: token`): arXiv 2503.14476.
* GiGPO's anchor states (`baseline: turn`): arXiv 2505.10978.

Knows: the formulas. Does not know: models, processes, how tokens were sampled. The ratio is always against the
log-probabilities of the policy that sampled, so stale data is corrected for, whatever the loop's schedule.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from rollforge.algo.advantages import compare, group_advantages, has_spread, rewards_of, turn_advantages
from rollforge.algo.config import GRPOConfig
from rollforge.algo.schedule import Schedule
from rollforge.types import Credit, Group

if TYPE_CHECKING:
    from torch import Tensor

    from rollforge.tensors import LossInputs, MetricPairs, TokenOutputs


def _weighted(coefficient: float, values_N: Tensor) -> Tensor | float:
    """0 when the coefficient is 0 at this step: 0 x infinity would be NaN."""
    return coefficient * values_N if coefficient else 0.0


class GRPO:
    """`credit` on plain numbers beside the rollouts, `loss` on tensors in the trainer; no state between calls."""

    def __init__(self, config: GRPOConfig) -> None:
        self.config = config
        self.kl, self.entropy, self.legal = map(Schedule.of, (config.kl_coef, config.entropy_coef, config.legal_coef))
        self.needs_reference = not self.kl.is_off
        self.needs_entropy = not self.entropy.is_off

    def credit(self, group: Group) -> Credit:
        """One advantage per rollout and turn. Raises UserError when a reward is NaN or infinite."""
        c = self.config
        how = partial(compare, advantage=c.advantage, std_eps=c.std_eps, tolerance=c.zero_variance_tolerance)
        advantages = (turn_advantages if c.baseline == "turn" else group_advantages)(group, how)
        equal = not has_spread(rewards_of(group), c.zero_variance_tolerance)
        return Credit(advantages, dropped="zero variance" if equal and c.filter_zero_variance else None)

    def loss(self, outputs: TokenOutputs, inputs: LossInputs) -> tuple[Tensor, MetricPairs]:
        """This micro-batch's part of the step's loss (a scalar; parts add up) and its metrics as (sum, weight) pairs.

        Raises ValueError when a coefficient is on and what it weighs was not handed in, which would train without it.
        """
        from rollforge.algo import losses  # only the trainer has tensors: who gives credit is spared torch
        from rollforge.algo.kl import kl_penalty

        c = self.config
        if outputs.logprobs_N.shape != inputs.behaviour_logprobs_N.shape:
            raise ValueError(f"{outputs.logprobs_N.shape[0]} outputs for {inputs.behaviour_logprobs_N.shape[0]} inputs")
        ratio_N = losses.importance_ratio(outputs.logprobs_N, inputs.behaviour_logprobs_N)
        weights_N = losses.token_weights(inputs, c.loss_norm, c.constant_tokens)
        loss_N = losses.clipped_surrogate(ratio_N, inputs.advantages_N, c.clip_low, c.clip_high)
        metrics = losses.policy_metrics(ratio_N, outputs, inputs, (c.clip_low, c.clip_high))
        metrics["loss/policy"] = losses.step_pair((weights_N * loss_N).sum(), inputs)

        kl_coef, entropy_coef, legal_coef = (
            schedule.at(inputs.step, inputs.total_steps) for schedule in (self.kl, self.entropy, self.legal)
        )
        for name, value in (("kl", kl_coef), ("entropy", entropy_coef), ("legal", legal_coef)):
            metrics[f"coef/{name}"] = losses.mean_pair(ratio_N.new_full(ratio_N.shape, value))
        if inputs.reference_logprobs_N is not None:
            kl_N = kl_penalty(outputs.logprobs_N, inputs.reference_logprobs_N, c.kl_estimator)
            metrics["kl/reference"] = losses.mean_pair(kl_N)
            loss_N = loss_N + _weighted(kl_coef, kl_N)
        elif self.needs_reference:
            raise ValueError("kl_coef is on, but reference_logprobs_N is None")
        if self.needs_entropy:
            if outputs.logprobs_N.requires_grad and not outputs.entropy_N.requires_grad:
                raise ValueError("entropy_coef is on, but entropy_N carries no gradient")
            loss_N = loss_N - _weighted(entropy_coef, outputs.entropy_N)
        if outputs.legal_mask_NA.shape[1] > 0:
            legal_N = losses.legal_kl(outputs.legal_logprobs_NA, outputs.legal_mask_NA)
            metrics["legal/kl"] = losses.mean_pair(legal_N, outputs.legal_mask_NA.any(-1))
            loss_N = loss_N + _weighted(legal_coef, legal_N)
        return (weights_N * loss_N).sum(), metrics
