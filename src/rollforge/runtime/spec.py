"""What a role is made of.

Knows: the fields of a role and what they may hold.
Does not know: how or where the role is run.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rollforge.config import ConfigError

_NAME = re.compile(r"[a-z][a-z0-9_]*")
_TARGET = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*")
_THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS")


@dataclass(frozen=True, slots=True)
class RoleSpec:
    """One role: `target` ("package.module:Class") is imported in the role's own process only.

    `kwargs` go to the class and may hold handles of other roles. `env` and `threads` (compute threads; None: as the
    controller) are set before anything is imported; they belong to a process, so roles built in process do without.
    `limit_s` bounds the construction and, unless a handle says otherwise, each call, in seconds.

    Raises ConfigError when a field cannot be used.
    """

    name: str
    target: str
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    env: Mapping[str, str] = field(default_factory=dict)
    threads: int | None = None
    limit_s: float = 600.0

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise ConfigError(f"Role name {self.name!r}: use lower-case letters, digits and '_', a letter first.")
        if not _TARGET.fullmatch(self.target):
            raise ConfigError(f"Role {self.name!r}: target {self.target!r} must read 'package.module:Class'.")
        if self.threads is not None and self.threads < 1:
            raise ConfigError(f"Role {self.name!r}: threads is {self.threads}; use at least 1, or None to inherit.")
        if not self.limit_s > 0:
            raise ConfigError(f"Role {self.name!r}: limit_s is {self.limit_s}; use a positive number of seconds.")

    def process_env(self) -> dict[str, str]:
        """The environment variables of the role's process; `env` wins over what `threads` says."""
        threads = {} if self.threads is None else dict.fromkeys(_THREAD_VARIABLES, str(self.threads))
        return {**threads, **self.env}
