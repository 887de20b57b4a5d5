"""Work on untrusted input that may take long, in helper processes with limits on time and memory.

These jobs parse large bodies, tokenize long texts and render costly chat templates. The code that starts and limits the
helper processes belongs in ridgeline/bounded.
"""
