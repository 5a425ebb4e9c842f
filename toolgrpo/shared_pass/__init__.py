"""The training pass that computes shared prefixes once: token ids and tensors in, log-probabilities out.

Reinforcement learning and supervised training both use it; it imports neither TRL nor rollouts.
"""
