"""The protocols that the server speaks: what each accepts and replies, a file for each.

openai.py is OpenAI's chat and text completions, and llama-server's infill; openai_events.py makes their replies.
responses.py is OpenAI's Responses, and messages.py Anthropic's API: they turn a request into one for a chat.

What they share: bodies.py how requests are read, blocks.py replies that are lists of thoughts, texts and calls,
events.py what all replies are made of, and errors.py the errors.
"""
