"""The finance tools against scipy, numpy_financial, and formulas written another way."""

from __future__ import annotations

import datetime
import re
from pathlib import Path
from typing import Any

import numpy as np
import numpy_financial as npf
import pytest
from scipy import integrate, optimize, stats

from toolgrpo.tools.plugin.plugin_file import PluginSource, load_functions

FILE = Path(__file__).parents[2] / "tools_funcs" / "financial_tools_complex.py"
TOOLS = {tool.spec.name: tool for tool in load_functions(PluginSource(path=str(FILE)))}


def call(name: str, **arguments: Any) -> str:
    """As a worker calls it: JSON arguments, converted."""
    result: str = TOOLS[name].call(arguments)
    return result


def number(text: str, label: str) -> float:
    found = re.search(rf"{re.escape(label)} (-?[\d.]+)", text)
    assert found, f"{label!r} is not in {text!r}"
    return float(found.group(1))


@pytest.mark.parametrize(
    ("principal", "rate", "years", "per_year"), [(250_000, 6, 30, 12), (9_999, 3.3, 4.5, 2), (500, 0, 2, 4)]
)
def test_loan_against_numpy_financial(principal: float, rate: float, years: float, per_year: int) -> None:
    count = round(years * per_year)
    payment = -npf.pmt(rate / 100 / per_year, count, principal) if rate else principal / count
    text = call("loan_amortization", principal=principal, annual_rate=rate, years=years, payments_per_year=per_year)
    assert number(text, "payment") == pytest.approx(payment, abs=0.006)
    assert number(text, "total interest") == pytest.approx(payment * count - principal, abs=0.02)


FLOWS = [("2020-01-15", -10_000.0), ("2020-09-01", 2_750.0), ("2021-07-31", 4_250.0), ("2022-02-28", 5_000.0)]


def test_irregular_cash_flows_against_a_root_finder() -> None:
    days = [datetime.date.fromisoformat(day) for day, _ in FLOWS]

    def value(rate: float) -> float:
        return sum(a * (1 + rate) ** (-(d - days[0]).days / 365) for d, (_, a) in zip(days, FLOWS, strict=True))

    shuffled = [{"on": day, "amount": amount} for day, amount in reversed(FLOWS)]
    text = call("npv_irr", cash_flows=shuffled, discount_rate=8)
    assert number(text, "NPV") == pytest.approx(value(0.08), abs=0.006)
    assert number(text, "IRR") / 100 == pytest.approx(optimize.brentq(value, -0.5, 5), abs=1e-6)


@pytest.mark.parametrize(
    ("coupon", "years", "freq", "ytm"),
    [(5, 10, 2, 5.7), (0, 7, 1, 3), (8, 30, 4, 12), (2, 1, 12, -0.5), (4, 50, 12, 6)],
)
def test_bond_against_numpy_financial_and_derivatives(coupon: float, years: float, freq: int, ytm: float) -> None:

    def price(y: float) -> float:
        return float(-npf.pv(y / 100 / freq, years * freq, 1000 * coupon / 100 / freq, 1000))

    common = {"face_value": 1000, "coupon_rate": coupon, "years_to_maturity": years, "coupons_per_year": freq}
    text = call("bond_price_yield", **common, yield_to_maturity=ytm)
    assert number(text, "price") == pytest.approx(price(ytm), abs=1e-4)
    step = 1e-2
    slope = (price(ytm + step) - price(ytm - step)) / (2 * step) * 100
    curve = (price(ytm + step) - 2 * price(ytm) + price(ytm - step)) / (step / 100) ** 2
    assert number(text, "modified duration") == pytest.approx(-slope / price(ytm), rel=1e-4)
    macaulay = -slope / price(ytm) * (1 + ytm / 100 / freq)
    assert number(text, "Macaulay duration") == pytest.approx(macaulay, rel=1e-4)
    assert number(text, "convexity") == pytest.approx(curve / price(ytm), rel=1e-3)
    back = call("bond_price_yield", **common, price=price(ytm))
    assert number(back, "yield") == pytest.approx(ytm, abs=1e-3)


def _expected_payoff(kind: str, s: float, k: float, t: float, v: float, r: float, q: float) -> float:
    """The discounted mean of the payoff, integrated over the lognormal end price."""
    sign = 1 if kind == "call" else -1

    def integrand(z: float) -> float:
        end = s * np.exp((r - q - v * v / 2) * t + v * np.sqrt(t) * z)
        return max(0.0, sign * (end - k)) * stats.norm.pdf(z)

    kink = (np.log(k / s) - (r - q - v * v / 2) * t) / (v * np.sqrt(t))
    parts = [integrate.quad(integrand, a, b, epsabs=1e-12)[0] for a, b in ((-12, kink), (kink, 12))]
    return float(np.exp(-r * t) * sum(parts))


@pytest.mark.parametrize("kind", ["call", "put"])
@pytest.mark.parametrize("case", [(100, 100, 1, 20, 5, 0), (80, 95, 0.25, 45, 1, 3), (120, 90, 2, 15, -0.5, 1)])
def test_option_against_integration_and_numeric_greeks(kind: str, case: tuple[float, ...]) -> None:
    s, k, t, v, r, q = case

    def price(s: float = s, t: float = t, v: float = v, r: float = r) -> float:
        return _expected_payoff(kind, s, k, t, v / 100, r / 100, q / 100)

    text = call(
        "option_price", kind=kind, spot=s, strike=k, years_to_expiry=t, volatility=v, risk_free_rate=r, dividend_yield=q
    )
    assert number(text, "price") == pytest.approx(price(), abs=1e-4)
    assert number(text, "delta") == pytest.approx((price(s=s + 0.01) - price(s=s - 0.01)) / 0.02, abs=2e-4)
    assert number(text, "gamma") == pytest.approx((price(s=s + 0.1) - 2 * price() + price(s=s - 0.1)) / 0.01, abs=2e-4)
    assert number(text, "vega") == pytest.approx((price(v=v + 0.1) - price(v=v - 0.1)) / 0.2, abs=2e-4)
    assert number(text, "rho") == pytest.approx((price(r=r + 0.1) - price(r=r - 0.1)) / 0.2, abs=2e-4)
    assert number(text, "theta") == pytest.approx((price(t=t - 1e-3) - price(t=t + 1e-3)) / 2e-3 / 365, abs=2e-4)


def test_portfolio_against_matrices() -> None:
    rng = np.random.default_rng(0)
    weights = rng.dirichlet(np.ones(5))
    weights[-1] = 1 - weights[:-1].sum()
    returns, vols = rng.uniform(1, 12, 5), rng.uniform(2, 30, 5)
    correlations = np.round(np.corrcoef(rng.normal(size=(5, 40))), 6)
    risk = float(np.sqrt(weights @ (np.outer(vols, vols) * correlations) @ weights))
    mean = float(weights @ returns)
    text = call(
        "portfolio_risk",
        holdings=[
            {"name": "a", "weight": w, "expected_return": m, "volatility": s}
            for w, m, s in np.stack([weights, returns, vols], axis=1).tolist()
        ],
        correlations=correlations.tolist(),
        risk_free_rate=2,
        value=1000,
    )
    assert number(text, "expected return") == pytest.approx(mean, abs=1e-4)
    assert number(text, "volatility") == pytest.approx(risk, abs=1e-4)
    assert number(text, "Sharpe ratio") == pytest.approx((mean - 2) / risk, abs=1e-4)
    assert number(text, "95% VaR") == pytest.approx(-stats.norm.ppf(0.05, mean, risk), abs=1e-3)


def test_retirement_against_closed_forms() -> None:
    common = {
        **{"current_age": 30, "retirement_age": 65, "life_expectancy": 90, "savings": 10_000},
        **{"yearly_contribution": 6_000, "return_before": 7, "return_after": 4, "inflation": 2},
    }
    at_retirement = -npf.fv(0.07, 35, 6_000, 10_000)
    text = call("retirement_projection", **common, yearly_spending=20_000)
    assert number(text, "at 65:") == pytest.approx(at_retirement, abs=0.01)
    first, growth, inflation = 20_000 * 1.02**35, 1.04, 1.02
    left = at_retirement * growth**25 - first * growth * (growth**25 - inflation**25) / (growth - inflation)
    assert number(text, "left at 90:") == pytest.approx(left, abs=0.5)
    assert "runs out at age" in call("retirement_projection", **common, yearly_spending=60_000)
    growing = call("retirement_projection", **common, yearly_spending=0, contribution_growth=3)
    paid_in = 6_000 * (1.07**35 - 1.03**35) / (0.07 - 0.03)  # a growing annuity
    assert number(growing, "at 65:") == pytest.approx(10_000 * 1.07**35 + paid_in, abs=0.01)


LOTS = [
    {"bought": "2020-05-01", "shares": 100, "price": 10},
    {"bought": "2022-05-01", "shares": 50, "price": 30},
    {"bought": "2023-01-01", "shares": 70, "price": 20},
]


@pytest.mark.parametrize(
    ("method", "short", "long"),
    [  # sold 120 at 25 on 2023-05-01; a lot of exactly one year is short-term
        ("FIFO", 20 * (25 - 30), 100 * (25 - 10)),
        ("LIFO", 70 * (25 - 20) + 50 * (25 - 30), 0),
        ("HIFO", 50 * (25 - 30) + 70 * (25 - 20), 0),
    ],
)
def test_tax_lots_against_hand_counting(method: str, short: float, long: float) -> None:
    common = {"lots": LOTS, "shares_sold": 120, "sale_price": 25, "method": method}
    text = call("tax_lot_gains", **common, sold_on="2023-05-01", short_term_rate=40, long_term_rate=15)
    assert number(text, "short-term gain") == pytest.approx(short)
    assert number(text, "long-term gain") == pytest.approx(long)
    assert number(text, "tax") == pytest.approx(max(0, short) * 0.4 + long * 0.15)


EXPIRED = {"kind": "put", "spot": 1, "strike": 1, "years_to_expiry": 0, "volatility": 1, "risk_free_rate": 1}
HALF = {"name": "a", "weight": 0.5, "expected_return": 1, "volatility": 1}


@pytest.mark.parametrize(
    ("name", "arguments", "says"),
    [
        ("loan_amortization", {"principal": -1, "annual_rate": 5, "years": 1}, "principal must be positive"),
        ("npv_irr", {"cash_flows": [], "discount_rate": 1}, "at least two"),
        ("bond_price_yield", {"face_value": 1, "coupon_rate": 1, "years_to_maturity": 1}, "exactly one"),
        ("option_price", EXPIRED, "years_to_expiry and volatility must be positive"),
        ("portfolio_risk", {"holdings": [HALF], "correlations": [[1]]}, "must sum to 1, they sum to 0.5"),
        (
            "tax_lot_gains",
            {"lots": LOTS, "shares_sold": 999, "sale_price": 1, "sold_on": "2023-05-01"},
            "only 220 shares",
        ),
    ],
)
def test_impossible_inputs_are_refused_in_words(name: str, arguments: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        call(name, **arguments)
