"""The tools of the shop. They only read: a training orders thousands of times, often nonsense."""

import sqlite3
from pathlib import Path

DATABASE = Path(__file__).resolve().with_name("shop.db")


def ask(query: str, *values: object) -> list[tuple]:
    shop = sqlite3.connect(f"file:{DATABASE}?mode=ro", uri=True)
    try:
        return shop.execute(query, values).fetchall()
    finally:
        shop.close()


def search_products(text: str, limit: int = 3) -> list[dict]:
    """Find products.

    Args:
        text: Part of a name.
        limit: Most results.
    """
    found = ask("SELECT product_id, name FROM products WHERE name LIKE ? LIMIT ?", f"%{text}%", limit)
    return [{"product_id": number, "name": name} for number, name in found]


def get_price(product_id: int) -> int:
    """Price of a product.

    Args:
        product_id: Its id.
    """
    found = ask("SELECT price FROM products WHERE product_id = ?", product_id)
    if not found:
        raise ValueError(f"there is no product {product_id}; search_products gives the ids")
    return found[0][0]


def place_order(product_id: int, quantity: int) -> int:
    """Order a product; gives the total.

    Args:
        product_id: Its id.
        quantity: How many.
    """
    if quantity < 1:
        raise ValueError(f"quantity must be at least 1, got {quantity}")
    return get_price(product_id) * quantity


TOOL_FUNCTIONS = [search_products, get_price, place_order]
