"""An agent of smolagents, as its own pages show one; only where the model answers is ours."""

import os

from smolagents import OpenAIServerModel, ToolCallingAgent, tool


@tool
def add(a: int, b: int) -> int:
    """Add two integers.

    Args:
        a: The first integer.
        b: The second integer.
    """
    return a + b


def run(client, row):
    model = OpenAIServerModel(
        "policy",
        api_base=os.environ["OPENAI_BASE_URL"],
        api_key=os.environ["OPENAI_API_KEY"],
        client_kwargs={"max_retries": 0},
    )
    agent = ToolCallingAgent(tools=[add], model=model, max_steps=5, verbosity_level=0)
    answer = agent.run(row["prompt"] if isinstance(row["prompt"], str) else row["prompt"][-1]["content"])
    return float(str(answer) == str(row["answer"]))
