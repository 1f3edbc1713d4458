"""Configuration of the policy server."""

from __future__ import annotations

from dataclasses import dataclass

from rollforge.config import option, require_at_least


@dataclass(frozen=True, kw_only=True)
class NativeConfig:
    """The native engine: continuous batching over the trainer's own transformers model."""

    max_batch: int = option(256, help="sequences decoded together at most")
    max_prefill: int = option(
        512, help="prompt tokens computed in one step at most; longer prompts take a step of their own"
    )
    cache_tokens: int = option(
        8192, help="prompt tokens whose keys and values are kept for reuse within a weight version"
    )

    def __post_init__(self) -> None:
        require_at_least(self, "generate", max_batch=1, max_prefill=1, cache_tokens=1)
