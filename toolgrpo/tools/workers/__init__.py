"""Tools in processes of their own.

In the trainer's process run `pool`, `dispatcher`, `connections`, `pool_records` and `output_log`; in
the supervisor, the parent of all workers, `supervisor`; in each worker `tool_worker`.
"""
