"""Classify transformers' types of causal language models: served, excluded with a reason, or to come.

Exclusions were made by hand from the classes of transformers 5.24; a later version may have more types.
"""

from __future__ import annotations

from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from ridgeline.archs import FAMILIES

MASKED = "trained to fill masks; its causal class has no published decoder"
PAIR = "the decoder of a pair of encoder and decoder, which reads the encoder's states"
SENSES = "a model of images or sound; its language model has a type of its own, or is no decoder of text"
TOO_OLD = "its positions or its memory are those of models before 2020, and no checkpoint of it is in use"
TO_COME = "decodes text: to come"

EXCLUDED: dict[str, str] = {
    name: reason
    for reason, names in {
        MASKED: "bert bert-generation big_bird camembert data2vec-text electra ernie megatron-bert rembert roberta "
        "roberta-prelayernorm roc_bert roformer xlm-roberta xlm-roberta-xl xmod",
        PAIR: "bart bigbird_pegasus blenderbot blenderbot-small marian mbart mvp pegasus plbart prophetnet trocr "
        "whisper",
        SENSES: "aria_text emu3 fuyu git got_ocr2 mllama moshi moss_transcribe_diarize musicgen musicgen_melody "
        "phi4_multimodal",
        TOO_OLD: "ctrl openai-gpt reformer xlm xlnet",
    }.items()
    for name in names.split()
}


def unserved() -> dict[str, str]:
    """Return the types that are not served, with their reasons."""
    return {name: EXCLUDED.get(name, TO_COME) for name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES if name not in FAMILIES}


def main() -> None:
    """Print the types that are not served, and how many of the decoders of text are."""
    for name, reason in sorted(unserved().items(), key=lambda pair: (pair[1], pair[0])):
        print(f"{name:28}{reason}")
    decoders = [name for name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES if name not in EXCLUDED]
    served = sum(name in FAMILIES for name in decoders)
    print(f"{served} of {len(decoders)} types that decode text are served; {len(EXCLUDED)} others are excluded")
