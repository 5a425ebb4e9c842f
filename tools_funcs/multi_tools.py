"""Several kinds of tools in one file, for mixtures of tasks: calculator, Python in the sandbox, and finance.

A row's column `tools` says which of them it is offered (docs/how-to/multi_turn.md).
"""

from calculator_tools import calculator
from financial_tools_complex import TOOL_FUNCTIONS as FINANCIAL_TOOLS
from python_tools import execute_code, python

# execute_code is python under another name; a row that wants it names it in its column `tools`.
TOOL_FUNCTIONS = [calculator, python, execute_code, *FINANCIAL_TOOLS]
