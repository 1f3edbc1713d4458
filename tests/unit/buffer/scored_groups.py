"""Scored groups for the tests of the buffer and of the loop."""

from __future__ import annotations

import numpy as np

from rollforge.types import Completion, Credit, Group, Observation, Prompt, Rollout, Scored, Turn


def group_of(index: int, version: int, rewards: tuple[float, ...] = (0.0, 1.0)) -> Group:
    """A group of one-token rollouts, all sampled at one version."""
    sampled = Completion(
        np.asarray([1], np.int32), np.zeros(1, np.float32), np.asarray([version], np.int32), "x", "stop"
    )
    rollouts = tuple(
        Rollout(f"{index}/{at}", (Turn(np.zeros(1, np.int32), sampled, Observation("", reward, True)),), reward)
        for at, reward in enumerate(rewards)
    )
    return Group(index, Prompt(f"prompt-{index}"), rollouts)


def scored(index: int, version: int) -> Scored:
    return Scored(group_of(index, version), Credit(((0.0,), (0.0,))), ())
