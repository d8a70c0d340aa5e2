"""Depth policies inside vLLM.

The way in is `register`, which vLLM calls through the entry point `vllm.general_plugins`. In the order of use:

- options.py: the policies of a server and of its requests, and the flags that pass them to vLLM.
- config.py: rejects engines and requests that would be wrong.
- scheduler.py: which requests reuse which cached blocks.
- runner.py: turns a batch into the forward that the model runs, in either of vLLM's two model runners.
- plan.py: which tokens of a batch run which layers.
- forward.py: the forward that the models run, and the attention metadata for it.
- models.py: vLLM's models with another loop over their layers.
- metrics.py: counters for vLLM's /metrics.

options.py, plan.py and metrics.py know nothing of vLLM.
"""

from __future__ import annotations

from ..errors import ModelError

TESTED = "0.32."
# vLLM's architectures, and their names with depth decay.
ARCHITECTURES = {f"{name}ForCausalLM": f"Taper{name}ForCausalLM" for name in ("Llama", "Mistral", "Qwen2", "Qwen3")}


def register() -> None:
    """Register Taper's architectures with vLLM; every process of vLLM calls this, and some call it again."""
    import vllm

    for architecture in ARCHITECTURES.values():
        if architecture not in vllm.ModelRegistry.get_supported_archs():
            vllm.ModelRegistry.register_model(architecture, f"{__name__}.models:{architecture}")
    if vllm.__version__.startswith(TESTED):
        # Any other vLLM must still serve other models; models.py rejects it when it is asked for one of ours.
        from vllm.model_executor.models.config import MODELS_CONFIG_MAP

        from .config import TaperConfig

        for architecture in ARCHITECTURES.values():
            MODELS_CONFIG_MAP.setdefault(architecture, TaperConfig)


def check_vllm_version() -> None:
    """Raise a ModelError if vLLM has a version that this plug-in was not tested with."""
    from vllm import __version__

    if not __version__.startswith(TESTED):
        raise ModelError(f"vLLM is {__version__}; Taper works with {TESTED}x", "pip install vllm==0.32.0")
