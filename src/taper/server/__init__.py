"""An OpenAI-compatible HTTP server on one engine, and a page to try it.

The entry point is `create_app` in app.py. A request passes the gate (limits.py), its body is checked (protocols/) and
turned into requests for the engine (served.py), these run in the engine's thread (engine_loop.py), and the outputs go
back to the client (completions.py) as events or as JSON (protocols/). metrics.py counts all of it.
"""
