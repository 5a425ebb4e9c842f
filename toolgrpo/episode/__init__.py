"""The record of one episode, which every part shares: types of the standard library alone.

`token_ledger` is what its tokens are written into while it runs, `trajectory` what it is at its end, `segments` its
training sequences; `tool_calls` is one call from the model's text to the tool's result, `dropped` why an episode is not
trained on.
"""
