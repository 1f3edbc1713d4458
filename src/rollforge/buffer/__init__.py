"""Holds scored groups between generation and training."""
