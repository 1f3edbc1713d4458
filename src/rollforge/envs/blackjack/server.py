"""The BlackJack server: `python -m rollforge.envs.blackjack.server --port 0` (see `rollforge.envs.serve` for the
options).

Knows: how OpenEnv makes an app of our environment. Does not know: the client.
"""

from __future__ import annotations

import argparse
from functools import partial
from typing import Any

from rollforge.envs import serve
from rollforge.envs.blackjack.game import PENALTY


def make_app(args: argparse.Namespace) -> Any:
    """The FastAPI app. A `ConcurrencyConfig` and not a bare count: the count alone switches OpenEnv's idle reaper
    off."""
    from openenv.core.env_server import ConcurrencyConfig, create_fastapi_app

    from rollforge.envs.blackjack.env import BlackjackAction, BlackjackEnvironment, BlackjackObservation

    return create_fastapi_app(
        partial(BlackjackEnvironment, penalty=args.penalty),
        BlackjackAction,
        BlackjackObservation,
        concurrency_config=ConcurrencyConfig(max_concurrent_envs=args.sessions, session_timeout=args.session_timeout),
    )


if __name__ == "__main__":
    options = serve.parser("BlackJack as an OpenEnv server.")
    options.add_argument("--penalty", type=float, default=PENALTY, help="reward of a forfeited hand")
    serve.main(make_app, options)
