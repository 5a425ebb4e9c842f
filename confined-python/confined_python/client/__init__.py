"""Runs in the process that opened the sandbox: finds the rung, asks the host for workers, hands them
code, checks what they answer.
"""
