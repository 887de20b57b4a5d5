"""Turn errors of llguidance into sentences for the author of the structure."""

from __future__ import annotations

import re

SHOWN = 300  # largest number of characters in a sentence
READ = 2048  # number of characters of an error that are read
_SIMPLIFY = "it exceeds the limit on {}: simplify it, or split it over several requests"
_NOTHING = "no text satisfies it"

# Patterns of the library's errors, and the sentences to show instead. The first match counts.
_KNOWN: tuple[tuple[str, str], ...] = (
    (r"NoExtension", f"{_NOTHING}, because it demands itself again without end or allows no character"),
    (r"recursion limit exceeded", "the schema is nested deeper than 127 levels: move inner parts to $defs"),
    (r"too deeply nested|nest limit", "it is nested too deeply: use fewer brackets inside each other"),
    (r"too many states", _SIMPLIFY.format("the states of its patterns")),
    (r"too many expressions|lexer_fuel|initial lexer configuration", _SIMPLIFY.format("the work for its patterns")),
    (r"exceeds size limit", _SIMPLIFY.format("the size of a pattern")),
    (r"[Pp]arserTooComplex|[Tt]oo many items|max_items|item limit", _SIMPLIFY.format("the alternatives at one place")),
    (r"LexerTooComplex", _SIMPLIFY.format("the work for its patterns")),
    (r"grammar size|max_grammar_size|[Gg]rammar too (large|big)", _SIMPLIFY.format("the size of a grammar")),
    (r'Unimplemented keys: \[(.*)\]', r"the schema uses \1, which is not supported: leave it out"),
    (r"Pointer '(.*?)' does not exist", r"the schema has a $ref to '#\1', and there is nothing at that place"),
    (r"Resource '(.*?)' is not present", r"the schema has a $ref to '\1': only references into the same schema, which "
                                         r"begin with #, are followed"),
    (r"oneOf constraints", "oneOf is supported only where no value can satisfy two of its alternatives: use anyOf"),
    (r"Unsatisfiable schema: anyOf is empty", "no value satisfies the schema, because a list of alternatives is empty"),
    (r"Unsatisfiable schema: (.*)", r"no value satisfies the schema: \1"),
    (r"Unknown format: (.*)", r"the schema uses the format '\1', which is not known: leave it out or use pattern"),
    (r"look-?around.*(Start|End) in regex", "the regular expression uses ^ or $, which are not supported: the whole "
                                            "text must match anyway, so leave them out"),
    (r"look-?around", "the regular expression looks ahead or behind, which is not supported"),
    (r"backreferences", "the regular expression refers to one of its groups, which is not supported"),
    (r"invalid regex .*\berror: (.*?)(?: \d+ \|.*)?$", r"the regular expression is not valid: \1"),
    (r"regex parse error: .*\berror: (.*)$", r"the regular expression is not valid: \1"),
    (r"no start rule found", "the grammar has no rule named start"),
    (r"^(?:at )?(\d+)\((\d+)\): (.*?)(?: \d+ \| .*)?$", r"line \1, column \2: \3"),
)  # fmt: skip


def sentence(error: str) -> str:
    """Return one line that says what is wrong with the structure, and what to do about it."""
    text = " ".join(error.replace("<non-verbose/>", "").split())
    if len(text) > READ:  # it quotes the whole structure twice, with the reason in between
        text = " ".join([text[:READ], *re.findall(r"\berror: .{1,200}", text)[-1:]])
    for pattern, words in _KNOWN:
        if found := re.search(pattern, text):
            return f"structured_outputs: {found.expand(words)[:SHOWN]}"
    return f"structured_outputs: it cannot be followed: {text[:SHOWN]}"
