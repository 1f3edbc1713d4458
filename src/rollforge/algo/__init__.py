"""Algorithms: credit on plain numbers, losses on tensors. Knows no process, no engine and no trainer."""
