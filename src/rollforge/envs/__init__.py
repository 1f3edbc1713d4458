"""Environments: the OpenEnv client and servers, BlackJack, single-turn tasks, and rewards."""
