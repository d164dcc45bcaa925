"""What a network is, as Keras' JSON. Needs Keras only, on any backend."""

import keras

from tfmiracle.keras_internals import walk, without_training_setup

_REGISTRATION = '@keras.saving.register_keras_serializable("my_package")'


def configuration(model: keras.Model) -> dict:
    """Serializes a network without its training setup, as Keras' JSON.

    Raises:
      ValueError: if a class or function in it is not registered with Keras, or one of
        its classes has no configuration.
    """
    with without_training_setup(model):
        try:
            config = keras.saving.serialize_keras_object(model)
        except Exception as error:  # which a `get_config` may raise
            layer = _without_configuration(model)
            raise ValueError(
                f"{type(layer).__name__} (layer {layer.name!r}) has no configuration "
                "that a file could hold. Its class needs a `get_config` that returns "
                f"the arguments of its `__init__`. Keras says: {error}"
            ) from error
    _refuse_unregistered(config, model.name)
    return config


def _without_configuration(model):
    """The innermost layer that cannot be serialized."""
    found = model
    for layer in walk(model):
        try:
            keras.saving.serialize_keras_object(layer)
        except Exception:
            found = layer
    return found


def _refuse_unregistered(config, where):
    """Refuses what Keras would not find again; `where` is the name of a layer."""
    if isinstance(config, list | tuple):
        for item in config:
            _refuse_unregistered(item, where)
    if not isinstance(config, dict):
        return
    inner = config.get("config")
    if isinstance(inner, dict):
        where = inner.get("name", where)
    # Keras writes a lambda with or without its class, as code.
    if config.get("class_name") == "__lambda__" or config.keys() == {"value"}:
        raise ValueError(
            f"There is a lambda in {where!r} (a Lambda layer?), and a file holds no "
            "code. Write a function or a layer instead, with this line above it: "
            f"{_REGISTRATION}"
        )
    if {"module", "class_name", "registered_name"} <= config.keys():
        is_function = config["class_name"] == "function"
        name = inner if is_function else config["registered_name"]
        if name is not None and not _is_known(name, config["module"]):
            what = f"function {name!r}" if is_function else config["class_name"]
            raise ValueError(
                f"{what} (in {where!r}) is not registered with Keras, which could "
                f"not rebuild it from a file. Put this line above its definition: "
                f"{_REGISTRATION}"
            )
    for value in config.values():
        _refuse_unregistered(value, where)


def _is_known(name, module):
    if keras.saving.get_registered_object(name) is not None:
        return True
    if module == "builtins":  # where Keras looks for functions by their names
        homes = (keras.activations, keras.initializers, keras.regularizers)
        return any(hasattr(home, name) for home in homes)
    packages = ("keras", "keras_hub", "keras_cv", "keras_nlp")
    return module is not None and module.partition(".")[0] in packages


def essential(config):
    """A configuration without what Keras finds anew as it rebuilds the network."""
    if isinstance(config, list | tuple):
        return [essential(item) for item in config]
    if not isinstance(config, dict):
        return config
    inner = config.get("config")
    if config.get("class_name") == "__keras_tensor__" and isinstance(inner, dict):
        # Where it comes from; shape and dtype Keras finds anew.
        return {**config, "config": {**inner, "shape": [], "dtype": "float32"}}
    config = {k: essential(v) for k, v in config.items()}
    layers = _layers_that_it_builds(config)
    if layers is not None:
        config.pop("build_config", None)
        for layer in layers:
            if layer.get("module") == "keras.layers":
                layer.pop("build_config", None)
    return config


def _layers_that_it_builds(config):
    """The layers of a model that Keras builds as it makes the model anew, or None."""
    inner = config.get("config")
    layers = inner.get("layers") if isinstance(inner, dict) else None
    if not (isinstance(layers, list) and all(isinstance(v, dict) for v in layers)):
        return None  # of a stranger
    if config.get("module") == "keras" and config.get("class_name") == "Sequential":
        built = bool(layers) and layers[0].get("class_name") == "InputLayer"
        return layers if built else None
    return layers if config.get("registered_name") == "Functional" else None
