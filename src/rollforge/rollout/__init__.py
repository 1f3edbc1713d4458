"""Plays prompts with the policy in an environment, and turns what came of it into samples to train on."""
