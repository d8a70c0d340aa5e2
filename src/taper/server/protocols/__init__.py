"""The protocols that the server speaks: what each accepts and replies, a file for each.

bodies.py has what all of them share of requests, errors.py the errors, and events.py what replies are made of.
openai.py is OpenAI's chat and text completions, and llama-server's infill; openai_events.py makes their replies.
"""
