"""Fields of requests as other servers of models take them: by Taper's names, or left out where they ask for nothing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..errors import RequestError, shown

_OTHER_NAMES = {  # of llama.cpp and Ollama
    "repeat_penalty": "repetition_penalty",
    "n_predict": "max_tokens",
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
    given = [name for name in (*_NOTHING, *_OTHER_NAMES) if name in body]
    if not given:  # a body may have a million fields
        return body
    ours = dict(body)
    for name in given:
        value, our_name = ours.pop(name), _OTHER_NAMES.get(name)
        if our_name is None and value is not None and value not in _NOTHING[name]:
            raise RequestError(f"{name} is {shown(value)}, which is not supported", "leave it out", name)
        if our_name is not None and ours.setdefault(our_name, value) != value:
            raise RequestError(f"{name} and {our_name} are two names of one number", "give one of the two", name)
    return ours
