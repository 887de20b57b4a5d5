"""Work on untrusted input that may take long, in helper processes with limits on time and memory.

What belongs here: parsing large bodies, tokenizing long texts, rendering costly chat templates. The helper processes
themselves are in ridgeline/bounded.
"""
