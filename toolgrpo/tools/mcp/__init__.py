"""Tools of MCP servers, through the official SDK.

Runs in the trainer's process, on a loop thread; `keeper` in a process of its own above each server
that is a process of ours.
"""
