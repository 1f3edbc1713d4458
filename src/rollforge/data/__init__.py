"""Data: models on disk, text and messages to tokens and back, prompt sources, shared prefixes.

Knows: folders, tokenizers, prompts. Does not know: engines, environments, algorithms, actors.
"""
