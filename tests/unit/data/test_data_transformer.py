"""What the hand-written forward pass asks of sizes."""

from __future__ import annotations

from rollforge.data.transformer import even_size


def test_few_sizes_are_computed_and_little_is_padded() -> None:
    sizes = {rows: even_size(rows) for rows in range(1, 2049)}
    assert all(rows <= size < rows + 64 and size <= rows * 2 for rows, size in sizes.items())
    assert all(size <= rows * 1.5 for rows, size in sizes.items() if rows >= 32)
    assert all(even_size(size) == size for size in sizes.values())
    assert len(set(sizes.values())) < 60


def test_the_sizes_of_single_steps_are_left_alone() -> None:
    assert [even_size(rows) for rows in (0, 1, 8, 15, 16)] == [0, 1, 8, 15, 16]
