"""An agent as for any OpenAI-compatible endpoint: nano's arithmetic, with the tools that nano was taught."""

import json
import operator

OPERATIONS = {"add": operator.add, "subtract": operator.sub, "multiply": operator.mul, "divide": operator.floordiv}
WORDS = """Add two integers.|The first integer.|The second integer.
Subtract the second integer from the first.|The integer to subtract from.|The integer to subtract.
Multiply two integers.|The first integer.|The second integer.
Divide the first integer by the second, with quotient and remainder.|The integer to divide.|The integer to divide by; not 0."""
TOOLS = []
for name, (does, *numbers) in zip(OPERATIONS, (line.split("|") for line in WORDS.splitlines()), strict=True):
    properties = {key: {"type": "integer", "description": text} for key, text in zip("ab", numbers, strict=True)}
    parameters = {"type": "object", "properties": properties, "required": ["a", "b"]}
    TOOLS.append({"type": "function", "function": {"name": name, "description": does, "parameters": parameters}})


async def run(client, row):
    messages = list(row["prompt"])
    ask = lambda: client.chat.completions.create(model="policy", messages=messages, tools=TOOLS, max_tokens=64)  # noqa: E731
    while (message := (await ask()).choices[0].message).tool_calls:
        messages.append(message)
        for call in message.tool_calls:
            try:
                numbers = json.loads(call.function.arguments)
                result = str(OPERATIONS[call.function.name](numbers["a"], numbers["b"]))
            except (KeyError, TypeError, ZeroDivisionError) as error:
                result = f"Error: {error}"
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    return float(str(row["answer"]) in (message.content or "").rstrip(".").split())
