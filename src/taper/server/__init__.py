"""An OpenAI-compatible HTTP server on one engine, and a page to try it.

The way in is `create_app` in app.py. A request passes the gate (limits.py), is checked as a body (protocol.py), becomes
the engine's requests (served.py), runs in the engine's thread (engine_loop.py), and goes back to its
client as events or as the JSON that they add up to (completions.py). metrics.py counts all of it.
"""
