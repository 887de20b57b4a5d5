"""The server: OpenAI's API over HTTP, on top of an engine in a process of its own.

http process                                          engine process
app -> routes -> completions, chat, responses ...     worker: LLM.session
       service (tokenize, check) -> client  ========> read messages, step, send what came of it
       sse <- answers <- client             <========
"""
