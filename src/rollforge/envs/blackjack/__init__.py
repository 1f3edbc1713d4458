"""BlackJack: the pure game, its OpenEnv environment and server, its exact evaluation, and its chart."""
