"""Register Ridgeline as the model `ridgeline` of lm-eval (EleutherAI's evaluation harness), and run lm-eval's command.

`python -m ridgeline.harness run --model ridgeline --model_args pretrained=MODEL --tasks hellaswag` is lm-eval's own
command. In Python, `import ridgeline.harness` adds the model to lm-eval. Needs the package lm-eval.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ridgeline.errors import RequestError

try:
    import lm_eval.models  # noqa: F401 - registers its own models, which it does only while there is no other
    from lm_eval.api.model import TemplateLM
    from lm_eval.api.registry import register_model
    from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
except ImportError as e:
    raise RequestError("ridgeline.harness needs lm-eval: pip install 'ridgeline[lm-eval]'") from e

from ridgeline.evals.likelihood import Likelihood, Pair, encode_pair, first_token, score
from ridgeline.llm import LLM
from ridgeline.spec.request import SamplingParams

MAX_NEW_TOKENS = 256  # of a generated answer, unless the task says otherwise, as in lm-eval's hf
# lm-eval passes these to each model; Ridgeline chooses its batches itself.
_NO_EFFECT = ("batch_size", "max_batch_size")
_SAMPLING = ("top_p", "top_k", "min_p", "repetition_penalty", "seed")


@register_model("ridgeline")
class RidgelineLM(TemplateLM):  # type: ignore[misc]
    """A model of lm-eval that Ridgeline runs.

    pretrained: a folder, a GGUF file or a hub id. max_length: longest context in tokens. device: as of LLM; lm-eval's
    default of a GPU is not taken. kv_cache_dtype: float32 here, so that likelihoods are those of the weights alone.
    Others: options of LLM, such as dtype and weights.
    """

    def __init__(
        self, pretrained: str, *, max_length: int | None = None, device: str = "auto", kv_cache_dtype: str = "float32",
        **options: Any,
    ) -> None:  # fmt: skip
        super().__init__()
        for name in _NO_EFFECT:
            options.pop(name, None)
        self.llm = LLM(
            pretrained, max_model_len=max_length, device=device, kv_cache_dtype=kv_cache_dtype, **options
        )  # fmt: skip
        self.words = self.llm.frontend.tokenizer()
        self._first = first_token(self.words, self.llm.loaded)

    @property
    def eot_token_id(self) -> int:
        """Return the id of the end token."""
        eos = self.words.eos_token_id
        return self._first if eos is None else eos

    @property
    def prefix_token_id(self) -> int:
        """Return the id before a text without a context."""
        return self._first

    @property
    def max_length(self) -> int:
        """Return the longest context in tokens."""
        return self.llm.max_model_len

    @property
    def tokenizer_name(self) -> str:
        """Return a name of the tokenizer for lm-eval's caches."""
        return str(self.llm.checkpoint.folder).replace("/", "__")

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        """Return the ids of a text, with the tokens that the model expects around it."""
        return self.words.encode(string, add_special_tokens=add_special_tokens is not False)

    def apply_chat_template(self, chat_history: Sequence[Any], add_generation_prompt: bool = True) -> str:
        """Return the text of a conversation in the model's format."""
        return self.words.render_chat(chat_history, add_generation_prompt=add_generation_prompt)

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        """Return the source of the chat template that is used, or None without one."""
        if not chat_template:
            return None
        return self.words.template_texts.get("default" if chat_template is True else chat_template)

    def loglikelihood(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[Likelihood]:
        """Return the log likelihood of each continuation in nats, and whether greedy decoding would write it."""
        texts = [request.args for request in requests]
        pairs = [encode_pair(self.words, context, continuation, self._first) for context, continuation in texts]
        return self._kept("loglikelihood", requests, score(self.llm.loaded, pairs))

    def _loglikelihood_tokens(self, requests: Sequence[Any], **kwargs: Any) -> list[Likelihood]:
        return score(self.llm.loaded, [Pair(context, continuation) for _, context, continuation in requests])

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        """Return the log likelihood of each text in nats, in windows of the longest context."""
        windows = [
            [
                Pair(*make_disjoint_window(window))
                for window in get_rolling_token_windows(
                    self.tok_encode(request.args[0]), self._first, max_seq_len=self.max_length, context_len=1
                )
            ]
            for request in requests
        ]
        found = iter(score(self.llm.loaded, [pair for some in windows for pair in some]))
        sums = [sum(next(found).logprob for _ in some) for some in windows]
        return self._kept("loglikelihood_rolling", requests, sums)

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """Return the answer to each prompt up to a stop string. A prompt that leaves no room is cut at its left."""
        prompts, params = [], []
        for request in requests:
            context, given = request.args
            one = _params(self.llm.default_sampling_fields(), given)
            assert one.max_tokens is not None  # _params gives a number
            room = self.max_length - one.max_tokens
            if room < 1:
                raise RequestError(
                    f"the task asks for {one.max_tokens} new tokens, and the context is {self.max_length}; use a "
                    "larger max_length or fewer max_gen_toks"
                )
            prompts.append(self.words.encode(context, max_tokens=room))
            params.append(one)
        outputs = self.llm.generate(prompts, params)
        return self._kept("generate_until", requests, [output.outputs[0].text for output in outputs])

    def _kept(self, kind: str, requests: Sequence[Any], answers: list[Any]) -> list[Any]:
        """Return answers, and put them into lm-eval's cache."""
        for request, answer in zip(requests, answers, strict=True):
            self.cache_hook.add_partial(kind, request.args, answer)
        return answers


def _params(defaults: Mapping[str, Any], given: Mapping[str, Any]) -> SamplingParams:
    """Return the sampling parameters of a task's generation_kwargs, over those that the model recommends, as in hf."""
    until = given.get("until") or []
    greedy = not given.get("do_sample", float(given.get("temperature", 0)) > 0)
    fields = {
        **defaults,
        **{name: given[name] for name in _SAMPLING if name in given},
        "max_tokens": int(given.get("max_gen_toks", given.get("max_new_tokens", MAX_NEW_TOKENS))),
        "temperature": 0 if greedy else float(given.get("temperature", defaults.get("temperature", 1))),
        "stop": [until] if isinstance(until, str) else list(until),
    }
    return SamplingParams(**fields)


def main() -> None:
    """Run lm-eval's command, which then knows the model."""
    from lm_eval.__main__ import cli_evaluate

    cli_evaluate()


if __name__ == "__main__":
    main()
