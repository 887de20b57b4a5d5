"""Tables, progress bars and reports that commands print. Code that reads options belongs in flags/."""
