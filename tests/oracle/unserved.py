"""Reasons why Ridgeline refuses some configs that transformers accepts, and accepts some that it refuses.

An entry is a pattern of the message, including the name of the field, and the reason. The first matching entry counts.
`python -m oracle.unserved`, with tests/ on the path, prints the types of transformers that are not served at all.
"""

from __future__ import annotations

import re
from typing import Final

from ridgeline.archs.config import HARMLESS

# Errors of ours where transformers computes something.

UNSERVED: Final[tuple[tuple[str, str], ...]] = (
    (r"is missing", "A size has to be given: the class's default would be another model's."),
    (r"is null, which has no meaning", "A null is not a value of this field."),
    (r", not (int|float|bool|str|list|dict)", "A value of another type is a damaged file."),
    (r"not understood for model_type", "A field that nobody reads may describe what would not be computed."),
    (r"supported: ", "This kind is not among those that published models use."),
    (r"must be (positive|at least|from \d)|must not be negative", "No model is trained with such a number."),
    (r"a number of at most|no model is that large", "Such a number is infinite for every practical purpose."),
    (r"must hold|must have one entry|must be a list", "A list of another length or with other words is damaged."),
    (r"would be rotated|so it must be even|rotates whole heads", "Such a part of a head cannot be rotated in pairs."),
    (r"is not supported; it must be", "This value asks for an algorithm that no published model of the family uses."),
    (r"not a multiple of", "The numbers of heads do not fit together."),
    (r"is null or switched off, but some layers are sliding", "A sliding layer without a window is no layer."),
    (r"gives \d+ channels|extends \d+ tokens", "The sizes do not fit together, or are beyond every computer."),
    (r"which yarn cannot|gives a temperature|no temperature", "Yarn has no frequencies at this value."),
    (r"must be a smallest and a largest step", "Limits that are not in order leave no step."),
    (r"ties the output head", "The file holds a head that is not the embedding, which tying would ignore."),
    (r"more than the \d+ experts|is not in 1\.\.", "More experts are chosen than there are."),
    (r"^n(um)?_shared_experts: .*the checkpoint has", "No published file has the empty tensors of no expert."),
    (r"heads must have \d+ numbers together", "The published class joins heads as wide as the stream alone."),
    (r"both must be equal", "Two names of one field with two values leave open which is meant."),
    (r"no token sees another", "Without mamba and attention, a model computes each token from itself alone."),
    (r"layers are described|to which|that it could change", "Two fields contradict each other."),
    (r"^tie_word_embeddings: .*lacks .*lm_head", "Published files without the field have a head of their own."),
    (r"whose row of the table of positions is zero", "A padding token would erase a position of texts."),
    (r"^per_layer_config: .*has shape", "With a null, transformers reads its own file in another way."),
)  # fmt: skip

# Errors of transformers where we compute something.
LENIENT: Final[tuple[tuple[str, str], ...]] = (
    (r"expected float, got int", "JSON has one kind of number: 1 is 1.0."),
    (r"doesn't match any type in \(list\[float", "JSON has one kind of number: 1 is 1.0."),
    (
        r"^num_attention_heads: .*(must match the size|cannot be multiplied)",
        "Latent attention has a key per query head, given or not.",
    ),
    (r"^qk_rope_head_dim: .*must match the size", "The head_dim beside it, which disagrees, is ignored."),
    (
        r"'NoneType' and 'float' \(modeling_(rope_utils|ministral)",
        "A null head_dim follows from the hidden size, in a scaling too.",
    ),
    (r"^(layer_types|sliding_window): ZeroDivisionError", "Without a window, all layers are global."),
    (
        r"^((n_positions|max_position_embeddings): Index|max_seq_len: Runtime)Error",
        "The sequence of the test is longer than such a table.",
    ),
    (r"'NoneType' object is not subscriptable \(modeling_gemma4", "The class cuts embeddings that it does not have."),
    (r"stride divisible by 2", "It is a limit of a view in transformers; the sizes are sound."),
    (r"is not a multiple of the number of attention", "With head_dim given, the hidden size need not be a multiple."),
)
# Fields without effect on a forward pass: transformers checks their type, or returns its results in another form.
IGNORED: Final = "The field changes nothing that is computed, so that whatever it holds is ignored."


def reason(refused: bool, name: str, detail: str, harmless: frozenset[str]) -> str | None:
    """Return the reason why one program may refuse what the other accepts, or None.

    refused: whether Ridgeline refused. name: the altered field. detail: the message of the program that refused.
    harmless: the fields that this family ignores.
    """
    if not refused and name in HARMLESS | harmless:
        return IGNORED
    table = UNSERVED if refused else LENIENT
    return next((why for pattern, why in table if re.search(pattern, f"{name}: {detail}")), None)


if __name__ == "__main__":
    from oracle.causal_types import main

    main()
