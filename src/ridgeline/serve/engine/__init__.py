"""The engine process, the messages between it and the HTTP process, and its counters. No HTTP belongs here."""
