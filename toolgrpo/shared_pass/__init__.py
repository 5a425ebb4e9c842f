"""The training pass that computes once what rows have in common:
token ids and tensors in, log-probabilities out.

Reinforcement learning and supervised training both run on it; it knows neither TRL nor rollouts.
"""
