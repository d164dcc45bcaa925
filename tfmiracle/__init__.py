"""Neural networks stored as random-code indices: hundreds of times smaller.

Names are loaded on first use, so that `tfmiracle.decoder` needs NumPy only. In a
process that has imported Keras before, layers and models are loaded at once: Keras
finds their classes in a saved model only if they are registered by then.
"""

import importlib
import sys

__version__ = "0.2.0.dev0"

_MODULE_OF = {
    "BlockPosterior": "posteriors.block_posterior",
    "CodedPosterior": "codec.coded_posterior",
    "Coder": "coding.coder",
    "CompressionCallback": "training.callbacks",
    "CompressionResult": "training.compression",
    "FileFormatError": "miracle_file",
    "MeanKL": "posteriors.parameterization",
    "MeanKLBijector": "posteriors.bijectors",
    "MeanKLConv1D": "hosts.layers",
    "MeanKLConv1DTranspose": "hosts.layers",
    "MeanKLConv2D": "hosts.layers",
    "MeanKLConv2DTranspose": "hosts.layers",
    "MeanKLConv3D": "hosts.layers",
    "MeanKLConv3DTranspose": "hosts.layers",
    "MeanKLDense": "hosts.layers",
    "MeanKLDepthwiseConv1D": "hosts.layers",
    "MeanKLDepthwiseConv2D": "hosts.layers",
    "MeanKLEinsumDense": "hosts.layers",
    "MeanKLEmbedding": "hosts.layers",
    "MeanKLSeparableConv1D": "hosts.layers",
    "MeanKLSeparableConv2D": "hosts.layers",
    "MeanVar": "posteriors.parameterization",
    "MeanVarConv1D": "hosts.layers",
    "MeanVarConv1DTranspose": "hosts.layers",
    "MeanVarConv2D": "hosts.layers",
    "MeanVarConv2DTranspose": "hosts.layers",
    "MeanVarConv3D": "hosts.layers",
    "MeanVarConv3DTranspose": "hosts.layers",
    "MeanVarDense": "hosts.layers",
    "MeanVarDepthwiseConv1D": "hosts.layers",
    "MeanVarDepthwiseConv2D": "hosts.layers",
    "MeanVarEinsumDense": "hosts.layers",
    "MeanVarEmbedding": "hosts.layers",
    "MeanVarSeparableConv1D": "hosts.layers",
    "MeanVarSeparableConv2D": "hosts.layers",
    "MinimalRandomCode": "codec.code",
    "MinimalRandomCoder": "coding.minimal_random",
    "MiracleFile": "miracle_file",
    "ONE_SHOT": "recipe",
    "PAPER": "recipe",
    "Parameterization": "posteriors.parameterization",
    "Prior": "codec.prior",
    "RandomCode": "codec.code",
    "Recipe": "recipe",
    "Sites": "posteriors.parameterization",
    "TrellisCode": "codec.trellis",
    "TrellisCoder": "coding.trellis",
    "VariationalModel": "hosts.models",
    "WeightLayout": "codec.layout",
    "compress": "training.compression",
    "decode": "decoder",
    "load": "hosts.loading",
    "predict_ensemble": "hosts.diagnostics",
    "pruned_networks": "codec.pruning",
    "recalibrate": "hosts.recalibration",
    "variable_summary": "hosts.diagnostics",
}

__all__ = [*_MODULE_OF, "__version__"]


def __getattr__(name):
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = importlib.import_module(f"{__name__}.{_MODULE_OF[name]}")
    value = globals()[name] = getattr(module, name)
    return value


if "keras" in sys.modules and "tensorflow" in sys.modules:
    importlib.import_module(f"{__name__}.hosts.models")


def __dir__():
    return sorted(__all__)
