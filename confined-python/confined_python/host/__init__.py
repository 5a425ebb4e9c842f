"""Runs in the host and its workers, trusted processes that the client starts by exec: they fork,
watch and end what runs code.
"""
