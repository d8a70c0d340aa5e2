"""Fields of requests as other servers of models take them: by Taper's names, or left out where they ask for nothing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..errors import RequestError, shown

OTHER_NAMES = {  # of llama.cpp and Ollama
    "repeat_penalty": "repetition_penalty",
    "n_predict": "max_tokens",
    "num_predict": "max_tokens",
}
# What Taper lacks, and the values with which it asks for nothing.
_NOTHING: dict[str, tuple[Any, ...]] = {
    "audio": (),
    "cache_prompt": (True,),  # a prefix is always computed once
    "dry_multiplier": (0,),
    "dynatemp_range": (0,),
    "length_penalty": (1,),
    "mirostat": (0,),
    "prediction": (),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "tfs_z": (1,),
    "top_n_sigma": (-1, 0),
    "truncate_prompt_tokens": (),
    "typical_p": (1,),
    "use_beam_search": (False,),
    "verbosity": ("medium",),
    "web_search_options": (),
    "xtc_probability": (0,),
}


def as_ours(body: Mapping[str, Any]) -> Mapping[str, Any]:
    """The fields of a request under Taper's names.

    Raises:
        RequestError: a field asks for what Taper lacks, or a limit has two values.
    """
    body = without_nothing(body, _NOTHING)
    given = [name for name in OTHER_NAMES if name in body]
    if not given:  # a body may have a million fields
        return body
    ours = dict(body)
    for name in given:
        value, our_name = ours.pop(name), OTHER_NAMES[name]
        if ours.setdefault(our_name, value) != value:
            raise RequestError(f"{name} and {our_name} are two names of one number", "give one of the two", name)
    return ours


def without_nothing(body: Mapping[str, Any], nothing: Mapping[str, tuple[Any, ...]]) -> Mapping[str, Any]:
    """A request without fields that Taper lacks, given the values with which each of them asks for nothing.

    Raises:
        RequestError: a field has another value.
    """
    given = [name for name in nothing if name in body]
    for name in given:
        if body[name] is not None and body[name] not in nothing[name]:
            raise RequestError(f"{name} is {shown(body[name])}, which is not supported", "leave it out", name)
    return {name: value for name, value in body.items() if name not in given} if given else body
