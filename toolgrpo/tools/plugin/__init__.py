"""A plugin file and what it says: functions, schemas, types.

Read in the trainer's process and loaded in the workers'.
"""
