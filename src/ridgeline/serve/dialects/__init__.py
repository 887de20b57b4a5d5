"""Answer requests of other APIs. Each file translates one API to the endpoints of `serve/api/`, and back."""
