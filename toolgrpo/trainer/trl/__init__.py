"""All that is private in TRL's trainer: four files, each of which lists in its header the names that it uses.

trainer   the trainer itself: its place in a batch, its weights, its log, its forward pass
batch     what it hands from its rewards to its loss, and what it asks and logs of rewards
fields    every field of its config: read here, read by TRL, or refused
grpo      its import, without vLLM
"""
