"""AdamW on float32 master weights for a model that computes in a narrower dtype.

At reinforcement-learning rates an update is far smaller than a bf16 weight's last bit: kept in bf16 it would be
rounded away. Knows: parameters and gradients. Does not know: losses, batches. Gradients of all micro-batches add up in
float32.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from rollforge.train.config import TrainConfig


class MasterAdamW:
    """Holds one float32 master per trained parameter; each `backward` adds to the masters' gradients."""

    def __init__(self, parameters: Iterable[nn.Parameter], config: TrainConfig) -> None:
        self._config = config
        self._masters: dict[nn.Parameter, Tensor] = {}
        for parameter in parameters:
            master = parameter if parameter.dtype == torch.float32 else parameter.detach().float()
            self._masters[parameter] = master
            if master is not parameter:
                parameter.register_post_accumulate_grad_hook(self._take_gradient)
        matrices = [m for m in self._masters.values() if m.ndim > 1]
        vectors = [m for m in self._masters.values() if m.ndim <= 1]
        self._adam = torch.optim.AdamW(
            [{"params": matrices, "weight_decay": config.weight_decay}, {"params": vectors, "weight_decay": 0.0}],
            lr=config.learning_rate,
            betas=(config.beta1, config.beta2),
            eps=config.eps,
            fused=True,
        )

    def _take_gradient(self, parameter: Tensor) -> None:
        assert isinstance(parameter, nn.Parameter) and parameter.grad is not None
        master = self._masters[parameter]
        if master.grad is None:  # made as late as this, it lies where activations were freed
            master.grad = parameter.grad.float()
        else:
            master.grad.add_(parameter.grad)
        parameter.grad = None

    def gradient(self, parameter: nn.Parameter) -> Tensor:
        """The float32 gradient gathered so far for `parameter`, to be added to in place."""
        master = self._masters[parameter]
        if master.grad is None:
            master.grad = torch.zeros_like(master)
        return master.grad

    @torch.no_grad()
    def step(self, rate: float) -> float:
        """Clips, updates masters and parameters, clears gradients. Returns the global gradient norm before clipping.

        A norm that is not finite leaves every weight as it was.
        """
        masters = list(self._masters.values())
        norm = float(nn.utils.clip_grad_norm_(masters, self._config.max_grad_norm))
        if norm < float("inf"):
            for group in self._adam.param_groups:
                group["lr"] = rate
            self._adam.step()
            for parameter, master in self._masters.items():
                if master is not parameter:
                    parameter.copy_(master)
        self.clear()
        return norm

    def clear(self) -> None:
        """Forgets the gradients gathered so far."""
        for parameter, master in self._masters.items():
            parameter.grad = master.grad = None
