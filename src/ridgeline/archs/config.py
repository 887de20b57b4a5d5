"""Read a parsed config.json and record which fields were read; a field that is never read is an error."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, Final, TypeVar, overload

from ridgeline.errors import ConfigError
from ridgeline.spec import Activation

T = TypeVar("T")
N = TypeVar("N")
REQUIRED: Final[Any] = object()
MAX_INT: Final = 2**53
MAX_LAYERS: Final = 10_000
MAX_FLOAT: Final = 1e15  # beyond it, ratios and powers of fields may overflow

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

# Fields that change nothing in a forward pass, grouped by purpose.
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
    "router_aux_loss_coef output_router_logits gradient_checkpointing pretraining_tp "
    # outputs and execution in transformers
    "use_cache cache_implementation output_attentions output_hidden_states return_dict return_dict_in_generate "
    "output_scores torchscript use_bfloat16 pruned_heads chunk_size_feed_forward is_decoder is_encoder_decoder "
    "tie_encoder_decoder cross_attention_hidden_size add_cross_attention is_llama_config "
    # classification heads and tasks
    "id2label label2id num_labels problem_type task_specific_params finetuning_task "
    # embeddings and scores: read beside sentence-transformers' files
    "is_matryoshka matryoshka_dimensions sentence_transformers sbert_ce_default_activation_function "
    # generation defaults in old configs; generation_config.json is read instead
    "max_length min_length do_sample early_stopping num_beams num_beam_groups diversity_penalty temperature "
    "top_k top_p typical_p repetition_penalty length_penalty no_repeat_ngram_size "
    "encoder_no_repeat_ngram_size num_return_sequences exponential_decay_length_penalty "
    "remove_invalid_values".split()
)


class Config:
    """Typed access to a mapping, which records the fields that are read. Every error names the field by its path.

    An absent field and a null are different, as in transformers: each getter takes the `default` for an absent field
    and, separately, the value of a `null`. Without a default the field is required; without `null` a null is an error.
    """

    def __init__(self, raw: Mapping[str, Any], path: str = "config.json: ", model_type: str | None = None) -> None:
        self._raw = raw
        self._path = path
        self._read: set[str] = set()
        self.model_type = str(raw.get("model_type", model_type))

    @property
    def names_read(self) -> Collection[str]:
        """Return the fields that were read, whether they exist or not."""
        return self._read

    @property
    def filled(self) -> bool:
        """Return whether there is any field."""
        return bool(self._raw)

    def fields(self, name: str | None = None) -> Mapping[str, Any]:
        """Return the parsed mapping, or the one at `name`; an empty one if there is none."""
        return self._raw if name is None else self._raw.get(name) or {}

    def is_null(self, name: str) -> bool:
        """Return whether the field exists and is null."""
        return self.present(name) and self._raw[name] is None

    def present(self, name: str) -> bool:
        """Return whether the field exists; it may be null."""
        return name in self._raw

    @overload
    def get_int(self, name: str) -> int: ...
    @overload
    def get_int(self, name: str, default: T) -> int | T: ...
    @overload
    def get_int(self, name: str, default: T, null: N) -> int | T | N: ...
    def get_int(self, name: str, default: Any = REQUIRED, null: Any = REQUIRED) -> Any:
        """Return a whole number. Raises ConfigError for anything else."""
        value = self._get(name, (int,), default, null)
        if type(value) is int and abs(value) > MAX_INT:
            raise self.error(name, f"is {value!r:.100}; no model is that large, so check the value")
        return value

    @overload
    def get_size(self, name: str) -> int: ...
    @overload
    def get_size(self, name: str, default: T) -> int | T: ...
    @overload
    def get_size(self, name: str, default: T, null: N) -> int | T | N: ...
    def get_size(self, name: str, default: Any = REQUIRED, null: Any = REQUIRED) -> Any:
        """Return a whole number of at least 1, such as a number of heads or of rows."""
        value = self.get_int(name, default, null)
        if type(value) is int and value < 1:
            raise self.error(name, f"is {value}; it must be at least 1")
        return value

    @overload
    def get_float(self, name: str) -> float: ...
    @overload
    def get_float(self, name: str, default: T) -> float | T: ...
    @overload
    def get_float(self, name: str, default: T, null: N) -> float | T | N: ...
    def get_float(self, name: str, default: Any = REQUIRED, null: Any = REQUIRED) -> Any:
        """Return a finite number."""
        value = self._get(name, (int, float), default, null)
        if type(value) not in (int, float):
            return value
        if not abs(value) <= MAX_FLOAT:  # also true of NaN
            raise self.error(name, f"is {value!r:.100}; it must be a number of at most {MAX_FLOAT:g}")
        return float(value)

    def get_auto(self, name: str, auto: int) -> int:
        """Return a whole number of at least 1, or `auto` if the field is absent or "auto"."""
        if not self.present(name) or self.raw(name) == "auto":
            self.raw(name)
            return auto
        return self.get_size(name)

    def get_layer_count(self, name: str = "num_hidden_layers") -> int:
        """Return the number of layers, from 1 to MAX_LAYERS, so that a typing error does not exhaust the memory."""
        count = self.get_int(name)
        if not 1 <= count <= MAX_LAYERS:
            raise self.error(name, f"is {count}; it must be from 1 to {MAX_LAYERS}")
        return count

    @overload
    def get_positive(self, name: str) -> float: ...
    @overload
    def get_positive(self, name: str, default: T) -> float | T: ...
    @overload
    def get_positive(self, name: str, default: T, null: N) -> float | T | N: ...
    def get_positive(self, name: str, default: Any = REQUIRED, null: Any = REQUIRED) -> Any:
        """Return a number above zero."""
        value = self.get_float(name, default, null)
        if value is not None and value <= 0:
            raise self.error(name, f"is {value}; it must be positive")
        return value

    def get_eps(self, name: str, default: float) -> float:
        """Return the number that a norm adds to a mean square, which is at least zero."""
        value = self.get_float(name, default)
        if value < 0:
            raise self.error(name, f"is {value}; it must not be negative")
        return value

    def get_bool(self, name: str, default: bool, null: Any = REQUIRED) -> bool:
        """Return true or false."""
        value: bool = self._get(name, (bool,), default, null)
        return value

    @overload
    def get_str(self, name: str) -> str: ...
    @overload
    def get_str(self, name: str, default: T) -> str | T: ...
    @overload
    def get_str(self, name: str, default: T, null: N) -> str | T | N: ...
    def get_str(self, name: str, default: Any = REQUIRED, null: Any = REQUIRED) -> Any:
        """Return a text."""
        return self._get(name, (str,), default, null)

    @overload
    def get_list(self, name: str) -> list[Any]: ...
    @overload
    def get_list(self, name: str, default: T) -> list[Any] | T: ...
    @overload
    def get_list(self, name: str, default: T, null: N) -> list[Any] | T | N: ...
    def get_list(self, name: str, default: Any = REQUIRED, null: Any = REQUIRED) -> Any:
        """Return a list of any values."""
        return self._get(name, (list,), default, null)

    def get_choices(self, name: str, count: int, allowed: Collection[Any], null: bool = True) -> list[Any] | None:
        """Return a list of `count` entries that are all in `allowed`; None if it is absent or, with `null`, null."""
        values: list[Any] | None = self.get_list(name, None, None if null else REQUIRED)
        if values is None:
            return None
        if len(values) != count or not all(type(v) in (str, int) and v in allowed for v in values):
            known = " or ".join(repr(v) for v in sorted(allowed))
            raise self.error(name, f"must hold {count} entries, each {known}")
        return values

    def get_indices(self, name: str, default: T) -> list[int] | T:
        """Return a list of whole numbers, such as indices of layers; a null means the default."""
        values: list[int] | T = self.get_list(name, default, default)
        if isinstance(values, list) and not all(type(v) is int for v in values):
            raise self.error(name, f"is {values!r:.100}; it must be a list of whole numbers")
        return values

    def sub(self, name: str) -> Config | None:
        """Return a reader of an object inside this one, or None if it is absent or null."""
        value = self._get(name, (dict,), None, None)
        return None if value is None else self.inside(name, value)

    def inside(self, name: str, raw: Mapping[str, Any]) -> Config:
        """Return a reader of the object at `name`, whose errors name this model type."""
        return Config(raw, f"{self._path}{name}.", self.model_type)

    def raw(self, name: str) -> Any:
        """Return the parsed value, or None."""
        self._read.add(name)
        return self._raw.get(name)

    def assume(self, defaults: Mapping[str, Any]) -> Config:
        """Take values for fields that are absent, and return this reader."""
        self._raw = {**defaults, **self._raw}
        return self

    def rename(self, names: Mapping[str, str]) -> Config:
        """Read fields that some files write under other names, and return this reader. names: the usual names by the
        others. Raises ConfigError if a field has both names and two values.
        """
        for other, name in names.items():
            self._read.add(other)
            if other in self._raw and self._raw.get(name, value := self._raw[other]) != value:
                raise self.error(
                    other, f"is {value!r:.100}, but {name} is {self._raw[name]!r:.100}; both must be equal"
                )
            if other in self._raw:
                self._raw = {**self._raw, name: self._raw[other]}
        return self

    def expect(self, name: str, *allowed: object, null: bool = True) -> None:
        """Check a field that is supported only with these values. It may be absent, or null if `null` is set."""
        value = self.raw(name)
        if not null and self.is_null(name):
            raise self.error(name, "is null, which has no meaning here")
        if not any(value is a or (type(value) is type(a) and value == a) for a in (None, *allowed)):
            wanted = " or ".join(repr(a) for a in allowed) or "absent"
            raise ConfigError(f"{self._path}{name} is {value!r:.100}, which is not supported; it must be {wanted}")

    def get_activation(self, name: str, default: str) -> Activation:
        """Return the activation function with this name."""
        value = self.get_str(name, default)
        if value not in ACTIVATIONS:
            raise self.error(name, f"is {value!r:.100}; supported: {', '.join(sorted(ACTIVATIONS))}")
        return ACTIVATIONS[value]

    def divide(self, name: str, value: int, other: str, divisor: int) -> None:
        """Raise ConfigError unless the value of one field is a multiple of another's."""
        if value % divisor:
            raise self.error(name, f"{value} is not a multiple of {other} {divisor}")

    def error(self, name: str, problem: str) -> ConfigError:
        return ConfigError(f"{self._path}{name} {problem}")

    def finish(self, harmless: Collection[str] = HARMLESS) -> None:
        """Raise ConfigError, which names them, if there are fields that were not read and are not harmless."""
        if unread := sorted(set(self._raw) - self._read - set(harmless)):
            raise ConfigError(
                f"{self._path}{', '.join(unread):.500}: not understood for model_type {self.model_type!r}; "
                "the model is refused, because ignoring the field could change its outputs"
            )

    def _get(self, name: str, types: tuple[type, ...], default: Any, null: Any) -> Any:
        value = self.raw(name)
        if value is None:
            found = null if self.present(name) else default
            if found is REQUIRED:
                raise self.error(name, "is null, which has no meaning here" if self.present(name) else "is missing")
            return found
        if not isinstance(value, types) or (isinstance(value, bool) and bool not in types):
            wanted = " or ".join(t.__name__ for t in types)
            raise self.error(name, f"is {value!r:.100}, not {wanted}")
        return value
