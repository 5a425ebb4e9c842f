"""Tools of MCP servers, through the official SDK.

Everything runs in the trainer's process, on a loop thread, except `keeper`, the parent process of each
server that toolgrpo starts.
"""
