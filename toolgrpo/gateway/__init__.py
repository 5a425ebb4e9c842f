"""A gateway: agents of any kind play episodes through an OpenAI-compatible endpoint.

`openai_forms.py` reads and writes OpenAI's JSON, `session.py` is one episode behind its key,
`conversations.py` finds the place in it that a request goes on from, `server.py` speaks HTTP, and
`agents.py` runs the user's agent in a process of its own (`agent_process.py`) and makes a
trajectory of what it did. Names of the endpoint's side are imported from there: starlette and
uvicorn are an extra.
"""
