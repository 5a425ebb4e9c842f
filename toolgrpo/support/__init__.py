"""Helpers that know nothing of training: files, names, text, locks, and the process itself. They import no PyTorch before
it is needed."""
