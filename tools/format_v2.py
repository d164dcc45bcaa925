"""Made the two files that are part of version 2 of the format, once.

    python tools/format_v2.py FOLDER

They are `defaults_v2.json`, what objects of Keras have in common, and
`description_v2.dict`, text that descriptions have in common. Both are frozen, as parts
of the format; what a newer Keras would put into them is said by each file. This tells
how they were made; the dictionary that it makes today is no longer that of the package.
"""

import inspect
import json
import pathlib
import re
import sys

import keras
from keras import layers

import tfmiracle
from tfmiracle.codec import keras_json, version2
from tfmiracle.hosts.network import plain_architecture, to_file
from tfmiracle.studies.architectures import new_network


def arguments():
    """Class -> arguments without which it cannot be made."""
    sizes = {"filters": 1, "kernel_size": 1, "units": 1, "input_dim": 1}
    sizes |= {"output_dim": 1, "rate": 0.5, "stddev": 0.5, "target_shape": (1,)}
    sizes |= {"size": 1, "height": 1, "width": 1, "num_heads": 1, "key_dim": 1}
    sizes |= {"head_dim": 1, "num_query_heads": 1, "num_key_value_heads": 1}
    sizes |= {"output_size": 1, "num_bins": 1, "factor": 0.5, "n": 1, "dims": (1,)}
    sizes |= {"mask_value": 0.0, "scale": 1.0, "equation": "a,ab->b", "seed": None}
    sizes |= {"output_shape": (1,), "cropping": 1, "axis": -1, "num_tokens": 1}
    sizes |= {"pool_size": 2, "activation": "relu", "axes": 1}
    sizes |= {"height_factor": 0.5, "width_factor": 0.5}
    sizes |= {"value_range": (0, 1), "image_size": 1, "l1": 0.01, "l2": 0.01}
    return sizes


def made(cls):
    """An object of a class, and the names of the arguments it needed."""
    known, given = arguments(), {}
    if cls is layers.InputLayer:
        return cls(batch_shape=(None, 1)), {"batch_shape"}
    for parameter in inspect.signature(cls.__init__).parameters.values():
        needed = parameter.default is parameter.empty
        named = parameter.kind is parameter.POSITIONAL_OR_KEYWORD
        if needed and named and parameter.name in known:
            given[parameter.name] = known[parameter.name]
    return cls(**given), set(given)


def defaults():
    """Class -> head, automatic name, and what its configuration has by default."""
    found = {}
    for module in (layers, keras.initializers, keras.regularizers, keras.constraints):
        for name, cls in sorted(vars(module).items()):
            if not (isinstance(cls, type) and cls.__name__ == name) or name in found:
                continue
            try:
                one, needed = made(cls)
                node = keras.saving.serialize_keras_object(one)
                node = json.loads(json.dumps(node, allow_nan=False))
            except Exception as error:  # abstract, or it wraps another layer
                print(f"{name}: {str(error).splitlines()[0][:60]}", file=sys.stderr)
                continue
            if node["class_name"] == name:
                found[name] = entry(node, needed)
    # As they are when they are built for vectors, or for sequences of them.
    found["LayerNormalization"]["config"]["axis"] = [-1]
    found["MultiHeadAttention"]["config"]["attention_axes"] = [1]
    policy = keras.saving.serialize_keras_object(keras.DTypePolicy("float32"))
    found["DTypePolicy"] = entry(policy, ())
    x = layers.Input((1,))
    for model in (keras.Sequential(), keras.Model(x, layers.Dense(1)(x))):
        node = json.loads(json.dumps(keras.saving.serialize_keras_object(model)))
        needed = {"layers", "build_input_shape", "input_layers", "output_layers"}
        found[node["class_name"]] = entry(node, needed)
    for name in ("TimeDistributed", "Bidirectional"):
        inner = layers.Dense(1) if name[0] == "T" else layers.LSTM(1)
        node = keras.saving.serialize_keras_object(getattr(layers, name)(inner))
        found[name] = entry(json.loads(json.dumps(node)), {"layer", "backward_layer"})
    tensor = {"class_name": "__keras_tensor__"}
    tensor["config"] = {"shape": [], "dtype": "float32"}
    found[tensor["class_name"]] = entry(tensor, ())
    return found


def entry(node, needed):
    config = {k: v for k, v in node["config"].items() if k not in needed}
    if isinstance(config.get("seed"), int):
        del config["seed"]  # drawn at random
    head = {k: node[k] for k in ("module", "registered_name") if k in node}
    automatic = re.fullmatch(r"(.*?)(_[0-9]+)?", str(config.get("name")))[1]
    is_layer = automatic.replace("_", "") == node["class_name"].lower()
    if not is_layer:
        return {"head": head, "config": config}
    del config["name"]
    return {"head": head, "name": automatic, "config": config}


def nested(value, found):
    """`value` with the objects in it as short as the table makes them."""
    if isinstance(value, dict) and value.get("class_name") in found:
        mine = found[value["class_name"]]
        head = {k: value[k] for k in ("module", "registered_name") if k in value}
        if head == mine["head"] and "name" not in mine:
            config = value["config"]
            own = {k: v for k, v in config.items() if mine["config"].get(k, ...) != v}
            if not set(mine["config"]) - set(config):
                short = {"class_name": value["class_name"]}
                return short | ({"config": nested(own, found)} if own else {})
    if isinstance(value, dict):
        return {k: nested(v, found) for k, v in value.items()}
    return [nested(v, found) for v in value] if isinstance(value, list) else value


def networks():
    """Networks as there are many, the most common ones last."""
    L = layers

    def convolution(x, filters, size=3, strides=1):
        x = L.Conv2D(filters, size, strides, padding="same", use_bias=False)(x)
        return L.BatchNormalization()(x)

    def resnet(shape, stage=3, stem=1, activation=None):
        inputs = L.Input(shape)
        x = L.ReLU()(convolution(inputs, 16, strides=stem))
        for filters in (16, 32, 64):
            for block in range(stage):
                strides = 2 if filters > 16 and block == 0 else 1
                y = L.ReLU()(convolution(x, filters, 3, strides))
                y = convolution(y, filters)
                if strides > 1:
                    x = convolution(x, filters, 1, strides)
                x = L.ReLU()(L.Add()([x, y]))
        x = L.GlobalAveragePooling2D()(x)
        return keras.Model(inputs, L.Dense(10, activation)(x), name="resnet20")

    def transformer(inputs, x):
        for _ in range(2):
            y = L.LayerNormalization()(x)
            x = L.Add()([x, L.MultiHeadAttention(4, 16)(y, y)])
            y = L.Dense(128, activation="gelu")(L.LayerNormalization()(x))
            x = L.Add()([x, L.Dropout(0.1)(L.Dense(64)(y))])
        x = L.GlobalAveragePooling1D()(L.LayerNormalization()(x))
        return keras.Model(inputs, L.Dense(10, "softmax")(x), name="transformer")

    def stack(shape, *parts, **options):
        return keras.Sequential([L.Input(shape), *parts], **options)

    tokens = L.Input((128,), dtype="int32")
    yield transformer(tokens, L.Embedding(10000, 64, mask_zero=True)(tokens))
    patches = L.Input((32, 32, 3))
    x = L.Conv2D(64, 4, 4)(patches)
    yield transformer(patches, L.Reshape((64, 64))(x))
    for cell in (L.GRU, L.LSTM):
        yield stack(
            (100,),
            L.Embedding(10000, 128),
            L.Bidirectional(cell(64, return_sequences=True)),
            cell(64, dropout=0.2),
            L.Dense(1, "sigmoid"),
        )
    for size in (224, 32):
        yield keras.applications.MobileNetV2(
            (size, size, 3), 0.35, weights=None, classes=10
        )
    yield keras.applications.MobileNet((32, 32, 3), 0.25, weights=None, classes=10)
    yield resnet((32, 32, 3), 1, activation="softmax")
    vgg = []
    for filters in (32, 64, 128, 256, 512):
        options = {"padding": "same", "activation": "relu"}
        vgg += [L.Conv2D(filters, 3, **options), L.Conv2D(filters, 3, **options)]
        vgg += [L.BatchNormalization(), L.MaxPooling2D(), L.Dropout(0.25)]
    yield stack((32, 32, 3), *vgg, L.Flatten(), L.Dense(512, "relu"), L.Dense(10))
    yield stack(
        (784,),
        L.Dense(300, "relu"),
        L.Dropout(0.5),
        L.Dense(100, "relu"),
        L.Dense(10, "softmax"),
    )
    yield stack(
        (28, 28, 1),
        L.Rescaling(1 / 255),
        L.Conv2D(32, 3, activation="relu"),
        L.MaxPooling2D(),
        L.Conv2D(64, 3, activation="relu"),
        L.MaxPooling2D(),
        L.Flatten(),
        L.Dense(128, "relu"),
        L.Dense(10, "softmax"),
    )
    keras.backend.clear_session()
    yield resnet((28, 28, 1), 3, 2)
    yield new_network("digits_cnn", (8, 8, 1), 10, "float32", 0)
    yield new_network("lenet5", (28, 28, 1), 10, "float32", 0)


def columns(model, **options):
    """Names and layout of a network, as a file has them behind its text."""
    coded = tfmiracle.VariationalModel(model, codebook="shared", **options)
    posterior = coded.block_posterior
    posterior.finalize_coding_scale()
    posterior.fix(range(posterior.layout.num_blocks), [0] * posterior.layout.num_blocks)
    file = to_file(coded)
    _, known = version2._text(file)
    return version2._layout(file, []), version2._layout(file, known)


def dictionary():
    """Text that descriptions have in common, the most common at the end."""
    head = '{"class_name":"%s","config":{"name":"%s'
    parts = [
        (head % (name, entry.get("name", ""))).encode()
        for name, entry in reversed(keras_json.defaults().items())
    ]
    names = ["embeddings", "recurrent_kernel", "pointwise_kernel", "depthwise_kernel"]
    names += ["query/kernel", "query/bias", "key/kernel", "key/bias", "value/kernel"]
    names += ["value/bias", "attention_output/kernel", "attention_output/bias"]
    names += ["seed_generator/seed_generator_state", "count", "mean", "variance"]
    parts.append("\n".join([*names, ""]).encode())
    *before, residual, digits, lenet5 = networks()
    for model in [*before, residual, digits, lenet5]:
        content = {"model": keras_json.shorten(plain_architecture(model))}
        text = json.dumps(content, separators=(",", ":")).encode()
        # Deep networks repeat themselves.
        parts.append(text if len(text) < 2000 else text[:1600] + text[-200:])
        if model is residual:
            parts += columns(model, block_size=30, block_bits=18)
        elif model is digits:
            parts += columns(model, block_size=160, block_bits=16)
    rules = {"conv2/kernel": "hash=2", "dense1/kernel": "hash=64"}
    parts += columns(lenet5, block_size=20, block_bits=20, rules=rules)
    return b"".join(parts)[-(1 << 15) :]  # as far as deflate looks back


def main():
    folder = pathlib.Path(sys.argv[1])
    found = defaults()
    table = {
        name: {**e, "config": {k: nested(v, found) for k, v in e["config"].items()}}
        for name, e in found.items()
    }
    lines = [
        f"{json.dumps(k)}:{json.dumps(v, separators=(',', ':'))}"
        for k, v in sorted(table.items())
    ]
    text = "{" + ",\n".join(lines) + "}\n"
    (folder / "defaults_v2.json").write_text(text)
    (folder / "description_v2.dict").write_bytes(dictionary())


if __name__ == "__main__":
    main()
