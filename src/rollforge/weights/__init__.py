"""Versioned weights: published by the trainer, fetched by the generators, through shared memory."""
