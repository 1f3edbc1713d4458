"""Showing what a run does: live progress, curves, pictures, peak memory."""
