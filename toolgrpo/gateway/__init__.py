"""The gateway: agents of any kind play episodes through an OpenAI-compatible endpoint.

`openai_forms.py` reads and writes OpenAI's JSON, `session.py` holds one episode and its key,
`conversations.py` finds the position in it that a request continues, and `server.py` serves HTTP.
`agents.py` runs the user's agent in its own process (`agent_process.py`) and makes a trajectory of
its episode. Import the names of the endpoint from these modules: starlette and uvicorn are an extra.
"""
