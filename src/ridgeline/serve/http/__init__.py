"""HTTP below the endpoints: connections, limits, keys, bodies, events, metrics, the page. No endpoint is here."""
