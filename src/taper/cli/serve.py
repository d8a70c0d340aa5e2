"""`taper serve`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from ..errors import TaperError
from ..models import model_name
from ..models.policies import FULL
from .common import OF_MODELS, REUSE_OPTION, draft_options, limits_of_drafts, load, model_options, say, say_why_full


@click.command()
@model_options
@click.option("--name", help="What clients call the model. Default: the model's name, or that of its file.")
@click.option("--policy", "policies", multiple=True, metavar="NAME|FILE", help="Policies; the first is the default.")
@REUSE_OPTION
@draft_options
@click.option("--host", default="127.0.0.1", help="Address to listen on.")
@click.option("--port", type=int, default=8000, help="Port to listen on; 0: a free one.")
@click.option("--root-path", default="", metavar="PATH", help="Prefix under which a proxy serves it, such as /taper.")
@click.option("--api-key", envvar="TAPER_API_KEY", show_default=False, help="What clients must send. [$TAPER_API_KEY]")
@click.option("--insecure", is_flag=True, help="Let other machines in without a key.")
@click.option("--cors-origin", "cors_origins", multiple=True, metavar="URL", help="Let pages of this origin in.")
@click.option("--max-batch-size", type=int, default=16, help="Outputs generated at a time.")
@click.option("--max-waiting", type=int, default=64, help="Outputs that may wait; more are answered with 429.")
@click.option("--max-n", type=int, default=8, help="Outputs of one request.")
@click.option("--max-body-bytes", type=int, default=4 << 20, help="Size of a request.")
@click.option("--max-seconds", type=float, default=600.0, help="Time of a request, and of a shutdown.")
@click.option("--keep-alive-seconds", type=int, default=65, help="Time that a connection without requests stays open.")
@click.option("--log-prompts", is_flag=True, help="Write requests with their prompts to the log.")
def serve(
    policies: tuple[str, ...],
    name: str | None,
    max_batch_size: int,
    reuse: str,
    draft: str | None,
    exact_bits: bool,
    **options: Any,
) -> None:
    """Serve a model with OpenAI's API, and a page to try it."""
    try:
        from ..server.app import serve as run_server
        from ..server.limits import Limits, listen
        from ..server.served import ServedModel
    except ImportError as error:
        raise TaperError(f"taper serve needs {error.name}", 'pip install "taper-llm[serve]"') from None
    if name is not None and not name.strip():
        raise TaperError("--name is empty", "give the name that clients use, or leave it out")
    model = {key: options.pop(key) for key in OF_MODELS}
    draft_limits = limits_of_drafts(options) | {"exact_bits": exact_bits}
    limits = Limits(**options | {"api_key": options["api_key"] or ""})
    listener = listen(limits)  # before the model is loaded, which takes time
    llm = load(model, max_batch_size=max_batch_size)
    known = llm.shipped_policies() | {FULL: llm.resolve_policy(FULL)}
    chosen = {}
    for policy in policies:
        resolved = llm.resolve_policy(policy)
        chosen[policy if policy in known else resolved.name or Path(policy).stem] = resolved
    default = next(iter(chosen)) if chosen else llm.resolve_policy().name
    llm.resolve_drafting(draft or "auto", **draft_limits)  # rejects what no request could use
    called = name or model_name(llm.model)
    served = ServedModel(called, llm, known | chosen, default, limits.max_n, reuse, draft, draft_limits)
    host, port = listener.getsockname()[:2]
    address = f"[{host}]" if ":" in host else host
    say(f"serving {served.name} at http://{address}:{port}/ with policy {default}; Ctrl-C stops it")
    if not policies:
        say_why_full(llm)
    run_server(served, limits, listener)
