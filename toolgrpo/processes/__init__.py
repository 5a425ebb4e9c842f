"""What the tools' and the sandbox's processes share. The standard library only."""
