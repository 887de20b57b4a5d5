"""Count what a model costs on a machine: operations, bytes, memory and time. Choosing settings belongs in settings/."""
