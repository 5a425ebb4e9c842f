"""The seam to the private names of TRL's trainer: five files, each with its names in the header.

calls     answers TRL's calls for a batch with our batch
trainer   the trainer itself: its position in a batch, weights, log and forward pass
batch     batches as TRL hands them from one of its calls to the next
fields    every field of its config: read here, read by TRL, or refused
grpo      its import, without vLLM
"""
