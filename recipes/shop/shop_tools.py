"""The tools of the shop. They only read: a training orders thousands of times, often nonsense."""

import sqlite3
from pathlib import Path

DATABASE = Path(__file__).resolve().with_name("shop.db")


def one(missing: str, query: str, value: int) -> int:
    shop = sqlite3.connect(f"file:{DATABASE}?mode=ro", uri=True)
    try:
        found = shop.execute(query, (value,)).fetchone()
    finally:
        shop.close()
    if found is None:
        raise ValueError(missing)
    return found[0]


def find(article: int) -> int:
    """Find a product.

    Args:
        article: Its number in the catalogue.
    """
    return one(f"there is no article {article}", "SELECT product_id FROM products WHERE article = ?", article)


def price(product: int) -> int:
    """Price of a product.

    Args:
        product: What find gave.
    """
    missing = f"there is no product {product}; find gives them"
    return one(missing, "SELECT price FROM products WHERE product_id = ?", product)


def order(product: int, quantity: int) -> int:
    """Order a product; gives the total.

    Args:
        product: What find gave.
        quantity: How many.
    """
    if quantity < 1:
        raise ValueError(f"quantity must be at least 1, got {quantity}")
    return price(product) * quantity


TOOL_FUNCTIONS = [find, price, order]
