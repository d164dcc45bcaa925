"""Neural networks stored as random-code indices: hundreds of times smaller.

Names are loaded on first use, so that `tfmiracle.decoder` needs NumPy only. In a
process that has imported Keras before, layers and models are loaded at once: Keras
finds their classes in a saved model only if they are registered by then.
"""

import importlib
import sys

__version__ = "0.1.0"

_MODULE_OF = {
    "BlockPosterior": "posteriors.block_posterior",
    "CodedPosterior": "coded_posterior",
    "Coder": "coding.coder",
    "CompressionCallback": "callbacks",
    "CompressionResult": "compression",
    "FileFormatError": "miracle_file",
    "MeanKL": "posteriors.parameterization",
    "MeanKLBijector": "bijectors",
    "MeanKLConv1D": "layers",
    "MeanKLConv1DTranspose": "layers",
    "MeanKLConv2D": "layers",
    "MeanKLConv2DTranspose": "layers",
    "MeanKLConv3D": "layers",
    "MeanKLConv3DTranspose": "layers",
    "MeanKLDense": "layers",
    "MeanKLDepthwiseConv1D": "layers",
    "MeanKLDepthwiseConv2D": "layers",
    "MeanKLEinsumDense": "layers",
    "MeanKLEmbedding": "layers",
    "MeanKLSeparableConv1D": "layers",
    "MeanKLSeparableConv2D": "layers",
    "MeanVar": "posteriors.parameterization",
    "MeanVarConv1D": "layers",
    "MeanVarConv1DTranspose": "layers",
    "MeanVarConv2D": "layers",
    "MeanVarConv2DTranspose": "layers",
    "MeanVarConv3D": "layers",
    "MeanVarConv3DTranspose": "layers",
    "MeanVarDense": "layers",
    "MeanVarDepthwiseConv1D": "layers",
    "MeanVarDepthwiseConv2D": "layers",
    "MeanVarEinsumDense": "layers",
    "MeanVarEmbedding": "layers",
    "MeanVarSeparableConv1D": "layers",
    "MeanVarSeparableConv2D": "layers",
    "MinimalRandomCode": "codec.code",
    "MinimalRandomCoder": "coding.minimal_random",
    "MiracleFile": "miracle_file",
    "PAPER": "recipe",
    "Parameterization": "posteriors.parameterization",
    "Prior": "codec.prior",
    "RandomCode": "codec.code",
    "Recipe": "recipe",
    "VariationalModel": "models",
    "WeightLayout": "layout",
    "compress": "compression",
    "decode": "decoder",
    "load": "loading",
    "predict_ensemble": "diagnostics",
    "pruned_networks": "pruning",
    "recalibrate": "recalibration",
    "variable_summary": "diagnostics",
}

__all__ = [*_MODULE_OF, "__version__"]


def __getattr__(name):
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = importlib.import_module(f"{__name__}.{_MODULE_OF[name]}")
    value = globals()[name] = getattr(module, name)
    return value


if "keras" in sys.modules and "tensorflow" in sys.modules:
    importlib.import_module(f"{__name__}.models")


def __dir__():
    return sorted(__all__)
