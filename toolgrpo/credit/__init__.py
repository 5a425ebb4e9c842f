"""Credit by turn: which part of an episode's worth each of its turns gets.

Pure functions over the episodes of a `RolloutBatch` in whole groups; no torch, and nothing of TRL.
"""
