"""Ready-made runs: the only place where an algorithm meets the infrastructure."""
