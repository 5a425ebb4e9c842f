"""Write the generated data of the recipes again, from its seeds; the files that are shipped are what this writes.

    python recipes/data/generate.py            the finance questions and the handbook's, for training and held out,
                                               and worked examples of the embedded arithmetic

Finance: each question names everything that its tool wants; its answer is the tool's whole response, which is what
the reward `tool_result` compares, and its call stands in `gold_calls` for the reward of that name. Each stands after
a worked question of another tool. Handbook: questions whose answers stand in the documents of recipes/data/handbook, in
the answers of the small API of tools_funcs/handbook_tools.py, or have to be computed from them.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from toolgrpo.data.arithmetic import draw_problem
from toolgrpo.support.plugin_files import import_file
from toolgrpo.tools import Toolbox, load_tools, run_tool
from toolgrpo.tools.plugin.plugin_file import PluginSource, load_functions

HERE = Path(__file__).resolve().parent
TOOLS = HERE.parents[1] / "tools_funcs"
TRAINING_SEED, HELD_OUT_SEED, WORKED_SEED = 1, 2, 3
Row = dict[str, Any]

_ARITHMETIC_SHOWN = 96


def main() -> None:
    _finance_files()
    products = _products(random.Random(TRAINING_SEED))
    for product in products:
        (HERE / "handbook" / f"{product['slug']}.md").write_text(_document(product))
    for kind, ask in _HANDBOOK.items():
        made = _unlike(partial(ask, products), {"train": (TRAINING_SEED, 60), "heldout": (HELD_OUT_SEED, 12)})
        for split, rows in made.items():
            _write(HERE / f"handbook_{kind}_{split}.jsonl", rows)
    _arithmetic_examples()


def _arithmetic_examples() -> None:
    """Worked questions of the embedded arithmetic, for a model that knows no tool call."""
    rng = random.Random(TRAINING_SEED)
    rows: dict[str, Row] = {}
    with load_tools(TOOLS / "arithmetic_tools.py", workers=1) as box:
        while len(rows) < _ARITHMETIC_SHOWN:
            problem = draw_problem(rng, 1 + len(rows) % 3)
            if problem.split == "train":
                calls = [
                    {"name": step.operation, "arguments": {"a": step.left, "b": step.right}} for step in problem.steps
                ]
                answer = f"The answer is {problem.answer}."
                rows[problem.question] = _worked(problem.question, calls, box, answer)
    _write(HERE / "arithmetic_examples.jsonl", list(rows.values()))


def _finance_files() -> None:
    rng = random.Random(WORKED_SEED)
    for split, rows in _unlike(_finance, {"train": (TRAINING_SEED, 400), "heldout": (HELD_OUT_SEED, 240)}).items():
        _write(HERE / f"financial_generated_{split}.jsonl", [_after_an_example(row, rng) for row in rows])


def _after_an_example(row: Row, rng: random.Random) -> Row:
    """The same question after a worked one of another tool: untrained, the model copies results instead of telling them."""
    example = row
    while example["expected_tools"] == row["expected_tools"]:
        example = _finance(rng)
    (name,) = example["expected_tools"]
    (call,) = json.loads(example["gold_calls"])
    said = _SAID[name](_NUMBER.findall(example["answer"]))
    shown = [
        *_conversation(example["prompt"], [(call, example["answer"])]),
        {"role": "assistant", "content": said},
    ]
    return {**row, "prompt": [*shown, {"role": "user", "content": row["prompt"]}]}


def _conversation(question: str, calls: list[tuple[Row, str]]) -> list[Row]:
    """A question and the calls that were made for it, each with what its tool said."""
    messages: list[Row] = [{"role": "user", "content": question}]
    for call, result in calls:
        messages.append(
            {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": call}]},
        )
        messages.append({"role": "tool", "name": call["name"], "content": result})
    return messages


def _worked(question: str, calls: list[Row], box: Toolbox, answer: str) -> Row:
    """One whole conversation, as it should go: the calls that the question wants, each with what its tool says."""
    made = []
    for call in calls:
        result = run_tool(box, call)
        assert result.ok, result.content
        made.append((call, result.content))
    return {"messages": [*_conversation(question, made), {"role": "assistant", "content": answer}]}


def _unlike(make: Callable[[random.Random], Row], splits: dict[str, tuple[int, int]]) -> dict[str, list[Row]]:
    """Make the rows of each split from its seed; no question stands twice, in one split or in two."""
    seen: set[str] = set()
    made: dict[str, list[Row]] = {}
    for split, (seed, n_rows) in splits.items():
        rng = random.Random(seed)
        rows: list[Row] = []
        while len(rows) < n_rows:
            row = make(rng)
            if row["prompt"] not in seen:
                seen.add(row["prompt"])
                rows.append(row)
        made[split] = rows
    return made


def _write(path: Path, rows: list[Row]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


# Finance: a tool by turns, with arguments drawn at random, in the order in which the question tells them: a small model
# copies what comes next before it can look anything up.


def _loan(rng: random.Random) -> tuple[str, Row]:
    p, r, y = rng.randrange(5, 500) * 1000, rng.randrange(20, 90) / 10, rng.randrange(2, 31)
    asked = rng.choice(["What is the monthly payment on", "Work out the repayment of", "How dear is"])
    return f"{asked} a loan of {p} at {r} % a year over {y} years, paid monthly?", {
        **{"principal": p, "annual_rate": r, "years": y}
    }


def _npv(rng: random.Random) -> tuple[str, Row]:
    year, rate = rng.randrange(2015, 2026), rng.randrange(2, 13)
    flows = [{"amount": -1000 * rng.randrange(5, 40), "on": f"{year}-01-01"}]
    flows += [{"amount": 500 * rng.randrange(4, 40), "on": f"{year + k}-01-01"} for k in range(1, rng.randrange(3, 5))]
    told = ", ".join(f"{flow['amount']} on {flow['on']}" for flow in flows)
    return f"Cash flows are {told}. What are net present value at {rate} % and internal rate of return?", {
        **{"cash_flows": flows, "discount_rate": rate}
    }


def _bond(rng: random.Random) -> tuple[str, Row]:
    face, coupon, years = rng.choice([100, 1000, 5000]), rng.randrange(4, 18) / 2, rng.randrange(2, 21)
    yielded, often = rng.randrange(4, 18) / 2, rng.choice([1, 2])
    told = {1: "once", 2: "twice"}[often]
    return (
        f"A bond of face value {face} pays {coupon} % a year, {told} a year, for {years} more years. Price it at a yield "
        f"of {yielded} %."
    ), {
        **{"face_value": face, "coupon_rate": coupon, "coupons_per_year": often, "years_to_maturity": years},
        **{"yield_to_maturity": yielded},
    }


def _option(rng: random.Random) -> tuple[str, Row]:
    kind, spot, strike = rng.choice(["call", "put"]), rng.randrange(20, 200), rng.randrange(20, 200)
    years, volatility, rate = rng.choice([0.25, 0.5, 1, 2]), rng.randrange(10, 60), rng.randrange(1, 7)
    return (
        f"Price a European {kind} with strike {strike} and {years} years to run on an underlying at {spot}, with "
        f"{volatility} % volatility and a risk-free rate of {rate} %."
    ), {
        **{"kind": kind, "strike": strike, "years_to_expiry": years, "spot": spot, "volatility": volatility},
        **{"risk_free_rate": rate},
    }


def _portfolio(rng: random.Random) -> tuple[str, Row]:
    share, correlation = rng.randrange(1, 10) / 10, rng.randrange(-5, 9) / 10
    parts = [
        {
            "name": name,
            "weight": weight,
            "expected_return": rng.randrange(low, high),
            "volatility": rng.randrange(4, 30),
        }
        for name, weight, low, high in (("shares", share, 5, 12), ("bonds", round(1 - share, 1), 1, 6))
    ]
    told = " and ".join(
        f"{p['weight']} in {p['name']} ({p['expected_return']} % expected, {p['volatility']} % volatility)"
        for p in parts
    )
    return f"A portfolio holds {told}; they correlate by {correlation}. What are its return and its risk?", {
        **{"holdings": parts, "correlations": [[1, correlation], [correlation, 1]]}
    }


def _refinance(rng: random.Random) -> tuple[str, Row]:
    balance, left = rng.randrange(50, 500) * 1000, rng.choice([120, 180, 240, 300])
    old = rng.randrange(45, 80) / 10
    new, costs = round(old - rng.randrange(3, 20) / 10, 1), rng.randrange(1, 9) * 1000
    return (
        f"{balance} is owed on a mortgage at {old} % with {left} months left. Is refinancing at {new} % over {left} months "
        f"for costs of {costs} worth it?"
    ), {
        **{"balance": balance, "current_rate": old, "months_left": left, "new_rate": new, "new_months": left},
        **{"closing_costs": costs},
    }


def _retirement(rng: random.Random) -> tuple[str, Row]:
    age, retire, end = rng.randrange(25, 56), rng.randrange(60, 68), rng.randrange(85, 96)
    saved, yearly, spent = rng.randrange(0, 300) * 1000, rng.randrange(4, 30) * 1000, rng.randrange(20, 60) * 1000
    before, after, inflation = rng.randrange(4, 8), rng.randrange(2, 5), rng.randrange(1, 4)
    return (
        f"Somebody aged {age} has {saved} and saves {yearly} a year until retiring at {retire}, at {before} % a year before "
        f"and {after} % after. With {inflation} % inflation and {spent} of spending a year to age {end}, does it last?"
    ), {
        **{"current_age": age, "savings": saved, "yearly_contribution": yearly, "retirement_age": retire},
        **{"return_before": before, "return_after": after, "inflation": inflation, "yearly_spending": spent},
        **{"life_expectancy": end},
    }


def _lots(rng: random.Random) -> tuple[str, Row]:
    lots = [
        {"shares": rng.randrange(2, 20) * 10, "price": rng.randrange(10, 60), "bought": f"{year}-03-01"}
        for year in (2021, 2023)
    ]
    sold = rng.randrange(1, sum(int(str(lot["shares"])) for lot in lots) // 10) * 10
    price, method = rng.randrange(20, 90), rng.choice(["FIFO", "LIFO", "HIFO"])
    told = " and ".join(f"{lot['shares']} at {lot['price']} on {lot['bought']}" for lot in lots)
    return (
        f"Shares were bought: {told}. {sold} of them are sold at {price} on 2024-06-03 by {method}. What is the gain?",
        {**{"lots": lots, "shares_sold": sold, "sale_price": price, "sold_on": "2024-06-03", "method": method}},
    )


_FINANCE: dict[str, Callable[[random.Random], tuple[str, Row]]] = {
    "loan_amortization": _loan,
    "npv_irr": _npv,
    "bond_price_yield": _bond,
    "option_price": _option,
    "portfolio_risk": _portfolio,
    "mortgage_refinance": _refinance,
    "retirement_projection": _retirement,
    "tax_lot_gains": _lots,
}
_NUMBER = re.compile(r"-?\d+(?:\.\d+)?")
_SAID: dict[str, Callable[[list[str]], str]] = {  # of the numbers of a tool's result; one frame, which fits every tool
    "loan_amortization": lambda n: f"The payment is {n[0]}, and the total interest is {n[2]}.",
    "npv_irr": lambda n: f"The net present value is {n[0]}, and the internal rate of return is {n[1]} %.",
    "bond_price_yield": lambda n: f"The price is {n[0]}, and the Macaulay duration is {n[2]} years.",
    "option_price": lambda n: f"The price is {n[0]}, and the delta is {n[1]}.",
    "portfolio_risk": lambda n: f"The expected return is {n[0]} %, and the volatility is {n[1]} %.",
    "mortgage_refinance": lambda n: f"The new payment is {n[1]}, and the monthly saving is {n[2]}.",
    "retirement_projection": lambda n: f"The savings at {n[0]} are {n[1]}, and in today's money {n[2]}.",
    "tax_lot_gains": lambda n: f"The total gain is {n[2]}, and the tax is {n[3]}.",
}
in_stock = import_file(TOOLS / "handbook_api.py").in_stock
_FUNCTIONS = {
    tool.spec.name: tool for tool in load_functions(PluginSource(path=str(TOOLS / "financial_tools_complex.py")))
}


def _finance(rng: random.Random) -> Row:
    name = rng.choice(tuple(_FINANCE))
    question, arguments = _FINANCE[name](rng)
    return {
        "prompt": question,
        "answer": _FUNCTIONS[name].call(arguments),
        "expected_tools": [name],
        "gold_calls": json.dumps([{"name": name, "arguments": arguments}]),
    }


# The handbook of a maker of tools: a document for each product, a price list in words.

_MADE_OF = ("Ash", "Beech", "Birch", "Cedar", "Elm", "Larch", "Maple", "Oak")
_THINGS = ("Drill", "Lathe", "Plane", "Press", "Router", "Sander")
_ROOMS = ("north", "south", "harbour")


def _products(rng: random.Random) -> list[Row]:
    names = [f"{first} {thing}" for first in _MADE_OF for thing in _THINGS]
    return [
        {
            "name": name,
            "slug": name.lower().replace(" ", "_"),
            "price": rng.randrange(40, 900),
            "warranty": rng.choice([12, 18, 24, 36, 48, 60]),
            "weight": rng.randrange(2, 80),
            "power": rng.randrange(3, 40) * 50,
            "oil": rng.randrange(2, 30) * 10,
        }
        for name in rng.sample(names, 24)
    ]


def _document(product: Row) -> str:
    return (
        f"# {product['name']}\n\n"
        f"List price: {product['price']} euros, without delivery.\n"
        f"Warranty: {product['warranty']} months from the day of delivery.\n"
        f"Weight: {product['weight']} kg. Motor: {product['power']} watts.\n\n"
        f"## Care\n\nOil the {product['name']} after {product['oil']} hours of work, and keep it dry.\n"
    )


_ASKED = {
    "warranty": "For how many months does the warranty of the {name} last?",
    "weight": "How many kilograms does the {name} weigh?",
    "power": "How many watts does the motor of the {name} have?",
    "oil": "After how many hours of work must the {name} be oiled?",
    "price": "What is the list price of the {name} in euros?",
}


def _lookup(products: list[Row], rng: random.Random) -> Row:
    product, key = rng.choice(products), rng.choice(list(_ASKED))
    return {
        "prompt": _ASKED[key].format(name=product["name"]),
        "answer": str(product[key]),
        "expected_tools": ["search"],
    }


def _compute(products: list[Row], rng: random.Random) -> Row:
    first, second = rng.sample(products, 2)
    n, m = rng.randrange(2, 30), rng.randrange(2, 30)
    return {
        "prompt": f"What do {n} of the {first['name']} and {m} of the {second['name']} cost together at list price, in euros?",
        "answer": str(n * first["price"] + m * second["price"]),
        "expected_tools": ["search", "execute_code"],
    }


def _stock(products: list[Row], rng: random.Random) -> Row:
    product, room = rng.choice(products), rng.choice(_ROOMS)
    return {
        "prompt": f"How many of the {product['name']} are in the {room} warehouse now?",
        "answer": str(in_stock(product["slug"], room)),
        "expected_tools": ["call_api"],
    }


def _file(products: list[Row], rng: random.Random) -> Row:
    product, line = rng.choice(products), rng.choice([3, 4, 5])
    return {
        "prompt": f"What does line {line} of the file {product['slug']}.md say? Answer with the line alone.",
        "answer": _document(product).split("\n")[line - 1],
        "expected_tools": ["read_file"],
    }


_HANDBOOK: dict[str, Callable[[list[Row], random.Random], Row]] = {
    "lookup": _lookup,
    "compute": _compute,
    "stock": _stock,
    "files": _file,
}


if __name__ == "__main__":
    main()
