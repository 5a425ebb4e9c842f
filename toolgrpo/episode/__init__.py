"""The record of one episode, shared by all parts; it uses types of the standard library only.

`token_ledger` records the tokens of a running episode, `trajectory` is the finished record, and `segments` are its
training sequences. `tool_calls` follows one call from the model's text to the tool's result; `dropped` has the reason
why an episode is not trained on.
"""
