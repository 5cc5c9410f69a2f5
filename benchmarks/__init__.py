"""Benchmarks: commands, never timed tests. ``python -m benchmarks.NAME --help``."""
