"""What the bodies of all protocols share: how they are read, Taper's own fields, and its statistics of an output.

Mistakes that can be seen in a request's body alone are rejected here: unknown fields, wrong types, lists that are too
long, fields that contradict each other. `ServedModel` rejects what does not fit the model, and `SamplingParams` values
out of their ranges.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from itertools import islice
from typing import Annotated, Any, Literal, TypeVar, get_args

from pydantic import BaseModel, BeforeValidator, ConfigDict, Discriminator, Field, ValidationError, model_validator

from ...errors import TaperError, did_you_mean, printable, shown
from ...models.files import without_mark
from .errors import ApiError, to_api_error

MAX_STOPS, MAX_STOP_CHARACTERS = 16, 1000
MAX_TOOLS = 128
MAX_MESSAGES, MAX_PARTS = 4096, 1024
MAX_METADATA = 16  # as OpenAI documents
MAX_PARAM_CHARACTERS = 100  # of a field's name in an error

_SURROGATE = re.compile("[\ud800-\udfff]")  # a lone one: json.loads joins the two halves of a pair

_Model = TypeVar("_Model", bound=BaseModel)


def read_body(body: bytes, model: type[Strict]) -> Strict:
    """A request from its body.

    Raises:
        ApiError: the body is not JSON, does not fit the model, or has a text with half of a surrogate pair, which no
            tokenizer accepts.
    """
    try:
        value = json.loads(without_mark(body.decode()))
        path = _find_surrogate(value) if re.search(rb"\\u[dD][89a-fA-F]", body) else None
    except UnicodeDecodeError as error:
        raise ApiError(400, f"the body is not UTF-8 (byte {error.start})", code="invalid_json") from None
    except json.JSONDecodeError as error:
        reason = f"{error.msg} (at character {error.pos})"
        raise ApiError(400, f"the body is not JSON: {reason}", code="invalid_json") from None
    except (RecursionError, ValueError):
        raise ApiError(400, "the body is nested too deep, or a number in it is too long", code="invalid_json") from None
    if path is not None:
        raise _invalid(printable(".".join(path))[:MAX_PARAM_CHARACTERS], "half of a surrogate pair is no character")
    try:
        return validated(model, value)
    except TaperError as error:
        raise to_api_error(error) from None


def validated(model: type[_Model], value: Any) -> _Model:
    """A value as an object of a model.

    Raises:
        ApiError: it does not fit.
        TaperError: its fields contradict each other.
    """
    try:
        return model.model_validate(value, from_attributes=True)
    except ValidationError as error:
        raise _validation_error(error, value, model.model_fields) from None


def _find_surrogate(value: Any, path: tuple[str, ...] = ()) -> tuple[str, ...] | None:
    """The path to the first text with a lone surrogate, as names and indices; None if there is none."""
    if isinstance(value, str):
        return path if _SURROGATE.search(value) else None
    items: Iterable[tuple[str | int, Any]] = ()
    if isinstance(value, dict):
        if any(map(_SURROGATE.search, value)):
            return path
        items = value.items()
    elif isinstance(value, list):
        items = enumerate(value)
    inner_paths = (_find_surrogate(item, (*path, str(name))) for name, item in items)
    return next((inner for inner in inner_paths if inner is not None), None)


class Strict(BaseModel):
    """Rejects unknown fields, and values whose type would have to be converted. Null means that a field is not given.

    A body of a few megabytes has room for a million mistakes, so checking an object or a list ends at its first one.
    """

    model_config = ConfigDict(extra="forbid", strict=True)

    @model_validator(mode="before")
    @classmethod
    def _given(cls, data: Any) -> Any:
        """The fields that are given: the known ones, and the first unknown one."""
        if not isinstance(data, dict):
            return data
        fields = {field.alias or name: field for name, field in cls.model_fields.items()}
        unknown = (name for name in data if name not in fields)
        given = {name: data[name] for name in (*fields, *islice(unknown, 1)) if name in data}
        optional = {name for name, field in fields.items() if not field.is_required()}
        return {name: value for name, value in given.items() if value is not None or name not in optional}


def at_most(count: int) -> BeforeValidator:
    """Rejects an object of more keys before its values are checked, and leaves out keys whose value is null."""

    def check(value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        if len(value) > count:
            raise ValueError(f"an object of {len(value)} keys; it may have {count}")
        return {name: item for name, item in value.items() if item is not None}

    return BeforeValidator(check)


Metadata = Annotated[dict[str, str] | None, at_most(MAX_METADATA)]
Note = Annotated[dict[str, Any] | None, at_most(MAX_METADATA)]  # an object that has no effect


def by_type(*models: type[Strict], default: str = "") -> Discriminator:
    """Chooses one of these models, whose tags are their names, by the `type` of an object, or by the default."""
    tags = {get_args(model.model_fields["type"].annotation)[0]: model.__name__ for model in models}

    def tag(value: Any) -> str | None:
        kind = value.get("type", default) if isinstance(value, dict) else getattr(value, "type", default)
        return tags.get(kind) if isinstance(kind, str) else None

    rule = f"only these types are supported: {', '.join(tags)}"
    return Discriminator(tag, custom_error_type="unknown_type", custom_error_message=rule)


def text_of(content: str | list[Any] | None) -> str:
    """The text of a content: text, or parts that have some."""
    return content if isinstance(content, str) else "".join(part.text for part in content or [])


class TaperFields(Strict):
    """Taper's own fields of a request: depth, and sampling parameters that OpenAI lacks.

    Sampling parameters may also stand beside OpenAI's own fields, as in vLLM.
    """

    policy: str | None = None
    mode: Literal["full", "taper", "exact", "compare"] | None = None
    draft: Literal["auto", "ngram", "policy", "off"] | None = None
    think: bool | None = None  # chats only
    reuse: Literal["filled", "exact"] | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    stop_token_ids: Annotated[list[int], Field(fail_fast=True, max_length=MAX_STOPS)] | None = None
    ignore_eos: bool | None = None


class TaperStats(BaseModel):
    """Depth and speed of an output, how many tokens were drafted, and how many of them it has."""

    policy: str
    num_hidden_layers: int
    mean_depth: float
    depths: list[int]
    ttft_s: float
    tokens_per_second: float
    drafted_tokens: int
    accepted_tokens: int


def _validation_error(error: ValidationError, body: Any, names: Iterable[str]) -> ApiError:
    """The first mistake in a body, which has fields of these names: where it is, what is wrong, and the value."""
    problems = error.errors(include_url=False)
    # pydantic reports a problem for each type of a union. The type that was meant is the one with a problem other than
    # a wrong type, or else with the deepest one.
    same_field = [problem for problem in problems if problem["loc"][:1] == problems[0]["loc"][:1]]
    other = [problem for problem in same_field if not problem["type"].endswith("_type")]
    problem = max(other[:1] or same_field, key=lambda problem: _param(problem, body).count("."))
    param = _param(problem, body)
    if problem["type"] == "extra_forbidden":
        hint = did_you_mean(param, names)
        message = f"unknown field {param!r}" + (f"; {hint}" if hint else "")
        return ApiError(400, message, param=param, code="unknown_field")
    if problem["type"] == "missing":
        return ApiError(400, f"field {param!r} is missing", param=param, code="missing_field")
    rule = problem["msg"][0].lower() + problem["msg"][1:]
    return _invalid(param, f"{rule} (given: {shown(problem['input'])})")


def _invalid(param: str, rule: str) -> ApiError:
    return ApiError(400, f"{param or 'the body'}: {rule}", param=param or None, code="invalid_value")


def _param(problem: Mapping[str, Any], value: Any) -> str:
    """The path to a problem in a body, as names and indices, without the names of types that pydantic adds."""
    names: list[str] = []
    for part in problem["loc"]:
        if part in value if isinstance(value, dict) else isinstance(value, list) and isinstance(part, int):
            names.append(str(part))
            value = value[part]
    if problem["type"] == "missing":
        names.append(str(problem["loc"][-1]))
    return printable(".".join(names))[:MAX_PARAM_CHARACTERS]
