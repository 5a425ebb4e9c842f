"""A task of verifiers 0.4 as an episode, as FILE.py beside it, or from a Python of its own: "venv/bin/python FILE.py"."""

import asyncio
import json
import os
import sys

import openai
import verifiers.v1 as vf


class Ask(vf.Harness):  # for one of their own: harness={"id": "bash"} below, and this away
    NEEDS_CONTAINER = False

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data, tool_interception_url=None):
        client = openai.AsyncOpenAI(base_url=endpoint, api_key=secret)
        await client.chat.completions.create(model=ctx.model, messages=[{"role": "user", "content": data.prompt}])
        return vf.ProgramResult(0, "", "")


async def run(client, row):
    class Question(vf.Task):
        @vf.reward
        async def exact(self, trace: vf.Trace) -> float:
            return float(trace.last_reply.strip() == row["answer"])

    endpoint = vf.EvalClientConfig(base_url=os.environ["OPENAI_BASE_URL"], api_key_var="OPENAI_API_KEY")
    runtime = vf.SubprocessConfig()
    agent = vf.Agent(vf.AgentConfig(harness={"id": "null"}, runtime=runtime, model="policy", client=endpoint))
    agent.harness = Ask(agent.config.harness)
    trace = await agent.run(Question(vf.TaskData(prompt=row["prompt"][-1]["content"])))
    if not trace.ok:
        raise RuntimeError(f"the rollout failed: {trace.last_error}")
    return trace.reward


if __name__ == "__main__":
    print(json.dumps(asyncio.run(run(None, json.load(sys.stdin)))))
