"""What is done once before the processes of agents are forked leaves nothing behind that a fork could not take along."""

from __future__ import annotations

import subprocess
import sys

import pytest

CHILD = """
import sys, threading, time
from functools import partial
import openai
from toolgrpo.gateway.agent_process import _client
from toolgrpo.gateway.agent_process import make_first_requests
from confined_python.processes.linux import forkable, open_descriptors

before = open_descriptors()
for kind in ("AsyncOpenAI", "OpenAI"):
    make_first_requests(partial(_client, kind), openai)
assert {"anyio._backends._asyncio", "h11"} <= sys.modules.keys()  # what only a request imports
assert forkable(before)
threading.Thread(target=time.sleep, args=(0.05,)).start()
assert forkable(before)  # it is about to end
threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
assert not forkable(before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="workers are forked on Linux only")
def test_a_client_that_has_talked_leaves_neither_thread_nor_descriptor() -> None:
    done = subprocess.run([sys.executable, "-c", CHILD], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
