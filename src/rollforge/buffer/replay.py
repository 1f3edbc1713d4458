"""The replay buffer: scored groups between generation and training, in the order in which their prompts were admitted.

Knows: order, versions, back-pressure. Does not know: tokens, algorithms, actors.

Why no token is ever older than `max_staleness` versions: batch v holds exactly the groups with index in [v B, (v + 1)
B) and is trained by version v; a group with index i is admitted only while i < (version + max_staleness + 1) B, that
is, its batch v is at most version + max_staleness; its tokens are sampled at that version or later, hence v - sampled
version <= max_staleness. A slow group delays its batch but is never discarded for being slow, so hard prompts are not
under-represented. The buffer does not trust the proof: it checks every group it is given and every batch it hands out.
"""

from __future__ import annotations

import asyncio

from rollforge.buffer.config import BufferConfig
from rollforge.config import RunFailed
from rollforge.types import Metrics, Scored


def may_admit(index: int, version: int, groups_per_step: int, max_staleness: int) -> bool:
    """Whether generation of group `index` may start while `version` is served."""
    return index < (version + max_staleness + 1) * groups_per_step


class StalenessError(RunFailed):
    """A group is older than the bound allows, or no fresh one came in time."""


class ReplayBuffer:
    """Implements `rollforge.types.Buffer`. Batches come out in order; `put` waits while its group is too far ahead."""

    def __init__(self, groups_per_step: int, config: BufferConfig) -> None:
        self._groups_per_step, self._config = groups_per_step, config
        self._held: dict[int, Scored] = {}
        self._next = 0
        self._version = 0
        self._evicted = 0
        self._newest_seen = 0
        self._changed = asyncio.Condition()

    async def put(self, scored: Scored) -> bool:
        """Takes a group; False when it is too old to be trained on (it is counted, and must be generated again).

        Waits while the group's batch is more than `max_staleness` batches ahead of the one being waited for: since the
        groups of that one always fit, this cannot deadlock. Raises ValueError for an index that is held or was trained
        already.
        """
        index = scored.group.index
        ahead = (self._config.max_staleness + 1) * self._groups_per_step
        async with self._changed:
            if index < self._next or index in self._held:
                raise ValueError(f"group {index} was given twice")
            try:
                await asyncio.wait_for(
                    self._changed.wait_for(lambda: index < self._next + ahead), self._config.wait_limit_s
                )
            except TimeoutError:
                raise StalenessError(
                    f"group {index} found no room within buffer.wait_limit_s = {self._config.wait_limit_s:g} s: the "
                    f"trainer has taken only the {self._next} groups before group {self._next}."
                ) from None
            self._newest_seen = max(self._newest_seen, scored.group.oldest_version)
            batch_version = max(self._version, index // self._groups_per_step)
            if batch_version - scored.group.oldest_version > self._config.max_staleness:
                self._evicted += 1
                return False
            self._held[index] = scored
            self._changed.notify_all()
            return True

    async def take(self, version: int, groups: int) -> list[Scored]:
        """The next `groups` groups in order, once all are there; `version` is the one that trains on them.

        Raises StalenessError when they do not come within `wait_limit_s` or one is older than the bound.
        """
        wanted = range(self._next, self._next + groups)
        async with self._changed:
            self._version = version
            try:
                await asyncio.wait_for(
                    self._changed.wait_for(lambda: all(i in self._held for i in wanted)), self._config.wait_limit_s
                )
            except TimeoutError:
                raise StalenessError(self._explain(version, wanted)) from None
            taken = [self._held.pop(i) for i in wanted]
            self._next = wanted.stop
            self._changed.notify_all()
        for scored in taken:
            if version - scored.group.oldest_version > self._config.max_staleness:
                raise StalenessError(
                    f"group {scored.group.index} holds a token of version {scored.group.oldest_version}, trained at "
                    f"version {version}: older than buffer.max_staleness = {self._config.max_staleness} allows."
                )
        return taken

    def _explain(self, version: int, wanted: range) -> str:
        missing = [i for i in wanted if i not in self._held]
        return (
            f"no complete batch within buffer.wait_limit_s = {self._config.wait_limit_s:g} s: the trainer is at "
            f"version "
            f"{version}, the newest group came from version {self._newest_seen}, {self._evicted} groups were "
            f"evicted as "
            f"older than max_staleness = {self._config.max_staleness}, and {len(missing)} of {len(wanted)} groups are "
            f"missing (first: {missing[0] if missing else 'none'})."
        )

    async def metrics(self) -> Metrics:
        """Groups held and evicted."""
        return {"buffer/held": float(len(self._held)), "buffer/evicted": float(self._evicted)}
