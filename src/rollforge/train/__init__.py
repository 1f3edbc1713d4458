"""The policy trainer and the frozen scorer, over any transformers causal language model."""
