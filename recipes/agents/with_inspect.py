"""A task of inspect-ai, evaluated through `toolgrpo gateway --model nano`:

TOOLGRPO_BASE_URL=... TOOLGRPO_API_KEY=any inspect eval with_inspect.py --model openai-api/toolgrpo/nano
"""

from inspect_ai import Task, task
from inspect_ai.dataset import Sample
from inspect_ai.scorer import includes
from inspect_ai.solver import generate, use_tools
from inspect_ai.tool import tool


@tool
def add():
    async def execute(a: int, b: int):
        """Add two integers.

        Args:
            a: The first integer.
            b: The second integer.
        """
        return str(a + b)

    return execute


@task
def sums():
    questions = [Sample(f"What is {n} plus {n + 4}?", target=str(2 * n + 4)) for n in range(19, 24)]
    return Task(questions, solver=[use_tools(add()), generate(max_tokens=64)], scorer=includes())
