"""The endpoints: one file for each family, the fields that it reads, and the answers that it writes.

What does not belong here: connections, keys and events (http/), and the engine process (engine/).
"""
