"""Draw rows from tools: choose arguments by type and name, run the calls, and word the questions."""
