"""Helpers of processes that start, watch and end others. The standard library only."""
