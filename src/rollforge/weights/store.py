"""The weight store: a role that knows which versions exist, where, and who reads them.

Knows: versions, locations and readers. Does not know: what is in the files, torch.
"""

from __future__ import annotations

from pathlib import Path

from rollforge.weights.folder import retire


class MemoryWeightStore:
    """Keeps the newest version of one folder, and any older one for as long as it is read.

    `folder` comes from `weight_folder`, which removes it; `close` empties it.
    """

    def __init__(self, folder: str) -> None:
        self._folder = Path(folder)
        self._locations: dict[int, str] = {}
        self._readers: dict[int, int] = {}

    async def announce(self, version: int, location: str) -> None:
        """Make a published version known. Raises ValueError unless it is newer than all others."""
        if self._locations and version <= max(self._locations):
            raise ValueError(f"weight version {version} is not newer than {max(self._locations)}")
        self._locations[version] = location
        self._drop_old()

    async def acquire(self, version: int) -> str:
        """The location of a version, kept until released. Raises LookupError for one that is not there."""
        if version not in self._locations:
            raise LookupError(f"weight version {version} is not there; present are {sorted(self._locations)}")
        self._readers[version] = self._readers.get(version, 0) + 1
        return self._locations[version]

    async def release(self, version: int) -> None:
        """Undo one `acquire`. Raises ValueError when nobody reads that version."""
        if not self._readers.get(version):
            raise ValueError(f"weight version {version} is released more often than it was acquired")
        self._readers[version] -= 1
        if not self._readers[version]:
            del self._readers[version]
        self._drop_old()

    async def versions(self) -> list[int]:
        """The versions that can be acquired, oldest first."""
        return sorted(self._locations)

    async def close(self) -> None:
        """Forget everything and remove all files; mappings of them stay valid. May be called twice."""
        self._locations.clear()
        self._readers.clear()
        for path in self._folder.glob("*"):
            path.unlink(missing_ok=True)

    def _drop_old(self) -> None:
        for version in sorted(self._locations)[:-1]:
            if version not in self._readers:
                retire(Path(self._locations.pop(version)))
