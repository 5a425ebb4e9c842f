"""An agent as one would write it for any OpenAI-compatible endpoint: nano's arithmetic, with tools of its own."""

import json
import operator


def tool(name, does, a, b):
    numbers = {key: {"type": "integer", "description": text} for key, text in (("a", a), ("b", b))}
    parameters = {"type": "object", "properties": numbers, "required": ["a", "b"]}
    return {"type": "function", "function": {"name": name, "description": does, "parameters": parameters}}


WAYS = "Divide the first integer by the second, with quotient and remainder."
OPERATIONS = {"add": operator.add, "subtract": operator.sub, "multiply": operator.mul, "divide": operator.floordiv}
TOOLS = [
    tool("add", "Add two integers.", "The first integer.", "The second integer."),
    tool(
        "subtract",
        "Subtract the second integer from the first.",
        "The integer to subtract from.",
        "The integer to subtract.",
    ),
    tool("multiply", "Multiply two integers.", "The first integer.", "The second integer."),
    tool("divide", WAYS, "The integer to divide.", "The integer to divide by; not 0."),
]


async def run(client, row):
    messages = list(row["prompt"])
    while True:
        answer = await client.chat.completions.create(model="policy", messages=messages, tools=TOOLS, max_tokens=64)
        message = answer.choices[0].message
        if not message.tool_calls:
            return float(str(row["answer"]) in (message.content or "").rstrip(".").split())
        messages.append(message)
        for call in message.tool_calls:
            try:
                numbers = json.loads(call.function.arguments)
                result = str(OPERATIONS[call.function.name](numbers["a"], numbers["b"]))
            except (KeyError, TypeError, ZeroDivisionError) as error:
                result = f"Error: {error}"
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
