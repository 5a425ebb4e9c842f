"""Engines: token ids in, token ids and log-probabilities out.

One file per engine; `build.py` picks one.
"""
