"""All that is private in TRL's trainer: five files, each of which lists in its header the names that it uses.

calls     TRL's calls of its trainer, answered with a batch of ours
trainer   the trainer itself: its place in a batch, its weights, its log, its forward pass
batch     batches as TRL hands them from one of its calls to the next
fields    every field of its config: read here, read by TRL, or refused
grpo      its import, without vLLM
"""
