"""Measure a model on held-out rows: success rates with intervals, as tables and JSON."""
