"""From a graded batch to what the loss sees of it: one file an idea, and the table of their order (`stages.py`).

Pure functions and frozen values over `RolloutBatch`; TRL and the trainer are not known here.
"""
