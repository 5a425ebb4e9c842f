"""Tools in processes of their own. `pool`, `pool_records` and `connections` run in the trainer's
process; `supervisor` and `tool_worker` are processes themselves.
"""
