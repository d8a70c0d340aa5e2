"""The model class `taper` of lm-evaluation-harness: generative tasks on one of our models, under a policy.

It treats prompts, stop strings and prompts that are too long as the harness's own class for transformers (`hf`) does,
so that full depth gives the same texts.
"""

from __future__ import annotations

import hashlib
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import lm_eval.models  # noqa: F401  # the harness's own classes; it looks for them only while none is registered
from lm_eval.api.instance import Instance
from lm_eval.api.model import LM
from lm_eval.api.registry import register_model
from lm_eval.models.utils import normalize_gen_kwargs
from tqdm import tqdm

from ...engine import Request
from ...errors import RequestError, TaperWarning, whole_number
from ...llm import LLM
from ...models.download import DEFAULT_MODEL
from ...policy import DepthPolicy
from ...sampling import SamplingParams
from ...stream import Output

DEFAULT_BATCH_SIZE = 16
MAX_GEN_TOKS = 256  # the harness's default where a task sets no limit
_SAMPLING = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
_GREEDY = {"do_sample", "num_beams"}


@register_model("taper")
class TaperLM(LM):  # type: ignore[misc]  # the harness has no types
    """A model and the policy under which it completes prompts.

    Args:
        model: an `LLM`, or what `LLM` takes: a name, a hub id, a GGUF file or a folder.
        policy: a `DepthPolicy`, the name of a shipped one, or a file.
        mode: "full" for all layers, "taper" for a policy; default taper if a shipped policy fits the model.
        batch_size: outputs generated at a time.
        max_gen_toks: tokens of an output where the task sets no limit.
        seed: of tasks that sample.
        options: what `LLM` takes besides: device, gpu_layers, dtype, context, threads, repack, head.

    Raises:
        RequestError: an unknown option, or one out of its range.
        ModelError: the model is missing, damaged or not supported.
        PolicyError: the policy is damaged or made for another model.
    """

    def __init__(
        self,
        model: LLM | str | Path = DEFAULT_MODEL,
        policy: DepthPolicy | str | Path | None = None,
        mode: str | None = None,
        batch_size: int | str = DEFAULT_BATCH_SIZE,
        max_gen_toks: int = MAX_GEN_TOKS,
        seed: int = 0,
        **options: Any,
    ) -> None:
        super().__init__()
        if unknown := sorted(set(options) - {"device", "gpu_layers", "dtype", "context", "threads", "repack", "head"}):
            raise RequestError(f"model_args has {unknown[0]}, which the model class taper does not take")
        self.max_gen_toks = whole_number("max_gen_toks", max_gen_toks, 1)
        self.seed = whole_number("seed", seed, 0)
        if not isinstance(model, LLM):
            slots = int(batch_size) if str(batch_size).isdigit() else batch_size
            model = LLM(model, max_batch_size=whole_number("batch_size", slots, 1), **options)
        elif options:
            raise RequestError(f"the model is loaded, so {next(iter(options))} does nothing", "leave it out")
        self.llm, self.policy = model, model.resolve_policy(policy, mode)
        self.num_truncated = 0  # prompts whose beginning was cut off

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """The texts that the model generates for requests of the harness, in their order.

        Raises:
            RequestError: what `request` raises.
        """
        repeats: Counter[int] = Counter()  # by id, as a task that wants several outputs repeats the request
        chains = []
        for instance in requests:
            context, gen_kwargs = instance.args[:2]
            seed = self.request_seed(instance, repeats[id(instance)])
            repeats[id(instance)] += 1
            chains.append([self.request(context, gen_kwargs, self.policy, seed)])
        if self.num_truncated:
            room = self.llm.engine.backend.context_length
            prompts = "prompt was" if self.num_truncated == 1 else "prompts were"
            warning = (
                f"{self.num_truncated} {prompts} cut at the beginning to leave room for the output in a context of "
                f"{room} tokens; a larger context avoids that"
            )
            warnings.warn(warning, TaperWarning, stacklevel=2)
            self.num_truncated = 0
        texts = [""] * len(requests)
        with tqdm(total=len(chains), disable=disable_tqdm, desc="Running generate_until requests") as bar:
            for index, output in complete(self.llm, chains):
                texts[index] = output.text
                self.cache_hook.add_partial("generate_until", requests[index].args, output.text)
                bar.update()
        return texts

    def request(self, context: str, gen_kwargs: Mapping[str, Any], policy: DepthPolicy, seed: int) -> Request:
        """The engine's request for a request of the harness.

        A prompt that leaves no room for the output loses its beginning, as in the harness; `num_truncated` counts these
        prompts.

        Raises:
            RequestError: an option of the task that is not supported or out of its range, or an output longer than the
                context.
        """
        tokenizer, room = self.llm.tokenizer, self.llm.engine.backend.context_length
        params = self._sampling_params(gen_kwargs, seed)
        if params.max_tokens >= room:
            reason = f"the task wants up to {params.max_tokens} tokens, but the context holds {room}, prompt included"
            raise RequestError(reason, "raise the context, or lower the tokens of an output")
        bos = tokenizer.template_tokens.get("bos_token")
        ids = tokenizer.encode(context, add_special_tokens=not (bos and context.startswith(bos)))
        if len(ids) > room - params.max_tokens:
            ids = ids[params.max_tokens - room :]
            self.num_truncated += 1
        # Exact, so that no output depends on those before it.
        return Request(ids, params, policy, tokenizer.declared_eos_token_ids, reuse="exact")

    def request_seed(self, instance: Instance, repeat: int) -> int:
        """The seed of one output: the same under every policy, and another one for each problem and repeat."""
        key = f"{self.seed} {instance.task_name} {instance.doc_id} {instance.idx} {repeat}"
        return int.from_bytes(hashlib.sha256(key.encode()).digest()[:8], "big")

    def _sampling_params(self, gen_kwargs: Mapping[str, Any], seed: int) -> SamplingParams:
        """How to sample and when to stop, from the `generation_kwargs` of a task."""
        given = dict(normalize_gen_kwargs(dict(gen_kwargs), self.max_gen_toks))
        until, max_tokens = given.pop("until"), given.pop("max_gen_toks")
        if unknown := sorted(set(given) - {*_SAMPLING, *_GREEDY}):
            raise RequestError(f"the task generates with {unknown[0]}, which is not supported")
        if given.get("num_beams", 1) != 1:
            raise RequestError(f"the task generates with {given['num_beams']} beams; only 1 is supported")
        if given["do_sample"] and not given.get("temperature"):
            raise RequestError("the task samples without a temperature; it must be above 0")
        # The harness's models stop at a control token by its text, which the text of an output never has.
        special = self.llm.tokenizer.special_tokens
        stop_ids = [i for i, text in special.items() if any(text in stop for stop in until)]
        eos = [special[i] for i in sorted(self.llm.tokenizer.declared_eos_token_ids) if i in special]
        stop = dict.fromkeys(text for text in [*until, *eos] if text)
        sampling = {name: given[name] for name in _SAMPLING if name in given}
        return SamplingParams(max_tokens=max_tokens, seed=seed, stop=list(stop), stop_token_ids=stop_ids, **sampling)

    def loglikelihood(self, requests: list[Instance], *_: Any, **__: Any) -> NoReturn:
        """Rejected with a RequestError: nothing is generated."""
        reason = "log-likelihood tasks generate nothing, so there is no step to run with fewer layers"
        raise RequestError(reason, "choose tasks that generate, such as gsm8k")

    loglikelihood_rolling = loglikelihood

    def apply_chat_template(self, chat_history: Sequence[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """The prompt of a conversation; without a generation prompt, its last message stays open.

        Raises:
            RequestError: the model has no chat template, or it refuses these messages.
        """
        messages = list(chat_history)
        opened = "" if add_generation_prompt else messages.pop()["content"]
        try:
            return self.llm.tokenizer.render(messages) + opened
        except RequestError:
            others = [message for message in messages if message["role"] != "system"]
            if len(others) == len(messages) or not self.llm.tokenizer.chat_template:
                raise
            # The harness leaves them out if a template has no system role.
            return self.llm.tokenizer.render(others) + opened

    def chat_template(self, chat_template: bool | str = False) -> str:
        """The source of the model's chat template, for the harness's records.

        Raises:
            RequestError: a template is asked for by name.
        """
        if isinstance(chat_template, str):
            raise RequestError(f"chat template {chat_template!r} is asked for; only the model's own is supported")
        return self.llm.tokenizer.chat_template

    @property
    def tokenizer_name(self) -> str:
        """The name of the model in the harness's cache of prompts."""
        return self.llm.model.replace("/", "__")


def complete(llm: LLM, chains: Iterable[Sequence[Request]]) -> Iterator[tuple[int, Output]]:
    """Complete requests, as many at a time as the engine has slots; yields (index of the chain, output) as they end.

    The requests of a chain run one after the other, so those with the same prompt find it computed in the slot.
    """
    waiting = enumerate(chains)
    running: dict[int, tuple[int, list[Request]]] = {}  # by index in the stream: the chain, and what follows in it
    with llm.stream_of([]) as stream:
        while True:
            while len(running) < llm.engine.backend.num_slots and (chain := next(waiting, None)) is not None:
                number, (first, *rest) = chain
                running[stream.add(first)] = number, rest
            if not running:
                return
            chunk = next(stream)
            if chunk.output is not None:
                number, rest = running.pop(chunk.index)
                if rest:
                    running[stream.add(rest[0])] = number, rest[1:]
                yield number, chunk.output
