"""The native engine: continuous batching over the trainer's own transformers model."""
