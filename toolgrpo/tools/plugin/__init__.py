"""A plugin file and what it says: functions, environments, schemas, types.

In the supervisor and the workers run `plugin_file` and `schema` (in the trainer's process only for
tools that ask for it); in both `tool_spec` and `tool_source`.
"""
