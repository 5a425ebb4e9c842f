"""Make the shop: its database, questions to train on, others to measure on, and worked examples."""

import json
import random
import sqlite3
from pathlib import Path

PRODUCTS, HELD_OUT, EXAMPLES = 48, 120, 250
PRICE = ("What does article {} cost?", "Which price has article {}?", "Tell me the price of article {}.")


def products(rng):
    """Each product has an id of the database, a number in the catalogue that customers read, and a price."""
    ids, articles = rng.sample(range(10, 100), PRODUCTS), rng.sample(range(100, 1000), PRODUCTS)
    return [(number, article, rng.randint(2, 60)) for number, article in zip(ids, articles, strict=True)]


def questions(goods):
    """Everything that can be asked: a price, or an order of two to nine."""
    for number, article, price in goods:
        of_both = {"product": number, "article": article}
        for words in PRICE:
            yield {
                "prompt": words.format(article),
                "answer": str(price),
                "expected_tools": ["find", "price"],
                **of_both,
                "quantity": None,
            }
        for quantity in range(2, 10):
            yield {
                "prompt": f"Order article {article}, {quantity} times.",
                "answer": str(price * quantity),
                "expected_tools": ["find", "order"],
                **of_both,
                "quantity": quantity,
            }


def call(name, arguments, result):
    """What the assistant writes to call a tool, and what the tool answers."""
    asked = {"type": "function", "function": {"name": name, "arguments": arguments}}
    return [
        {"role": "assistant", "content": "", "tool_calls": [asked]},
        {"role": "tool", "name": name, "content": result},
    ]


def example(row):
    """One whole conversation, as it should go."""
    found = call("find", {"article": row["article"]}, str(row["product"]))
    messages = [{"role": "user", "content": row["prompt"]}, *found]
    if row["quantity"] is None:
        messages += call("price", {"product": row["product"]}, row["answer"])
    else:
        order = {"product": row["product"], "quantity": row["quantity"]}
        messages += call("order", order, row["answer"])
    return {"messages": [*messages, {"role": "assistant", "content": row["answer"]}]}


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def main(folder=Path(), seed=1):
    rng = random.Random(seed)
    goods = products(rng)
    database = folder / "shop.db"
    database.unlink(missing_ok=True)
    with sqlite3.connect(database) as shop:
        shop.execute("CREATE TABLE products (product_id INTEGER PRIMARY KEY, article INTEGER, price INTEGER)")
        shop.executemany("INSERT INTO products VALUES (?, ?, ?)", goods)
    shop.close()
    rows = list(questions(goods))
    rng.shuffle(rows)
    heldout, train = rows[:HELD_OUT], rows[HELD_OUT:]  # no question is in both
    write(folder / "heldout.jsonl", heldout)
    write(folder / "train.jsonl", train)
    write(folder / "examples.jsonl", map(example, rng.sample(train, EXAMPLES)))
    print(f"{len(goods)} products, {len(train)} questions to train on, {len(heldout)} held out, {EXAMPLES} examples")


if __name__ == "__main__":
    main()
