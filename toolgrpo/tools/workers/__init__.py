"""Run tools in separate processes.

`pool`, `dispatcher`, `connections`, `pool_records` and `output_log` run in the trainer's process,
`supervisor` in the supervisor, the parent of all workers, and `tool_worker` in each worker.
"""
