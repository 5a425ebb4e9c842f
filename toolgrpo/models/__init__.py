"""Models that need no hub, by name."""
