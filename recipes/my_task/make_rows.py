"""Make data.jsonl, rows for the reward, and examples.jsonl, other questions with their conversations, for `toolgrpo sft`."""

import json
import random
from pathlib import Path

from my_tools import PARTS, price, stock

QUESTIONS = {
    price: ("What does part {} cost?", "Which price has part {}?", "Tell me the price of part {}."),
    stock: ("How many of part {} are there?", "What is the stock of part {}?", "Count part {}."),
}


def example(question, tool, part, answer):
    call = {"type": "function", "function": {"name": tool.__name__, "arguments": {"part": part}}}
    return [
        {"role": "user", "content": question},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "name": tool.__name__, "content": answer},
        {"role": "assistant", "content": answer},
    ]


def main():
    every = [(words.format(part), tool, part) for tool, asked in QUESTIONS.items() for words in asked for part in PARTS]
    random.Random(1).shuffle(every)
    shown = [{"messages": example(*one, str(one[1](one[2])))} for one in every[:96]]
    rows = [{"prompt": question, "answer": str(tool(part))} for question, tool, part in every[96:]]
    for name, lines in (("data.jsonl", rows), ("examples.jsonl", shown)):
        Path(name).write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")


if __name__ == "__main__":
    main()
