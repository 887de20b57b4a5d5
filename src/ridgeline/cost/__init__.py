"""Count what a model takes on a machine: operations, bytes, memory and time. Choices of settings do not belong here."""
