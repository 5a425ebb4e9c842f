"""Make the shop: its database, questions to train on, others to measure on, and worked examples."""

import json
import random
import sqlite3
from pathlib import Path

COLOURS = ("red", "blue", "green", "black", "white", "pink")
THINGS = ("cup", "hat", "pen", "bag", "lamp", "sofa", "vase", "bowl")
HELD_OUT, EXAMPLES = 60, 250


def products(rng):
    """Every colour of every thing, with a number and a price."""
    names = [f"{colour} {thing}" for colour in COLOURS for thing in THINGS]
    numbers = rng.sample(range(10, 100), len(names))
    return [(number, name, rng.randint(2, 60)) for number, name in zip(numbers, names)]


def questions(goods):
    """Everything that can be asked: a price, or an order of two to nine."""
    for number, name, price in goods:
        yield {
            "prompt": f"What does the {name} cost?",
            "answer": str(price),
            "expected_tools": ["search_products", "get_price"],
            "product": number,
            "quantity": None,
        }
        for quantity in range(2, 10):
            yield {
                "prompt": f"Order {quantity} of the {name}.",
                "answer": str(price * quantity),
                "expected_tools": ["search_products", "place_order"],
                "product": number,
                "quantity": quantity,
            }


def call(name, arguments, result):
    """What the assistant writes to call a tool, and what the tool answers."""
    asked = {"type": "function", "function": {"name": name, "arguments": arguments}}
    return [
        {"role": "assistant", "content": "", "tool_calls": [asked]},
        {"role": "tool", "name": name, "content": result},
    ]


def example(row, name):
    """One whole conversation, as it should go."""
    found = json.dumps([{"product_id": row["product"], "name": name}])
    messages = [{"role": "user", "content": row["prompt"]}, *call("search_products", {"text": name}, found)]
    if row["quantity"] is None:
        messages += call("get_price", {"product_id": row["product"]}, row["answer"])
    else:
        order = {"product_id": row["product"], "quantity": row["quantity"]}
        messages += call("place_order", order, row["answer"])
    return {"messages": [*messages, {"role": "assistant", "content": row["answer"]}]}


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def main(folder=Path(), seed=1):
    rng = random.Random(seed)
    goods = products(rng)
    database = folder / "shop.db"
    database.unlink(missing_ok=True)
    with sqlite3.connect(database) as shop:
        shop.execute("CREATE TABLE products (product_id INTEGER PRIMARY KEY, name TEXT, price INTEGER)")
        shop.executemany("INSERT INTO products VALUES (?, ?, ?)", goods)
    shop.close()
    rows = list(questions(goods))
    rng.shuffle(rows)
    heldout, train = rows[:HELD_OUT], rows[HELD_OUT:]  # no question is in both
    names = {number: name for number, name, _ in goods}
    write(folder / "heldout.jsonl", heldout)
    write(folder / "train.jsonl", train)
    write(folder / "examples.jsonl", [example(row, names[row["product"]]) for row in rng.sample(train, EXAMPLES)])
    print(f"{len(goods)} products, {len(train)} questions to train on, {len(heldout)} held out, {EXAMPLES} examples")


if __name__ == "__main__":
    main()
