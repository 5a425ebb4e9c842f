"""The four integer operations of math_tools.py alone: the tools of the embedded job, which nano was taught to call."""

from .math_tools import add, divide, multiply, subtract

TOOL_FUNCTIONS = [add, subtract, multiply, divide]
