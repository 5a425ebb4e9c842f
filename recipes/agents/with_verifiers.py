"""A task of verifiers 0.4 as an episode, as FILE.py beside it, or from a Python of its own: "venv/bin/python FILE.py"."""

import asyncio
import json
import os
import sys

import verifiers.v1 as vf


async def run(client, row):
    class Question(vf.Task):
        @vf.reward
        async def exact(self, trace: vf.Trace) -> float:
            return float(trace.last_reply.strip() == row["answer"])

    endpoint = vf.EvalClientConfig(base_url=os.environ["OPENAI_BASE_URL"], api_key_var="OPENAI_API_KEY")
    runtime = vf.SubprocessConfig()
    agent = vf.Agent(vf.AgentConfig(harness={"id": "null"}, runtime=runtime, model="policy", client=endpoint))
    trace = await agent.run(Question(vf.TaskData(prompt=row["prompt"][-1]["content"])))
    if not trace.ok:
        raise RuntimeError(f"the rollout failed: {trace.last_error}")
    return trace.reward


if __name__ == "__main__":
    print(json.dumps(asyncio.run(run(None, json.load(sys.stdin)))))
