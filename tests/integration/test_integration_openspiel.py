"""The public `openspiel_env` layout, spoken by a real OpenEnv server: hands through the pool, and a whole run."""

from __future__ import annotations

import asyncio
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from run_command import SMALL_BLACKJACK, lines, rollforge_command

from rollforge.envs.blackjack.codecs import OpenSpielBlackjackCodec
from rollforge.envs.blackjack.game import ACTIONS
from rollforge.envs.config import OpenEnvConfig
from rollforge.envs.openenv import OpenEnvPool
from rollforge.envs.server import EnvServer
from rollforge.types import Observation

SESSIONS = 8  # openspiel_env's own default
DECISION = re.compile(r"Hand (\d+) (hard|soft), dealer (A|\d+):")
ENDS = {-1.0: "lost.", 0.0: "push.", 1.0: "won."}


@pytest.fixture(scope="module")
def server() -> Iterator[EnvServer]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]))
        with EnvServer("openspiel_server", sessions=SESSIONS) as running:
            yield running


async def play(pool: OpenEnvPool, *words: str) -> list[Observation]:
    """The observations of one hand in which `words` are said, and then stand."""
    async with pool.session() as env:
        seen = [await env.reset({})]
        for word in [*words, "stand"]:
            if not seen[-1].done:
                seen.append(await env.step(word))
        return seen


async def test_hands_are_played_in_our_own_words(server: EnvServer) -> None:
    async with OpenEnvPool(OpenEnvConfig(url=server.url, max_sessions=3 * SESSIONS), OpenSpielBlackjackCodec) as pool:
        hands = await asyncio.wait_for(asyncio.gather(*(play(pool, " Hit\n", "hit") for _ in range(60))), 60)
    for *decisions, end in hands:
        totals = [int(DECISION.fullmatch(one.text)[1]) for one in decisions]  # type: ignore[index]
        assert all(sum(one.info["cards"]) in (total, total - 10) for one, total in zip(decisions, totals, strict=True))
        assert all((one.reward, one.legal_actions) == (None, ACTIONS) for one in decisions)
        assert end.reward is not None
        assert end.done
        assert end.text.endswith(ENDS[end.reward])
    assert len({hand[0].text for hand in hands}) > 10  # nothing seeds them


async def test_what_cannot_be_read_is_told_once_and_then_ends_the_hand(server: EnvServer) -> None:
    async with OpenEnvPool(OpenEnvConfig(url=server.url), OpenSpielBlackjackCodec) as pool:
        first, told, lost = await play(pool, "double", "split")
        assert told.text == f"Say hit or stand. {first.text}"
        assert (lost.reward, lost.done, lost.info["counts"]) == (-1.5, True, {"illegal": 2, "forfeit": 1})
        assert (await play(pool))[-1].done  # the forfeited hand does not reach into the next


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_a_run_trains_on_groups_of_different_deals(server: EnvServer, tmp_path: Path) -> None:
    command = (*SMALL_BLACKJACK, "--steps", "1", "--out", str(tmp_path / "run"))
    theirs = ("--server", "openspiel", "--env.url", server.url, "--rollout.same-start", "false")
    done = rollforge_command("run", "blackjack", *command, *theirs)
    assert done.returncode == 0, done.stderr
    rollouts = lines(tmp_path / "run" / "rollouts.jsonl")
    assert len(rollouts) == 16
    assert len({rollout["group"] for rollout in rollouts}) == 4
    assert len({tuple(rollout["turns"][0]["prompt_ids"]) for rollout in rollouts}) > 4  # so groups do not begin alike
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["failed_episodes"] == 0
    assert {"eval/exact", "eval/played"} < summary["after"].keys()
