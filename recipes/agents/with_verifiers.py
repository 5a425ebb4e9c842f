"""An environment of verifiers 0.4 as an agent: nano's arithmetic as a task of theirs, with a reward and a harness.

verifiers wants other versions than ours, and takes seconds to import. So it has a Python of its own, which VERIFIERS_PYTHON
names: one process of it, started where toolgrpo imports this file, plays all episodes.
"""

import asyncio
import itertools
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

START_S = 100


def run(client, row):
    """Have an episode played there, and return its reward."""
    with socket.socket(socket.AF_UNIX) as connection, connection.makefile("rw") as file:
        connection.connect(PLAYER)
        file.write(json.dumps({"row": row, "url": str(client.base_url), "key": client.api_key}) + "\n")
        file.flush()
        answer = json.loads(file.readline())
    if "failed" in answer:
        raise RuntimeError(answer["failed"])
    return answer["reward"]


def start():
    """Start the other Python, and return where it listens."""
    path = str(Path(tempfile.mkdtemp(prefix="verifiers-")) / "socket")
    player = subprocess.Popen([os.environ.get("VERIFIERS_PYTHON", sys.executable), __file__, path])
    give_up = time.monotonic() + START_S
    while not os.path.exists(path):
        if player.poll() is not None or time.monotonic() > give_up:
            raise RuntimeError("verifiers did not start; VERIFIERS_PYTHON names a Python that has verifiers==0.4.0")
        time.sleep(0.05)
    return path


async def play_all(path):
    import arithmetic
    import openai
    import verifiers.v1 as vf

    class Sum(vf.TaskData):
        answer: str

    class Arithmetic(vf.Task):
        @vf.reward
        async def exact(self, trace: vf.Trace) -> float:
            return float(self.data.answer in trace.last_reply.strip().rstrip(".").split())

    class WithTools(vf.Harness):
        """The agent beside this file, in this process; verifiers sees its requests and hands them on."""

        NEEDS_CONTAINER = EXECUTES_CODE = False

        async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data, **_):
            row = {"prompt": [{"role": "user", "content": data.prompt}], "answer": data.answer}
            async with openai.AsyncOpenAI(base_url=endpoint, api_key=secret, max_retries=0, timeout=3600) as client:
                await arithmetic.run(client, row)
            return vf.ProgramResult(exit_code=0, stdout="", stderr="")

    numbers = itertools.count()

    async def episode(given):
        variable = f"EPISODE_KEY_{next(numbers)}"  # verifiers takes a key from the environment
        os.environ[variable] = given["key"]
        try:
            endpoint = vf.EvalClientConfig(base_url=given["url"], api_key_var=variable)
            config = {
                "harness": {"id": "null"},
                "runtime": vf.SubprocessConfig(),
                "model": "policy",
                "client": endpoint,
            }
            agent = vf.Agent(vf.AgentConfig(**config))
            agent.harness = WithTools(agent.config.harness)
            row = given["row"]
            trace = await agent.run(Arithmetic(Sum(prompt=row["prompt"][-1]["content"], answer=str(row["answer"]))))
            return {"reward": trace.reward} if trace.ok else {"failed": f"the rollout failed: {trace.last_error}"}
        finally:
            del os.environ[variable]

    async def serve(reader, writer):
        try:
            answer = await episode(json.loads(await reader.readline()))
        except Exception as error:
            answer = {"failed": f"{type(error).__name__}: {error}"}
        writer.write(json.dumps(answer).encode() + b"\n")
        writer.close()

    server = await asyncio.start_unix_server(serve, path, limit=2**24)
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(play_all(sys.argv[1]))
else:
    PLAYER = start()
