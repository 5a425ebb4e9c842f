"""How good a model is on questions: rates with intervals, and what was found as tables and JSON."""
