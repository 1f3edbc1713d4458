"""The two sides of the weight store: what a trainer publishes with and what a generator reads with.

Knows: the order of steps (write, then announce; acquire, map, release).
Does not know: where the store runs, how a file is laid out.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from rollforge.types import WeightStore

if TYPE_CHECKING:
    import torch


class WeightPublisher:
    """Publishes versions into `folder`. One publisher per folder."""

    def __init__(self, store: WeightStore, folder: Path | str) -> None:
        self._store, self._folder = store, Path(folder)

    async def publish(self, version: int, tensors: Mapping[str, torch.Tensor]) -> None:
        """Write and announce a version. The tensors must not change meanwhile; the event loop is not held up.

        Raises UserError when there is no room, ValueError when the version is not newer than all others.
        """
        from rollforge.weights.shm import publish  # the controller, which hands the two sides out, is spared torch

        location = await asyncio.to_thread(publish, tensors, version, self._folder)
        await self._store.announce(version, location)


class WeightReader:
    """Reads versions from the store."""

    def __init__(self, store: WeightStore) -> None:
        self._store = store

    @asynccontextmanager
    async def read(self, version: int) -> AsyncIterator[Mapping[str, torch.Tensor]]:
        """The tensors of a version, not copied, with that version kept in the store until the block ends.

        Raises LookupError for a version that the store does not have.
        """
        from rollforge.weights.shm import fetch

        location = await self._store.acquire(version)
        try:
            yield fetch(location)
        finally:
            await self._store.release(version)
