"""An OpenAI-compatible HTTP server on one engine, and a page to try it."""
