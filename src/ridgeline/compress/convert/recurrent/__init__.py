"""Recurrent layers in place of attention: what they begin with, and which layers keep their attention."""
