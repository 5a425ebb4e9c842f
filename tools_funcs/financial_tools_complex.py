"""Eight calculations of real finance. Pure functions; each answers in one or two short lines.

Rates are in percent a year (5 means 5 %), money is in units of one currency, dates are ISO (2024-01-31).
"""

import math
from collections.abc import Callable, Sequence
from datetime import date
from statistics import NormalDist
from typing import Literal

from pydantic import BaseModel, Field

from toolgrpo.tools import tool


class CashFlow(BaseModel):
    """One dated payment."""

    on: date = Field(description="The day, as YYYY-MM-DD.")
    amount: float = Field(description="Money received (positive) or paid (negative).")


class Holding(BaseModel):
    """One part of a portfolio."""

    name: str = Field(description="What it is.")
    weight: float = Field(description="Its share of the portfolio, as a fraction; all shares sum to 1.")
    expected_return: float = Field(description="Expected return in percent a year.")
    volatility: float = Field(ge=0, description="Standard deviation of the return in percent a year.")


class TaxLot(BaseModel):
    """Shares bought at one time."""

    bought: date = Field(description="The day of the purchase, as YYYY-MM-DD.")
    shares: float = Field(gt=0, description="How many shares.")
    price: float = Field(ge=0, description="Price paid per share.")


@tool(cache=True)
def loan_amortization(
    principal: float,
    annual_rate: float,
    years: float,
    payments_per_year: Literal[1, 2, 4, 6, 12, 24, 26, 52] = 12,
    extra_payment: float = 0.0,
) -> str:
    """Work out the level payment of a loan, its total interest, and how soon extra payments pay it off.

    Args:
        principal: The amount borrowed.
        annual_rate: Nominal interest rate in percent a year.
        years: The term of the loan in years.
        payments_per_year: Payments a year, 12 for monthly.
        extra_payment: Paid on top of every payment.
    """
    _require(principal > 0, "principal must be positive")
    _require(annual_rate >= 0, "annual_rate must not be negative")
    _require(0 < years <= 100, "years must be over 0 and at most 100")
    _require(extra_payment >= 0, "extra_payment must not be negative")
    count = round(years * payments_per_year)
    _require(count >= 1, "the term must have at least one payment")
    rate = annual_rate / 100 / payments_per_year
    payment = _level_payment(principal, rate, count)
    balance, interest, paid_in = principal, 0.0, 0
    while balance > 0.005 and paid_in < count:
        due = balance * rate
        balance -= min(balance, payment + extra_payment - due)
        interest += due
        paid_in += 1
    return f"payment {payment:.2f}, payments {paid_in}, total interest {interest:.2f}, total paid {principal + interest:.2f}"


@tool(cache=True)
def npv_irr(cash_flows: list[CashFlow], discount_rate: float) -> str:
    """Work out net present value and internal rate of return of cash flows on irregular days.

    Days count as fractions of a year of 365 days from the first cash flow. If several rates are internal rates of return,
    the lowest is given.

    Args:
        cash_flows: The dated payments, in any order; at least two.
        discount_rate: Discount rate in percent a year, compounded yearly.
    """
    _require(len(cash_flows) >= 2, "at least two cash flows are needed")
    _require(discount_rate > -100, "discount_rate must be over -100")
    flows = sorted(cash_flows, key=lambda flow: flow.on)
    timed = [((flow.on - flows[0].on).days / 365, flow.amount) for flow in flows]
    net = _present_value(timed, discount_rate / 100)
    if not (any(amount > 0 for _, amount in timed) and any(amount < 0 for _, amount in timed)):
        return f"NPV {net:.2f}, IRR does not exist (it needs a payment in each direction)"
    root = _root(lambda rate: _present_value(timed, rate), -0.99, 100.0)
    return f"NPV {net:.2f}, IRR " + ("not found between -99% and 10000%" if root is None else f"{root * 100:.4f}%")


@tool(cache=True)
def bond_price_yield(
    face_value: float,
    coupon_rate: float,
    years_to_maturity: float,
    coupons_per_year: Literal[1, 2, 4, 12] = 2,
    yield_to_maturity: float | None = None,
    price: float | None = None,
) -> str:
    """Price a bond from its yield, or find its yield from its price; also duration and convexity.

    Give exactly one of yield_to_maturity and price. A coupon has just been paid.

    Args:
        face_value: What is paid back at maturity.
        coupon_rate: Coupons in percent of the face value a year.
        years_to_maturity: Years left; a whole number of coupon periods.
        coupons_per_year: Coupons a year.
        yield_to_maturity: Yield in percent a year, compounded with every coupon.
        price: Price paid for the bond.
    """
    _require(face_value > 0 and coupon_rate >= 0, "face_value must be positive and coupon_rate not negative")
    _require((yield_to_maturity is None) != (price is None), "give exactly one of yield_to_maturity and price")
    periods = years_to_maturity * coupons_per_year
    _require(
        0 < periods <= 1200 and abs(periods - round(periods)) < 1e-9,
        "years_to_maturity must be a whole number of coupon periods",
    )
    coupon = face_value * coupon_rate / 100 / coupons_per_year
    flows = [(k, coupon + (face_value if k == round(periods) else 0.0)) for k in range(1, round(periods) + 1)]
    if price is None:
        rate = (yield_to_maturity or 0.0) / 100 / coupons_per_year
        _require(rate > -1, "yield_to_maturity is too far below 0")
    else:
        _require(price > 0, "price must be positive")
        root = _root(lambda candidate: _present_value(flows, candidate) - price, -0.99, 10.0)
        if root is None:
            raise ValueError("no yield gives this price")
        rate = root
    worth = _present_value(flows, rate)
    macaulay = sum(k * amount / (1 + rate) ** k for k, amount in flows) / worth / coupons_per_year
    modified = macaulay / (1 + rate)
    convexity = sum(k * (k + 1) * amount / (1 + rate) ** (k + 2) for k, amount in flows) / worth / coupons_per_year**2
    return (
        f"price {worth:.4f}, yield {rate * coupons_per_year * 100:.4f}%, Macaulay duration {macaulay:.4f} years, "
        f"modified duration {modified:.4f}, convexity {convexity:.4f}"
    )


@tool(cache=True)
def option_price(
    kind: Literal["call", "put"],
    spot: float,
    strike: float,
    years_to_expiry: float,
    volatility: float,
    risk_free_rate: float,
    dividend_yield: float = 0.0,
) -> str:
    """Price a European option with Black-Scholes-Merton, with its greeks.

    Rates are continuously compounded. Vega and rho are per percentage point, theta is per calendar day.

    Args:
        kind: call or put.
        spot: Price of the underlying now.
        strike: Strike price.
        years_to_expiry: Time to expiry in years.
        volatility: Volatility in percent a year.
        risk_free_rate: Risk-free rate in percent a year.
        dividend_yield: Dividend yield in percent a year.
    """
    _require(spot > 0 and strike > 0, "spot and strike must be positive")
    _require(years_to_expiry > 0 and volatility > 0, "years_to_expiry and volatility must be positive")
    normal, t, sigma = NormalDist(), years_to_expiry, volatility / 100
    rate, dividend = risk_free_rate / 100, dividend_yield / 100
    root_t = math.sqrt(t)
    d1 = (math.log(spot / strike) + (rate - dividend + sigma**2 / 2) * t) / (sigma * root_t)
    d2 = d1 - sigma * root_t
    carry, discount = math.exp(-dividend * t), math.exp(-rate * t)
    sign = 1 if kind == "call" else -1
    worth = sign * (spot * carry * normal.cdf(sign * d1) - strike * discount * normal.cdf(sign * d2))
    delta = sign * carry * normal.cdf(sign * d1)
    gamma = carry * normal.pdf(d1) / (spot * sigma * root_t)
    vega = spot * carry * normal.pdf(d1) * root_t / 100
    rho = sign * strike * t * discount * normal.cdf(sign * d2) / 100
    theta = (
        -spot * carry * normal.pdf(d1) * sigma / (2 * root_t)
        - sign * rate * strike * discount * normal.cdf(sign * d2)
        + sign * dividend * spot * carry * normal.cdf(sign * d1)
    ) / 365
    return f"price {worth:.4f}, delta {delta:.4f}, gamma {gamma:.6f}, vega {vega:.4f}, theta {theta:.4f}, rho {rho:.4f}"


@tool(cache=True)
def portfolio_risk(
    holdings: list[Holding], correlations: list[list[float]], risk_free_rate: float = 0.0, value: float = 0.0
) -> str:
    """Work out expected return, volatility, Sharpe ratio and one-year 95 % value at risk of a portfolio.

    Args:
        holdings: The parts of the portfolio; weights sum to 1.
        correlations: The correlation matrix, one row a holding, in the order of the holdings.
        risk_free_rate: Risk-free rate in percent a year, for the Sharpe ratio.
        value: Worth of the portfolio; 0 leaves the value at risk in percent.
    """
    n = len(holdings)
    total = sum(holding.weight for holding in holdings)
    _require(abs(total - 1) < 1e-6, f"the weights must sum to 1, they sum to {total:g}")
    _require(
        len(correlations) == n and all(len(row) == n for row in correlations),
        f"correlations must have {n} rows of {n} numbers",
    )
    for i in range(n):
        _require(abs(correlations[i][i] - 1) < 1e-9, "every holding correlates with itself by 1")
        for j in range(n):
            _require(abs(correlations[i][j] - correlations[j][i]) < 1e-9, "correlations must be symmetric")
            _require(-1 <= correlations[i][j] <= 1, "correlations lie between -1 and 1")
    expected = sum(holding.weight * holding.expected_return for holding in holdings)
    sized = [holding.weight * holding.volatility for holding in holdings]
    variance = sum(sized[i] * sized[j] * correlations[i][j] for i in range(n) for j in range(n))
    _require(variance >= -1e-9, "these correlations are impossible together: the variance is negative")
    risk = math.sqrt(max(0.0, variance))
    sharpe = "undefined" if risk == 0 else f"{(expected - risk_free_rate) / risk:.4f}"
    loss = NormalDist().inv_cdf(0.95) * risk - expected
    at_risk = f"{loss:.4f}%" + (f" = {value * loss / 100:.2f}" if value else "")
    return f"expected return {expected:.4f}%, volatility {risk:.4f}%, Sharpe ratio {sharpe}, 95% VaR {at_risk}"


@tool(cache=True)
def mortgage_refinance(
    balance: float,
    current_rate: float,
    months_left: int,
    new_rate: float,
    new_months: int,
    closing_costs: float,
    roll_costs_into_loan: bool = False,
) -> str:
    """Compare keeping a mortgage with refinancing it: payments, months to break even, total saved.

    Args:
        balance: What is still owed.
        current_rate: Rate of the present mortgage in percent a year.
        months_left: Monthly payments left on it.
        new_rate: Rate of the new mortgage in percent a year.
        new_months: Monthly payments of the new mortgage.
        closing_costs: What refinancing costs.
        roll_costs_into_loan: Borrow the costs instead of paying them at once.
    """
    _require(balance > 0 and closing_costs >= 0, "balance must be positive and closing_costs not negative")
    _require(min(current_rate, new_rate) >= 0, "rates must not be negative")
    _require(0 < months_left <= 1200 and 0 < new_months <= 1200, "months must be between 1 and 1200")
    old = _level_payment(balance, current_rate / 1200, months_left)
    borrowed = balance + (closing_costs if roll_costs_into_loan else 0.0)
    new = _level_payment(borrowed, new_rate / 1200, new_months)
    upfront = 0.0 if roll_costs_into_loan else closing_costs
    saved = old * months_left - new * new_months - upfront
    months = math.ceil(upfront / (old - new) - 1e-9) if old > new else None
    even = "never (the payment does not fall)" if months is None else f"{months} months"
    return (
        f"payment {old:.2f} -> {new:.2f}, monthly saving {old - new:.2f}, break-even {even}, "
        f"total saved {saved:.2f} ({'refinancing is cheaper' if saved > 0 else 'keeping is cheaper'} over the whole term)"
    )


@tool(cache=True)
def retirement_projection(
    current_age: int,
    retirement_age: int,
    life_expectancy: int,
    savings: float,
    yearly_contribution: float,
    return_before: float,
    return_after: float,
    inflation: float,
    yearly_spending: float,
    contribution_growth: float = 0.0,
) -> str:
    """Project savings to retirement and through it, year by year.

    Contributions come at the end of each year. Spending is in today's money, grows with inflation, and is taken at the
    start of each year of retirement.

    Args:
        current_age: Age now.
        retirement_age: Age of the first year without contributions.
        life_expectancy: Age until which the money should last.
        savings: Saved so far.
        yearly_contribution: Saved in the first year.
        return_before: Return in percent a year until retirement.
        return_after: Return in percent a year in retirement.
        inflation: Inflation in percent a year.
        yearly_spending: Spending a year in retirement, in today's money.
        contribution_growth: How much contributions grow, in percent a year.
    """
    _require(0 <= current_age < retirement_age < life_expectancy <= 130, "ages must rise: now, retirement, end")
    _require(min(savings, yearly_contribution, yearly_spending) >= 0, "amounts of money must not be negative")
    _require(min(return_before, return_after, inflation, contribution_growth) > -100, "rates must be over -100")
    balance, contribution = savings, yearly_contribution
    for _ in range(retirement_age - current_age):
        balance = balance * (1 + return_before / 100) + contribution
        contribution *= 1 + contribution_growth / 100
    prices = (1 + inflation / 100) ** (retirement_age - current_age)
    start = f"at {retirement_age}: {balance:.2f} ({balance / prices:.2f} in today's money); "
    for age in range(retirement_age, life_expectancy):
        spending = yearly_spending * prices
        if balance < spending:
            return f"{start}the money runs out at age {age}"
        balance = (balance - spending) * (1 + return_after / 100)
        prices *= 1 + inflation / 100
    return f"{start}left at {life_expectancy}: {balance:.2f}"


@tool(cache=True)
def tax_lot_gains(
    lots: list[TaxLot],
    shares_sold: float,
    sale_price: float,
    sold_on: date,
    method: Literal["FIFO", "LIFO", "HIFO"] = "FIFO",
    short_term_rate: float = 0.0,
    long_term_rate: float = 0.0,
) -> str:
    """Work out the taxable gain of selling shares bought in several lots. Held over a year is long-term.

    Args:
        lots: What was bought and when.
        shares_sold: How many shares are sold.
        sale_price: Price received per share.
        sold_on: The day of the sale, as YYYY-MM-DD.
        method: Which lots go first: oldest (FIFO), newest (LIFO) or dearest (HIFO).
        short_term_rate: Tax on short-term gains in percent.
        long_term_rate: Tax on long-term gains in percent.
    """
    _require(shares_sold > 0 and sale_price >= 0, "shares_sold must be positive and sale_price not negative")
    usable = [lot for lot in lots if lot.bought <= sold_on]
    held = sum(lot.shares for lot in usable)
    _require(shares_sold <= held + 1e-9, f"only {held:g} shares were held on {sold_on}")
    keys = {
        "FIFO": lambda lot: lot.bought.toordinal(),
        "LIFO": lambda lot: -lot.bought.toordinal(),
        "HIFO": lambda lot: -lot.price,
    }
    left, gains = shares_sold, {"short": 0.0, "long": 0.0}
    for lot in sorted(usable, key=keys[method]):
        taken = min(left, lot.shares)
        gains["long" if _over_a_year(lot.bought, sold_on) else "short"] += taken * (sale_price - lot.price)
        left -= taken
    tax = max(0.0, gains["short"]) * short_term_rate / 100 + max(0.0, gains["long"]) * long_term_rate / 100
    return (
        f"short-term gain {gains['short']:.2f}, long-term gain {gains['long']:.2f}, "
        f"total {gains['short'] + gains['long']:.2f}, tax {tax:.2f}"
    )


def _require(condition: bool, sentence: str) -> None:
    if not condition:
        raise ValueError(sentence)


def _level_payment(principal: float, rate: float, count: int) -> float:
    """The payment that pays off a principal in `count` payments."""
    if rate == 0:
        return principal / count
    return principal * rate / -math.expm1(-count * math.log1p(rate))


def _present_value(flows: Sequence[tuple[float, float]], rate: float) -> float:
    """The worth now of (time, amount) pairs in order of time; infinite where a float cannot hold it."""
    try:
        worth = sum(amount / (1 + rate) ** time for time, amount in flows)
    except (OverflowError, ZeroDivisionError):  # over a long time near -100 %
        worth = math.nan
    return worth if math.isfinite(worth) else math.copysign(math.inf, next(a for _, a in reversed(flows) if a))


def _root(function: Callable[[float], float], low: float, high: float) -> float | None:
    """Where the function first changes its sign between two points, looked for on a grid; None if nowhere."""
    grid = [low + (high - low) * (k / 400) ** 3 for k in range(401)]
    above = [function(point) > 0 for point in grid]
    place = next((k for k in range(400) if above[k] != above[k + 1]), None)
    if place is None:
        return None
    left, right = grid[place], grid[place + 1]
    for _ in range(60):
        middle = (left + right) / 2
        if (function(middle) > 0) == above[place]:
            left = middle
        else:
            right = middle
    return (left + right) / 2


def _over_a_year(bought: date, sold: date) -> bool:
    """Whether shares were held for more than one year, counted by calendar day."""
    try:
        anniversary = bought.replace(year=bought.year + 1)
    except ValueError:  # bought on 29 February
        anniversary = date(bought.year + 1, 2, 28)
    return sold > anniversary


TOOL_FUNCTIONS = [
    loan_amortization,
    npv_irr,
    bond_price_yield,
    option_price,
    portfolio_risk,
    mortgage_refinance,
    retirement_projection,
    tax_lot_gains,
]
