"""Recording of metrics and spans from anywhere in a process, and showing them: terminal, curves, memory."""
