"""A parsed config.json that knows which of its fields were read: a field that nobody reads is an error."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, Final, TypeVar, overload

from ridgeline.errors import ConfigError
from ridgeline.spec import Activation

T = TypeVar("T")
REQUIRED: Final = object()
MAX_INT: Final = 2**53
MAX_LAYERS: Final = 10_000
MAX_FLOAT: Final = 1e15  # beyond it, ratios and powers of fields stop being numbers

# Names that published configs use for the same functions.
ACTIVATIONS: Final[dict[str, Activation]] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
    "relu2": "relu2",
}

# Fields that change nothing in a forward pass, by what they are for.
HARMLESS: Final = frozenset(
    # identity and bookkeeping
    "model_type architectures transformers_version _name_or_path name_or_path auto_map torch_dtype dtype "
    "_attn_implementation _attn_implementation_autoset attn_implementation unsloth_version unsloth_fixed "
    # special tokens: read by the loader, with generation_config.json
    "bos_token_id eos_token_id pad_token_id unk_token_id sep_token_id cls_token_id decoder_start_token_id "
    "forced_bos_token_id forced_eos_token_id suppress_tokens begin_suppress_tokens bad_words_ids "
    "tokenizer_class prefix "
    # training only
    "initializer_range attention_dropout hidden_dropout classifier_dropout resid_pdrop embd_pdrop attn_pdrop "
    "router_aux_loss_coef router_jitter_noise output_router_logits gradient_checkpointing pretraining_tp "
    # what transformers returns, and how it runs
    "use_cache cache_implementation output_attentions output_hidden_states return_dict return_dict_in_generate "
    "output_scores torchscript use_bfloat16 pruned_heads chunk_size_feed_forward is_decoder is_encoder_decoder "
    "tie_encoder_decoder cross_attention_hidden_size add_cross_attention is_llama_config "
    # classification heads and tasks
    "id2label label2id num_labels problem_type task_specific_params finetuning_task "
    # generation defaults that old configs carry: generation_config.json is the place that is read
    "max_length min_length do_sample early_stopping num_beams num_beam_groups diversity_penalty temperature "
    "top_k top_p typical_p repetition_penalty length_penalty no_repeat_ngram_size "
    "encoder_no_repeat_ngram_size num_return_sequences exponential_decay_length_penalty "
    "remove_invalid_values".split()
)


class Config:
    """Typed, tracked access to a mapping. Every message names the field by its path."""

    def __init__(self, raw: Mapping[str, Any], path: str = "config.json: ") -> None:
        self._raw = raw
        self._path = path
        self._read: set[str] = set()

    @property
    def model_type(self) -> str:
        return str(self._raw.get("model_type"))

    def present(self, name: str) -> bool:
        """Is the field there, be it null?"""
        return name in self._raw

    def has(self, name: str) -> bool:
        """Is the field there, and not null?"""
        return self._raw.get(name) is not None

    @overload
    def get_int(self, name: str) -> int: ...
    @overload
    def get_int(self, name: str, default: T) -> int | T: ...
    def get_int(self, name: str, default: Any = REQUIRED) -> Any:
        """A whole number; a null counts as absent. Raises ConfigError if it is absent or something else."""
        value = self._get(name, (int,), default)
        if value is not default and abs(value) > MAX_INT:
            raise self.error(name, f"is {value}; no model is that large")
        return value

    @overload
    def get_float(self, name: str) -> float: ...
    @overload
    def get_float(self, name: str, default: T) -> float | T: ...
    def get_float(self, name: str, default: Any = REQUIRED) -> Any:
        """A finite number; a null counts as absent."""
        value = self._get(name, (int, float), default)
        if value is default:
            return value
        if not abs(value) <= MAX_FLOAT:  # also true of NaN
            raise self.error(name, f"is {value}; it must be a number of at most {MAX_FLOAT:g}")
        return float(value)

    def get_layer_count(self, name: str = "num_hidden_layers") -> int:
        """The number of layers: from one to MAX_LAYERS, so that a typing error does not fill the memory."""
        count = self.get_int(name)
        if not 1 <= count <= MAX_LAYERS:
            raise self.error(name, f"is {count}; it must be from 1 to {MAX_LAYERS}")
        return count

    def get_positive(self, name: str, default: float) -> float:
        """A number above zero."""
        value = self.get_float(name, default)
        if value <= 0:
            raise self.error(name, f"is {value}; it must be positive")
        return value

    def get_bool(self, name: str, default: bool) -> bool:
        value: bool = self._get(name, (bool,), default)
        return value

    @overload
    def get_str(self, name: str) -> str: ...
    @overload
    def get_str(self, name: str, default: T) -> str | T: ...
    def get_str(self, name: str, default: Any = REQUIRED) -> Any:
        return self._get(name, (str,), default)

    @overload
    def get_list(self, name: str) -> list[Any]: ...
    @overload
    def get_list(self, name: str, default: T) -> list[Any] | T: ...
    def get_list(self, name: str, default: Any = REQUIRED) -> Any:
        return self._get(name, (list,), default)

    def sub(self, name: str) -> Config | None:
        """An object inside this one, or None where it is absent or null."""
        value = self._get(name, (dict,), None)
        return None if value is None else Config(value, f"{self._path}{name}.")

    def raw(self, name: str) -> Any:
        """The value as it was parsed, or None."""
        self._read.add(name)
        return self._raw.get(name)

    def expect(self, name: str, *allowed: object) -> None:
        """A field that is supported only at these values (None: absent or null)."""
        value = self.raw(name)
        if not any(value is a or (type(value) is type(a) and value == a) for a in (None, *allowed)):
            wanted = " or ".join(repr(a) for a in allowed) or "absent"
            raise ConfigError(f"{self._path}{name} is {value!r}, which is not supported; it must be {wanted}")

    def get_activation(self, name: str, default: str | None = None) -> Activation:
        value = self.get_str(name, default) if default else self.get_str(name)
        if value not in ACTIVATIONS:
            raise self.error(name, f"is {value!r}; known are {', '.join(sorted(ACTIVATIONS))}")
        return ACTIVATIONS[value]

    def error(self, name: str, problem: str) -> ConfigError:
        return ConfigError(f"{self._path}{name} {problem}")

    def finish(self, harmless: Collection[str] = HARMLESS) -> None:
        """Raise ConfigError, naming them, if fields are left that nobody read and that are not harmless."""
        if unread := sorted(set(self._raw) - self._read - set(harmless)):
            raise ConfigError(
                f"{self._path}{', '.join(unread)}: not understood for model_type {self.model_type!r}; "
                "refusing to compute something other than what it describes"
            )

    def _get(self, name: str, types: tuple[type, ...], default: Any) -> Any:
        value = self.raw(name)
        if value is None:
            if default is REQUIRED:
                raise ConfigError(f"{self._path}{name} is missing")
            return default
        if not isinstance(value, types) or (isinstance(value, bool) and bool not in types):
            wanted = " or ".join(t.__name__ for t in types)
            raise ConfigError(f"{self._path}{name} is {value!r}, not {wanted}")
        return value
