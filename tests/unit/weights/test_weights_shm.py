"""Weight files: what is written is read back, without a copy, and nothing torn is ever read."""

from __future__ import annotations

import errno
import os
import struct
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from rollforge.config import UserError
from rollforge.weights import shm
from rollforge.weights.folder import retire
from rollforge.weights.shm import WeightFileError, fetch, publish


def some_tensors(seed: int = 0) -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(seed)
    return {
        "bytes": torch.arange(5, dtype=torch.uint8),
        "bf16": torch.randn(33, 7, generator=draw).to(torch.bfloat16),
        "fp32": torch.randn(3, 5, generator=draw),
        "strided": torch.randn(6, 4, generator=draw).T,
        "scalar": torch.tensor(2.5),
        "empty": torch.empty(0, 4),
        "counts": torch.tensor([1, 2**40]),
        "flags": torch.tensor([True, False, True]),
        "trained": torch.nn.Parameter(torch.randn(8, generator=draw)),
    }


def assert_same(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> None:
    assert got.keys() == want.keys()
    for name, tensor in want.items():
        assert got[name].dtype == tensor.dtype and got[name].shape == tensor.shape, name
        assert torch.equal(got[name], tensor), name


def test_every_dtype_and_shape_comes_back_bit_for_bit(tmp_path: Path) -> None:
    tensors = some_tensors()
    assert_same(fetch(publish(tensors, 3, tmp_path)), tensors)


def test_other_tools_read_the_file_as_safetensors(tmp_path: Path) -> None:
    tensors = some_tensors()
    assert_same(load_file(publish(tensors, 3, tmp_path)), tensors)


def test_nothing_is_copied(tmp_path: Path) -> None:
    tensors = fetch(publish(some_tensors(), 1, tmp_path))
    maps = Path("/proc/self/maps").read_text().splitlines()
    spans = [line.split()[0].split("-") for line in maps if str(tmp_path) in line]
    for name in ("bf16", "fp32", "bytes"):
        assert any(int(a, 16) <= tensors[name].data_ptr() < int(b, 16) for a, b in spans), name


def test_an_empty_model_comes_back_empty(tmp_path: Path) -> None:
    assert fetch(publish({}, 0, tmp_path)) == {}


def test_writing_to_fetched_tensors_changes_nobody_elses(tmp_path: Path) -> None:
    location = publish(some_tensors(), 1, tmp_path)
    fetch(location)["fp32"].zero_()
    assert_same(fetch(location), some_tensors())


def test_an_unmapped_spare_is_written_over(tmp_path: Path) -> None:
    old = Path(publish(some_tensors(), 1, tmp_path))
    inode = old.stat().st_ino
    retire(old)
    new = publish(some_tensors(1), 2, tmp_path)
    assert Path(new).stat().st_ino == inode
    assert_same(fetch(new), some_tensors(1))
    assert [path.name for path in tmp_path.iterdir()] == ["v00000002.safetensors"]


def test_a_spare_that_is_still_mapped_keeps_its_values(tmp_path: Path) -> None:
    old = Path(publish(some_tensors(), 1, tmp_path))
    one_tensor = fetch(str(old))["fp32"]
    retire(old)
    publish(some_tensors(1), 2, tmp_path)
    assert torch.equal(one_tensor, some_tensors()["fp32"])
    del one_tensor
    inode = next(tmp_path.glob("*.spare")).stat().st_ino
    assert Path(publish(some_tensors(2), 3, tmp_path)).stat().st_ino == inode


def test_a_larger_spare_is_cut_to_size(tmp_path: Path) -> None:
    retire(Path(publish({"x": torch.zeros(100_000)}, 1, tmp_path)))
    assert_same(fetch(publish({"x": torch.ones(10)}, 2, tmp_path)), {"x": torch.ones(10)})


def test_only_one_spare_is_kept(tmp_path: Path) -> None:
    locations = [publish({"x": torch.ones(4)}, version, tmp_path) for version in range(3)]
    for location in locations:
        retire(Path(location))
    assert len(list(tmp_path.iterdir())) == 1


def test_a_version_is_published_once(tmp_path: Path) -> None:
    publish({"x": torch.ones(4)}, 1, tmp_path)
    with pytest.raises(WeightFileError, match="version 1 exists already"):
        publish({"x": torch.zeros(4)}, 1, tmp_path)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(WeightFileError, match="no weight file at"):
        fetch(str(tmp_path / "v00000001.safetensors"))


def test_every_truncation_is_refused(tmp_path: Path) -> None:
    location = publish(some_tensors(), 1, tmp_path)
    size = os.path.getsize(location)
    header = 8 + struct.unpack("<Q", Path(location).read_bytes()[:8])[0]
    for length in (size - 1, header, header - 1, 9, 8, 7, 0):
        os.truncate(location, length)
        with pytest.raises(WeightFileError, match="torn"):
            fetch(location)


@pytest.mark.parametrize("place", [0, 12, 60, 200])
def test_a_changed_header_is_refused(tmp_path: Path, place: int) -> None:
    location = Path(publish(some_tensors(), 1, tmp_path))
    content = bytearray(location.read_bytes())
    content[place] ^= 0x01
    location.write_bytes(content)
    with pytest.raises(WeightFileError, match="torn"):
        fetch(str(location))


def test_a_file_of_another_version_is_refused(tmp_path: Path) -> None:
    location = Path(publish(some_tensors(), 1, tmp_path))
    wrong = location.with_name("v00000002.safetensors")
    location.rename(wrong)
    with pytest.raises(WeightFileError, match="holds version 1"):
        fetch(str(wrong))


def test_a_write_that_fails_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = os.pwrite

    def full_after_the_header(file: int, data: memoryview, place: int) -> int:
        if place > 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(file, data, place)

    monkeypatch.setattr(os, "pwrite", full_after_the_header)
    with pytest.raises(UserError, match="are free"):
        publish(some_tensors(), 1, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_no_room_is_told_before_anything_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shm, "free_bytes", lambda folder: 1000)
    with pytest.raises(UserError, match=r"needs 40,\d\d\d bytes .* where 1,000 are free"):
        publish({"x": torch.zeros(10_000)}, 1, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_dtype_without_a_name_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=r"'x' has dtype torch\.complex64"):
        publish({"x": torch.zeros(2, dtype=torch.complex64)}, 1, tmp_path)
    assert list(tmp_path.iterdir()) == []
