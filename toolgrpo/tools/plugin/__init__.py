"""Read a plugin file: functions, environments, schemas, types.

`plugin_file` and `schema` run in the supervisor and the workers (in the trainer's process only for
tools that ask for it); `tool_spec` and `tool_source` run in both.
"""
