"""Tools of MCP servers, through the official SDK.

Runs in the trainer's process, on a loop thread.
"""
