"""Runs in the confined process, beside the model's code: nothing that is said here is believed
outside.
"""
