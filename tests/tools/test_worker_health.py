"""A tool that wears its worker out costs no later call anything: the worker is put right, or replaced in time.

One worker only, so that every later call would meet the damage.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.tool_calls import attempt, call_all
from toolgrpo.episode.tool_calls import ToolErrorKind
from toolgrpo.tools import Toolbox, load_tools, run_tool
from toolgrpo.tools.loop_thread import LoopThread
from toolgrpo.tools.workers.tool_worker import Health

TOOLS = Path(__file__).parents[1] / "fixtures" / "tools" / "wearing_tools.py"
HONEST = (
    attempt("open_file"),
    attempt("wait", seconds=0.01),
    attempt("nap", seconds=0.01),
    attempt("say_where"),
)


@pytest.fixture(scope="module")
def toolbox(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Toolbox]:
    log_path = tmp_path_factory.mktemp("log") / "tools.log"
    with load_tools(TOOLS, tool_timeout_s=60.0, workers=1, memory_mb=3000, log_path=log_path) as box:
        yield box


@pytest.mark.parametrize(
    ("name", "error"),
    [
        ("leak_descriptors", None),
        ("close_streams", None),
        ("clear_environment", None),
        ("change_folder", None),
        ("leak_threads", None),
        ("take_address_space", None),
        ("interrupt_main", None),
        ("stop_loop", None),
        ("exit_in_callback", None),
        ("interrupt_in_task", ToolErrorKind.RAISED),
        ("block_loop", ToolErrorKind.TIMEOUT),
    ],
)
def test_later_calls_meet_a_worker_that_works(toolbox: Toolbox, name: str, error: ToolErrorKind | None) -> None:
    before = run_tool(toolbox, {"name": "say_where"})
    result = run_tool(toolbox, {"name": name})
    assert result.error == error, result.content
    answers = call_all(toolbox, *HONEST * 11)
    assert [answer.content for answer in answers if not answer.ok] == []
    assert {answer.content for answer in answers[3::4]} == {before.content}


@pytest.mark.parametrize("name", ["stop_loop", "exit_in_callback", "interrupt_in_task", "interrupt_main", "block_loop"])
def test_calls_beside_it_lose_nothing(toolbox: Toolbox, name: str) -> None:
    """Those on the loop go on there; those that had not begun on a blocked one go to another worker."""
    waits = [attempt("wait", seconds=0.3) for _ in range(10)]
    answers = call_all(toolbox, attempt(name), *waits, attempt("nap", seconds=0.3))[1:]
    assert [answer.content for answer in answers] == ["waited"] * 10 + ["slept"]


def test_a_worker_that_leaks_is_replaced_before_it_is_empty(toolbox: Toolbox) -> None:
    """A hundred descriptors a call: without a replacement the process's limit would come within some calls."""
    seen = [run_tool(toolbox, {"name": "leak_some_descriptors"}) for _ in range(30)]
    assert all(result.ok for result in seen)
    assert len({result.content for result in seen}) > 1


def test_a_worker_that_nothing_is_wrong_with_stays(toolbox: Toolbox) -> None:
    call_all(toolbox, *HONEST * 40)
    pids = {answer.content for _ in range(3) for answer in call_all(toolbox, *[attempt("process_id")] * 10)}
    assert len(pids) == 1


def test_health_complains_of_nothing_in_a_healthy_process() -> None:
    health = Health(threads=64)
    health.restore(variables=True)
    assert health.complaint() is None


def test_a_loop_goes_on_after_it_was_stopped() -> None:
    thread = LoopThread("test")

    async def one() -> int:
        return 1

    try:
        thread.loop.call_soon_threadsafe(thread.loop.stop)
        assert thread.submit(one()).result(timeout=30) == 1
        assert thread.alive
    finally:
        thread.close()
    assert not thread.alive


def test_a_file_whose_import_maps_more_than_a_worker_may_take_runs_its_calls(tmp_path: Path) -> None:
    """A corpus that is mapped, say: the limit is for what calls take."""
    (tmp_path / "mapped.py").write_text(
        "import mmap\nkept = mmap.mmap(-1, 3 << 30)\n\ndef take(mb: int) -> int:\n    'Take.'\n    return len(bytes(mb << 20)) >> 20\n\n"
        "TOOL_FUNCTIONS = [take]\n"
    )
    with load_tools(tmp_path / "mapped.py", workers=1, memory_mb=2000) as box:
        assert run_tool(box, {"name": "take", "arguments": {"mb": 100}}).content == "100"
        assert "out of memory" in run_tool(box, {"name": "take", "arguments": {"mb": 4000}}).content
