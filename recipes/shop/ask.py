"""Ask the served shop: an OpenAI client, the functions, and the tools as the model knows them."""

import json
import os
import sys
from pathlib import Path

from openai import APIConnectionError, OpenAI
from shop_tools import TOOL_FUNCTIONS

client = OpenAI(base_url=os.environ.get("SHOP_URL", "http://localhost:8000/v1"), api_key="none")
tools = json.loads(Path("outputs/shop/tools.json").read_text())
functions = {function.__name__: function for function in TOOL_FUNCTIONS}
messages = [{"role": "user", "content": sys.argv[1]}]
for _ in range(4):
    try:
        reply = client.chat.completions.create(model="shop", messages=messages, tools=tools, temperature=0)
    except APIConnectionError:
        sys.exit(f"no server answers at {client.base_url}: start it first, and wait until it says that it is ready")
    said = reply.choices[0].message
    messages.append(said.model_dump(exclude_none=True))
    if not said.tool_calls:
        break
    for call in said.tool_calls:
        try:
            result = json.dumps(functions[call.function.name](**json.loads(call.function.arguments)))
        except Exception as error:
            result = f"Error: {error}"
        print(f"{call.function.name} {call.function.arguments} -> {result}")
        messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
print((said.content or "").strip())
