"""The weight store, and the publisher and reader that use it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from rollforge.weights.client import WeightPublisher, WeightReader
from rollforge.weights.store import MemoryWeightStore


def weights(version: int) -> dict[str, torch.Tensor]:
    return {"w": torch.full((1000,), float(version), dtype=torch.bfloat16)}


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("*.safetensors"))


async def publish_until(last: int, store: MemoryWeightStore, folder: Path) -> WeightPublisher:
    publisher = WeightPublisher(store, folder)
    for version in range(last + 1):
        await publisher.publish(version, weights(version))
    return publisher


async def test_the_newest_version_is_kept_and_the_others_files_go(tmp_path: Path) -> None:
    store = MemoryWeightStore(str(tmp_path))
    await publish_until(4, store, tmp_path)
    assert await store.versions() == [4]
    assert files(tmp_path) == ["v00000004.safetensors"]
    assert len(list(tmp_path.iterdir())) <= 2, "a version and at most one spare"


async def test_a_version_that_is_read_stays_until_its_last_reader_is_done(tmp_path: Path) -> None:
    store = MemoryWeightStore(str(tmp_path))
    publisher = await publish_until(0, store, tmp_path)
    reader = WeightReader(store)
    async with reader.read(0) as first, reader.read(0) as second:
        for version in (1, 2, 3):
            await publisher.publish(version, weights(version))
        assert await store.versions() == [0, 3]
        assert torch.equal(first["w"], weights(0)["w"]) and torch.equal(second["w"], weights(0)["w"])
    assert await store.versions() == [3]
    assert files(tmp_path) == ["v00000003.safetensors"]


async def test_tensors_kept_too_long_are_still_never_overwritten(tmp_path: Path) -> None:
    store = MemoryWeightStore(str(tmp_path))
    publisher = await publish_until(0, store, tmp_path)
    async with WeightReader(store).read(0) as tensors:
        kept = tensors["w"]
    for version in (1, 2, 3):
        await publisher.publish(version, weights(version))
    assert torch.equal(kept, weights(0)["w"])


async def test_a_reader_that_fails_releases_its_version(tmp_path: Path) -> None:
    store = MemoryWeightStore(str(tmp_path))
    publisher = await publish_until(0, store, tmp_path)
    with pytest.raises(KeyError):
        async with WeightReader(store).read(0):
            raise KeyError
    await publisher.publish(1, weights(1))
    assert await store.versions() == [1]


async def test_what_is_not_there_is_told_with_what_is(tmp_path: Path) -> None:
    store = MemoryWeightStore(str(tmp_path))
    await publish_until(3, store, tmp_path)
    with pytest.raises(LookupError, match=r"version 1 is not there; present are \[3\]"):
        await store.acquire(1)


async def test_versions_only_grow_and_releases_match(tmp_path: Path) -> None:
    store = MemoryWeightStore(str(tmp_path))
    await store.announce(5, str(tmp_path / "v00000005.safetensors"))
    with pytest.raises(ValueError, match="5 is not newer than 5"):
        await store.announce(5, "elsewhere")
    with pytest.raises(ValueError, match="released more often"):
        await store.release(5)


async def test_close_removes_every_file_and_mapped_tensors_live_on(tmp_path: Path) -> None:
    store = MemoryWeightStore(str(tmp_path))
    await publish_until(2, store, tmp_path)
    async with WeightReader(store).read(2) as tensors:
        await store.acquire(2)
        kept = tensors["w"]
    await store.close()
    await store.close()
    assert list(tmp_path.iterdir()) == []
    assert torch.equal(kept, weights(2)["w"])


def test_store_and_folder_load_no_torch() -> None:
    code = "import sys, rollforge.weights.store, rollforge.weights.folder; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"
