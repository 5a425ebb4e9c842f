"""Helpers that do not depend on training: files, names, text, locks and the process. They import PyTorch only when
needed."""
