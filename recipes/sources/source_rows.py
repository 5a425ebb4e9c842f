"""Write the rows: questions with their answer and nothing else; no article of a held-out question occurs in training.

    python recipes/sources/source_rows.py outputs/sources          train.jsonl (400), heldout.jsonl (240), worked.jsonl (300)

worked.jsonl shows how the systems are asked, in questions about fields that all three have right; which is asked is drawn.
"""

import argparse
import json
import random
from pathlib import Path

from source_tools import ARTICLES, TODAY, WAYS

ASKED = {
    "price": ("What does the {} cost?", "What is the price of the {}?", "How much is the {}?"),
    "supplier": ("Who supplies the {}?", "What is the supplier of the {}?", "Which company do we buy the {} from?"),
    "contact": (
        "Who is the contact for the {}?",
        "Whom do we call about the {}?",
        "What is the name of the contact for the {}?",
    ),
}
WORKED = {  # fields that all three have right
    "material": ("What is the {} made of?", "The {} is made of {}."),
    "origin": ("Where does the {} come from?", "The {} comes from {}."),
    "year": ("Since when do we sell the {}?", "We have sold the {} since {}."),
}
ROWS = {"heldout": 240, "train": 400, "worked": 300}
ARTICLES_OF = {"heldout": slice(100), "train": slice(100, None)}


def worked(article, field, system):
    question, answer = WORKED[field]
    value = TODAY[article][field]
    call = {"type": "function", "function": {"name": system, "arguments": {"article": article, "field": field}}}
    return [
        {"role": "user", "content": question.format(article)},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "name": system, "content": value},
        {"role": "assistant", "content": answer.format(article, value)},
    ]


def drawn(n, rng, articles):
    asked = [(field, words.format(name), name) for name in articles for field, all in ASKED.items() for words in all]
    rng.shuffle(asked)
    of_field = {field: [one for one in asked if one[0] == field] for field in ASKED}
    for number in range(n):
        field, question, name = of_field[list(ASKED)[number % len(ASKED)]].pop()
        yield {"prompt": question, "answer": TODAY[name][field], "task": field}


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def main(folder):
    rng = random.Random(1)
    articles = rng.sample(ARTICLES, len(ARTICLES))
    folder.mkdir(parents=True, exist_ok=True)
    for split, its in ARTICLES_OF.items():
        write(folder / f"{split}.jsonl", drawn(ROWS[split], rng, articles[its]))
    shown = [(article, field) for article in articles[ARTICLES_OF["train"]] for field in WORKED]
    chosen = rng.sample(shown, ROWS["worked"])
    write(folder / "worked.jsonl", ({"messages": worked(*one, rng.choice(list(WAYS)))} for one in chosen))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    main(parser.parse_args().folder)
