"""The engine process and the pipe to it: messages, heartbeat, counters. No HTTP belongs here."""
