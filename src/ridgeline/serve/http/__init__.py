"""HTTP below the endpoints: connections, timeouts, limits, keys, bodies, events, the page. No endpoint belongs here."""
