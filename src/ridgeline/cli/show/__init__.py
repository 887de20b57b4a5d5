"""Tables, progress and reports that commands print. Nothing here reads an option."""
