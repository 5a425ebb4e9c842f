"""Engines: token ids in, token ids and log-probabilities out. One file per engine; `choose.py` picks one."""
