"""The server: OpenAI's API over HTTP, with the engine in a process of its own.

    HTTP process                                           engine process
    server.py   listens, stops at a signal                 engine/worker.py  runs LLM.session
    http/       connections, limits, keys, bodies
    app.py      builds the application
    api/        endpoints
    gate.py     limits running and waiting answers
    service.py  tokenizes and checks requests
    helpers/    long work on untrusted input
    engine/client.py      ===  engine/messages.py  ===>   reads requests, runs a step
    http/sse.py           <==  one message per step  ===   sends the tokens of the step

Only the server belongs here. It uses `LLM` and adds nothing to the way in which tokens are computed.
"""
