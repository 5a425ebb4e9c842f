"""The report in a real browser: every view, by keyboard and by link, and nothing hostile gets through."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.chromium import Chromium
from tests.support.recorded_run import record_run
from toolgrpo.evaluation.measures import wilson_interval
from toolgrpo.report.build import build_report

pytestmark = pytest.mark.e2e

Show = Callable[[Path, str], Chromium]
VIEWS = ("overview", "groups", "find", "compare", "reinforced", "timeline", "findings")
HOSTILE = (
    "<script>window.hacked=1</script><img src=x onerror=window.hacked=1></script></title></style>"
    "<svg onload=window.hacked=1><!-- ]]> &lt; {{x}} ${window.hacked=1} javascript:window.hacked=1 "
    "\u202e\u2066\u2028\x1b[2J\x00\ud800\u200b'\"`"
)


@pytest.fixture(scope="session")
def page(run: Path) -> Path:
    return build_report([run]).path


def text_of(browser: Chromium) -> str:
    return str(browser.run("document.querySelector('main').innerText"))


def at(browser: Chromium, address: str) -> str:
    """Go to an address; return what stands there when it is drawn."""
    browser.run(
        "new Promise((done) => { const seen = new MutationObserver(() => { seen.disconnect(); setTimeout(done, 30); });"
        f" seen.observe(document.querySelector('main'), {{childList: true}}); location.hash = {json.dumps(address)}; }})"
    )
    return text_of(browser)


def quiet(browser: Chromium, page: Path) -> None:
    """The page had no error, broke no rule of its policy, and asked nobody for anything."""
    assert browser.messages == []
    assert [url for url in browser.requests if not url.startswith((page.as_uri(), "about:"))] == []


def test_every_view_shows_the_run(shown: Show, page: Path) -> None:
    browser = shown(page, "")
    overview = text_of(browser)
    assert "held-out success, greedy" in overview and "0 % → 100 %" in overview.replace("\n", " ")
    assert browser.run("document.querySelectorAll('figure.chart').length") > 8
    assert browser.run("document.querySelectorAll('text.event.warning').length") > 0, "events stand on the axis"
    assert "raised 5" in overview, "the tool that fails, and why"
    groups = at(browser, "#/groups")
    assert "6 groups" in groups and "dead, all failed" in groups
    assert "24 episodes of 28" in at(browser, "#/find?mode=train")
    assert "flipped to success (2)" in at(browser, "#/compare")
    reinforced = at(browser, "#/reinforced?which=wrong")
    assert "Pushed down" in reinforced and "Share of the loss by tool" in reinforced
    assert "no call" in reinforced and "turn 2" in reinforced
    timeline = at(browser, "#/timeline")
    assert "It waited most for" in timeline and "no episode waited for the engine" in timeline
    assert "Findings" in at(browser, "#/findings") and "the tools are slow" in text_of(browser)
    quiet(browser, page)


def test_labels_of_an_axis_are_told_apart_and_lie_in_the_drawing(shown: Show, page: Path) -> None:
    browser = shown(page, "")
    charts = browser.run(
        "[...document.querySelectorAll('figure.chart svg')].map((one) => [one.getAttribute('aria-label'),"
        " [...one.querySelectorAll('text.tick')].map((tick) => [tick.getAttribute('text-anchor'), tick.textContent,"
        " tick.getBBox().x, tick.getBBox().x + tick.getBBox().width])])"
    )
    assert len(charts) > 8
    for name, ticks in charts:
        for anchor in ("end", "middle"):
            labels = [text for side, text, *_ in ticks if side == anchor]
            assert len(set(labels)) == len(labels), (name, labels)
        assert all(begin >= 0 and end <= 560 for *_, begin, end in ticks), (name, ticks)


def test_a_run_of_many_steps_has_its_charts(shown: Show, tmp_path: Path) -> None:
    names = ("sampling/sampling_logp_difference/mean", "sampling/sampling_logp_difference/max")
    steps = ({"kind": "step", "step": n, "metrics": dict.fromkeys(names, n)} for n in range(70_000))
    lines = [{"kind": "run", "schema": 2}, *steps]
    (tmp_path / "steps.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    browser = shown(build_report([tmp_path]).path, "")
    assert "70000" in text_of(browser) and browser.run("document.querySelectorAll('figure.chart').length") == 1
    assert browser.messages == []


def test_a_number_of_many_digits_is_short(shown: Show, run: Path, tmp_path: Path) -> None:
    shutil.copytree(run, tmp_path / "run")
    lines = [json.loads(line) for line in (tmp_path / "run" / "steps.jsonl").read_text().splitlines()]
    for line in lines:
        line.get("metrics", {})["grad_norm"] = -2.5e45
    (tmp_path / "run" / "steps.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    browser = shown(build_report([tmp_path / "run"]).path, "")
    assert "−2.0e45" in text_of(browser) and "000,000,000" not in text_of(browser)


def test_examples_of_broken_calls_are_calls_that_could_not_be_run(shown: Show, run: Path, tmp_path: Path) -> None:
    shutil.copytree(run, tmp_path / "run")
    recorded = tmp_path / "run" / "episodes.jsonl"
    recorded.write_text(recorded.read_text().replace('"error": "raised"', '"error": "invalid_json"', 1))
    browser = shown(build_report([tmp_path / "run"]).path, "#/find?ready=brokencall")
    assert "1 episode of 28" in text_of(browser) and "5 episodes of 28" in at(browser, "#/find?ready=failedcall")


def test_an_evaluation_shows_its_success_and_no_steps(shown: Show, run: Path, tmp_path: Path) -> None:
    lines = [json.loads(line) for line in (run / "episodes.jsonl").read_text().splitlines()]
    asked = [{**line, "step": 0, "mode": "eval", "label": "model"} for line in lines if line["step"] == 1]
    (tmp_path / "episodes.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in asked))
    browser = shown(build_report([tmp_path]).path, "")
    cards = str(browser.run("document.querySelector('.cards').innerText"))
    low, high = wilson_interval(0.25 * 2, 2)  # of two questions
    assert " ".join(cards.split()) == f"success 25 % 95 %: {100 * low:.1f} % to {100 * high:.0f} %, 8 episodes"


def test_a_dropped_episode_is_found_and_says_why(shown: Show, run: Path, tmp_path: Path) -> None:
    shutil.copytree(run, tmp_path / "run")
    recorded = tmp_path / "run" / "episodes.jsonl"
    first, *others = recorded.read_text().splitlines(keepends=True)
    drop = {"cause": "reward", "reason": "<b>no judge</b> answered"}
    scored = {**json.loads(first), "drop": drop, "reward_given": None, "success": None}
    recorded.write_text("".join([json.dumps(scored) + "\n", *others]))
    browser = shown(build_report([tmp_path / "run"]).path, "#/find?ready=dropped")
    assert "1 episode of 28" in text_of(browser)
    browser.run("document.querySelector('td a.question').click()")
    browser.wait_for("document.querySelectorAll('.bubble.dropped').length === 1")
    assert "reward: <b>no judge</b> answered" in text_of(browser)


def test_an_episode_is_a_conversation_and_its_tokens(shown: Show, page: Path) -> None:
    browser = shown(page, "#/find?mode=train&ready=repeated")
    browser.run("document.querySelector('td a.question').click()")
    browser.wait_for("document.querySelectorAll('.bubble').length > 4")
    said = text_of(browser)
    for part in ("What is 0 plus 2?", "raised", "cached", "7 characters cut", "The answer is 2.", "repeats a call"):
        assert part in said
    assert "segment 2 begins, with a history of" in said, "before the turn that reads another history"
    assert "advantage +0.5" in said and "advantage −0.25" in said  # of its turns
    browser.press("t")
    browser.wait_for("document.querySelectorAll('.token').length > 10")
    assert browser.run("document.querySelector('select').value") == "advantage"
    by_turn = browser.run(
        "[...document.querySelectorAll('.tokens[role=group] .token.sampled')].map((one) => one.className.includes('down'))"
    )
    assert True in by_turn and False in by_turn
    assert browser.run("document.querySelectorAll('.tokens[role=group] .segment').length") == 1
    browser.press("k")
    browser.wait_for("location.hash.includes('view=tokens') && location.hash.includes('/1?')")
    browser.wait_for("document.querySelector('.crumbs').innerText.includes('episode 1')")
    browser.press("k")
    browser.wait_for("location.hash.includes('/0?')")
    browser.wait_for("[...document.querySelectorAll('select option')].some((one) => one.value === 'entropy')")
    colours = browser.run("[...document.querySelectorAll('select option')].map((one) => one.value)")
    assert colours == ["mask", "weight", "logprob", "entropy", "difference", "correction", "advantage"]
    browser.run("document.querySelector('.tokens[role=group] .token.sampled').focus()")
    noted = str(browser.run("document.querySelector('.hovernote').innerText"))
    for name in ("token", "bytes", "probability", "trainer − engine", "entropy", "correction", "advantage", "push"):
        assert name in noted
    assert browser.run("document.querySelectorAll('.tokens .special').length") > 0
    quiet(browser, page)


@pytest.mark.parametrize(
    ("address", "count"),
    [
        ("text=the%20ANSWER%20is%202", 7),
        ("tool=add&cause=raised", 5),
        ("ready=hack", 5),
        ("ready=void", 5),
        ("ready=nocall&success=no&mode=train", 9),
        ("stop=length", 5),
        ("min=0.5&max=0.7", 5),
        ("from=2&to=2", 8),
        ("ready=dead", 4),
    ],
)
def test_a_filter_is_a_link(shown: Show, page: Path, address: str, count: int) -> None:
    browser = shown(page, f"#/find?{address}")
    browser.wait_for("document.querySelector('p.count').innerText.includes(' of 28')")
    assert browser.run("document.querySelector('p.count').innerText").startswith(f"{count} episode")


def test_the_page_is_used_without_a_mouse(shown: Show, page: Path) -> None:
    browser = shown(page, "")
    for number, view in enumerate(VIEWS, start=1):
        browser.press(str(number), f"Digit{number}")
        browser.wait_for(f"document.querySelector('[aria-current]')?.dataset.view === '{view}'")
    browser.press("/", "Slash")
    browser.wait_for("location.hash === '#/find' && document.querySelector('main') !== null")
    browser.press("1", "Digit1")
    browser.wait_for("document.querySelector('figure.chart') !== null")
    browser.run("document.querySelector('figure.chart').focus()")
    browser.press("ArrowLeft")
    assert "step 2" in str(browser.run("document.querySelector('.hovernote').innerText"))
    unnamed = "[...document.querySelectorAll('input, select, button, a')].filter((one) => !one.innerText && !one.labels?.length && !one.getAttribute('aria-label')).length"
    for view in VIEWS:
        at(browser, f"#/{view}?x")
        assert browser.run(unnamed) == 0, f"{view}: everything that can be used has a name"
    quiet(browser, page)


@pytest.mark.parametrize("dark", [False, True])
def test_it_fits_a_phone_in_both_colour_schemes(shown: Show, page: Path, dark: bool) -> None:
    browser = shown(page, "")
    browser.look(390, 844, dark=dark)
    backgrounds = set()
    for view in (*VIEWS, "episode/4/2", "episode/4/2?view=tokens", "group/4/0"):
        at(browser, f"#/{view}")
        assert browser.run("document.documentElement.scrollWidth <= innerWidth"), view
        backgrounds.add(browser.run("getComputedStyle(document.body).backgroundColor"))
    assert backgrounds == {"rgb(18, 20, 23)" if dark else "rgb(251, 251, 249)"}


def test_nothing_that_was_recorded_runs_or_turns_the_text_around(shown: Show, tmp_path: Path) -> None:
    run = record_run(tmp_path / "run", said=lambda text: f"{HOSTILE}{text}")
    page = build_report([run]).path
    browser = shown(page, "")
    views = [*VIEWS, "episode/4/2", "episode/4/2?view=tokens", "episode/4/3", "group/4/0", "find?text=onerror"]
    for view in views:
        at(browser, f"#/{view}?" if "?" not in view else f"#/{view}")
        browser.run("document.querySelectorAll('details').forEach((one) => { one.open = true; })")
        planted = browser.run(
            "document.querySelectorAll('main img, main script, main [onload], main [onerror]').length"
        )
        assert planted == 0 and browser.run("window.hacked === undefined"), view
        everything = str(browser.run("document.body.innerText"))
        assert not set("\u202e\u2066\u2028\x1b\x00\u200b") & set(everything), view
    assert "<script>window.hacked=1</script>" in at(browser, "#/episode/4/0")
    assert "\\u202e\\u2066" in text_of(browser), "what is unseen is written out"
    quiet(browser, page)


def test_addresses_that_lead_nowhere_say_so(shown: Show, page: Path) -> None:
    browser = shown(page, "")
    for address in ("episode/99/0", "group/x/y", "episode/%3Cscript%3E/0"):
        assert "There is no such" in at(browser, f"#/{address}")
    assert "Reward" in at(browser, "#/nothing")
    assert "0 episodes" in at(browser, "#/find?tool=no_such_tool&cause=none&min=x")
    quiet(browser, page)


def test_two_runs_stand_side_by_side(shown: Show, run: Path, tmp_path: Path) -> None:
    other = record_run(tmp_path / "run-2", steps=1, heldout=1)
    page = build_report([run, other], tmp_path / "both.html").path
    browser = shown(page, "#/compare")
    chosen = browser.run("[...document.querySelectorAll('select')].map((one) => one.selectedOptions[0].innerText)")
    assert chosen == ["run: held out, after (greedy)", "run-2: held out, after (greedy)"]
    sets: Any = browser.run("[...document.querySelector('select').options].map((one) => one.innerText)")
    assert {name.split(":")[0] for name in sets} == {"run", "run-2"}
    assert "all (1)" in text_of(browser)
    assert "1 step" in at(browser, "#/overview?run=1") or "of 1" in text_of(browser)
    both = at(browser, "#/groups")
    assert "8 groups" in both and "run: 1" in both and "run-2: 1" in both
    assert "6 groups" in at(browser, "#/groups?run=0")
    quiet(browser, page)
