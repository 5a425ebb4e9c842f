"""What a batch of groups teaches: which groups are dead, which are drawn,
and how rewards become advantages.

Pure functions and frozen values over `RolloutBatch`; TRL and the trainer are not known here.
"""
