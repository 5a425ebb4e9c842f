"""The ways to confine a process, and which of them this machine holds.

Used by the host's processes, tried by the client.
"""
