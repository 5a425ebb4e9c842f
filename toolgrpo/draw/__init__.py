"""Rows drawn from tools: arguments by their types and names, calls that really run, questions in plain words."""
