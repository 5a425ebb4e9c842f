"""Helpers shared by the processes of the tools and of the sandbox. The standard library only."""
