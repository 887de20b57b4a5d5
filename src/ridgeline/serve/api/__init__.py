"""The endpoints: one file for each family, the fields that it reads, and the answers that it writes.

Connections, keys and events belong in http/, and the engine process in engine/.
"""
