"""The two coroutines, continuous rollouts and continuous training."""
