"""Tools of MCP servers, through the official SDK.

All runs in the trainer's process, on a loop thread, but `keeper`: that is a process above each server
that we start.
"""
